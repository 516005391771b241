"""Sends lines of metrics to metrics.jsonl, W&B and TensorBoard."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from zero.base.keys import at_least, key
from zero.hosts import agreement
from zero.record.metrics_file import Line
from zero.record.run_files import SAMPLES_FILE
from zero.run.feature import Feature, Moment
from zero.run.features.sample import samples_after
from zero.run.run import Run
from zero.tracking.metrics import Metric
from zero.tracking.tracker import Tracker, TrackerKeys, open_tracker


class Track(Feature):
    """Records each line on host 0, with the run's clock; at least one line every `training.log_frequency` steps."""

    @dataclass(frozen=True)
    class Keys:
        log_frequency: int = key(10, at_least(1), "Log metrics every n steps.", in_steps=True)

    name = "track"
    metrics = (
        Metric(
            ("time", "wall_time", "goodput/PHASE"),
            "seconds since 1970; seconds since the first start, over all resumes; the share of each phase",
        ),
    )
    acts_on_every_line = True

    def __init__(self, keys: Keys, destinations: TrackerKeys, run: Run) -> None:
        self._every = keys.log_frequency
        self._stack = ExitStack()
        self._tracker: Tracker | None = None
        self._samples = run.directory.path / SAMPLES_FILE
        self._sampled = run.position.step  # the step of the newest sample sent
        if agreement.is_host_0():
            opened = open_tracker(
                run.directory.path,
                project=destinations.wandb_project,
                tensorboard=destinations.tensorboard,
                config=run.config,
                resumed_from=None if run.config["resume"] is None else run.position.step,
            )
            self._tracker = self._stack.enter_context(opened)

    def due(self, now: Moment) -> bool:
        return now.is_evaluation or now.step % self._every == 0

    def do(self, run: Run, now: Moment, line: Line) -> None:
        if self._tracker is not None:
            self._tracker(line | run.clock.line())
            self._send_samples()

    def close(self) -> None:
        self._send_samples()
        self._stack.close()

    def _send_samples(self) -> None:
        """Sends the samples written since the last call; each is written after the line of its step."""
        if self._tracker is not None and self._samples.exists():
            for step, text in samples_after(self._samples.read_text(errors="replace"), self._sampled):
                self._tracker.text(step, text)
                self._sampled = step
