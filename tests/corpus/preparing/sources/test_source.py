"""Sources: every document once, in units that can be read apart, and a word about what cannot be read."""

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers import records, sources
from tests.helpers.records import record
from zero.base.errors import UserError
from zero.corpus.preparing import documents
from zero.corpus.preparing.sources.source import Source


def contents(source: Path | str, key: str = "text") -> list[str | list[int] | None]:
    """All documents, the parts of a lone text apart, None for a file that is not UTF-8; sizes are checked."""
    opened = Source(str(source), key, 0.2)
    units = list(opened.units())
    if opened.size is not None and not opened.is_one_text:
        assert sum(unit.size for unit in units) == opened.size
    found = [document for unit in units for document in unit.documents()]
    assert all(document.left_out_by in (None, documents.BROKEN) for document in found)
    return [None if document.left_out_by else _listed(document.content) for document in found]


def _listed(content: str | np.ndarray) -> str | list[int]:
    return content if isinstance(content, str) else content.tolist()


@given(
    st.lists(st.text(max_size=30), min_size=1, max_size=20),
    st.integers(1, 100),
    st.sampled_from([".jsonl", ".jsonl.gz", ".jsonl.zst"]),
    st.booleans(),
    st.booleans(),
)
@example(["a\u2028b\x85c\x1cd\r", "e"], 1, ".jsonl", True, False)  # where splitlines() would cut
def test_lines(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], unit: int, suffix: str, ends: bool, is_ascii: bool
):
    path = tmp_path_factory.mktemp("lines") / f"a{suffix}"
    lines = [json.dumps({"text": text}, ensure_ascii=is_ascii) for text in texts]
    data = "\n".join(lines).encode() + b"\n" * ends
    middle = len(data) // 2  # packed in two frames, which `cat a.gz b.gz` gives and makes one stream of text
    packers: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}
    pack = packers.get(path.suffix, bytes)
    path.write_bytes(pack(data[:middle]) + pack(data[middle:]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "UNIT_BYTES", unit)
        assert contents(path) == texts


@given(st.text(alphabet="aé€😀\n", min_size=1, max_size=300), st.integers(8, 100), st.booleans())
def test_a_lone_text(tmp_path_factory: pytest.TempPathFactory, text: str, unit: int, marked: bool):
    path = tmp_path_factory.mktemp("lone") / "a.txt"
    path.write_bytes(text.encode("utf-8-sig" if marked else "utf-8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "UNIT_BYTES", unit)
        assert "".join(map(str, contents(path))) == text
        parts = [part for unit in Source(str(path), "text", 0.2).units() for part in unit.documents() if part]
    kinds = [bool(part.split) for part in parts]
    assert kinds == sorted(kinds)
    for is_validation in set(kinds):  # each half is ended once, by its last part
        assert [part.ends for part in parts if bool(part.split) is is_validation][::-1] == [
            i == 0 for i in range(kinds.count(is_validation))
        ]


def test_folders(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.py").write_text("1")
    (tmp_path / "b" / "lines.JSONL").write_text('{"text": "2"}\n\n{"text": "3", "more": 0}')
    (tmp_path / "b" / "lines.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "4"}'))
    (tmp_path / "a.txt").write_text("0")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / "archive.gz").write_bytes(b"")
    assert contents(tmp_path) == ["0", "2", "3", "4", "1", None]
    assert contents(tmp_path / "b") == ["2", "3", "4", "1"]


def test_records(tmp_path: Path):
    for part, lists in enumerate([[[1, 2], [3]], [[4]]]):
        data = b"".join(record(records.example(ids=ids, other=[0])) for ids in lists)
        (tmp_path / f"train.tfrecord-0000{part}-of-00002").write_bytes(data)
    assert contents(tmp_path, "ids") == [[1, 2], [3], [4]]
    (tmp_path / "note.txt").write_text("about them")
    with pytest.raises(UserError, match="holds both token files and text files"):
        contents(tmp_path)


def test_fingerprints_and_contents(tmp_path: Path):
    """A copy has the same fingerprint and contents, and an edit other contents."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
    one, two = (Source(str(tmp_path / name), "text", 0.2) for name in ("a", "b"))
    assert one.fingerprint == two.fingerprint and one.contents != two.contents
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    os.utime(tmp_path / "c" / "x.txt", (1, 1))
    assert Source(str(tmp_path / "c"), "text", 0.2).contents == one.contents
    (tmp_path / "c" / "x.txt").rename(tmp_path / "c" / "y.txt")
    assert Source(str(tmp_path / "c"), "text", 0.2).contents != one.contents
    (tmp_path / "a" / "x.txt").write_text("longer")
    assert Source(str(tmp_path / "a"), "text", 0.2).fingerprint != two.fingerprint


def test_index_of_an_array_is_content(tmp_path: Path):
    """The index of Megatron beside an array, which tells where documents begin, is a part of the source."""
    sources.write_ids["Megatron"](tmp_path / "a", ["one", "two"])
    before = Source(str(tmp_path), "text", 0.2).contents
    assert Source(str(tmp_path), "text", 0.2).contents == before
    index = tmp_path / "a.idx"
    index.write_bytes(index.read_bytes()[:-1] + b"\1")
    assert Source(str(tmp_path), "text", 0.2).contents != before


def test_what_is_wrong_is_named(tmp_path: Path):
    packed = zstandard.compress(b'{"text": "a"}\n' * 1000)
    lines = gzip.compress(b'{"text": "a"}\n' * 1000)
    for name, data, message in [
        ("b.jsonl.zst", packed[:-3], r"b\.jsonl\.zst is truncated or damaged"),
        ("c.jsonl.zst", b"no frame", r"c\.jsonl\.zst is not compressed with \.zst"),
        ("d.jsonl.gz", lines[:-9], r"d\.jsonl\.gz is truncated or damaged"),
        ("e.jsonl.gz", lines[:20] + b"x" + lines[21:], r"e\.jsonl\.gz is truncated or damaged"),
        ("f.txt", b"plain\n" * 9 + b"\xe9", r"f\.txt is not UTF-8"),
        ("g.txt", "plain".encode("utf-16"), r"g\.txt is UTF-16; convert it: iconv"),
        ("h.zip", b"PK\x03\x04" + bytes(range(256)), r"h\.zip is a zip archive; unpack it"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=message):
            contents(tmp_path / name)
