"""Runs without devices, for tests of single features: stand-ins take the place of what a test does not look at.

- `make_run`: a `Run` at step 3 with the metrics of one step.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

from zero.corpus.reading.batch_schedule import BatchSchedule
from zero.partition.collectives.axis import Axis
from zero.run.position import Position
from zero.run.requests import Requests
from zero.run.restore import TrainingPosition
from zero.run.run import Run
from zero.run.step_metrics import StepMetrics
from zero.tracking.goodput import Goodput
from zero.training.objectives.objective import LIKELIHOOD
from zero.training.schedules import SequenceLengths

CONTEXT = 16


class NoCheckpoints:
    """Has none, and refuses to save."""

    def check(self) -> None: ...

    def steps(self) -> list[int]:
        return []


def values(**other: float) -> dict[str, Any]:
    """The metrics of a step, as its program gives them."""
    usual = {"loss": 2.0, "gradient_norm": 1.0, "learning_rate": 0.1}
    counts = {"skipped_steps": 0, "skipped_in_a_row": 0, "skipped_spikes": 0}
    return {name: jnp.asarray(value) for name, value in (usual | counts | other).items()}


def in_steps() -> Goodput:
    """A clock as it is during the training loop."""
    clock = Goodput()
    clock._phase = "steps"
    return clock


def make_run(directory: Path, **metrics: float) -> Any:
    """A run at step 3 with the metrics of one step that are not read yet."""
    model = SimpleNamespace(
        axis=Axis("zero", (1, 8)),
        config=SimpleNamespace(score_outputs=None),
        weights=lambda params, averages, frozen: params,
        positions_in=lambda tokens: tokens.shape[1],
    )
    clock = in_steps()
    step_metrics = StepMetrics(8, peak_flops=1e6, goodput=clock)
    loader = SimpleNamespace(rows_seen=lambda batches: {}, epochs_seen=lambda batches: {})
    stand_ins: dict[str, Any] = {
        "job": SimpleNamespace(model=model, objective=LIKELIHOOD),
        "data": SimpleNamespace(
            tokenizer=None, training=loader, validation={}, context=SequenceLengths(CONTEXT), columns={}
        ),
        "directory": SimpleNamespace(path=directory, checkpoints=NoCheckpoints(), emergency=None, mirror=lambda: None),
        "state": SimpleNamespace(params=0.0, averages={}),
    }
    run = Run(
        **stand_ins,
        requests=Requests(lag=0),
        clock=clock,
        metrics=step_metrics,
        frozen=None,
        position=TrainingPosition(8, step=3, cursor={"batches": 3}),
        start=Position(0, BatchSchedule(8), CONTEXT),
        last_step=10,
        evaluation_frequency=20,
        config={"resume": None},
    )
    step_metrics.add(values(**metrics), leave=1, tokens=128, flops=500)
    return run
