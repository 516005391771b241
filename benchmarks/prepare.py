"""Preparing a corpus against only tokenizing it: text to shards on a disk, as a ratio of `tokenizers`' own speed.

    python benchmarks/prepare.py

The peers get their texts in memory, tokenize them with their own threads on all cores and throw the result away. This
project starts its processes, reads the files, hashes and joins the documents, and writes shards, index files and a
manifest. Rounds take turns in a random order; the median of each round's ratios counts. A minute or two on two cores.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers

from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.prepare import prepare
from zero.corpus.text.tokenizers import FileTokenizer, train_tokenizer


def collect(folder: Path, size: int) -> list[str]:
    """About `size` bytes of Python's library, tests and packages included, linked into a folder; its texts."""
    texts: list[str] = []
    folder.mkdir()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    random.Random(0).shuffle(files)
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        (folder / f"{len(texts):05d}.py").symlink_to(file)
        texts.append(text)
        size -= file.stat().st_size
        if size < 0:
            break
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=48)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        texts = collect(place / "text", options.megabytes * 1_000_000)
        size = sum(len(text.encode()) for text in texts)
        tokenizer = FileTokenizer("bpe.json", train_tokenizer(texts[: len(texts) // 8], options.vocabulary))
        peer = tokenizers.Tokenizer.from_buffer(tokenizer.data)

        def prepare_corpus() -> None:
            prepare(
                place / "text",
                "c",
                CorpusOptions(tokenizer, row_tokens=1024),
                directory=place / str(time.monotonic_ns()),
                index_directory=place / "index",
                progress=False,
            )

        contestants: dict[str, Callable[[], object]] = {
            "encode_batch": lambda: peer.encode_batch(texts, add_special_tokens=False),
            "encode_batch_fast": lambda: peer.encode_batch_fast(texts, add_special_tokens=False),
            "prepare, shards written": prepare_corpus,
        }
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(options.rounds):
            for name in random.sample(list(contestants), len(contestants)):
                begin = time.perf_counter()
                contestants[name]()
                seconds[name].append(time.perf_counter() - begin)
    print(f"{size / 1e6:.0f} MB in {len(texts)} documents, {tokenizer.vocab_size} tokens")
    for name, taken in seconds.items():
        ratio = statistics.median(base / own for base, own in zip(seconds["encode_batch"], taken, strict=True))
        speed = size / 1e6 / statistics.median(taken)
        print(f"{name:24} {speed:6.1f} MB/s   {ratio:5.2f} x encode_batch")


if __name__ == "__main__":
    main()
