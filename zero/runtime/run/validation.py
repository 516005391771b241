"""Losses on the validation sets during training: of each named set, and of all tokens together."""

from __future__ import annotations

import math
from contextlib import closing
from itertools import islice

import jax
import numpy as np

from zero.runtime.errors import UserError
from zero.runtime.hosts import agreement
from zero.runtime.run.active_run import ActiveRun
from zero.runtime.streaming.loader import Loader
from zero.runtime.streaming.prefetch import prefetch
from zero.training.ema import EMA
from zero.training.programs import split_rows


def validation_metrics(run: ActiveRun) -> dict[str, float] | None:
    """`validation/loss` in nats per token, of averaged weights `validation/ema_loss`; None if the run was stopped.

    Sets with names have theirs as `validation/NAME/loss`, and bits per byte beside it; the total is the mean over the
    tokens of all sets.

    Raises:
      UserError: a set holds no token to score.
    """
    averages = run.state.averages
    weights = {"loss": run.weights}
    if EMA in averages:
        weights["ema_loss"] = run.model.weights(averages[EMA], averages, run.frozen)
    is_named = "" not in run.validation
    sizes = _byte_sizes(run) if is_named and not run.objective.metrics else None
    metrics: dict[str, float] = {}
    total = _no_sums(run, weights)
    for name, loader in run.validation.items():
        sums = _sums(run, loader, weights, sizes)
        if sums is None:
            return None
        if not sums["tokens"]:
            of_set = f" of {name} in data.index_path_validation" if is_named else ""
            raise UserError(
                f"training.loss_on={run.config.training.loss_on}: the rows{of_set} of the evaluation hold no token to "
                "score"
            )
        total = {key: total[key] + value for key, value in sums.items()}
        if is_named:
            metrics |= _means(f"validation/{name}/", sums)
    return _means("validation/", total) | metrics


def _byte_sizes(run: ActiveRun) -> np.ndarray:
    """The bytes of text of each token of the model; ids above those of the tokenizer have none."""
    lengths = run.tokenizer.byte_lengths()
    return np.pad(lengths, (0, run.size.vocab_size - len(lengths)))


def _sums(
    run: ActiveRun, loader: Loader, weights: dict[str, object], sizes: np.ndarray | None
) -> dict[str, float] | None:
    """The sum of losses by each of `weights`, the scored tokens, and with `sizes` their bytes; None if stopped.

    For an objective on pairs, of the losses and metrics of pairs, which count in place of tokens.
    """
    sums = _no_sums(run, weights)
    with closing(prefetch(loader.batches())) as batches:
        for batch in islice(batches, run.config.training.maximum_evaluation_steps):
            texts = batch.tokens.reshape(run.objective.rows * len(batch.tokens), -1)
            rows = split_rows(texts, jax.local_device_count(), run.axis.row_group)
            reference = run.reference(rows, batch.reference)
            for name, params in weights.items():
                loss, terms, of_objective = jax.device_get(run.programs.evaluate(params, rows, reference))
                sums[name] += loss.item()
                if name == "loss":
                    sums["tokens"] += terms.item()
                    sums |= {key: sums[key] + x.item() for key, x in of_objective.items()}
            if sizes is not None:
                targets = batch.tokens[:, 1:]
                sums["bytes"] += int(sizes[targets[targets >= 0]].sum())
            is_stop, _ = run.poll()
            if is_stop:
                return None
    if sizes is None:
        return sums
    high, low = agreement.sum_over_hosts(*divmod(int(sums["bytes"]), 2**16))  # each modulo 2^32
    return sums | {"bytes": float(high * 2**16 + low)}


def _no_sums(run: ActiveRun, weights: dict[str, object]) -> dict[str, float]:
    return dict.fromkeys((*weights, *run.objective.metrics, "tokens", "bytes"), 0.0)


def _means(prefix: str, sums: dict[str, float]) -> dict[str, float]:
    """The losses per token, and bits per byte where bytes are counted."""
    losses = {key: value for key, value in sums.items() if key not in ("tokens", "bytes")}
    means = {f"{prefix}{key}": value / sums["tokens"] for key, value in losses.items()}
    if sums["bytes"]:
        means[f"{prefix}bits_per_byte"] = losses["loss"] / math.log(2) / sums["bytes"]
    return means
