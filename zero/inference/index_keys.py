"""Which index files `mode=evaluate` reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from zero.base.keys import Check, key
from zero.corpus.format.index_files import PATHS, SETS, Shards, named_sets, paths_of, read_index
from zero.corpus.reading.keys import SetKeys, is_validation


@dataclass(frozen=True)
class IndexKeys:
    """Which index files are read, in section `evaluate`."""

    index: Any = key(
        None,
        Check(is_validation, f"{PATHS}, {SETS}, or null"),
        "The index files to score, such as a test set, in the form of data.index_path_validation; null: that key's "
        "files.",
    )

    def sets(self, data: SetKeys) -> dict[str, str | list[str]]:
        """The index file, or the list of them, of each set by its name; empty if there is none."""
        if not (self.index or data.has_validation_set):
            return {}
        return named_sets(self.index or data.index_path_validation, data.bucket_path)


def shards_of(indices: Iterable[str | list[str]]) -> Shards:
    """The shards of index files, or of lists of them."""
    paths = itertools.chain.from_iterable(map(paths_of, indices))
    return Shards.joined(map(read_index, paths))
