"""Trains short jobs with some keys at other values, and compares what they did with what the keys promise.

- `random_pairs`: pairs of overrides. `random_groups`: three to six. `Tried`: runs them in this process, and says how
  each ended.
- `NEUTRAL`: overrides that change neither the program of the step nor a loss. `PLACED`: they change the program, and
  losses only by rounding. `VALUES`: they change the program. `OF_DATA`: they change the losses.
- `compile_quickly`: for a process of its own, before its first program.

A run takes 1 to 4 seconds of CPU time. All runs of a process share what is compiled, by its text (jax's persistent
cache), and runs that differ in neutral keys share their job (tests/helpers/shared_jobs.py).
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import random
import re
import shutil
import traceback
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import asdict, dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax
from hydra.errors import HydraException

from tests.config import composing
from tests.helpers import cli, key_table
from tests.helpers.shared_jobs import SharedJobs
from zero.base.errors import UserError
from zero.commands.cli import compose as compose_of_command_line
from zero.commands.modes import check
from zero.job.job import make_job, place_model
from zero.job.sizes import load_sizes
from zero.models.config import GPTConfig
from zero.planning.compile import step_arguments
from zero.run import train as run_train
from zero.run.config import TrainConfig

JOB = dict(override.split("=", 1) for override in cli.TINY) | {
    "training.total_steps": "3",
    "training.warmup_steps": "1",
    "training.evaluation_frequency": "2",
    "training.maximum_evaluation_steps": "0",
    "training.gradient_accumulation_steps": "1",
    "training.batch_size": "32",  # four rows per device, for micro-batches and groups of devices
}
WITH = {"zero.emergency_steps": {"zero.emergency_directory": "emergency"}}  # what belongs to a key
WITHOUT = {"data.corpus": ("data.index_path_train", "data.index_path_validation")}  # what it has no use for


def _overrides(values: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in values.items())


NEUTRAL = _overrides({key: key_table.ELSEWHERE[key] for key in key_table.NEUTRAL})
NEUTRAL += ("data.shuffle_shards=17", "data.tensorboard=true", "training.max_epochs=9", "zero.phases=flat")
PLACED = _overrides({key: key_table.OF_THE_STEP[key] for key in key_table.PLACED})
PLACED += ("zero.stage=0", "zero.stage=2", "zero.remat=dots", "training.gradient_accumulation_steps=4")
# Of the step, but neither the seed, whose value only the data and the initial weights hold, nor other steps' values.
VALUES = tuple(
    override
    for override in _overrides(key_table.OF_THE_STEP)
    if override not in PLACED and override.partition("=")[0] not in ("seed", "schedule.decay_end")
)
VALUES = tuple(override.replace("total_steps=13", "total_steps=4") for override in VALUES) + (
    *("schedule.decay_end=2", "schedule=linear", "schedule=constant", "schedule=wsd", "optimizer=lion"),
    *("optimizer=sgd", "optimizer=adafactor", "optimizer=lamb", "optimizer=muon", "optimizer.state_dtype=int8"),
    *("zero.wire_dtype=int8", "model.override={alibi_attn: false}"),
)
OF_DATA = (
    *("seed=1", "training.batch_size=16", "data.max_context=16", "data.train_samples=20", "data.corpus=synthetic"),
    "training.context_stages=[[1,16]]",
)
# Values that round: what another key computes in another order differs by more.
ROUNDING = ("int8", "bfloat16", "optimizer=muon")
ROWS = 4  # per device, of the steps that are compared by their text
SETTLED = {
    ("model.attention=blockwise", "zero.context_shards=2"),  # around a ring attention is in blocks anyway
    ("training.total_steps=4", "schedule.decay_end=2"),  # the rate ends before either; a run of four steps is longer
}
SIZES = load_sizes()
EQUAL = "as promised"
REFUSED = "refused by name"
WRONG = "wrong"


class Verdict(NamedTuple):
    kind: str
    reason: str = ""


Pair: TypeAlias = tuple[str, str]


@dataclass
class Outcome:
    """How a run ended: losses of its steps and checksums of the texts of its programs, or the lines of its refusal."""

    losses: list[float] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)
    refusal: str = ""
    traceback: str = ""


def compile_quickly(cache: Path) -> None:
    """Shares what is compiled by its text, in this directory, and leaves out most optimizations (tests/conftest.py)."""
    os.environ["WANDB_MODE"] = "offline"
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its idle threads spin
    os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_disable_most_optimizations", True)
    gc.set_threshold(100_000, 20, 20)


def random_pairs(count: int, seed: int) -> list[Pair]:
    """Half of them with a neutral override, half of them without, as far as there are so many."""
    draw = random.Random(seed)
    others = (*PLACED, *VALUES, *OF_DATA)
    neutral = list(product(NEUTRAL, others))
    both = [pair for pair in combinations(others, 2) if key_of(pair[0]) != key_of(pair[1])]
    beside = draw.sample(neutral, min(count // 2, len(neutral)))
    both = draw.sample(both, min(count - count // 2, len(both)))
    return sorted(beside, key=lambda pair: others.index(pair[1])) + both  # runs of one job are neighbors


def random_groups(count: int, seed: int) -> list[tuple[str, ...]]:
    """Three to six overrides of different keys each."""
    draw = random.Random(seed)
    values: dict[str, list[str]] = {}
    for override in (*NEUTRAL, *PLACED, *VALUES, *OF_DATA):
        values.setdefault(key_of(override), []).append(override)
    drawn = [draw.sample(sorted(values), draw.randint(3, 6)) for _ in range(count)]
    return [tuple(draw.choice(values[key]) for key in keys) for keys in drawn]


def key_of(override: str) -> str:
    return override.partition("=")[0]


class Tried:
    """Runs of the job in a workplace, each once; what they did is kept in a file, if one is given."""

    def __init__(self, workplace: Path, results: Path | None = None) -> None:
        self._workplace = workplace
        self._results = results
        self._outcomes: dict[frozenset[str], Outcome] = {}
        self._steps: dict[frozenset[str], str] = {}
        self._jobs = SharedJobs(map(key_of, NEUTRAL))
        if results is not None and results.exists():
            for line in map(json.loads, results.read_text().splitlines()):
                overrides = frozenset(line.pop("overrides"))
                self._outcomes[overrides] = Outcome(**line)

    def verdict(self, *overrides: str) -> Verdict:
        """How a run with these overrides ended, compared with runs and programs that lack some of them.

        Those that promise the same losses are left out together, each of the others by itself.
        """
        made = self.outcome(*overrides)
        if made.traceback:
            return Verdict(WRONG, made.traceback)
        if made.refusal:
            return of_refusal(made.refusal, *overrides)
        if not made.losses or not all(map(math.isfinite, made.losses)):
            return Verdict(WRONG, f"losses {made.losses}")
        same = [own for own in overrides if own in NEUTRAL or own in PLACED]
        if same:
            beside = self.outcome(*(one for one in overrides if one not in same))
            broken = broken_promise(same, beside, made, is_rounding=_rounds(*overrides))
            if broken:
                return Verdict(WRONG, f"{' '.join(same)}: {broken}")
        for own in overrides:
            rest = [one for one in overrides if one != own]
            if own in OF_DATA:
                is_without_effect = self.outcome(*rest).losses == made.losses
            else:
                settled = any(own == one and other in rest for one, other in SETTLED)
                is_without_effect = (
                    own not in NEUTRAL and not settled and self.step_of(*rest) == self.step_of(*overrides)
                )
            if is_without_effect:
                return Verdict(WRONG, f"{own}: it has no effect")
        return Verdict(EQUAL)

    def step_of(self, *overrides: str) -> str:
        """The checksum of the lowered step, on rows of one shape; of refused overrides the line."""
        key = frozenset(overrides)
        if key not in self._steps:
            try:
                with chdir(self._workplace):
                    config, size = _composed(job(overrides))
                    made = make_job(config, place_model(config, size))
                    lowered = made.programs.step.lower(*step_arguments(made, ROWS, config.data.max_context))
                self._steps[key] = hashlib.sha256(lowered.as_text().encode()).hexdigest()
            except UserError as error:  # another one is possible only with the one that is left out
                self._steps[key] = str(error)
        return self._steps[key]

    def outcome(self, *overrides: str) -> Outcome:
        key = frozenset(overrides)
        if key not in self._outcomes:
            outcome = self._outcomes[key] = self._run(overrides)
            if self._results is not None:
                with self._results.open("a") as file:
                    file.write(json.dumps({"overrides": sorted(key)} | asdict(outcome)) + "\n")
        return self._outcomes[key]

    def _run(self, overrides: tuple[str, ...]) -> Outcome:
        outcome = Outcome()
        with chdir(self._workplace):
            directory = Path("run").absolute()
            directory.mkdir()
            try:
                config, size = _composed(job(overrides))
                with self._jobs.shared(outcome.programs):
                    status = run_train.train(config, size, directory)
                assert status == 0
                outcome.losses = cli.losses(directory)
            except UserError as error:
                outcome.refusal = str(error)
            except Exception:  # noqa: BLE001  it is what is looked for
                outcome.traceback = traceback.format_exc()
            finally:
                for place in ("run", "elsewhere", "cache", "emergency"):
                    shutil.rmtree(place, ignore_errors=True)
        return outcome


def _composed(overrides: list[str]) -> tuple[TrainConfig, GPTConfig]:
    try:
        config = check(composing.compose(*overrides), SIZES, [key_of(override) for override in overrides])
    except HydraException:
        return compose_of_command_line(overrides)  # which makes lines of it
    return config, SIZES.chosen(config.model)


def job(overrides: tuple[str, ...]) -> list[str]:
    """The overrides of the job with these in place of its own."""
    values = dict(JOB)
    for override in overrides:
        key, _, value = override.partition("=")
        values |= {key: value} | WITH.get(key, {})
        for unused in WITHOUT.get(key, ()):
            del values[unused]
    return [f"{key}={value}" for key, value in values.items()]


def of_refusal(refusal: str, *overrides: str) -> Verdict:
    """A refusal names one of the keys, or the last word of a key."""
    names = [key_of(override).rpartition(".")[2] for override in overrides]
    if any(re.search(rf"\b{name}\b", line) for line in refusal.splitlines() for name in names):
        return Verdict(REFUSED, refusal)
    return Verdict(WRONG, f"the refusal names none of the keys: {refusal}")


def broken_promise(same: Sequence[str], beside: Outcome, made: Outcome, is_rounding: bool) -> str:
    """What a run does not keep of the promise of overrides to have the losses of a run beside it; or nothing.

    Args:
      same: the overrides that the run beside it lacks, each `NEUTRAL` or `PLACED`.
    """
    if not beside.losses:
        return ""  # the others are possible only with these
    is_neutral = all(override in NEUTRAL for override in same)
    if is_neutral and made.programs != beside.programs:
        return "the program differs"
    if any(override.startswith("training.log_frequency") for override in same):
        return ""  # its lines are means of steps
    differs = f"losses {made.losses} in place of {beside.losses}"
    if is_neutral:
        return "" if made.losses == beside.losses else differs
    tolerance = 2e-2 if is_rounding else 2e-5
    pairs = zip(made.losses, beside.losses, strict=True)
    return "" if all(math.isclose(ours, theirs, rel_tol=tolerance) for ours, theirs in pairs) else differs


def _rounds(*overrides: str) -> bool:
    return any(word in override for override in overrides for word in ROUNDING)
