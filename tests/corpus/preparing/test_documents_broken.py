"""Documents that cannot be read: the first one stops a corpus, or a number of them is left out, counted and listed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import sources
from tests.helpers.corpora import both, call, make
from zero.base.errors import UserError
from zero.corpus.preparing.corpus_statistics import read_removed

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
    sources.parquet.write_table(sources.pyarrow.table({"text": texts}), folder / "a.parquet")


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
