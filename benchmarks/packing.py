"""Best-fit packing against joining documents: how many documents are cut, what is padding, and how long it takes.

    python benchmarks/packing.py

Documents are the files of Python's library in tokens of a byte-level BPE that is trained on some of them. A minute.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.prepare import collect
from zero.corpus.preparing.packing import best_fit
from zero.corpus.text.tokenizers import FileTokenizer, train_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=24)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--vocabulary", type=int, default=4096)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        texts = collect(Path(directory, "text"), options.megabytes * 1_000_000)
    tokenizer = FileTokenizer("bpe.json", train_tokenizer(texts[: len(texts) // 16], options.vocabulary))
    sizes = np.array([len(tokenizer.encode(text)) + 1 for text in texts])
    ends = np.cumsum(sizes)
    starts = np.zeros(ends[-1], np.uint8)
    starts[ends - sizes] = 1
    print(f"{len(sizes):,} documents, {ends[-1]:,} tokens, median document {int(np.median(sizes)):,} tokens\n")
    print("| row | | rows | cuts | documents cut that would fit | tokens of padding | seconds |")
    print("|---|---|---|---|---|---|---|")
    for row_tokens in options.contexts:
        bounds = np.arange(row_tokens, ends[-1], row_tokens)
        inside = bounds[~np.isin(bounds, ends)]
        cut = np.unique(np.searchsorted(ends, inside, side="right"))
        rows = -(-int(ends[-1]) // row_tokens)
        fitting = int((sizes[cut] <= row_tokens).sum())
        padding = rows * row_tokens - int(ends[-1])
        print(f"| {row_tokens:,} | joined | {rows:,} | {len(inside):,} | {fitting:,} | {padding:,} | – |")
        begin = time.perf_counter()
        packed = best_fit(starts, row_tokens)
        seconds = time.perf_counter() - begin
        rows = len(packed.lengths)
        padding = rows * row_tokens - int(ends[-1])
        print(f"| {row_tokens:,} | best fit | {rows:,} | {packed.truncations:,} | 0 | {padding:,} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
