"""The table of schedules of the batch: the choices of the group `batch`, the default first."""

from __future__ import annotations

from zero.run.batches.keys import BatchKeys, Constant
from zero.run.batches.ramp import Ramp
from zero.run.batches.stages import Stages

BATCHES: tuple[type[BatchKeys], ...] = (Constant, Stages, Ramp)
