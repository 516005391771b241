"""Compares the data and tokenizer of a start with those of its checkpoint, and records them for the next start."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from zero.base.errors import UserError
from zero.corpus.format.manifest import check_tokenizers
from zero.corpus.format.one_host import looked_up
from zero.corpus.reading.contents import Contents, IndexContents
from zero.corpus.reading.loader import Loader
from zero.corpus.reading.synthetic import AnyLoader
from zero.corpus.text.tokenizers import Tokenizer, TokenizerIdentity
from zero.hosts import agreement
from zero.run.restore import TrainingPosition

log = logging.getLogger(__name__)


def check_identity(
    position: TrainingPosition, tokenizer: Tokenizer, loader: AnyLoader, validation: Mapping[str, Loader]
) -> None:
    """Compares data and tokenizer with other hosts, the checkpoint and the corpora. All hosts call it.

    The position records the tokenizer and the validation sets; its cursor identifies the training data.

    Raises:
      UserError: the training data or the tokenizer differs from the checkpoint's, or from another host's.
    """
    contents = list(loader.contents)
    paths = list(loader.shards.paths)
    for data in validation.values():
        contents += data.contents
        paths += data.shards.paths
    looked_up(
        agreement.on_host_0,
        "tokenizers of the corpora",
        paths,
        lambda: check_tokenizers(paths, tokenizer),
        given=TokenizerIdentity.of(tokenizer),
    )
    _check_hosts(contents)
    sets = {name: list(map(list, data.contents)) for name, data in validation.items()}
    loader.check(position.cursor)
    before = TokenizerIdentity(position.tokenizer, position.beside_tokenizer)
    before.check(f"step {position.step}", tokenizer, is_resumed=True)
    if position.validation is not None and (names := _changed(position.validation, sets)):
        log.warning(
            "the validation set %s has changed since step %d: validation/loss before and after it covers different "
            "texts, and so does the choice of the best checkpoint",
            ", ".join(names),
            position.step,
        )
    position.tokenizer, position.beside_tokenizer = TokenizerIdentity.of(tokenizer)
    position.validation = sets


def _check_hosts(contents: list[IndexContents]) -> None:
    """Raises UserError on all hosts if an index file lists different contents on some host than on host 0."""
    mine = [[index.path, index.known_by, index.digest] for index in contents]
    first = json.loads(agreement.broadcast("contents of the data", json.dumps(mine)))
    # Hosts may keep index files in different directories, so the message names the path on host 0.
    differences = [
        [path, known_by, known_by_here]
        for (path, known_by, digest), (_, known_by_here, digest_here) in zip(first, mine, strict=True)
        if (known_by, digest) != (known_by_here, digest_here)
    ]
    report = json.dumps(differences[0]) if differences else None
    for host, text in agreement.reports("contents of the data", report).items():
        path, known_by, known_by_there = json.loads(text)
        raise UserError(
            f"{path}: host 0 has other contents (by {known_by}) than host {host} (by {known_by_there}); all hosts "
            "need the same shards, and the same manifest.json beside them"
        )


def _changed(before: Mapping[str, list[Any]], now: Mapping[str, list[Any]]) -> list[str]:
    """The names of sets that occur in both with different contents."""
    common = sorted(before.keys() & now.keys())
    return [name or "without a name" for name in common if _facts(before[name]) != _facts(now[name])]


def _facts(contents: list[Any]) -> list[Contents]:
    """The contents of index files without their paths, from lists of JSON."""
    return [Contents(*facts) for _, *facts in contents]
