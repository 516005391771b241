"""Text to token shards and index files: python data/prepare.py <source> [options]

A source is a folder, a text file, a .jsonl file of objects with a "text", or "stdlib", the standard library of the
running Python.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zero.runtime import UserError
from zero.runtime.corpus import prepare
from zero.runtime.text import load_tokenizer

HERE = Path(__file__).resolve().parent


def main() -> None:
    description, _, sources = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description, epilog=sources)
    parser.add_argument("source")
    parser.add_argument("--name", help="of the corpus; default: the last part of the source")
    parser.add_argument("--tokenizer", default="bytes", help='"bytes", or a file of the tokenizers library (.json)')
    parser.add_argument(
        "--row-tokens", type=int, default=1024, help="tokens of a row, the longest context to train with"
    )
    parser.add_argument("--validation-fraction", type=float, default=0.05, help="of the documents")
    parser.add_argument("--rows-per-member", type=int, default=256)
    parser.add_argument("--rows-per-shard", type=int, default=8192)
    parser.add_argument("--directory", type=Path, default=HERE / "corpus", help="for the shards")
    parser.add_argument("--index-directory", type=Path, default=HERE / "index", help="for the index files")
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus that was made with other options")
    options = vars(parser.parse_args())
    source = options.pop("source")
    name = options.pop("name") or Path(source).resolve().stem
    try:
        corpus = prepare(source, name, tokenizer=load_tokenizer(options.pop("tokenizer")), **options)
    except UserError as error:
        sys.exit(f"error: {error}")
    for index, split in ((corpus.train_index, corpus.train), (corpus.validation_index, corpus.validation)):
        print(
            f"{index}: {split.documents} documents, {split.tokens} tokens, {split.rows} rows of "
            f"{options['row_tokens']}, {split.shards} shards"
        )
    if corpus.skipped:
        print(f"{corpus.skipped} files were left out: they are not UTF-8")


if __name__ == "__main__":
    main()
