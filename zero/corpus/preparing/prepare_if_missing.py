"""Prepares the corpus of `data.corpus` at the start of a run if its index files do not exist yet."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from zero.corpus.preparing.manifest import MANIFEST, SPLITS, load
from zero.corpus.text.tokenizers import Tokenizer
from zero.errors import UserError
from zero.files import storage

DIRECTORY, INDEX_DIRECTORY = "data/corpus", "data/index"  # relative to the current directory, as for zero-prepare
_log = logging.getLogger(__name__)


def prepare_if_missing(
    corpus: str, index_files: Iterable[str], tokenizer: Tokenizer, row_tokens: int
) -> dict[str, str]:
    """Prepares `corpus`, a source and the name of the corpus, unless all local `index_files` exist.

    If they are of this corpus with shorter rows, it is prepared again beside that, as CORPUS-ROW_TOKENS.

    Returns:
      The index files to use in place of given ones.

    Raises UserError, before anything is prepared, for a missing index file that this would not write: a misspelt path.
    """
    given = {path: os.path.abspath(path) for path in index_files}
    beside = f"{corpus}-{row_tokens}"
    own, longer = ([os.path.abspath(path) for path in _index_files(name)] for name in (corpus, beside))
    missing = [path for path in given if not storage.is_remote(path) and not storage.exists(path)]
    for path in missing:
        if given[path] not in (*own, *longer):  # a run that has used the longer rows may be resumed elsewhere
            raise UserError(
                f"index file {path}: no such file; data.corpus={corpus} prepares only "
                f"{' and '.join(_index_files(corpus))}"
            )
    names = {corpus if given[path] in own else beside for path in missing}
    place = f"{DIRECTORY}/{corpus}"
    used = {}
    is_own = not missing and {*given.values()} == {*own} and storage.exists(f"{place}/{MANIFEST}")
    if is_own and load(place).get("row_tokens", row_tokens) < row_tokens:
        used = {path: _index_files(beside)[own.index(given[path])] for path in given}
        names = set() if all(map(storage.exists, used.values())) else {beside}
    if names:  # the import takes time, which a first step does not wait for
        from zero.corpus.preparing.options import CorpusOptions
        from zero.corpus.preparing.prepare import prepare
    for name in sorted(names):
        prepared = prepare(
            corpus,
            name,
            CorpusOptions(tokenizer, row_tokens),
            directory=DIRECTORY,
            index_directory=INDEX_DIRECTORY,
        )
        _log.info("prepared corpus %s: %s", name, prepared)
    return used


def _index_files(name: str) -> list[str]:
    return [f"{INDEX_DIRECTORY}/{name}_{split}.index" for split in SPLITS]
