"""No key is without effect: another value of each, alone, is refused, or changes the program, the data or the files."""

import ast
import os
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import pytest

import zero
from tests.config.composing import compose
from tests.helpers.key_values import ELSEWHERE, OF_THE_STEP
from zero.cli import compose as cli_compose
from zero.config.check import check
from zero.config.declared import whole_kind
from zero.config.files import load_sizes
from zero.config.keys import all_keys
from zero.config.schema import Config
from zero.errors import UserError
from zero.hosts import startup, watchdog, xla_options
from zero.job import make_axis, make_job
from zero.models.config import GPTConfig
from zero.plan.compile import step_arguments
from zero.run_directory import checkpoint_directory

SIZES = load_sizes()
# The run in which a key is set alone: small, and as plain as the default job.
JOB = (
    *("model.size=test", "data.max_context=32", "training.batch_size=16", "training.total_steps=12"),
    *("training.warmup_steps=3", "training.staged_warmup_steps=4", "training.warmup_train_context=8"),
)
# Keys that are refused alone, and what they need.
REFUSED = {
    "resume": "set by --resume",
    "model.warm_start": "true",
    "model.model_path": "run",
    "data.resume_step": "6",
    "optimizer.scaled_eps": "true",
    "zero.tensor_shards": "2",
    "zero.expert_shards": "2",
    "zero.emergency_directory": "elsewhere",
    "harness.every": "2",
    "harness.tasks": "[a.yaml]",
    "distributed.coordinator_address": "host:1234",
    "distributed.num_processes": "2",
    "distributed.process_id": "1",
}


SOME = ("training.end_learning_rate", "zero.remat")  # of the step: the others are slow


def checked(*overrides: str) -> Config:
    return check(compose(*JOB, *overrides), SIZES, [override.partition("=")[0] for override in overrides])


def test_every_key_is_tried() -> None:
    """The tables above hold every key of a training run once."""
    keys = [key.name for key in all_keys(whole_kind()) if key.name != "mode"]
    assert sorted([*OF_THE_STEP, *ELSEWHERE, *REFUSED]) == sorted(keys)


def test_number_of_keys() -> None:
    """conf/config.yaml shows few keys; the names of groups and of the mode are chosen, not set."""
    assert len([key for key in all_keys(whole_kind()) if key.name != "mode"]) <= 90


@cache
def step_of(*overrides: str) -> str:
    """The lowered step, on rows of the same shape."""
    config = checked(*overrides)
    job = make_job(config, SIZES.chosen(config.model))
    return str(job.programs.step.lower(*step_arguments(job, 4, config.data.max_context)).as_text())


@pytest.mark.parametrize(
    "key", [key if key in SOME else pytest.param(key, marks=pytest.mark.slow) for key in OF_THE_STEP]
)
def test_keys_of_the_step(key: str) -> None:
    """Another value of a key lowers to another step."""
    assert step_of(f"{key}={OF_THE_STEP[key]}") != step_of()


@cache
def names_in_use() -> set[str]:
    """The attributes that the package reads, and the arguments of its functions, outside of the configuration."""
    package = Path(zero.__file__).parent
    files = [path for path in package.rglob("*.py") if "config" not in path.relative_to(package).parts[:1]]
    trees = [ast.parse(path.read_text()) for path in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    return read | {node.arg for node in nodes if isinstance(node, ast.arg)}


def settings(config: Config) -> list[Any]:
    """What a start sets for the whole process."""
    with (
        patch.object(startup, "use_cpu_devices") as devices,
        patch.object(watchdog, "start") as watching,
        patch.object(jax.config, "update") as updated,
        patch.dict(os.environ),
    ):
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
        startup.start(**asdict(config.distributed), overlap_gathers=config.zero.overlap_gathers)
    return [devices.mock_calls, watching.mock_calls, updated.mock_calls]


def on_tpu(config: Config) -> list[Any]:
    """The axis and the options of the compiler on a TPU slice, which is not there."""
    places = [(x, y, z) for x in range(2) for y in range(2) for z in range(2)]
    kind = {"platform": "tpu", "device_kind": "TPU v4", "core_on_chip": 0, "process_index": 0}
    devices = [SimpleNamespace(id=number, coords=coords, **kind) for number, coords in enumerate(places)]
    return [make_axis(config.zero, devices), xla_options.for_tpu("TPU v4", config.zero.overlap_gathers)]


def size_of(config: Config) -> GPTConfig:
    return SIZES.chosen(config.model)


def place_of_checkpoints(config: Config) -> str:
    return str(checkpoint_directory(Path("run"), config.data.bucket_path, config.data.checkpoint_directory))


WITHOUT_A_RUN: dict[str, Callable[[Config], Any]] = {
    "model.size": size_of,
    "data.bucket_path": place_of_checkpoints,
    "zero.phases": on_tpu,
    "zero.overlap_gathers": on_tpu,
    "distributed.cpu_devices": settings,
    "distributed.compilation_cache": settings,
    "distributed.stall_minutes": settings,
}


@pytest.mark.parametrize("key", WITHOUT_A_RUN)
def test_keys_of_a_start(key: str) -> None:
    """Another value changes what a start sets, the placement on a TPU, the model or the place of the checkpoints."""
    value = "torus" if key == "zero.phases" else ELSEWHERE[key]
    look = WITHOUT_A_RUN[key]
    assert look(checked(f"{key}={value}")) != look(checked())


@pytest.mark.parametrize("key", ELSEWHERE)
def test_keys_elsewhere(key: str) -> None:
    """Another value is refused by the data or files that it names, or accepted, kept and read."""
    try:
        config = checked(f"{key}={ELSEWHERE[key]}")
    except UserError as error:
        assert str(error).startswith((key, ELSEWHERE[key])), error
        return
    assert asdict(config) != asdict(checked())
    assert key.rpartition(".")[2] in names_in_use()


@pytest.mark.parametrize("key", [key for key in REFUSED if key != "resume"])
def test_keys_that_need_others(key: str) -> None:
    """A key that does nothing alone is refused, by its name or by that of the key that it needs."""
    with pytest.raises(UserError) as caught:
        checked(f"{key}={REFUSED[key]}")
    assert key.partition(".")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("tuning.rank=2",), "tuning.rank: a key of tuning=lora and tuning=dora, which this run has not chosen"),
        (
            ("tuning=dora", "tuning.dropout=0.1", "model.warm_start=true", "model.model_path=x"),
            "tuning.dropout: a key of tuning=lora, which this run has not chosen",
        ),
        (("tuning.adapter=x",), "tuning.adapter: a key of tuning=lora and tuning=dora, which this run has not chosen"),
        (("objective.beta=1",), "objective.beta: a key of objective=dpo, which this run has not chosen"),
        (("evaluate.follow=true",), "evaluate.follow: a key of mode=evaluate, which this run has not chosen"),
        (("evaluate.harness=[a]",), "evaluate.harness: a key of mode=evaluate, which this run has not chosen"),
        (
            ("zero.replicate=true",),
            "zero.replicate: it is evaluate.replicate with mode=evaluate, sample.replicate with ",
        ),
        (
            ("schedule=constant", "training.end_learning_rate=1e-4"),
            "training.end_learning_rate=0.0001: it has no",
        ),
        (("schedule=inverse_sqrt", "training.end_learning_rate=0"), "training.end_learning_rate=0.0: it has no effect"),
        (
            ("data.corpus=synthetic", "data.shuffle_shards=4"),
            "data.shuffle_shards=4: it has no effect, as ",
        ),
        (("optimizer.name=lion",), "optimizer.name: use optimizer=lion"),
        (("schedule.name=wsd",), "schedule.name: use schedule=wsd"),
        (("training.objective=dpo",), "training.objective: use objective=dpo"),
        (("tuning.method=all",), "tuning.method: use tuning=none"),
        (("+preset=v3-8", "plan.topology=v3-8"), "plan.topology: a key of mode=plan, which this run has not chosen"),
        (("model.model_path=nowhere",), "model.model_path=nowhere: it has no effect, as model.warm_start=false"),
    ],
)
def test_keys_that_do_nothing(overrides: tuple[str, ...], line: str) -> None:
    """Each is one line, which says what to write or which choice is missing."""
    with pytest.raises(UserError) as caught:
        cli_compose([*overrides])
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "override", "reason"),
    [
        ("evaluate", "training.total_steps=70", "mode=evaluate does not read it"),
        ("evaluate", "optimizer=lion", "mode=evaluate does not read it"),
        ("evaluate", "tuning=lora", "mode=evaluate does not read it"),
        ("evaluate", "seed=1", "mode=evaluate does not read it"),
        ("evaluate", "zero.remat=full", "mode=evaluate does not read it"),
        ("evaluate", "statistics.every=3", "mode=evaluate does not read it"),
        ("evaluate", "data.tensorboard=true", "evaluate.follow=false"),
        ("sample", "training.batch_size=7", "mode=sample does not read it"),
        ("sample", "data.index_path_validation=x.index", "mode=sample does not read it"),
        ("sample", "schedule=wsd", "mode=sample does not read it"),
        ("plan", "training.batch_size=7", "plan.micro_batch takes its place"),
        ("plan", "zero.stage=1", "mode=plan compiles stages 0 to 3, or those of plan.grid.stage in a search"),
        ("plan", "plan.grid.stage=[3]", "plan.search=none"),
        ("plan", "profile.step_time=1", "mode=plan predicts it"),
        ("plan", "data.cache_directory=x", None),
        ("evaluate", "training.batch_size=7", None),
        ("evaluate", "data.index_path_validation=x.index", None),
        ("sample", "zero.tensor_shards=3", None),
        ("sample", "distributed.cpu_devices=4", None),
    ],
)
def test_keys_of_training_in_other_modes(mode: str, override: str, reason: str | None) -> None:
    """Those that a mode does not read are refused where they are given for its start, but not in a saved run."""
    key = override.partition("=")[0]
    config = compose("model.size=test", f"mode={mode}", override)
    assert check(config, SIZES)
    if reason is None:
        assert check(config, SIZES, [key])
        return
    with pytest.raises(UserError, match=rf"^{key}=.*: it has no effect, as {re.escape(reason)}$"):
        check(config, SIZES, [key])
