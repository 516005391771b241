"""Which index files `mode=evaluate` reads, and what is looked up of them on one host for all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from zero.base.keys import Check, key
from zero.corpus.format.index_files import PATHS, SETS, Shards, named_sets, paths_of, read_index
from zero.corpus.format.manifest import check_tokenizers
from zero.corpus.format.one_host import looked_up
from zero.corpus.reading.contents import contents_on_one_host
from zero.corpus.reading.keys import SetKeys, is_validation
from zero.corpus.text.tokenizers import Tokenizer, TokenizerIdentity
from zero.hosts import agreement


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
    """The shards of index files, or of lists of them. All hosts ask in the same order, as for all that follows here."""
    paths = itertools.chain.from_iterable(map(paths_of, indices))
    return Shards.joined(map(partial(read_index, on_one_host=agreement.on_host_0), paths))


def contents_of_sets(sets: Mapping[str, str | list[str]]) -> dict[str, list[Any]]:
    """What identifies the contents of each set, by its name."""
    return {
        name: list(contents_on_one_host(str(index), shards_of([index]), agreement.on_host_0))
        for name, index in sets.items()
    }


def check_tokenizer(sets: Mapping[str, str | list[str]], tokenizer: Tokenizer) -> None:
    """Raises UserError if a set was prepared with another tokenizer than `data.tokenizer`."""
    paths = shards_of(sets.values()).paths
    look = partial(check_tokenizers, paths, tokenizer)
    looked_up(agreement.on_host_0, "tokenizers of the sets", paths, look, given=TokenizerIdentity.of(tokenizer))
