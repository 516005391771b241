"""Losses on the validation sets during training: of each named set, and of all tokens together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from itertools import islice
from typing import TypeAlias

import jax
import numpy as np

from zero.corpus.reading.loader import HostBatch, Loader
from zero.corpus.reading.prefetch import prefetch
from zero.errors import UserError
from zero.hosts import agreement
from zero.run.active_run import ActiveRun
from zero.training.ema import EMA
from zero.training.programs import split_rows

Sums: TypeAlias = dict[str, float]  # of losses by the names of weights, of an objective's metrics, "tokens" and "bytes"


def validation_metrics(run: ActiveRun) -> dict[str, float] | None:
    """`validation/loss` in nats per token, of averaged weights `validation/ema_loss`; None if the run was stopped.

    Sets with names have theirs as `validation/NAME/loss`, and bits per byte beside it, of their first
    `training.maximum_evaluation_steps` batches. Names change no total: it is the mean over the tokens of the first so
    many batches of all sets, one after the other, as of a list of their files.

    Raises:
      UserError: a set holds no token to score.
    """
    averages = run.state.averages
    weights = {"loss": run.weights}
    if EMA in averages:
        weights["ema_loss"] = run.job.model.weights(averages[EMA], averages, run.frozen)
    is_named = "" not in run.validation
    sizes = _byte_sizes(run) if is_named and not run.job.objective.metrics else None
    metrics: dict[str, float] = {}
    total = _zeros(run, weights)
    left = run.config.training.maximum_evaluation_steps * run.position.global_rows
    for name, loader in run.validation.items():
        sums = _sums(run, loader, weights, sizes, left)
        if sums is None:
            return None
        own, counted = sums
        _check_tokens(run, own, f" of {name} in data.index_path_validation" if is_named else "")
        total = _plus(total, counted)
        left -= loader.rows
        if is_named:
            metrics |= _means(f"validation/{name}/", own)
    _check_tokens(run, total, "")
    return _means("validation/", total) | metrics


def uncovered(loaders: Mapping[str, Loader], batches: int, global_rows: int) -> list[str]:
    """The sets of which this number of batches of all sets, one after the other, holds nothing."""
    names, left = [], batches * global_rows
    for name, loader in loaders.items():
        if left <= 0:
            names.append(name)
        left -= loader.rows
    return names


def _check_tokens(run: ActiveRun, sums: Sums, of_set: str) -> None:
    if not sums["tokens"]:
        raise UserError(
            f"training.loss_on={run.config.training.loss_on}: the rows{of_set} of the evaluation hold no token to score"
        )


def _byte_sizes(run: ActiveRun) -> np.ndarray:
    """The bytes of text of each token of the model; ids above those of the tokenizer have none."""
    lengths = run.tokenizer.byte_lengths()
    return np.pad(lengths, (0, run.job.model.config.vocab_size - len(lengths)))


def _sums(
    run: ActiveRun, loader: Loader, weights: dict[str, object], sizes: np.ndarray | None, left: int
) -> tuple[Sums, Sums] | None:
    """The sums of a set, and those of its first `left` rows of the global batches; None if stopped."""
    own = counted = _zeros(run, weights)
    rows = run.position.global_rows
    with closing(prefetch(loader.batches())) as batches:
        for number, batch in enumerate(islice(batches, run.config.training.maximum_evaluation_steps)):
            found = _sums_of_batch(run, batch, weights, sizes)
            own, inside = _plus(own, found), left - number * rows
            if inside >= min(rows, loader.rows - number * rows):
                counted = _plus(counted, found)
            elif inside > 0:
                first = jax.process_index() * len(batch.tokens)
                is_inside = np.arange(first, first + len(batch.tokens)) < inside
                some = batch._replace(tokens=np.where(is_inside[:, None], batch.tokens, -1))
                counted = _plus(counted, _sums_of_batch(run, some, weights, sizes))
            if run.poll():
                return None
    return _over_hosts(own, sizes), _over_hosts(counted, sizes)


def _sums_of_batch(run: ActiveRun, batch: HostBatch, weights: dict[str, object], sizes: np.ndarray | None) -> Sums:
    """The sum of losses by each of `weights`, the scored tokens, and with `sizes` their bytes on this host.

    For an objective on pairs, of the losses and metrics of pairs, which count in place of tokens.
    """
    sums, tokens = _zeros(run, weights), batch.tokens
    texts = tokens.reshape(run.job.objective.rows * len(tokens), -1)
    rows = split_rows(texts, jax.local_device_count(), run.axis.row_group)
    by_reference = run.reference(rows, batch.reference)
    for name, params in weights.items():
        loss, terms, of_objective = jax.device_get(run.job.programs.evaluate(params, rows, by_reference))
        sums[name] = loss.item()
        if name == "loss":
            sums |= {"tokens": terms.item(), **{key: x.item() for key, x in of_objective.items()}}
    if sizes is not None:
        targets = tokens[:, 1:]
        sums["bytes"] = int(sizes[targets[targets >= 0]].sum())
    return sums


def _over_hosts(sums: Sums, sizes: np.ndarray | None) -> Sums:
    """With the bytes of all hosts; losses and tokens are those of all hosts already."""
    if sizes is None:
        return sums
    high, low = agreement.sum_over_hosts(*divmod(int(sums["bytes"]), 2**16))  # each modulo 2^32
    return sums | {"bytes": float(high * 2**16 + low)}


def _zeros(run: ActiveRun, weights: Mapping[str, object]) -> Sums:
    return dict.fromkeys((*weights, *run.job.objective.metrics, "tokens", "bytes"), 0.0)


def _plus(one: Sums, other: Sums) -> Sums:
    return {key: value + other[key] for key, value in one.items()}


def _means(prefix: str, sums: Sums) -> dict[str, float]:
    """The losses per token, and bits per byte where bytes are counted."""
    losses = {key: value for key, value in sums.items() if key not in ("tokens", "bytes")}
    means = {f"{prefix}{key}": value / sums["tokens"] for key, value in losses.items()}
    if sums["bytes"]:
        means[f"{prefix}bits_per_byte"] = losses["loss"] / math.log(2) / sums["bytes"]
    return means
