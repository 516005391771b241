"""Sources that the tests of this folder prepare."""

import gzip
import json
import os
import random
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes most of the time of these tests, and matters only when the power fails (tests/run/storage)."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five mebibytes: several units, of files and of lines, plain and packed."""
    root, words = tmp_path_factory.mktemp("mixed"), random.Random(0)

    def text(i: int, size: int) -> str:
        return f"document {i}, not <|endoftext|>: " + " ".join(
            words.choices(["shard", "gather", "scatter", "zéro", "\n"], k=size)
        )

    for i in range(30):
        (root / f"{i:02}.txt").write_text(text(i, 9000), encoding="utf-8")
    lines = b"".join(json.dumps({"text": text(i, 900)}).encode() + b"\n" for i in range(300))
    (root / "x.jsonl").write_bytes(lines)
    (root / "y.jsonl.gz").write_bytes(gzip.compress(lines[: len(lines) // 2 - 9].rpartition(b"\n")[0], mtime=0))
    return root


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Four files of 60 lines, 2 KB each, of which many are equal."""
    root = tmp_path / "lines"
    root.mkdir()
    for file in range(4):
        texts = [f"line {number * (file + 1) % 97} of some length" for number in range(60)]
        (root / f"{file}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return root
