"""A batch that grows in stages, as for Llama 3 (arXiv 2407.21783, section 3.4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero.base.keys import Check, Mistakes, is_stages, key, named
from zero.run.batches.keys import BatchKeys


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
