"""Documents that cannot be read: the first one stops a corpus, or a number of them is left out, counted and listed."""

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.helpers import sources
from tests.helpers.corpora import both, call, make
from zero.base.errors import UserError
from zero.corpus.preparing import documents
from zero.corpus.preparing.corpus_statistics import read_removed
from zero.corpus.preparing.sources.source import Source

TEXTS = [f"document {number}" for number in range(40)]


def write_lines(folder: Path) -> None:
    lines = [json.dumps({"text": text}).encode() for text in TEXTS]
    lines[7:7] = [b'{"text": null}', b'{"text": "half', b'{"text": "\xff"}']
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))


def write_csv(folder: Path) -> None:
    lines = [f"{number},{text}".encode() for number, text in enumerate(TEXTS)]
    lines[7:7] = [b"1,2,3", b"4,\xff", b"5"]
    (folder / "a.csv").write_bytes(b"\n".join([b"number,text", *lines]))


def write_table(folder: Path) -> None:
    texts = [*TEXTS[:7], None, None, None, *TEXTS[7:]]
    (folder / "a.parquet").write_bytes(sources.parquet_bytes({"text": texts}))


def write_files(folder: Path) -> None:
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(text)
    for number in range(3):
        (folder / f"latin{number}.txt").write_bytes(b"\xff")


def write_tar(folder: Path) -> None:
    members = {f"{number:02}.txt": text.encode() for number, text in enumerate(TEXTS)}
    members |= {"x.txt": b"\xff", "y.json": b"{", "z.jpg": b"picture"}
    (folder / "a.tar").write_bytes(sources.tar(members))


def write_plain_lines(folder: Path) -> None:
    lines = [text.encode() for text in TEXTS]
    lines[7:7] = [b"\xff", b"\xfe", b"\xe9"]
    (folder / "a.log").write_bytes(b"\n".join(lines))


WRITERS = [write_lines, write_csv, write_table, write_files, write_tar, write_plain_lines]


@pytest.mark.parametrize("write", WRITERS)
def test_broken_documents(write: Callable[[Path], None], tmp_path: Path):
    folder = tmp_path / "source"
    folder.mkdir()
    write(folder)
    options: dict[str, Any] = {"lines": write is write_plain_lines}
    with pytest.raises(UserError, match=r"; --skip-broken N leaves out up to N such documents$") as caught:
        make(folder, tmp_path, **options)
    assert str(folder) in str(caught.value)
    with pytest.raises(UserError, match=r"^3 documents are broken, more than --skip-broken 2; one of them: "):
        make(folder, tmp_path, skip_broken=2, **options)
    corpus = make(folder, tmp_path, skip_broken=3, **options)
    assert corpus.skipped == 3 and both(corpus) == sorted(TEXTS)
    removed = list(read_removed(f"{corpus.directory}/removed.jsonl.gz"))
    assert [entry["left_out_by"] for entry in removed] == ["--skip-broken"] * 3
    assert "--skip-broken" in Path(corpus.directory, "report.html").read_text()
    with pytest.raises(
        UserError, match=r"^3 documents are broken, more than --skip-broken 1; .*report\.html shows them"
    ):
        make(folder, tmp_path, skip_broken=1, **options)
    assert make(folder, tmp_path, skip_broken=5, **options) == corpus


def test_broken_documents_of_many_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The limit is of all parts together, and parts that are made already stay."""
    for part in range(4):
        lines = [json.dumps({"text": text}) for text in TEXTS[part::4]]
        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / "source" / f"{part}.jsonl").write_text("\n".join([*lines, '{"text": null}']))
    size = (tmp_path / "source" / "0.jsonl").stat().st_size
    with pytest.raises(UserError, match=r"^4 documents are broken, more than --skip-broken 3; .*part-00000\.removed"):
        make(tmp_path / "source", tmp_path, skip_broken=3, part_bytes=size, workers=1, validation_fraction=0.4)
    before = Path(tmp_path / "corpus/c/part-00000.json").stat().st_mtime_ns
    corpus = make(tmp_path / "source", tmp_path, skip_broken=4, part_bytes=size, workers=1, validation_fraction=0.4)
    assert corpus.skipped == 4 and both(corpus) == sorted(TEXTS)
    assert Path(tmp_path / "corpus/c/part-00000.json").stat().st_mtime_ns == before


def test_shuffled_and_on_the_command_line(tmp_path: Path):
    (tmp_path / "source").mkdir()
    write_lines(tmp_path / "source")
    folders: list[str | Path] = [
        "--directory",
        tmp_path / "corpus",
        "--index-directory",
        tmp_path / "index",
        "--row-tokens",
        "16",
    ]
    done = call(tmp_path / "source", "--shuffle", "--deduplicate", *folders)
    assert done.returncode == 2 and "a.jsonl, line 8: expected a string" in done.stderr
    done = call(tmp_path / "source", "--shuffle", "--deduplicate", "--skip-broken", "3", *folders)
    assert "left out 3 documents that cannot be read (--skip-broken)" in done.stdout, done.stderr
    assert call(tmp_path / "source", "--skip-broken", "-1", *folders).returncode == 2


LONG = "long " * 60


def long_lines(folder: Path) -> None:
    texts = [*TEXTS[:7], LONG, *TEXTS[7:]]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def long_csv(folder: Path) -> None:
    """A line, and a field whose lines are short."""
    lines = ["number,text", *(f"{number},{text}" for number, text in enumerate(TEXTS))]
    lines[7:7] = [f"1,{LONG}"]
    lines[14:14] = ['2,"' + "\n".join(LONG.split()) + '"']
    (folder / "a.csv").write_text("\n".join(lines))


def long_texts(folder: Path) -> None:
    for number, text in enumerate([*TEXTS[:7], LONG, *TEXTS[7:]]):
        (folder / f"{number:02}.txt").write_text(text)


def long_text_lines(folder: Path) -> None:
    (folder / "a.log").write_text("\n".join([*TEXTS[:7], LONG, *TEXTS[7:]]))


def long_table(folder: Path) -> None:
    (folder / "a.parquet").write_bytes(sources.parquet_bytes({"text": [*TEXTS[:7], LONG, *TEXTS[7:]]}))


@pytest.mark.parametrize("write", [long_lines, long_csv, long_texts, long_text_lines, long_table])
@pytest.mark.parametrize("unit_bytes", [documents.UNIT_BYTES, 64], ids=["one unit", "units"])
def test_long_documents(
    write: Callable[[Path], None], unit_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document of more than --document-bytes is broken, in a block of a file or over several."""
    monkeypatch.setattr(documents, "UNIT_BYTES", unit_bytes)
    folder = tmp_path / "source"
    folder.mkdir()
    write(folder)
    options: dict[str, Any] = {"lines": write is long_text_lines, "document_bytes": 250}
    with pytest.raises(UserError, match=r"longer than --document-bytes 250.*; --skip-broken N leaves out"):
        make(folder, tmp_path, **options)
    corpus = make(folder, tmp_path, skip_broken=20, **options)
    assert both(corpus) == sorted(TEXTS)
    assert corpus.skipped == 1 or (write is long_csv and corpus.skipped == 11)  # what is left of the field are rows


def repeated(path: Path, opening: bytes, size: int) -> None:
    """A compressed file of one line, of `size` bytes, and one that is short."""
    compressed = zstandard.open if path.suffix == ".zst" else gzip.open
    with compressed(path, "wb") as file:
        file.write(opening)
        for _ in range(size >> 20):
            file.write(b"a" * (1 << 20))
        file.write(b'\n{"text": "short"}\n')


@pytest.mark.parametrize(
    ("name", "opening"),
    [("a.jsonl.gz", b'{"text": "'), ("a.jsonl.zst", b'{"text": "'), ("a.csv.gz", b'text\n"'), ("a.json.gz", b'["')],
)
def test_memory_of_a_long_document(name: str, opening: bytes, tmp_path: Path) -> None:
    """A small file of one long line is read in the memory of --document-bytes."""
    path = tmp_path / name
    repeated(path, opening, 128 << 20)
    assert path.stat().st_size < 1 << 18
    tracemalloc.start()
    try:
        found = [
            document
            for unit in Source(str(path), "text", 0.0, document_bytes=2 << 20).units()
            for document in unit.documents()
        ]
    except UserError as error:
        assert name == "a.json.gz" and "longer than --document-bytes 2097152" in str(error)
    else:
        assert name != "a.json.gz" and "longer than --document-bytes 2097152" in found[0].problem
        assert name == "a.csv.gz" or found[1].content == "short"
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 48 << 20


def test_long_line_of_a_cut_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that spans pieces of a file is read in the memory of one document, and broken once."""
    monkeypatch.setattr(documents, "UNIT_BYTES", 1 << 16)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"a" * (16 << 20) + b'"}\n{"text": "short"}\n')
    source = Source(str(path), "text", 0.0, part_bytes=1 << 20, document_bytes=1 << 17)
    tracemalloc.start()
    parts = [source.part(number) for number in range(source.parts)]
    found = [document for part in parts for unit in part.units() for document in unit.documents()]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert source.parts > 8 and [document.content for document in found] == ["", "short"] and peak < 4 << 20
