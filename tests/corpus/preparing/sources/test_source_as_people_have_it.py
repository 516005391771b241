"""Files as people have them, and what each gets: its tokens of bytes, ends of text included, or the message."""

import gzip
import json
import pickle
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import sources
from tests.helpers.corpora import make
from tests.helpers.shards import npy
from zero.base.errors import UserError

TEXTS = ["one text", "two \u6f22 texts", "a third"]
C4 = [{"text": text, "timestamp": "2019-04-25", "url": "http://a.b"} for text in TEXTS]
ALPACA = [{"instruction": "Say it.", "input": "", "output": text} for text in TEXTS]
PROMPTS = [{"prompt": "Say it. ", "completion": text, "id": number} for number, text in enumerate(TEXTS)]
HH = [{"chosen": f"\n\nHuman: a?\n\nAssistant: {text}", "rejected": "\n\nHuman: a?\n\nAssistant: no"} for text in TEXTS]
IDS = np.arange(1, 81)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * b"a" + b"\nsize 9\n"
TOKENS = sum(len(text.encode()) + 1 for text in TEXTS)


def lines(entries: list[Any]) -> bytes:
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


def table(*texts: Any) -> Callable[[], bytes]:
    """A table that its test makes, as only it needs pyarrow."""
    return lambda: sources.parquet_bytes({"text": list(texts), "url": ["http://a.b"] * len(texts)})


COMPLETIONS: dict[str, Any] = {"completions": True}
PAIRS: dict[str, Any] = {"examples": "preferences", "row_tokens": 64}
LABELS: dict[str, Any] = {"examples": "labels", "row_tokens": 64}
FILES: list[tuple[str, bytes | Callable[[], bytes], dict[str, Any], int | str]] = [
    ("c4-train.00000.json", lines(C4), {}, TOKENS),
    ("c4-train.00000.json.gz", gzip.compress(lines(C4)), {}, TOKENS),
    ("c4-train.00000.jsonl", lines(C4), {}, TOKENS),
    ("pandas.json", json.dumps(C4).encode(), {}, TOKENS),
    ("printed.json", json.dumps(C4, indent=4, ensure_ascii=False).encode(), {}, TOKENS),
    ("texts.json", json.dumps(TEXTS).encode(), {}, TOKENS),
    ("jq.json", b"\n".join(json.dumps(entry, indent=2).encode() for entry in C4), {}, TOKENS),
    (
        "printed.jsonl",
        json.dumps(C4, indent=4).encode(),
        {},
        "is JSON over several lines, but its name promises one object",
    ),
    ("packed.jsonl", gzip.compress(lines(C4)), {}, "is compressed with gzip; add .gz to its name"),
    ("plain.jsonl.gz", lines(C4), {}, "is not compressed with .gz, judging by its first bytes"),
    (
        "padded.jsonl.gz",
        gzip.compress(lines(C4)) + b"padding",
        {},
        "continues with other bytes after the end of its gzip",
    ),
    ("windows.jsonl", lines(C4).decode().encode("utf-16"), {}, "is UTF-16; convert it: iconv -f UTF-16 -t UTF-8"),
    ("squad.json", json.dumps({"version": "1.1", "data": []}).encode(), {}, 'under "text"; found data, version'),
    ("alpaca.json", json.dumps(ALPACA).encode(), {}, 'under "text"; found input, instruction, output'),
    ("alpaca.json", json.dumps(ALPACA).encode(), COMPLETIONS, "Alpaca lines do not say how to format a prompt"),
    ("scraped.json", json.dumps([{"text": "a \ud83d b"}, *C4]).encode(), {"skip_broken": 1}, TOKENS),
    ("spark.parquet", table(*(text.encode() for text in TEXTS)), {}, TOKENS),
    ("latin.parquet", table(b"caf\xe9", *(text.encode() for text in TEXTS)), {"skip_broken": 1}, TOKENS),
    ("dates.parquet", table(date(2020, 1, 1)), {}, 'row 0: expected a string under "text"; it is of the type date'),
    ("book.xlsx", b"PK\3\4" + bytes(26) + b"xl/workbook.xml", {}, "is an Office document; save a table as .csv"),
    ("data.pkl", pickle.dumps(TEXTS), {}, "is a pickle, which can run any code and is never loaded"),
    ("data.db", b"SQLite format 3\0" + bytes(99), {}, "is an SQLite database; export a table"),
    *((f"pointer.{end}", POINTER, {}, "is a pointer of Git LFS") for end in ("parquet", "jsonl", "json", "txt", "csv")),
    ("notes.tex", b"\\section{One}\n" * 9, {}, 9 * 14 + 2),
    ("gpt2.bin", IDS.astype("<u2").tobytes(), {}, 80 + 2),
    ("llama3.bin", IDS.astype("<u4").tobytes(), {}, "so its tokens have 32 bits: --token-bits 32 reads them"),
    ("llama3.bin", IDS.astype("<u4").tobytes(), {"token_bits": 32}, 80 + 2),
    ("logits.npy", npy(np.ones(9)), {}, "holds float64; expected token ids, integers"),
    ("turned.npy", npy(np.asfortranarray(np.ones((4, 3), int))), {}, "stores its array column by column"),
    ("dots.tar", sources.tar({"v1.0.txt": b"a", "v1.1.txt": b"b"}), {}, "a key ends at the first dot of a name"),
    ("prompts.jsonl", lines(PROMPTS), COMPLETIONS, TOKENS + 3 * 8),
    (
        "orca.jsonl",
        lines([{**PROMPTS[0], "system_prompt": "Be short."}]),
        COMPLETIONS,
        '"system_prompt" is "Be short."',
    ),
    (
        "llava.jsonl",
        lines([{**PROMPTS[0], "images": ["a.png"]}]),
        COMPLETIONS,
        '"images" is ["a.png"]: zero learns text',
    ),
    ("hh.jsonl", lines(HH), PAIRS, sum(len(text.encode()) + 1 for pair in HH for text in pair.values())),
    ("margins.jsonl", lines([{**HH[0], "margin": 2.5}]), PAIRS, '"margin" is 2.5: no objective of zero reads it'),
    ("kto.jsonl", lines([{**PROMPTS[0], "label": 1}]), LABELS, 'under "label"; it is 1: write true for a desirable'),
]


@pytest.mark.parametrize("number", range(len(FILES)), ids=lambda number: f"{number}-{FILES[number][0]}")
def test_files(number: int, tmp_path: Path) -> None:
    name, data, options, expected = FILES[number]
    path = tmp_path / name
    path.write_bytes(data() if callable(data) else data)
    if isinstance(expected, str):
        with pytest.raises(UserError) as caught:
            make(path, tmp_path, **options)
        assert expected in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)
        return
    corpus = make(path, tmp_path, **options)
    assert corpus.train.tokens + corpus.validation.tokens == expected
