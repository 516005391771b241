"""Prepares the corpus of `data.corpus` at the start of a run if its index files do not exist yet."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from zero.base.errors import UserError
from zero.corpus.format.manifest import MANIFEST, SPLITS, load
from zero.corpus.text.tokenizers import Tokenizer
from zero.files import storage

DIRECTORY, INDEX_DIRECTORY = "data/corpus", "data/index"  # relative to the current directory, as for zero-prepare
_log = logging.getLogger(__name__)


def corpus_name(source: str) -> str:
    """The name of a corpus that is given none: the last part of its source.

    >>> corpus_name("texts/books.jsonl.gz"), corpus_name("hf:wikitext:wikitext-2-v1"), corpus_name("stdlib")
    ('books', 'wikitext', 'stdlib')
    """
    path = Path(source.removeprefix("hf:").partition(":")[0]).resolve()
    if path.is_dir():
        return path.name
    return path.name.partition(".")[0]


def prepare_if_missing(
    source: str,
    index_files: Iterable[str],
    tokenizer: Tokenizer,
    row_tokens: int,
    completions: bool = False,
    on_progress: Callable[[], None] | None = None,
) -> dict[str, str]:
    """Prepares the corpus of a source, by its `corpus_name`, unless all local `index_files` exist.

    If they are of this corpus with shorter rows, it is prepared again beside that, as CORPUS-ROW_TOKENS.

    Args:
      completions: of the source are learned, as with zero-prepare --completions.

    Returns:
      The index files to use in place of given ones.

    Raises UserError, before anything is prepared, for a missing index file that this would not write: a wrong path.
    """
    corpus = corpus_name(source)
    absolute = {path: os.path.abspath(path) for path in index_files}
    beside = f"{corpus}-{row_tokens}"
    corpus_paths = [os.path.abspath(path) for path in _index_files(corpus)]
    longer_paths = [os.path.abspath(path) for path in _index_files(beside)]
    missing = [path for path in absolute if not storage.is_remote(path) and not storage.exists(path)]
    for path in missing:  # a run that has used the longer rows may be resumed elsewhere
        if absolute[path] not in corpus_paths and absolute[path] not in longer_paths:
            raise UserError(
                f"index file {path}: no such file; data.corpus={source} prepares only "
                f"{' and '.join(_index_files(corpus))}"
            )
    names = {corpus if absolute[path] in corpus_paths else beside for path in missing}
    folder = f"{DIRECTORY}/{corpus}"
    is_prepared = not missing and set(absolute.values()) == set(corpus_paths) and storage.exists(f"{folder}/{MANIFEST}")
    used = {}
    if is_prepared and load(folder).get("row_tokens", row_tokens) < row_tokens:
        used = {path: _index_files(beside)[corpus_paths.index(absolute[path])] for path in absolute}
        if not all(map(storage.exists, used.values())):
            names = {beside}
    if names:  # the import takes time, which a first step does not wait for
        from zero.corpus.preparing.options import CorpusOptions
        from zero.corpus.preparing.prepare import prepare
    for name in sorted(names):
        prepared = prepare(
            source,
            name,
            CorpusOptions(tokenizer, row_tokens, completions=completions),
            directory=DIRECTORY,
            index_directory=INDEX_DIRECTORY,
            on_progress=on_progress,
        )
        sizes = [
            f"{split.documents:,} documents, {split.tokens:,} tokens" for split in (prepared.train, prepared.validation)
        ]
        _log.info("prepared %s: %s for training; %s for validation", prepared.directory, *sizes)
    return used


def _index_files(name: str) -> list[str]:
    return [f"{INDEX_DIRECTORY}/{name}_{split}.index" for split in SPLITS]
