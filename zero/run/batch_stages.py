"""`training.batch_stages`: a batch that grows by step, as for Llama 3 (arXiv 2407.21783, section 3.4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero.config.keys import Check, Mistakes, key
from zero.training.schedules import is_stages

_STAGES = "[[steps, sequences per host], ...]"


@dataclass(frozen=True)
class Keys:
    """The keys of a batch that grows."""

    batch_stages: Any = key(
        None,
        Check(lambda value: value is None or is_stages(value), f"{_STAGES}, or null"),
        "Batch size by stage: [[500, 4], [500, 8]] takes 500 steps of 4 sequences per host, then 500 of 8, then "
        "batch_size; null: batch_size from the start.",
        "A resume keeps the stages of the run.",
        fixed=True,
    )

    def global_stages(self, hosts: int) -> list[list[int]]:
        """The stages with the rows of all hosts, as a checkpoint fixes them."""
        return [[steps, rows * hosts] for steps, rows in self.batch_stages or ()]

    def stage_mistakes(self, steps_per_row: int, setting: str) -> Mistakes:
        """Stages that end within a row."""
        if any(steps % steps_per_row for steps, _ in self.batch_stages or ()):
            yield "training.batch_stages", f"stages of a multiple of {steps_per_row} steps, a row's with {setting}"
