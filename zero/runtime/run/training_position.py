"""Where a run is between two steps, apart from what the devices hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class TrainingPosition:
    """Where the data and the counters are between two steps; a checkpoint holds it together with the state."""

    global_rows: int  # of a batch over all hosts; fixed by the first checkpoint
    step: int = 0
    cursor: dict[str, int] | None = None
    skipped_rows: int = 0
    samples_checksum: int = 0
    unevaluated: dict[str, Any] | None = None  # metrics of this step where a signal came before its evaluation
