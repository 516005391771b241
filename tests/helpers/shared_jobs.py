"""Short runs in this process that share what they compile.

`SharedJobs` has runs that differ only in some keys share their job: it is made of a configuration that lacks these
keys, so that it cannot depend on them. A run then takes about a second of CPU time. Pictures and pages are blank.
"""

from __future__ import annotations

import copy
import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax

from tests.helpers.blank_pages import leave_blank
from zero.job.job import Job, PlacedModel, make_job, place_model
from zero.models.config import GPTConfig
from zero.run import step_programs
from zero.run import train as run_train
from zero.run.config import TrainConfig
from zero.run.features import report

MOST_JOBS = 12  # what is compiled uses up the memory mappings of a process
ON_TPU = {"zero.phases", "zero.overlap_gathers"}  # keys that a job reads, though they mean something on TPU only


class Compiled(NamedTuple):
    program: Callable[..., Any]
    checksum: str


class SharedJobs:
    """Jobs and their compiled steps; `keys` are those that no job depends on."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = {*keys, "data.checkpoint_directory", "zero.emergency_directory"} - ON_TPU
        self._jobs: dict[str, tuple[Job, dict[str, Compiled]]] = {}

    def drop(self) -> None:
        """Forgets all jobs, and what was compiled for them."""
        self._jobs.clear()
        jax.clear_caches()
        gc.collect()

    @contextmanager
    def shared(self, checksums: list[str]) -> Iterator[None]:
        """Runs share jobs and compiled steps; adds the checksum of the text of each step that a run uses."""
        if len(self._jobs) > MOST_JOBS:
            self.drop()
        compiled: dict[str, Compiled] = {}

        def place_blind_model(config: TrainConfig, size: GPTConfig) -> PlacedModel:
            return place_model(without(self._keys, config), size)

        def make_shared_job(config: TrainConfig, placed: PlacedModel) -> Job:
            nonlocal compiled
            blind = without(self._keys, config)
            key = f"{_shown(blind)} {placed.model.config}"
            if key not in self._jobs:
                self._jobs[key] = make_job(blind, placed), {}
            made, compiled = self._jobs[key]
            return made

        def compile_once(stop: list[int], program: Any, *arguments: Any) -> Callable[..., Any]:
            shapes = str(jax.tree.map(jax.typeof, arguments))
            if shapes not in compiled:
                lowered = program.lower(*arguments)
                checksum = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]
                compiled[shapes] = Compiled(lowered.compile(), checksum)
            checksums.append(compiled[shapes].checksum)
            return compiled[shapes].program

        with (
            patch.object(run_train, "place_model", place_blind_model),
            patch.object(run_train, "make_job", make_shared_job),
            patch.object(step_programs, "compile_unless_stopped", compile_once),
            patch.object(report, "draw", leave_blank),
        ):
            yield


def without(keys: Iterable[str], config: TrainConfig) -> TrainConfig:
    """A copy in which these keys are missing: to read one raises AttributeError."""
    blind = copy.deepcopy(config)
    for key in keys:
        *sections, name = key.split(".")
        section: Any = blind
        for inner in sections:
            section = getattr(section, inner)
        object.__delattr__(section, name)  # a configuration is frozen
    return blind


def _shown(config: Any) -> str:
    """The keys that a configuration has, and their values."""
    return str({name: _shown(value) if is_dataclass(value) else value for name, value in vars(config).items()})


class FinishedRun(NamedTuple):
    """A run that has ended, its workplace, and the jobs that further runs there share."""

    root: Path
    run: Path
    jobs: SharedJobs
