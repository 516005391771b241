"""Losses of a trained model on passages of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from zero.hosts.watchdog import progress
from zero.inference.trained_model import TrainedModel
from zero.training.programs import make_inference

_Item = TypeVar("_Item")


class Passage(NamedTuple):
    """Tokens as in `Batch`, scored from `first` on, each given all tokens before it."""

    tokens: np.ndarray
    first: int


class Score(NamedTuple):
    """The scored tokens of a passage, their losses in nats, and whether each was the most likely token."""

    tokens: np.ndarray
    losses: np.ndarray
    is_greedy: np.ndarray


class Scorer:
    """Scores passages of at most `context` tokens in order, batch by batch on all devices.

    `rows` is per host and batch; the sum over hosts is rounded up to a multiple of the number of tensor groups.
    `trained` may be replaced by other weights of the same model; nothing is recompiled.
    """

    def __init__(self, trained: TrainedModel, context: int, rows: int):
        self.trained = trained
        self.context = context
        self._programs = make_inference(trained.model)
        self._places = self._programs.host_rows
        self._rows = -(-rows * jax.process_count() // self._places.count)  # per part of a batch

    @property
    def batch_rows(self) -> int:
        """Passages of one batch over all devices."""
        return self._places.count * self._rows

    def scores(self, passages: Iterable[Passage], length: int | None = None) -> Iterator[Score]:
        """The scores of passages of at most `length` tokens, by default `context`."""
        for batch in batched(passages, self.batch_rows):
            mine = self._place([passage.tokens for passage in batch], length or self.context)
            progress()
            losses, is_greedy = (np.asarray(x) for x in self._programs.score(self.trained.params, mine))
            for row, (text, first) in enumerate(batch):
                part = slice(first - 1, len(text) - 1)  # the loss of token t is at t - 1
                yield Score(text[first:], losses[row, part].astype(np.float64), is_greedy[row, part])

    def split(self, rows: np.ndarray) -> np.ndarray:
        """The rows of a batch `(batch_rows, T)` that the devices of this host compute `(devices, R, T)`."""
        return self._places.split_global(rows)

    def scores_of_whole(self, rows: Iterable[np.ndarray]) -> Iterator[Score]:
        """Scores every token but the first of rows of any length, given all tokens before it.

        For models with memory: carries it from one `context` tokens to the next. A batch of rows takes
        as long as its longest.
        """
        for batch in batched(rows, self.batch_rows):
            length = max(map(len, batch)) - 1
            mine = self._place(batch, -(-length // self.context) * self.context + 1)
            cache = self._programs.new_cache(mine)
            parts = []
            for start in range(0, length, self.context):
                part = mine[..., start : start + self.context + 1]
                position = np.full(len(mine), start, np.int32)
                losses_of_part, is_greedy_of_part, cache = self._programs.score_on(
                    self.trained.params, part, cache, position
                )
                parts.append((np.asarray(losses_of_part), np.asarray(is_greedy_of_part)))
            progress()
            losses, is_greedy = (np.concatenate(x, axis=1) for x in zip(*parts, strict=True))
            for number, row in enumerate(batch):
                scored = slice(len(row) - 1)
                yield Score(row[1:], losses[number, scored].astype(np.float64), is_greedy[number, scored])

    def _place(self, rows: Sequence[np.ndarray], length: int) -> np.ndarray:
        """These rows for the devices of this host `(devices, rows, length)`, padded with -1."""
        tokens = np.full((self.batch_rows, length), -1, np.int32)
        for blank, row in zip(tokens, rows, strict=False):
            blank[: len(row)] = row
        return self.split(tokens)


def batched(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    """The items in lists of `size`; the last one may be shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def windows(tokens: np.ndarray, context: int, stride: int) -> Iterator[Passage]:
    """Passages that score every token after the first once, each but in the first with `context - stride` before it.

    >>> [(len(tokens), first) for tokens, first in windows(np.arange(10), context=6, stride=3)]
    [(6, 1), (6, 3), (4, 3)]
    """
    scored = 1
    for start in range(0, len(tokens), stride):
        end = min(start + context, len(tokens))
        if end <= scored:
            return
        yield Passage(tokens[start:end], scored - start)
        scored = end
