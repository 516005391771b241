"""Validation losses during training: of each named set, and over all tokens together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import jax
import numpy as np

from zero.base.errors import UserError
from zero.base.keys import at_least, key
from zero.corpus.reading.keys import ScoredKeys
from zero.corpus.reading.loader import HostBatch, Loader
from zero.corpus.reading.prefetch import prefetch
from zero.hosts import agreement
from zero.partition.layout import PyTree
from zero.record.metrics_file import Line, line_of
from zero.run.feature import Feature, Moment, Stopped
from zero.run.run import Run
from zero.tracking.metrics import Metric
from zero.training.ema import EMA
from zero.training.host_rows import HostRows
from zero.training.objectives.objective import Mean, divided, without_terms

Sums: TypeAlias = dict[str, float]  # losses by weights, an objective's metrics, "tokens" and "bytes"


class Validate(Feature):
    """Adds the losses on the validation sets to the line of an evaluation.

    They are `validation/loss` in nats per token, and `validation/ema_loss` of averaged weights. Named sets add
    `validation/NAME/loss` and bits per byte, over their first `training.maximum_evaluation_steps` batches. Names do not
    change the total: the mean over the tokens of that many batches of all sets in order, the same as for a list of
    their files.

    If the step is already saved, for example because a stop interrupted its evaluation, the loss is added to its
    checkpoint, because retention compares losses.
    """

    @dataclass(frozen=True)
    class Keys:
        evaluation_frequency: int = key(
            240,
            at_least(1),
            "Evaluate every n steps and after the last; each evaluation also saves a checkpoint, draws the curves and "
            "samples text.",
            in_steps=True,
        )
        maximum_evaluation_steps: int = key(
            16,
            at_least(0),
            "Maximum number of validation batches per evaluation, over all sets in order and for each named set; 0: "
            "no validation, so that an evaluation only saves and samples.",
        )

    name = "validate"
    metrics = (
        Metric(
            ("validation/loss", "validation/ema_loss"),
            "loss of the weights, and of their moving average (`training.ema`), on the first "
            "`training.maximum_evaluation_steps` batches; nats per token",
        ),
        Metric(
            ("validation/NAME/loss", "validation/NAME/bits_per_byte", "validation/bits_per_byte"),
            "of each validation set that has a name, and bits per byte of all of them",
        ),
    )
    phase = "evaluation"
    is_deferrable = True

    def __init__(self, keys: Keys, scored: ScoredKeys, run: Run) -> None:
        self._sets = run.data.validation
        self._most_batches = keys.maximum_evaluation_steps
        self._loss_on = scored.loss_on
        self._is_named = "" not in self._sets
        self._token_bytes: np.ndarray | None = None  # (vocabulary,), if bits per byte are counted

    @classmethod
    def is_done(cls, run_directory: Path, now: Moment) -> bool:
        return any(name.startswith("validation/") for name in line_of(run_directory, now.step) or {})

    def due(self, now: Moment) -> bool:
        return bool(self._sets) and now.is_evaluation

    def do(self, run: Run, now: Moment, line: Line) -> None:
        line |= self._metrics(run)
        checkpoints = run.directory.checkpoints
        if now.step in checkpoints.steps():
            checkpoints.set_validation_loss(now.step, line["validation/loss"])

    def _metrics(self, run: Run) -> dict[str, float]:
        """The losses of all sets; raises UserError if a set has no token to score."""
        averages = run.state.averages
        weights = {"loss": run.weights}
        if EMA in averages:
            weights["ema_loss"] = run.job.model.weights(averages[EMA], averages, run.frozen)
        if self._is_named and not run.job.objective.metrics and self._token_bytes is None:
            self._token_bytes = token_bytes(run)
        metrics: dict[str, float] = {}
        total = self._zeros(run, weights)
        rows_left = self._most_batches * run.position.global_rows  # left in the sample over all sets
        for name, loader in self._sets.items():
            sums_of_set, sums_of_sample = self._sums(run, loader, weights, rows_left)
            self._check_tokens(sums_of_set, f" of {name} in data.index_path_validation" if self._is_named else "")
            total = plus(total, sums_of_sample)
            rows_left -= loader.rows
            if self._is_named:
                metrics |= means(f"validation/{name}/", sums_of_set, run.job.objective.metrics)
        self._check_tokens(total, "")
        return means("validation/", total, run.job.objective.metrics) | metrics

    def _sums(self, run: Run, loader: Loader, weights: dict[str, PyTree], rows_of_sample: int) -> tuple[Sums, Sums]:
        """The sums over a set, and over its first rows, which belong to the sample over all sets.

        Raises:
          Stopped: a stop request came.
        """
        set_sums = self._zeros(run, weights)
        sample_sums = self._zeros(run, weights)
        global_rows = run.position.global_rows
        with closing(prefetch(loader.batches())) as batches:
            for number, batch in enumerate(islice(batches, self._most_batches)):
                first_row = number * global_rows
                rows_in_sample = rows_of_sample - first_row
                sums = self._sums_of_batch(run, batch, weights)
                set_sums = plus(set_sums, sums)
                if rows_in_sample >= min(global_rows, loader.rows - first_row):
                    sample_sums = plus(sample_sums, sums)
                elif rows_in_sample > 0:
                    sample = first_rows(batch, rows_in_sample, run.host_rows)
                    sample_sums = plus(sample_sums, self._sums_of_batch(run, sample, weights))
                if run.requests.is_stop(run.position.step):
                    raise Stopped
        return self._over_hosts(set_sums), self._over_hosts(sample_sums)

    def _sums_of_batch(self, run: Run, batch: HostBatch, weights: dict[str, PyTree]) -> Sums:
        """The sum of losses for each of `weights`, the number of scored tokens, and their bytes on this host.

        If the objective is not the likelihood, its terms are counted instead of tokens, and its metrics are summed too.
        """
        sums = self._zeros(run, weights)
        tokens = batch.tokens
        texts = tokens.reshape(run.job.objective.example.texts * len(tokens), -1)
        rows = run.host_rows.split(texts)
        extra = run.extra(rows, batch.extra)
        for name, params in weights.items():
            loss, terms, objective_sums = jax.device_get(run.job.programs.evaluate(params, rows, extra))
            sums[name] = loss.item()
            if name == "loss":
                sums["tokens"] = terms.item()
                sums |= {key: x.item() for key, x in objective_sums.items()}
        if self._token_bytes is not None:
            targets = tokens[run.host_rows.is_counted(len(tokens)), 1:]
            sums["bytes"] = int(self._token_bytes[targets[targets >= 0]].sum())
        return sums

    def _over_hosts(self, sums: Sums) -> Sums:
        """The sums with the bytes of all hosts; losses and tokens already cover all hosts."""
        if self._token_bytes is None:
            return sums
        high, low = agreement.sum_over_hosts(*divmod(int(sums["bytes"]), 2**16))  # each modulo 2^32
        return sums | {"bytes": float(high * 2**16 + low)}

    def _zeros(self, run: Run, weights: dict[str, PyTree]) -> Sums:
        return dict.fromkeys((*weights, *run.job.objective.names, "tokens", "bytes"), 0.0)

    def _check_tokens(self, sums: Sums, place: str) -> None:
        if not sums["tokens"]:
            raise UserError(
                f"training.loss_on={self._loss_on}: the rows{place} of the evaluation hold no token to score"
            )


def token_bytes(run: Run) -> np.ndarray:
    """The bytes of text of each token; ids above the tokenizer's have none."""
    lengths = run.data.tokenizer.byte_lengths()
    return np.pad(lengths, (0, run.job.model.config.vocab_size - len(lengths)))


def first_rows(batch: HostBatch, count: int, host_rows: HostRows) -> HostBatch:
    """The batch with all rows replaced by padding except the first `count` of the global batch."""
    is_kept = host_rows.numbers(len(batch.tokens)) < count
    return batch._replace(tokens=np.where(is_kept[:, None], batch.tokens, -1))


def plus(left: Sums, right: Sums) -> Sums:
    """The sums key by key.

    >>> plus({"loss": 1.0, "tokens": 2.0}, {"loss": 3.0, "tokens": 4.0})
    {'loss': 4.0, 'tokens': 6.0}
    """
    return {key: value + right[key] for key, value in left.items()}


def means(prefix: str, sums: Sums, objective_metrics: Sequence[Mean] = ()) -> dict[str, float]:
    """Losses per token, bits per byte if bytes are counted, and the metrics of an objective.

    >>> means("validation/", {"loss": 6.0, "tokens": 4.0, "bytes": 0.0})
    {'validation/loss': 1.5}
    """
    names = {metric.name for metric in objective_metrics}
    losses = {key: value for key, value in sums.items() if key not in {"tokens", "bytes", *names}}
    values = {key: value / sums["tokens"] for key, value in losses.items()} | divided(
        objective_metrics, sums, sums["tokens"]
    )
    left_out = without_terms(objective_metrics, sums)
    metrics = {f"{prefix}{key}": value for key, value in values.items() if key not in left_out}
    if sums["bytes"]:
        metrics[f"{prefix}bits_per_byte"] = losses["loss"] / math.log(2) / sums["bytes"]
    return metrics
