"""A batch that grows evenly from the first step on, as for GPT-3 (arXiv 2005.14165, appendix B) and in Megatron-LM."""

from __future__ import annotations

from dataclasses import dataclass

from zero.base.keys import Mistakes, at_least, key, named
from zero.run.batches.keys import BatchKeys


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
