"""The loader as a library: token rows of prepared corpora in an exact order, on any number of hosts."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zero.base.errors import UserError
from zero.corpus.format import manifest
from zero.corpus.format.crop import CROPS
from zero.corpus.format.index_files import Weight, listed_shards, paths_of
from zero.corpus.format.shards import RowFormat
from zero.corpus.reading.cache import ShardCache
from zero.corpus.reading.loader import Batching, Loader, RowOrder
from zero.corpus.reading.prefetch import prefetch
from zero.files import storage

_UNKNOWN_VOCABULARY = 2**31 - 1  # of shards without a manifest: any id that int32 holds


class Rows:
    """An iterable of numpy arrays, one for each batch: int32 `(batch / hosts, context)`.

    -1 stands where there is no token: in padding, and in rows that were skipped. Each loop continues where the one
    before has stopped, which raises an error if it is then continued. The order depends on the corpus, `batch`, `seed`,
    `shuffle_shards` and `crop` alone: any number of hosts reads the same global batches.

    Args:
      index: an .index file, here or in a bucket; several that are one corpus, also as braces; or a mixture, index files
        with weights, each a number or `[[batch, weight], ...]`, the batches from 0 on at which a weight begins.
      batch: rows of a batch over all hosts. Each host gives its part of them; host h the h-th.
      context: tokens of a row; longer rows of the corpus are cut as `crop` says.
      seed: of the order; None reads the rows in the order of the shards.
      epochs: passes over the corpus; None never ends. What does not fill a batch at the end is dropped in a shuffled
        order, and filled up with -1 in the order of the shards.
      shuffle_shards: shards whose rows are mixed at any time, over all hosts. Twice as many are in memory.
      crop: "first": the first `context` tokens of each row; "all": as many sequences as fit, each a row of the order;
        "random": one at an offset that is drawn for each row and epoch.
      host: the number of this host.
      hosts: how many there are; they divide `batch`.
      stages: `(batches, length)` of stages at the beginning in which each row is cut into sequences of that length,
        which divides the context: `(batch / hosts * context / length, length)` tokens.
      last_target: rows have one token more, the target of the last position, and so has each sequence of a stage.
      only_completions: a token t that a corpus of completions does not mark as learned is ~t, that is -1 - t.
      vocab_size: ids must be below it; None takes it from the manifest of the corpus.
      skip: rows of this host that may be skipped because they cannot be read, over all objects that a state has gone
        through; `skipped` counts them. 0: the first one raises.
      prefetch: batches that a thread of its own reads ahead; 0 reads when asked.
      cache: a directory that keeps shards of a bucket.
      state: of `state()`, from which to continue.

    Attributes:
      skipped: rows that could not be read so far.
      checksum: of the rows and their places in the order, those that this object has given. Summed over hosts, modulo
        2**32, it tells whether two runs have read the same rows in the same order.

    Raises:
      UserError: something is wrong with the data, or the state belongs to another corpus or order; it is named.
    """

    def __init__(
        self,
        index: str | Path | Sequence[str | Path] | Mapping[str, Weight],
        *,
        batch: int,
        context: int,
        seed: int | None = 0,
        epochs: int | None = None,
        shuffle_shards: int = 16,
        crop: str = "first",
        host: int = 0,
        hosts: int = 1,
        stages: Sequence[tuple[int, int]] = (),
        last_target: bool = False,
        only_completions: bool = False,
        vocab_size: int | None = None,
        skip: int = 0,
        prefetch: int = 2,
        cache: str | Path | None = None,
        state: Mapping[str, Any] | None = None,
    ):
        if crop not in CROPS:
            raise UserError(f"crop={crop}: expected one of {', '.join(CROPS)}")
        if not 0 <= host < hosts:
            raise UserError(f"host={host}: expected a number from 0 to {hosts - 1}, as hosts={hosts}")
        for _, length in stages:
            if length < 1 or context % length:
                raise UserError(f"stages: sequences of {length} tokens do not evenly divide rows of {context}")
        self._arguments: dict[str, Any] = {
            "batch": batch,
            "context": context,
            "seed": seed,
            "epochs": epochs,
            "shuffle_shards": shuffle_shards,
            "crop": crop,
            "host": host,
            "hosts": hosts,
            "stages": tuple(stages),
            "last_target": last_target,
            "only_completions": only_completions,
            "vocab_size": vocab_size,
            "skip": skip,
            "prefetch": prefetch,
            "cache": cache,
        }
        self._index = index
        self._context = context
        self._stages = tuple(stages)
        self._last_target = last_target
        self._skip = skip
        self._prefetch = prefetch
        self._batching = Batching(batch, (host,), hosts)
        self._loader = Loader(
            index,
            self._batching,
            RowFormat(context + last_target, vocab_size or _vocab_size(index), crop, only_completions),
            RowOrder(seed or 0, seed is not None, shuffle_shards, epochs),
            skip_bad=skip > 0,
            cache=None if cache is None else ShardCache(Path(cache)),
        )
        self._cursor = {**self._loader.identity, "batches": 0}
        self._loop = object()  # the one that gives batches, so that two do not share one position
        self.skipped = 0
        self.checksum = 0
        if state is not None:
            self.restore(state)

    def __reduce__(self) -> Any:
        """To another process it goes as its arguments and its state."""
        return partial(Rows, self._index, **self._arguments, state=self.state()), ()

    @property
    def batches(self) -> int | None:
        """How many batches there are in all; None: without end."""
        return self._loader.total_batches

    def state(self) -> dict[str, Any]:
        """The position after the last batch that was given, for JSON. Only its `skipped` differs between hosts."""
        return {**self._cursor, "skipped": self.skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a state. Loops that run already raise an error when they are continued.

        Raises:
          UserError: the state belongs to another corpus or order, or is none; the message names the difference.
        """
        missing = [key for key in self.state() if key not in state]
        if missing:
            raise UserError(f"state: {', '.join(missing)} missing; expected a dict that Rows.state() has returned")
        for key in ("batches", "skipped"):
            if type(state[key]) is not int or state[key] < 0:
                raise UserError(f"state: {key}={state[key]!r}: expected a number from 0 on")
        cursor = {key: value for key, value in state.items() if key != "skipped"}
        self._loader.check(cursor)
        self._cursor = cursor
        self._loop = object()
        self.skipped = state["skipped"]

    def rows_seen(self) -> dict[str, int]:
        """Rows of each corpus of a mixture up to here, over all hosts, by the name of its index file."""
        return self._loader.rows_seen(self._cursor["batches"])

    def __iter__(self) -> Iterator[np.ndarray]:
        loop = object()
        self._loop = loop
        batches = self._loader.batches(self._cursor)
        if self._prefetch:
            batches = prefetch(batches, self._prefetch)
        with closing(batches):
            for batch in batches:
                if self._loop is not loop:
                    raise UserError("another loop over these rows has begun, or a state was restored; use that one")
                skipped = self.skipped + int(batch.is_skipped.sum())
                if skipped > self._skip:
                    raise UserError(f"{skipped} rows could not be read, more than skip={self._skip}; see the log")
                number = self._cursor["batches"]
                self._cursor = batch.cursor
                self.skipped = skipped
                rows = self._batching.schedule.rows
                places = number * rows + self._batching.numbers(rows)
                for place, row in zip(places.tolist(), batch.tokens, strict=True):
                    self.checksum = (self.checksum + zlib.crc32(row, zlib.crc32(place.to_bytes(8)))) % 2**32
                yield self._cut(batch.tokens, number)

    def _cut(self, tokens: np.ndarray, number: int) -> np.ndarray:
        """The rows of a batch, or in a stage its sequences; the sequences of a row stay adjacent."""
        ends = itertools.accumulate(batches for batches, _ in self._stages)
        lengths = (length for end, (_, length) in zip(ends, self._stages, strict=True) if number < end)
        length = next(lengths, self._context)
        columns = np.arange(0, self._context, length)[:, None] + np.arange(length + self._last_target)
        if length == self._context:
            return tokens
        return tokens[:, columns].reshape(-1, columns.shape[1])


def _vocab_size(index: str | Path | Sequence[str | Path] | Mapping[str, Weight]) -> int:
    """The largest vocabulary recorded in the manifests beside the shards; the range of int32 if a shard has none."""
    paths = itertools.chain.from_iterable(listed_shards(path).paths for path in paths_of(index))
    sizes = []
    for folder in sorted(map(storage.parent, storage.one_of_each_folder(paths))):
        recorded = manifest.find(folder)
        size = None if recorded is None else recorded.get("vocab_size")
        if not isinstance(size, int):
            return _UNKNOWN_VOCABULARY
        sizes.append(size)
    return max(sizes)
