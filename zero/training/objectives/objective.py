"""The interface of objectives, which a step minimizes.

A new objective is a file with its keys, an `ObjectiveKeys` that makes an `Objective`, and an entry of `table.py`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from zero.base.keys import Mistakes, named
from zero.corpus.format.example import TEXT, Example
from zero.models.branch import Branch
from zero.models.config import GPTConfig
from zero.models.gpt import Scores
from zero.partition.layout import PyTree
from zero.training.batch import Batch, Entry, Rows
from zero.training.sharded_gpt import ShardedGPT

Value = TypeVar("Value", float, jax.Array)
# The log-probability in nats of each row's scored tokens by a reference model.
REFERENCE = Entry("reference", source="reference")


class Mean(NamedTuple):
    """A metric of an objective: a mean over its terms, in lines of training, and as `validation/...` of evaluations.

    Attributes:
      name: in the lines.
      sentence: its meaning, with the unit.
      title, unit: of its panel in report.html; metrics of one title share a panel.
      over: another metric of the objective, a share of the terms. This metric is averaged over those terms only, and
        left out of lines whose rows have none of them.
      evaluated: whether evaluations alone report it.
    """

    name: str
    sentence: str
    title: str
    unit: str = ""
    over: str = ""
    evaluated: bool = False


def divided(metrics: Iterable[Mean], sums: Mapping[str, Value], terms: Value) -> dict[str, Value]:
    """Metrics from their sums, which are over `terms` or over those that `Mean.over` counts.

    >>> metrics = Mean("share", "", ""), Mean("chosen", "", "", over="share")
    >>> divided(metrics, {"share": 2.0, "chosen": 6.0}, 4.0), divided(metrics, {"share": 0.0, "chosen": 0.0}, 4.0)
    ({'share': 0.5, 'chosen': 3.0}, {'share': 0.0, 'chosen': 0.0})
    """
    means = {}
    for metric in metrics:
        count = terms
        if metric.over:
            count = sums[metric.over] + (sums[metric.over] == 0)
        means[metric.name] = sums[metric.name] / count
    return means


def without_terms(metrics: Iterable[Mean], values: Mapping[str, float]) -> set[str]:
    """The names of the metrics without any terms to average over.

    >>> without_terms([Mean("chosen", "", "", over="share")], {"share": 0.0, "chosen": 0.0})
    {'chosen'}
    """
    return {metric.name for metric in metrics if metric.over and not values[metric.over]}


class Need(NamedTuple):
    """What an objective reads of the model beside losses: an entry of `Scores.extra`.

    Attributes:
      name: of the entry.
      inputs: `(model, batch)` to what it is computed from: arrays of whole rows, `(R, positions, ...)`. Per device.
      branch: the part of the model that computes it; None: every model can.
    """

    name: str
    inputs: Callable[[ShardedGPT, Batch], PyTree]
    branch: Branch | None = None


@dataclasses.dataclass(frozen=True)
class Objective:
    """A mean of terms over the global batch, computed from the losses of tokens. Its functions run inside pmap.

    Rules, data, metrics and messages ask for these attributes, never for the name of an objective.

    Attributes:
      count_terms: `(model, tokens (R, T))` to the number of terms in this device's rows, int32. A psum counts each term
        once.
      sum_losses: `(model, scores, batch)` to the sum of these terms, and sums over them of the metrics. Per device: the
        result of `ShardedGPT.scores`, `batch` with the entries of `reads`. In a group that takes the same rows, values
        and gradients of all its devices add up to those of the rows.
      metrics: further means over the terms.
      reads: the entries of `Batch.extra` that `sum_losses` reads.
      example: the contents of a row of the data.
      needs: the entries of `Scores.extra` that `sum_losses` reads.
    """

    count_terms: Callable[[ShardedGPT, Rows], jax.Array]
    sum_losses: Callable[[ShardedGPT, Scores, Batch], tuple[jax.Array, dict[str, jax.Array]]]
    metrics: tuple[Mean, ...] = ()
    reads: tuple[Entry, ...] = ()
    example: Example = TEXT
    needs: tuple[Need, ...] = ()

    @property
    def metrics_of_steps(self) -> tuple[Mean, ...]:
        """Those of `metrics` that lines of training have."""
        return tuple(metric for metric in self.metrics if not metric.evaluated)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of `metrics`."""
        return tuple(metric.name for metric in self.metrics)

    def count_all(self, model: ShardedGPT, tokens: Rows) -> jax.Array:
        """The terms of all devices, as a divisor: float32, at least 1."""
        return jnp.maximum(lax.psum(self.count_terms(model, tokens), model.axis.name).astype(jnp.float32), 1)

    def inputs(self, model: ShardedGPT, batch: Batch) -> dict[str, PyTree]:
        """By name, what `ShardedGPT.scores` computes the entries of `Scores.extra` from that `sum_losses` reads."""
        return {need.name: need.inputs(model, batch) for need in self.needs}

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The branches that it trains."""
        return tuple(need.branch for need in self.needs if need.branch is not None)

    @property
    def has_reference(self) -> bool:
        """Whether it reads the log-probabilities of a reference model."""
        return REFERENCE in self.reads

    def extra(self, rows: int, positions: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of `Batch.extra` for this many rows and positions."""
        return {entry.name: entry.struct(rows, positions, self.example.texts) for entry in self.reads}

    def zeros(self) -> dict[str, jax.Array]:
        """Sums of `metrics` over no terms."""
        return dict.fromkeys(self.names, jnp.float32(0))

    def means(self, model: ShardedGPT, sums: dict[str, jax.Array], terms: jax.Array) -> dict[str, jax.Array]:
        """`metrics_of_steps` over all devices, from the sums of each."""
        summed = {metric.name: lax.psum(sums[metric.name], model.axis.name) for metric in self.metrics_of_steps}
        return divided(self.metrics_of_steps, summed, terms)


# The mean negative log-likelihood of the scored tokens, in nats.
LIKELIHOOD = Objective(
    count_terms=ShardedGPT.count_scored,
    sum_losses=lambda model, scores, batch: (model.sum_scored(scores.losses_BT, batch.tokens), {}),
)


@dataclasses.dataclass(frozen=True)
class ObjectiveKeys(ABC):
    """The keys shared by all choices of the group `objective`."""

    name: str = ""

    @abstractmethod
    def objective(self) -> Objective:
        """The objective that these keys describe."""

    def mistakes(self, model_config: GPTConfig, model_label: str) -> Mistakes:
        """The contradictions between these keys, or with the model, whose branches are compared elsewhere."""
        yield from ()

    def start_mistakes(self) -> Mistakes:
        """The keys by which a run that starts would learn nothing that the objective is for."""
        yield from ()


@dataclasses.dataclass(frozen=True)
class Likelihood(ObjectiveKeys):
    """The negative log-likelihood of the next token."""

    name: str = named("likelihood")

    def objective(self) -> Objective:
        return LIKELIHOOD
