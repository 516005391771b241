"""Trains short jobs with one or two keys at other values, and compares what they did with what the keys promise.

- `random_pairs`: pairs of overrides. `Tried`: runs them in this process, and says how each ended.
- `NEUTRAL`: overrides that change neither the program of the step nor a loss. `PLACED`: they change the program, and
  losses only by rounding. `VALUES`: they change the program. `OF_DATA`: they change the losses.
- `compile_quickly`: for a process of its own, before its first program.

A run takes 1 to 4 seconds of CPU time. All runs of a process share what is compiled, by its text (jax's persistent
cache), and runs that differ in neutral keys share their job (tests/helpers/shared_jobs.py).
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import re
import shutil
import traceback
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
from zero.job.sizes import load_sizes
from zero.models.config import GPTConfig
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
SETTLED = {("model.attention=blockwise", "zero.context_shards=2")}  # around a ring attention is in blocks anyway
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


def key_of(override: str) -> str:
    return override.partition("=")[0]


class Tried:
    """Runs of the job in a workplace, each once; what they did is kept in a file, if one is given."""

    def __init__(self, workplace: Path, results: Path | None = None) -> None:
        self._workplace = workplace
        self._results = results
        self._outcomes: dict[frozenset[str], Outcome] = {}
        self._jobs = SharedJobs(map(key_of, NEUTRAL))
        if results is not None and results.exists():
            for line in map(json.loads, results.read_text().splitlines()):
                overrides = frozenset(line.pop("overrides"))
                self._outcomes[overrides] = Outcome(**line)

    def verdict(self, one: str, other: str) -> Verdict:
        """How the pair of overrides ended, compared with each of them alone."""
        both = self.outcome(one, other)
        if both.traceback:
            return Verdict(WRONG, both.traceback)
        if both.refusal:
            return of_refusal(both.refusal, one, other)
        if not both.losses or not all(map(math.isfinite, both.losses)):
            return Verdict(WRONG, f"losses {both.losses}")
        for own, beside in ((one, other), (other, one)):
            if (own, beside) in SETTLED:
                continue
            broken = broken_promise(own, self.outcome(beside), both, is_rounding=_rounds(one, other))
            if broken:
                return Verdict(WRONG, f"{own} beside {beside}: {broken}")
        return Verdict(EQUAL)

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


def of_refusal(refusal: str, one: str, other: str) -> Verdict:
    """A refusal names one of the keys, or the last word of a key."""
    names = [key_of(override).rpartition(".")[2] for override in (one, other)]
    if any(re.search(rf"\b{name}\b", line) for line in refusal.splitlines() for name in names):
        return Verdict(REFUSED, refusal)
    return Verdict(WRONG, f"the refusal names neither key: {refusal}")


def broken_promise(own: str, beside: Outcome, both: Outcome, is_rounding: bool) -> str:
    """What an override does not keep of its promises beside another one, whose outcome alone is given; or nothing."""
    if not beside.losses:
        return ""  # the other one is possible only with this one
    is_mean = "training.log_frequency" in own  # its lines are means of steps
    are_equal = both.losses == beside.losses or is_mean
    if own in NEUTRAL:
        if both.programs != beside.programs:
            return "the program differs"
        return "" if are_equal else f"losses {both.losses} in place of {beside.losses}"
    if own in OF_DATA:
        return "" if both.losses != beside.losses else "the losses are the same"
    if both.programs == beside.programs and len(both.losses) == len(beside.losses):
        return "the program is the same"
    if own in PLACED:
        tolerance = 2e-2 if is_rounding else 2e-5
        pairs = zip(both.losses, beside.losses, strict=True)
        if not all(math.isclose(ours, theirs, rel_tol=tolerance) for ours, theirs in pairs):
            return f"losses {both.losses} in place of {beside.losses}"
    return ""


def _rounds(*overrides: str) -> bool:
    return any(word in override for override in overrides for word in ROUNDING)
