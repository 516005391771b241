"""How many sequences the batch of each step has: the choices of the group `batch`.

Stages grow as for Llama 3 (arXiv 2407.21783, section 3.4.1); a ramp grows evenly from the first step on, as for GPT-3
(arXiv 2005.14165, appendix B) and in Megatron-LM. A new schedule is a class of its keys and an entry of `BATCHES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from zero.base.keys import Check, Mistakes, at_least, is_stages, key, named


@dataclass(frozen=True)
class BatchKeys(ABC):
    """The keys shared by all choices of the group `batch`."""

    name: str = ""

    @abstractmethod
    def stages_to(self, batch_size: int) -> list[tuple[int, int]]:
        """Steps and sequences per host of each stage before batches of `training.batch_size` sequences."""

    def global_stages(self, batch_size: int, hosts: int) -> list[list[int]]:
        """The stages in rows over all hosts, which the first checkpoint of a run fixes."""
        return [[steps, rows * hosts] for steps, rows in self.stages_to(batch_size)]

    def mistakes(self, batch_size: int) -> Mistakes:
        """The keys that contradict `training.batch_size`."""
        yield from ()

    def start_mistakes(self, batch_size: int, total_steps: int) -> Mistakes:
        """The keys by which a run that starts would not grow its batches; one that is resumed keeps its own."""
        yield from ()


@dataclass(frozen=True)
class Constant(BatchKeys):
    """training.batch_size sequences per host in every step."""

    name: str = named("constant")

    def stages_to(self, batch_size: int) -> list[tuple[int, int]]:
        return []


@dataclass(frozen=True)
class Stages(BatchKeys):
    """Batches that grow in stages to training.batch_size sequences per host (arXiv 2407.21783)."""

    name: str = named("stages")
    stages: Any = key(
        [],
        Check(is_stages, "[[steps, sequences per host], ...]"),
        "[[500, 4], [500, 8]]: 500 steps of 4 sequences per host, then 500 of 8, then training.batch_size.",
        "A resume keeps the stages of the run.",
        fixed=True,
    )

    def stages_to(self, batch_size: int) -> list[tuple[int, int]]:
        return [(steps, rows) for steps, rows in self.stages]

    def start_mistakes(self, batch_size: int, total_steps: int) -> Mistakes:
        sizes = [rows for _, rows in self.stages] + [batch_size]
        if sizes != sorted(sizes) or sizes[0] == batch_size:
            yield "batch.stages", f"batches that grow up to training.batch_size={batch_size}"
        if sum(steps for steps, _ in self.stages) >= total_steps:
            yield "batch.stages", f"fewer steps than training.total_steps={total_steps}, which ends the run"


@dataclass(frozen=True)
class Ramp(BatchKeys):
    """Batches that grow by equal amounts to training.batch_size sequences per host (arXiv 2005.14165, appendix B)."""

    name: str = named("ramp")
    first: int = key(
        1,
        at_least(1),
        "Sequences per host at the start, and how many each increase adds; a divisor of training.batch_size.",
        fixed=True,
    )
    steps: int = key(1000, at_least(1), "Steps before training.batch_size is reached.", fixed=True)

    def stages_to(self, batch_size: int) -> list[tuple[int, int]]:
        """Stages of equal length; the first ones take one more step if the steps do not divide evenly.

        >>> Ramp(first=2, steps=8).stages_to(8)
        [(3, 2), (3, 4), (2, 6)]
        """
        sizes = range(self.first, batch_size, self.first)
        if not sizes:
            return []
        steps, more = divmod(self.steps, len(sizes))
        return [(steps + (number < more), rows) for number, rows in enumerate(sizes)]

    def mistakes(self, batch_size: int) -> Mistakes:
        if batch_size % self.first:
            yield "batch.first", f"a divisor of training.batch_size={batch_size}"
            return
        count = batch_size // self.first - 1
        if self.steps < count:
            yield "batch.steps", f"at least {count}, the stages from batch.first to training.batch_size={batch_size}"

    def start_mistakes(self, batch_size: int, total_steps: int) -> Mistakes:
        if self.first >= batch_size:
            yield "batch.first", f"less than training.batch_size={batch_size}, to which batches grow"
        if self.steps >= total_steps:
            yield "batch.steps", f"fewer than training.total_steps={total_steps}, which ends the run"


BATCHES: tuple[type[BatchKeys], ...] = (Constant, Stages, Ramp)  # the default first
