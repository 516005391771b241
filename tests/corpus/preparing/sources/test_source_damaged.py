"""Sources that are damaged or hold something else: one line with the file, the line or member in it, and the remedy."""

import io
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import sources
from tests.helpers.corpora import call
from tests.helpers.records import example, record

WRITERS = sources.write_text | sources.write_ids
TEXTS = [f"{i}: " + "é\u2028x" * (i % 20) for i in range(60)]
REMEDY = re.compile(r"expected|again|--key|--tokenizer|iconv")


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def table_of(**columns: list[Any]) -> Callable[[], bytes]:
    """A table that its test makes, as only it needs pyarrow."""
    return lambda: sources.parquet_bytes(columns)


# A name; its contents, or a format of which the last third is cut off; and words of the message.
WRONG: tuple[tuple[str, bytes | str | Callable[[], bytes], str], ...] = (
    ("a.parquet", b"PAR1 nothing PAR1", r"a\.parquet (is not a complete Parquet|cannot be read)"),
    ("a.arrow", b"ARROW1\0\0nothing", r"a\.arrow is not a complete Parquet or Arrow file"),
    ("a.feather", "feather", r"a\.feather is not a complete Parquet or Arrow file"),
    ("a.csv", b"text\n'a'\n\"b", r"a\.csv: expected CSV: unexpected end of data"),
    ("a.csv", b'text\n"b"c\n', r"a\.csv: expected CSV: ',' expected after"),
    (
        "a.csv",
        b"text,n\na,1\nb\n",
        r"a\.csv, line 3: expected 2 fields in this row, as many as columns; found 1",
    ),
    ("a.csv", b"body\na\n", r'a\.csv, line 2: expected a string under "text"; found body'),
    ("a.csv", b"text\n\xff\n", r"a\.csv, line 2: not UTF-8"),
    ("a.csv.gz", b"no gzip", r"a\.csv\.gz is not compressed with \.gz, .* remove \.gz from"),
    ("a.json.xz", "json.xz", r"a\.json\.xz is truncated or damaged"),
    ("a.json.xz", b"no xz", r"a\.json\.xz is not compressed with \.xz, .* remove \.xz from"),
    ("a.tar.xz", "tar.xz", r"a\.tar\.xz is truncated or damaged"),
    ("a.tar", "tar", r"a\.tar is truncated or damaged"),
    ("a.tar", b"x" * 600, r"a\.tar is truncated or damaged"),
    ("a.tar.gz", b"no gzip", r"a\.tar\.gz is not compressed with \.gz, .* remove \.gz from"),
    ("a.tar.gz", "torch", r"a\.tar\.gz is truncated or damaged"),
    ("a.tar", sources.tar({"7.jpg": b"x", "7.cls": b"1"}), r"sample 7: expected a member \.txt, .*found cls, jpg"),
    ("a.tar", sources.tar({"7.json": b"{"}), r"sample 7, member json: expected a JSON object"),
    ("a.tar", sources.tar({"7.json": b'{"body": 1}'}), r'sample 7: expected a string under "text"; found body'),
    ("a.tar", sources.tar({"7.input_id.pth": b"text"}), r"sample 7, member input_id\.pth: expected a zip of torch"),
    ("a.npy", b"\x93NUMPY", r"a\.npy is not a complete \.npy file"),
    ("a.npy", "npy", r"a\.npy is not a complete \.npy file; .*: it has \d+ bytes, and the shape"),
    ("a.bin", b"abc", r"a\.bin has 3 bytes: expected tokens of 2 bytes each"),
    ("a.bin", struct.pack("<3i", 20240520, 9, 1), r"a\.bin: a header of llm\.c with version 9"),
    ("a.bin", "llm.c", r"a\.bin: a header of llm\.c with version 1 and \d+ tokens, in \d+ bytes"),
    (
        "a.bin",
        "Megatron",
        r"a\.idx is not an index of Megatron-LM for .*; copy or write both again: it lists \d+ tokens",
    ),
    ("a.idx", "Megatron", r"a\.idx is not an index of Megatron-LM for .*; copy or write both again: it is truncated"),
    (
        "a.idx",
        b"TNTIDX\0\0" + bytes(40),
        r"a\.idx is not an index of Megatron-LM for .*; copy or write both again: expected MMIDIDX",
    ),
    (
        "a.tar",
        sources.tar({"7.txt": b"x", "7.TXT": b"y"}),
        r"a\.tar: 7\.TXT is there twice",
    ),
    ("a.tar", sources.tar({"7.json": b'{"text": ["x"]}'}), r'sample 7: expected a string under "text"; it is a list'),
    ("a.jsonl", b'{"text": "x"}\n{"text"', r"a\.jsonl, line 2: expected a JSON object"),
    (
        "a.jsonl",
        b'{"text": "x"}\n\n{"body": "x"}',
        r'a\.jsonl, line 3: expected a string under "text"; found body; --key',
    ),
    ("a.jsonl", b'{"text": "x"}\n"x"', r'a\.jsonl, line 2: expected a string under "text"; found no object'),
    (
        "a.jsonl",
        b'{"text": null}',
        r'a\.jsonl, line 1: expected a string under "text"; it is null; --key .*--skip-broken N',
    ),
    ("a.jsonl", b'{"text": "\xff"}', r"a\.jsonl, line 1: expected a JSON object: 'utf-8' codec"),
    ("a.jsonl", b"[" * 9999, r"a\.jsonl, line 1: expected a JSON object: maximum recursion depth"),
    ("a.jsonl.gz", "jsonl.gz", r"a\.jsonl\.gz is truncated or damaged"),
    ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz is not compressed with \.gz, judging by its first bytes"),
    ("a.jsonl.zst", "jsonl.zst", r"a\.jsonl\.zst is truncated or damaged"),
    ("a.jsonl.zst", b"no zstd", r"a\.jsonl\.zst is not compressed with \.zst, .* remove \.zst from"),
    ("a.parquet", "parquet", r"a\.parquet (is not a complete Parquet|cannot be read)"),
    ("a.parquet", table_of(body=["x"]), r'a\.parquet, row 0: expected a string under "text"; found body; --key'),
    ("a.parquet", table_of(text=[1, 2]), r'a\.parquet, row 0: expected a string under "text"; it is a number'),
    ("a.tfrecord", "tfrecord", r"a\.tfrecord, record \d+ does not match its checksum: .* copy it again"),
    ("a.tfrecord", flipped(record(example(ids=[1])), 20), r"a\.tfrecord, record 0 does not match its checksum"),
    ("a.tfrecord", b"no record" * 9, r"a\.tfrecord, record 0 does not match its checksum: not a TFRecord file"),
    ("a.tfrecord", record(example(ids=[1.5])), r"a\.tfrecord, record 0: expected integers under"),
    ("a.tfrecord", record(example(ids=[300])), r"a\.tfrecord, record 0 holds token 300, outside the vocabulary of 256"),
    ("a.npy", npy(np.ones(3)), r"a\.npy holds float64; expected token ids, integers"),
    (
        "a.npy",
        npy(np.array([1, 300])),
        r"a\.npy, tokens \d to \d holds token 300, outside the vocabulary of 256 of bytes",
    ),
    (
        "a.npy",
        npy(np.array([1, -3])),
        r"a\.npy, tokens \d to \d holds token -3, outside the vocabulary of 256 of bytes",
    ),
    ("a.bin", b"\xff" * 8, r"a\.bin, tokens \d to \d holds token 65535, outside the vocabulary of 256 of bytes"),
)


@pytest.mark.parametrize("number", range(len(WRONG)), ids=lambda number: f"{number}-{WRONG[number][0]}")
def test_bad_sources(number: int, tmp_path: Path) -> None:
    """Status 2 and one line; no index file, and no manifest."""
    name, content, message = WRONG[number]
    source = tmp_path / "source"
    source.mkdir()
    if isinstance(content, str):
        WRITERS[content](source / "a", TEXTS)
        whole = (source / name).read_bytes()
        (source / name).write_bytes(whole[: len(whole) * 2 // 3])
    else:
        if name == "a.idx":
            (source / "a.bin").write_bytes(b"ab")
        (source / name).write_bytes(content() if callable(content) else content)
    folders = ["--directory", str(tmp_path / "corpus"), "--index-directory", str(tmp_path / "index")]
    done = call(source, "--row-tokens", "16", "--validation-fraction", "0.5", *folders)
    assert done.returncode == 2 and done.stdout == ""
    line = done.stderr.removesuffix("\n")
    assert line.startswith("error: ") and len(line.splitlines()) == 1 and len(line) < 700
    assert re.search(message, line) and str(source) in line and REMEDY.search(line), line
    assert not list(tmp_path.rglob("*.index"))
    assert not list(tmp_path.rglob("manifest.json"))


def test_the_table_is_long() -> None:
    assert len(WRONG) >= 40
