"""Prepares the corpus of `data.corpus` at the start of a run if its index files do not exist yet."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from zero.runtime import storage
from zero.runtime.corpus.manifest import SPLITS
from zero.runtime.corpus.prepare import prepare
from zero.runtime.errors import UserError
from zero.runtime.tokenizers import Tokenizer

DIRECTORY, INDEX_DIRECTORY = "data/corpus", "data/index"  # relative to the current directory, as for zero-prepare
_log = logging.getLogger(__name__)


def prepare_if_missing(corpus: str, index_files: Iterable[str], tokenizer: Tokenizer, row_tokens: int) -> None:
    """Prepares `corpus`, a source and the name of the corpus, unless all local `index_files` exist.

    Raises UserError, before anything is prepared, for a missing index file that this would not write: a misspelt path.
    """
    missing = [path for path in index_files if not storage.is_remote(path) and not storage.exists(path)]
    written = [f"{INDEX_DIRECTORY}/{corpus}_{split}.index" for split in SPLITS]
    for path in missing:
        if os.path.abspath(path) not in map(os.path.abspath, written):
            raise UserError(
                f"index file {path}: no such file; data.corpus={corpus} prepares only {' and '.join(written)}"
            )
    if missing:
        prepared = prepare(
            corpus,
            corpus,
            directory=DIRECTORY,
            index_directory=INDEX_DIRECTORY,
            tokenizer=tokenizer,
            row_tokens=row_tokens,
        )
        _log.info("prepared corpus %s: %s", corpus, prepared)
