"""Text to token shards and index files: zero-prepare <source> [options]

A source is
  a folder or glob    of text and source files, or of the formats below; the suffixes decide; here or gs://
  .jsonl, .json       objects with a "text" (or another --key), one a line, also as .gz, .xz or .zst; of .json
                      one array or objects over several lines too; --completions and others read other keys
  .parquet, .arrow    tables whose rows are such objects; also .csv and .tsv with a header
  .tar, .tar.gz       samples of webdataset: .txt, .json, or token ids in .npy or a .pth of torch.save
  .index              the shards it lists
  .tfrecord           token ids that --tokenizer made, as in the next two
  .bin, .npy          an array of token ids, nanoGPT's and llm.c's too: its last part is for validation
  .bin with .idx      documents of Megatron-LM
  any other file      one text: its last part is for validation
  hf:name             a dataset on the Hugging Face hub, streamed: hf:name, hf:name:config, hf:name:config:split
  stdlib              the standard library of the running Python

After an interruption, the same command continues; it does nothing if the corpus is complete.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from tqdm import tqdm

from zero.base.errors import UserError, exit_on_error, trainer
from zero.base.plural import counted
from zero.corpus.format.manifest import TOKENIZER
from zero.corpus.preparing.example_kinds import EXAMPLE_KINDS
from zero.corpus.preparing.filters.table import FILTERS
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.peek import peek
from zero.corpus.preparing.prepare import Corpus, prepare
from zero.corpus.preparing.prepare_if_missing import DIRECTORY, INDEX_DIRECTORY, corpus_name
from zero.corpus.preparing.sources.parts import PART_BYTES
from zero.corpus.preparing.verify import verify
from zero.corpus.text.hub import PREFIX, download
from zero.corpus.text.special_tokens import COMPANIONS, MODEL_CONFIG
from zero.corpus.text.tokenizers import FileTokenizer, Tokenizer, load_tokenizer
from zero.files import storage

MODEL = "MODEL"  # in place of a model that the user has to name
FILTER = "filter "  # begins the attribute of a filter's option
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # of a model, in the folder of its tokenizer
SHORT_ROWS = 64  # tokens of the short sequences that the default job begins with, into which its rows are cut


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; --help lists the options\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command with these arguments, by default the arguments of the process.

    An error is one line, and status 2 for a mistake, 1 where a repeat may succeed. `--verify` also exits with status 1,
    where something differs.
    """
    words, runner = _without_runner(sys.argv[1:] if arguments is None else list(arguments))
    options = _parser().parse_args(words)
    try:
        with exit_on_error():
            if options.peek is not None:
                _peek(options)
            elif options.verify:
                _verify(options)
            else:
                _prepare(options, runner)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues")


def _parser() -> argparse.ArgumentParser:
    description, _, sources = (__doc__ or "").partition("\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(description=description, epilog=sources, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("source", help="the source to prepare; with --verify, the corpus to check")
    parser.add_argument("--name", help="name of the corpus; default: the last part of the source")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--tokenizer",
        help='"bytes" (the default), a file of the tokenizers library (.json), SentencePiece (.model) or tiktoken '
        "(cl100k_base.tiktoken), or hf:NAME@REVISION",
    )
    kind.add_argument(
        "--train-tokenizer", type=int, metavar="TOKENS", help="train a tokenizer with this many tokens on the source"
    )
    _add_corpus_options(parser)
    parser.add_argument(
        "--directory",
        default=DIRECTORY,
        type=os.path.expanduser,
        help=f"directory of all corpora, a path or gs:// URL ({DIRECTORY})",
    )
    parser.add_argument(
        "--index-directory",
        default=INDEX_DIRECTORY,
        type=os.path.expanduser,
        help=f"directory of the index files, a path or URL ({INDEX_DIRECTORY})",
    )
    parser.add_argument(
        "--workers", type=int, help="worker processes; default: one per core; the result does not depend on it"
    )
    parser.add_argument(
        "--part-bytes",
        type=int,
        default=PART_BYTES,
        help=f"bytes of a source per part; parts are prepared independently, and a killed one is repeated "
        f"({PART_BYTES})",
    )
    parser.add_argument(
        "--runner",
        metavar="RUNNER BEAM-OPTIONS",
        help="prepare the parts with Apache Beam (the extra beam): DirectRunner, PrismRunner, FlinkRunner, "
        "SparkRunner, DataflowRunner; must come last, because everything after it is passed to Beam",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a corpus that was made with other options or from other text"
    )
    parser.add_argument(
        "--peek",
        type=int,
        metavar="ROWS",
        help="print this many rows of an index file as text, evenly spaced, with their ids, where documents begin and "
        "what was cut",
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare a corpus, or one of its index files, with its manifest"
    )
    return parser


def _add_corpus_options(parser: argparse.ArgumentParser) -> None:
    """The options that are fields of `CorpusOptions`, in their order."""
    types = get_type_hints(CorpusOptions)
    for field in fields(CorpusOptions):
        if field.name == "filters":
            for name, kept in FILTERS.items():
                parser.add_argument(f"--{name}", dest=FILTER + name, metavar=kept.metavar, help=kept.help)
        elif field.name == "examples":
            for name, kind_of_example in EXAMPLE_KINDS.items():
                flag = kind_of_example.example.option
                parser.add_argument(flag, action="store_const", dest="examples", const=name, help=kind_of_example.help)
        elif field.metadata:
            flag = f"--{field.name.replace('_', '-')}"
            parser.add_argument(flag, **field.metadata, **_reading(types[field.name]))


def _reading(kind: Any) -> dict[str, Any]:
    """How argparse reads a value of this type.

    >>> _reading(bool), _reading(int | None)["type"], _reading(tuple[str, ...])["type"]("a,b")
    ({'action': 'store_true'}, <class 'int'>, ('a', 'b'))
    """
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is tuple:
        return {"type": lambda names: tuple(names.split(","))}
    return {"type": next(one for one in (*get_args(kind), kind) if one is not NoneType)}


def _without_runner(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """The arguments before --runner, and those from it on, which are Beam's.

    >>> _without_runner(["texts", "--workers", "2"])
    (['texts', '--workers', '2'], None)
    >>> _without_runner(["texts", "--runner", "DataflowRunner", "--region=us-east1"])
    (['texts'], ['--runner', 'DataflowRunner', '--region=us-east1'])
    """
    for number, argument in enumerate(arguments):
        if argument == "--runner" or argument.startswith("--runner="):
            return arguments[:number], arguments[number:]
    return arguments, None


def _prepare(given: argparse.Namespace, runner: list[str] | None) -> None:
    """Prepares a corpus and prints its size."""
    options = _corpus_options(given)
    corpus = prepare(
        given.source,
        corpus_name(given.source) if given.name is None else given.name,
        options,
        directory=given.directory,
        index_directory=given.index_directory,
        workers=given.workers,
        overwrite=given.overwrite,
        part_bytes=given.part_bytes,
        runner=runner,
        announce=tqdm.write,
    )
    row_tokens = options.row_tokens
    for index, split in (
        (corpus.train_index, corpus.train),
        (corpus.validation_index, corpus.validation),
        (corpus.test_index, corpus.test),
    ):
        if split is None or not split.rows:
            continue
        documents = counted(split.documents, "document")
        size = f"{documents}, {counted(split.tokens, 'token')}, {counted(split.rows, 'row')} of {row_tokens}"
        cuts = counted(split.truncations, "time")
        is_joined = options.packing is None and not options.is_unjoined
        ends = f"documents continue in the next row {cuts}" if is_joined else f"documents cut {cuts}"
        print(f"{index}: {size}, {counted(split.shards, 'shard')}, {ends}")
    if corpus.skipped:
        print(f"left out {counted(corpus.skipped, 'document')} that cannot be read (--skip-broken)")
    if corpus.short:
        print(f"left out {counted(corpus.short, 'document')} with fewer tokens than --minimum-tokens")
    if corpus.long and options.examples is not None:
        print(f"left out {counted(corpus.long, 'example')} because a text has more than --row-tokens {row_tokens}")
    elif corpus.long:
        print(
            f"left out {counted(corpus.long, 'document')} because no completion ends within --row-tokens {row_tokens}"
        )
    if corpus.cut:
        print(f"{corpus.cut} documents were cut to a row of {row_tokens} tokens")
    if corpus.dropped_calls:
        print(f"{corpus.dropped_calls} messages have tool calls that the chat template does not write")
    if corpus.unmatched:
        examples = counted(corpus.unmatched, "example")
        print(f"{examples} without an answer of another prompt: the estimate of the divergence leaves them out")
    if corpus.duplicates:
        print(f"left out {counted(corpus.duplicates, 'document')} equal to an earlier one")
    if corpus.near:
        print(f"left out {counted(corpus.near, 'document')} similar to an earlier one")
    for name, count in corpus.filtered.items():
        print(f"left out {counted(count, 'document')} by --{name}")
    if corpus.validation.tokens > corpus.train.tokens:
        print(
            "validation has more tokens than training: documents are chosen by a hash of their text, and here they "
            "are few or very different in size; use --splits, or one file for each split"
        )
    print("Train on it:")
    print(shlex.join([*trainer(), *training_overrides(corpus, options)]))


def _corpus_options(given: argparse.Namespace) -> CorpusOptions:
    """What the command line says of the rows; a tokenizer of the hub is downloaded."""
    source = None
    tokenizer: Tokenizer | int
    if given.train_tokenizer is not None:
        tokenizer = given.train_tokenizer
    elif given.tokenizer is not None and given.tokenizer.startswith(PREFIX):
        tokenizer, source = _hub_tokenizer(given.tokenizer)
        print(f"tokenizer {given.tokenizer} is {source}")
    else:
        tokenizer = load_tokenizer(given.tokenizer or "bytes")
    names = {field.name for field in fields(CorpusOptions)} - {"tokenizer", "tokenizer_source", "filters"}
    others = {name: getattr(given, name) for name in names}
    values = [(name, getattr(given, FILTER + name)) for name in FILTERS]
    filters = tuple((name, value) for name, value in values if value is not None)
    return CorpusOptions(tokenizer=tokenizer, tokenizer_source=source, filters=filters, **others)


def training_overrides(corpus: Corpus, options: CorpusOptions) -> list[str]:
    """What a job needs to train on a corpus: its files, and the model of its tokenizer or one for its rows and tokens.

    A model that has weights starts with the settings of conf/tune, not with the default job's, which would destroy it.
    """
    base = _base(options)
    context = training_context(options)
    overrides = []
    if options.examples is not None:  # base is None: the model is one that the user has
        kind = EXAMPLE_KINDS[options.examples]
        overrides += ["+tune=preferences", f"objective={kind.objective}", f"model.model_path={_quoted(base or MODEL)}"]
        overrides += kind.overrides(options)
    elif base is not None:
        overrides += ["+tune=all", f"model.model_path={_quoted(base)}"]
    overrides += ["data.corpus=null", f"data.index_path_train={_quoted(corpus.train_index)}"]
    validation = _quoted(corpus.validation_index) if corpus.validation.rows else "null"
    overrides.append(f"data.index_path_validation={validation}")
    path = storage.join(corpus.directory, TOKENIZER)
    if storage.exists(path):
        overrides.append(f"data.tokenizer={_quoted(path)}")
    if overrides[0].startswith("+tune="):
        overrides.append(f"data.max_context={context}")
        if options.examples is None and not options.completions:
            overrides.append("training.loss_on=all")
        if options.one_document_per_row and options.examples is None:
            overrides.append("data.isolate_documents=false")
        return overrides
    if storage.exists(path):
        overrides.append(f"model.override.vocab_size={load_tokenizer(path).vocab_size}")
    overrides.append(f"model.override.block_size={context}")
    if context % SHORT_ROWS:
        overrides.append("training.staged_warmup_steps=0")
    if options.completions:
        overrides.append("training.loss_on=completion")
    return overrides


def training_context(options: CorpusOptions) -> int:
    """The sequence length of a row. A row of 1025 tokens has 1024 positions, the last one with its target.

    >>> [training_context(CorpusOptions(tokenizer=300, row_tokens=tokens)) for tokens in (1024, 1025, 100)]
    [1024, 1024, 100]
    """
    ends_with_target = options.examples is None and options.row_tokens % SHORT_ROWS == 1
    return options.row_tokens - (options.begin_rows or ends_with_target)


def _base(options: CorpusOptions) -> str | None:
    """The model that came with the tokenizer: its name on the hub, or its folder; None for none."""
    if options.tokenizer_source is not None:
        return options.tokenizer_source
    if not isinstance(options.tokenizer, FileTokenizer):
        return None
    folder = storage.parent(options.tokenizer.path)
    has_weights = any(storage.exists(storage.join(folder, name)) for name in WEIGHTS)
    if has_weights and storage.exists(storage.join(folder, MODEL_CONFIG)):
        return folder
    return None


def _quoted(path: str) -> str:
    """A path as a value of an override: in quotes where it has other characters than most paths.

    >>> _quoted("data/index/mine_train.index"), _quoted("my text.index")
    ('data/index/mine_train.index', "'my text.index'")
    """
    is_plain = re.fullmatch(r"[\w./:@-]+", path, re.ASCII) is not None
    escaped = path.replace("'", "\\'")
    if is_plain:
        return path
    return f"'{escaped}'"


def _hub_tokenizer(model: str) -> tuple[FileTokenizer, str]:
    """The tokenizer of a model of the hub, and its name as `hf:NAME@COMMIT`, which never changes."""
    folder = download(model, (TOKENIZER, *COMPANIONS, MODEL_CONFIG))
    path = folder / TOKENIZER
    if not path.is_file():
        raise UserError(f"{model} has no {TOKENIZER}; expected a model with a file of the tokenizers library")
    return FileTokenizer(str(path), path.read_bytes()), f"{model.partition('@')[0]}@{folder.name}"


def _peek(given: argparse.Namespace) -> None:
    """Prints some rows of an index file."""
    for line in peek(given.source, given.peek, _tokenizer_of(given)):
        print(line)


def _verify(given: argparse.Namespace) -> None:
    """Prints the differences from the manifest; if there are any, the exit status is 1."""
    differences = verify(given.source, _tokenizer_of(given))
    for difference in differences:
        print(difference)
    if differences:
        sys.exit(1)
    print(f"{given.source} matches its manifest")


def _tokenizer_of(given: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer of the command line; None for the tokenizer of the corpus."""
    if given.tokenizer is None:
        return None
    return load_tokenizer(given.tokenizer)


if __name__ == "__main__":
    main()
