"""Losses of a trained model on passages of text, and on a whole validation set."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from zero.base.errors import UserError
from zero.corpus.format.index_files import row_tokens
from zero.corpus.format.shards import RowFormat
from zero.corpus.reading.loader import ONCE, Batching, Loader
from zero.corpus.reading.prefetch import prefetch
from zero.hosts.watchdog import progress
from zero.inference.trained_model import TrainedModel
from zero.tracking.progress import Stage
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

    def top_tokens(self, rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The most likely tokens of each position of a batch `(batch_rows, T)`, and their log-probabilities."""
        progress()
        results = self._programs.top_tokens(self.trained.params, self._places.split_global(rows), count)
        tokens, log_probabilities = map(np.asarray, results)
        return tokens, log_probabilities

    def scores_of_whole(self, rows: Iterable[np.ndarray]) -> Iterator[Score]:
        """Scores every token but the first of rows of any length, given all tokens before it.

        For models of gated units, whose memory is carried from one span of `context` tokens to the next. A batch of
        rows takes as long as its longest row.
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
        return self._places.split_global(tokens)


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


class Sums(NamedTuple):
    """The losses of a set of texts, and the counts of what was scored."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0

    def plus(self, other: Sums) -> Sums:
        return Sums(self.nats + other.nats, self.tokens + other.tokens, self.bytes + other.bytes)

    def means(self) -> dict[str, Any]:
        """Loss in nats per token, perplexity and bits per byte; None without bytes."""
        loss = self.nats / self.tokens
        bits = self.nats / math.log(2) / self.bytes if self.bytes else None
        means = {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": bits}
        return {**means, "tokens": self.tokens, "bytes": self.bytes}


def score_sets(
    scorer: Scorer, sets: Mapping[str, str | list[str]], stride: int | None, only_completions: bool
) -> dict[str, Any]:
    """The means over the tokens of all sets, and under "sets" the means of each named set."""
    sums = {name: score_validation_set(scorer, index, stride, only_completions) for name, index in sets.items()}
    total = functools.reduce(Sums.plus, sums.values())
    means = {**total.means(), "stride": stride}
    named = {name: sums_of_set.means() for name, sums_of_set in sums.items() if name}
    if not named:
        return means
    return {**means, "sets": named}


def score_validation_set(
    scorer: Scorer, index: str | list[str], stride: int | None, only_completions: bool = False
) -> Sums:
    """The losses of every token except the first of each row, each scored once.

    Rows longer than the scorer's context are scored in passages `stride` tokens apart; with None, as if seen at once.
    `only_completions` counts only the tokens of completions.
    """
    tokenizer = scorer.trained.tokenizer
    loader = Loader(
        index,
        Batching(global_rows=1),
        RowFormat(row_tokens(index), scorer.trained.model.config.vocab_size, only_completions=only_completions),
        ONCE,
    )
    lengths = tokenizer.byte_lengths()
    separators = scorer.trained.model.separators  # as in `ShardedGPT.targets`

    def rows() -> Iterator[np.ndarray]:
        stage = Stage("validation rows scored", loader.rows, is_shown=jax.process_index() == 0)
        with closing(prefetch(loader.batches())) as batches, stage:
            for batch in stage.counted(batches):
                row = np.trim_zeros(batch.tokens[0] + 1, "b") - 1  # without padding
                follows = np.append(False, np.isin(np.maximum(row, ~row)[:-1], separators.ends))[: len(row)]
                yield np.where(follows & (row >= 0), ~row, row)

    if stride is None:
        scores = scorer.scores_of_whole(rows())
    else:
        scores = scorer.scores(chain.from_iterable(windows(row, scorer.context, stride) for row in rows()))
    sums = Sums()
    for score in scores:
        is_scored = score.tokens >= 0
        count = int(is_scored.sum())
        size = int(lengths[score.tokens[is_scored]].sum())
        sums = sums.plus(Sums(score.losses[is_scored].sum(), count, size))
    if not sums.tokens:
        raise UserError(f"{index}: its rows have no token to score")
    return sums
