"""Text to token shards and index files: python data/prepare.py <source> [options]

A source is
  a folder            of text and source files, of JSON lines, or of TFRecords of token ids, told by their suffixes
  a .jsonl file       of objects with a "text" (--key names another), also as .jsonl.gz or .jsonl.zst
  a .tfrecord file    of token ids that --tokenizer made
  any other file      one text: its last part is for validation
  hf:name             a dataset of the Hugging Face hub, streamed: hf:name, hf:name:config, hf:name:config:split
  stdlib              the standard library of the running Python

The same call again does what is missing: nothing, if all is there, and the rest, if it was stopped or killed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from zero.runtime.corpus.corpus import prepare, verify
from zero.runtime.errors import UserError
from zero.runtime.tokenizers import load_tokenizer

HERE = Path(__file__).resolve().parent


class Parser(argparse.ArgumentParser):
    """One that tells of a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; --help lists what there is\n")


def main() -> None:
    description, _, sources = (__doc__ or "").partition("\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=description, epilog=sources, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("source", help="what is prepared, or with --verify, what has been")
    parser.add_argument("--name", help="of the corpus; default: the last part of the source")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--tokenizer", help='"bytes" (the default), or a file of the tokenizers library (.json)')
    kind.add_argument("--train-tokenizer", type=int, metavar="TOKENS", help="train one of so many on the source")
    parser.add_argument(
        "--row-tokens", type=int, default=1024, help="tokens of a row, the longest context to train with (1024)"
    )
    parser.add_argument(
        "--one-document-a-row", action="store_true", help="pad the rows of each document, instead of joining documents"
    )
    parser.add_argument("--validation-fraction", type=float, default=0.05, help="of the documents (0.05)")
    parser.add_argument("--rows-per-member", type=int, default=256, help="rows in one array of a shard (256)")
    parser.add_argument("--rows-per-shard", type=int, default=8192, help="rows in a shard (8192)")
    parser.add_argument("--key", default="text", help='of the text in an object or of the ids in a TFRecord ("text")')
    parser.add_argument("--directory", default=str(HERE / "corpus"), help="for the shards, a path or gs:// URL")
    parser.add_argument("--index-directory", default=str(HERE / "index"), help="for the index files, the same")
    parser.add_argument("--workers", type=int, help="processes; default: one a core; they change no byte")
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus that was made with other options")
    parser.add_argument(
        "--verify", action="store_true", help="check a corpus, or one of its index files, against its manifest"
    )
    options = vars(parser.parse_args())
    try:
        (check if options.pop("verify") else make)(**options)
    except (UserError, OSError) as error:  # an OSError is of a directory here, and names it
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same call goes on")


def make(
    source: str,
    name: str | None,
    tokenizer: str | None,
    train_tokenizer: int | None,
    row_tokens: int,
    **options: object,
) -> None:
    """Prepares a corpus and says what it holds."""
    if name is None:
        path = Path(source.removeprefix("hf:").partition(":")[0]).resolve()
        name = path.name if path.is_dir() else path.name.partition(".")[0]
    corpus = prepare(
        source,
        name,
        tokenizer=train_tokenizer or load_tokenizer(tokenizer or "bytes"),
        row_tokens=row_tokens,
        **options,  # type: ignore[arg-type]
    )
    for index, split in ((corpus.train_index, corpus.train), (corpus.validation_index, corpus.validation)):
        print(
            f"{index}: {split.documents} documents, {split.tokens} tokens, {split.rows} rows of {row_tokens}, "
            f"{split.shards} shards"
        )
    if corpus.skipped:
        print(f"{corpus.skipped} files were left out: they are not UTF-8")


def check(source: str, tokenizer: str | None, **_: object) -> None:
    """Says what differs from the manifest; then the exit status is 1."""
    differences = verify(source, load_tokenizer(tokenizer) if tokenizer else None)
    for difference in differences:
        print(difference)
    if differences:
        sys.exit(1)
    print(f"{source} is as its manifest says")


if __name__ == "__main__":
    main()
