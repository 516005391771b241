"""The loss on whole validation sets, each token scored once."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np

from zero.base.errors import UserError
from zero.base.keys import Mistakes, at_least, key, shown
from zero.corpus.format.index_files import row_tokens
from zero.corpus.format.shards import RowFormat
from zero.corpus.reading.keys import ScoredKeys, SetKeys
from zero.corpus.reading.loader import ONCE, Batching, Loader
from zero.corpus.reading.prefetch import prefetch
from zero.hosts import agreement
from zero.inference.index_keys import IndexKeys, check_tokenizer, contents_of_sets
from zero.inference.output import Output
from zero.inference.scoring import Scorer, windows
from zero.models.config import GPTConfig
from zero.tracking.progress import Stage
from zero.training.objectives import objective
from zero.training.objectives.objective import ObjectiveKeys


class Validation(Output):
    """`evaluate.validation`: the means over the tokens of all sets, and under "sets" those of each named set."""

    key = "evaluate.validation"

    @dataclass(frozen=True)
    class Keys(IndexKeys):
        validation: bool = key(True, None, "Score the whole validation set, each token once.", in_scores=True)
        stride: int | None = key(
            None,
            at_least(1),
            "Tokens scored per forward pass in rows longer than the context; null: half the context.",
            in_scores=True,
        )
        carry: bool = key(
            False,
            None,
            "Carry the model's memory from one context to the next, so that a row of any length is scored as one "
            "context; only for models with memory.",
            in_scores=True,
        )

    def __init__(
        self, keys: Keys, scored: ScoredKeys, data: SetKeys, context: int, training_objective: ObjectiveKeys
    ) -> None:
        """Scores in contexts of so many tokens a model that was trained for an objective."""
        self._keys = keys
        self._only_completions = scored.loss_on == "completion"
        self._data = data
        self._context = context
        self._objective = training_objective

    @property
    def is_asked(self) -> bool:
        return self._keys.validation and not scores_examples(self._keys, self._objective.objective())

    @property
    def _sets(self) -> dict[str, str | list[str]]:
        return self._keys.sets(self._data)

    def mistakes(self, model_config: GPTConfig, model_label: str) -> Mistakes:
        keys = self._keys
        data = self._data
        example = self._objective.objective().example
        if self.is_asked and example.is_whole and not keys.index:
            holds = f"data.index_path_validation of objective={self._objective.name} holds"
            yield "evaluate.index", f"an index file of texts, as {holds} rows of zero-prepare {example.option}"
        if keys.validation and not self._sets:
            path = shown(data.index_path_validation)
            indices = f"data.corpus={shown(data.corpus)} and data.index_path_validation={path}"
            yield "evaluate.validation", f"false, or evaluate.index, as {indices} hold no validation set"
        if keys.stride is not None and keys.stride >= self._context:
            yield "evaluate.stride", f"1 to {self._context - 1}, or null"
        if keys.carry and not model_config.has_memory:
            yield "evaluate.carry", f"false, as {model_label} has no memory of constant size"
        elif keys.carry and (keys.stride is not None or self._context % model_config.vq_block):
            block = f"vq_block={model_config.vq_block} of {model_label}"
            yield "evaluate.carry", f"false, or evaluate.stride=null and a context that is a multiple of {block}"

    def identity(self) -> dict[str, Any]:
        return {"sets": contents_of_sets(self._sets)}

    def evaluate(self, scorer: Scorer) -> dict[str, Any]:
        sets = self._sets
        check_tokenizer(sets, scorer.trained.tokenizer)
        stride = None
        if not self._keys.carry:
            stride = self._keys.stride or -(-scorer.context // 2)
        return score_sets(scorer, sets, stride, self._only_completions)


def scores_examples(keys: Validation.Keys, chosen: objective.Objective) -> bool:
    """Whether `evaluate.validation` is of the examples of the data, not of the tokens of texts.

    The objective reads nothing beside the data, and `evaluate.index` does not name texts for a model of tokens.
    """
    is_of_data = chosen.example.is_whole and not any(entry.source for entry in chosen.reads)
    return is_of_data and (not keys.index or bool(chosen.branches))


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
        on_one_host=agreement.on_host_0,
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
