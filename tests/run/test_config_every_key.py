"""No key is without effect: another value of each, alone, is refused, or changes the program, the data or the files."""

import contextlib
import dataclasses
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import cache_key, compiler

from tests.config.composing import compose
from tests.helpers import cli
from tests.helpers.key_table import ALONE_REFUSED, NEUTRAL, OF_THE_STEP, ROWS, STEP
from tests.helpers.key_table import REFUSED as ALONE
from tests.helpers.key_table import RUN as RUN_OF_SIX
from tests.helpers.shared_jobs import SharedJobs
from zero.base.errors import UserError
from zero.base.keys import all_keys
from zero.commands.cli import compose as cli_compose
from zero.commands.modes import MODES, check, typed
from zero.costs.compiler import compiler_options
from zero.hosts import startup, watchdog, xla_options
from zero.job.devices import make_axis
from zero.job.job import make_job, place_model
from zero.job.sizes import load_sizes
from zero.models.config import GPTConfig
from zero.planning.compile import step_arguments
from zero.planning.config import OF_GRID, Grid
from zero.record.metrics_file import read_metrics
from zero.record.run_files import checkpoint_directory
from zero.run import train as run_train
from zero.run.config import TrainConfig
from zero.tracking import weights_and_biases

SIZES = load_sizes()
# The run in which a key is set alone: small, and as plain as the default job.
JOB = (
    *("model.size=test", "data.max_context=32", "training.batch_size=16", "training.total_steps=12"),
    *("training.warmup_steps=3", "training.staged_warmup_steps=4", "training.warmup_train_context=8"),
)
TPUS: list[Any] = [
    SimpleNamespace(
        id=number, coords=coords, platform="tpu", device_kind="TPU v4", core_on_chip=0, process_index=0, slice_index=0
    )
    for number, coords in enumerate(product(range(2), repeat=3))
]
SOME = ("training.end_learning_rate", "zero.remat")  # of the step: the others are slow


def checked(*overrides: str) -> TrainConfig:
    return check(compose(*JOB, *overrides), SIZES, [override.partition("=")[0] for override in overrides])


def test_every_key_has_a_row() -> None:
    """The table says of each key of a training run what shows that it is obeyed."""
    keys = {key.name for key in all_keys(MODES.first)} - {"mode"}
    for key in keys - ROWS.keys():
        raise AssertionError(f"{key}: give it a row in tests/helpers/key_table.py: another value, and what shows it")
    for key in ROWS.keys() - keys:
        raise AssertionError(f"{key}: no such key; remove its row of tests/helpers/key_table.py")
    for key, row in ROWS.items():
        path = row.shown_by.split(".py")[0] + ".py"
        is_known = row.shown_by in (STEP, RUN_OF_SIX, ALONE) or row.shown_by in WITHOUT_A_RUN or Path(path).is_file()
        assert is_known, f"{key}: {row.shown_by!r} is neither a kind, nor a function of this file, nor a test"


def test_each_key_says_whether_a_resume_may_change_it() -> None:
    fixed = {key.name: bool(key.fixed) for key in all_keys(MODES.first)}
    for key, row in ROWS.items():
        says = "fixed=True at the key" if row.is_fixed else "is_fixed=True in its row of tests/helpers/key_table.py"
        assert fixed[key] == row.is_fixed, f"{key}: may a resume change it? If not, it lacks {says}"


def test_number_of_keys() -> None:
    """conf/config.yaml shows few keys; the names of groups and of the mode are chosen, not set."""
    keys = [key for key in all_keys(MODES.first) if key.name != "mode"]
    # One grows the batch, as large runs do, one exports what a run has tuned, and two limit a start on many hosts.
    assert len(keys) <= 93


def test_keys_in_steps_say_so() -> None:
    """A feature that acts every so many steps declares its key so: steps of parts of rows need a multiple of them."""
    keys = {key.name: key for key in all_keys(MODES.first)}
    in_steps = {name for name, key in keys.items() if key.in_steps}
    every = {name for name in keys if name.endswith((".every", "_frequency", "save_every", "_steps"))}
    refused = {"statistics.every"}
    # Of schedules, batches and evaluations; none of these ends a pause of a run.
    lengths = {
        "training.warmup_steps",
        "training.staged_warmup_steps",
        "training.gradient_accumulation_steps",
        "training.maximum_evaluation_steps",
    }
    assert in_steps == every - refused - lengths


def cached_as(lowered: Any, options: dict[str, Any] | None = None) -> str:
    """The name of a compiled program in jax's cache, of which the plans and runs of a machine share one."""
    compiled = compiler.get_compile_options(jax.device_count(), 1, env_options_overrides=options)
    devices = np.asarray(jax.devices())
    return str(cache_key.get(lowered.compiler_ir("stablehlo"), devices, compiled, devices[0].client))


@cache
def step_of(*overrides: str) -> str:
    """The lowered step, on rows of the same shape, as jax's cache knows it."""
    config = checked(*overrides)
    job = make_job(config, place_model(config, SIZES.chosen(config.model)))
    return cached_as(job.programs.step.lower(*step_arguments(job, 4, config.data.max_context)))


@pytest.mark.parametrize(
    "key", [key if key in SOME else pytest.param(key, marks=pytest.mark.slow) for key in OF_THE_STEP]
)
def test_keys_of_the_step(key: str) -> None:
    """Another value of a key lowers to another step, and no program in the cache is taken for it."""
    assert step_of(f"{key}={OF_THE_STEP[key]}") != step_of()


def test_keys_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that only sets options of the compiler gives a program another name in the cache, in runs and in plans."""
    lowered = jax.pmap(jnp.sin, "batch").lower(jnp.ones(jax.device_count()))
    names = set()
    for value in (False, True):
        for extra in ("tpu", "cuda12"):
            monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
            monkeypatch.setenv("XLA_FLAGS", "")
            xla_options.set_before_start(value, extra)
            names.add(cached_as(lowered))
        monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
        names.add(cached_as(lowered, compiler_options(TPUS, value)))
    assert len(names) == 6


# What another value of a key that is read outside the step changes: in a run of 6 steps, or in what a function sees.
RUN = dict(override.split("=", 1) for override in cli.TINY) | {
    "training.batch_size": "16",
    "training.gradient_accumulation_steps": "1",
    "training.total_steps": "6",
    "training.warmup_steps": "1",
    "training.staged_warmup_steps": "2",
    "training.warmup_train_context": "8",
    "training.evaluation_frequency": "3",
    "training.maximum_evaluation_steps": "1",
    "distributed.compilation_cache": "null",  # it is of the whole process, which compiles for TPU too
}


def settings(config: TrainConfig) -> list[Any]:
    """What a start sets for the whole process."""
    with (
        patch.object(startup, "use_cpu_devices") as devices,
        patch.object(watchdog, "start") as watching,
        patch.object(jax.config, "update") as updated,
        patch.dict(os.environ),
    ):
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
        startup.start(**dataclasses.asdict(config.distributed), overlap_gathers=config.zero.overlap_gathers)
    return [devices.mock_calls, watching.mock_calls, updated.mock_calls]


def on_tpu(config: TrainConfig) -> list[Any]:
    """The axis and the options of the compiler on a TPU slice, which is not there."""
    return [make_axis(config.zero, TPUS), compiler_options(TPUS, config.zero.overlap_gathers)]


def on_two_slices(config: TrainConfig) -> Any:
    """The axis over two slices of four TPUs."""
    kind = {"platform": "tpu", "device_kind": "TPU v5 lite", "core_on_chip": 0, "process_index": 0}
    devices = [
        SimpleNamespace(id=number, coords=(number % 4 // 2, number % 2, 0), slice_index=number // 4, **kind)
        for number in range(8)
    ]
    return make_axis(config.zero, devices)


def size_of(config: TrainConfig) -> GPTConfig:
    return SIZES.chosen(config.model)


def place_of_checkpoints(config: TrainConfig) -> str:
    return str(checkpoint_directory(Path("run"), config.data.bucket_path, config.data.checkpoint_directory))


# Those that see a key without a run, by the names that the table has for them.
WITHOUT_A_RUN: dict[str, Callable[[TrainConfig], Any]] = {
    function.__name__: function for function in (settings, on_tpu, on_two_slices, size_of, place_of_checkpoints)
}
WIDE_RUNS = ("data.save_every", "profile.peak_flops")


class Observed(NamedTuple):
    """What a run left: its files, metrics without times, and names of all metrics; or its error."""

    files: frozenset[str] = frozenset()
    metrics: str = ""
    names: frozenset[str] = frozenset()
    error: str = ""


@pytest.fixture(scope="module")
def observed(workplace: Path) -> Callable[..., Observed]:
    """Runs with these overrides, each once; what devices compute is compiled once."""
    jobs = SharedJobs(NEUTRAL)
    (workplace / "holes.index").write_text(
        "corpus/missing.tar # 8 rows\n" + (workplace / cli.INDICES[0]).read_text().replace("../", "corpus/")
    )

    @cache
    def run(*overrides: str) -> Observed:
        values = RUN | dict(override.split("=", 1) for override in overrides)
        config = checked_run(values)
        with contextlib.chdir(workplace), tempfile.TemporaryDirectory(dir=workplace) as place:
            os.symlink(workplace / "corpus", Path(place) / "corpus")
            shutil.copy("holes.index", place)
            os.chdir(place)
            Path("run").mkdir()
            try:
                with jobs.shared([]), patch.object(weights_and_biases, "_started", quiet):
                    run_train.train(config, SIZES.chosen(config.model), Path("run").absolute())
            except UserError as error:
                return Observed(error=str(error))
            names = [re.sub(r"\d{6,}.*", "", str(path)) for path in Path(".").rglob("*") if not is_inner(path)]
            lines = read_metrics(Path("run/metrics.jsonl"))
            return Observed(
                frozenset(names), str(cli.metrics(Path("run"))), frozenset(key for line in lines for key in line)
            )

    return run


def checked_run(values: dict[str, str]) -> TrainConfig:
    return check(compose(*(f"{key}={value}" for key, value in values.items())), SIZES, [*values])


def is_inner(path: Path) -> bool:
    """Whether a file is one of a step's, whose names are checksums, or of the corpus."""
    return "corpus" in path.parts or any(part.isdecimal() for part in path.parts[:-1])


@contextlib.contextmanager
def quiet(*_: Any) -> Iterator[Callable[..., None]]:
    """In place of W&B."""
    yield lambda metrics: None


@pytest.mark.parametrize("shards", [1, 2])
def test_a_run_says_whether_it_has_groups(shards: int, tmp_path: Path) -> None:
    """All-to-alls of groups would end the compilation with options of a run without them."""
    config = checked_run(RUN | {"zero.context_shards": str(shards)})
    with patch.object(startup, "start", side_effect=UserError("no devices")) as start, pytest.raises(UserError):
        run_train.train(config, SIZES.chosen(config.model), tmp_path)
    assert start.call_args.kwargs["in_groups"] == (shards > 1)


WITHOUT = [key for key, row in ROWS.items() if row.shown_by in WITHOUT_A_RUN]
IN_A_RUN = [key for key, row in ROWS.items() if row.shown_by == RUN_OF_SIX]


@pytest.mark.parametrize("key", WITHOUT)
def test_keys_without_a_run(key: str) -> None:
    """Another value changes what a start sets, or what a function makes of it."""
    look = WITHOUT_A_RUN[ROWS[key].shown_by]
    assert look(checked(f"{key}={ROWS[key].in_run or ROWS[key].value}")) != look(checked())


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.wide if key in WIDE_RUNS else pytest.mark.slow) for key in IN_A_RUN]
)
def test_keys_in_a_run(key: str, observed: Callable[..., Observed]) -> None:
    """Another value changes the files or the metrics of a run, or is refused by name."""
    row = ROWS[key]
    value = row.in_run or row.value
    try:
        other = observed(*row.beside, f"{key}={value}")
    except UserError as error:
        other = Observed(error=str(error))
    if other.error and not observed(*row.beside).error:
        assert value in other.error or key.rpartition(".")[2] in other.error, other.error
    assert other != observed(*row.beside)


@pytest.mark.parametrize("key", [key for key in ALONE_REFUSED if key != "resume"])
def test_keys_that_need_others(key: str) -> None:
    """A key that does nothing alone is refused, by its name or by that of the key that it needs."""
    with pytest.raises(UserError) as caught:
        checked(f"{key}={ALONE_REFUSED[key]}")
    assert key.partition(".")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("tuning.rank=2",), "tuning.rank: only applies to tuning=lora and tuning=dora"),
        (
            ("tuning=dora", "tuning.dropout=0.1", "model.warm_start=true", "model.model_path=x"),
            "tuning.dropout: only applies to tuning=lora",
        ),
        (("tuning.adapter=x",), "tuning.adapter: only applies to tuning=lora and tuning=dora"),
        (("objective.beta=1",), "objective.beta: only applies to objective=dpo"),
        (("evaluate.follow=true",), "evaluate.follow: only applies to mode=evaluate"),
        (("evaluate.harness=[a]",), "evaluate.harness: only applies to mode=evaluate"),
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
        (("+preset=v3-8", "plan.topology=v3-8"), "plan.topology: only applies to mode=plan"),
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
        ("plan", "training.batch_size=7", "plan.micro_batch replaces it"),
        ("plan", "zero.stage=1", None),
        ("plan", "plan.grid.stage=[3]", "plan.search=none; plan.search=fastest reads it"),
        ("plan", "plan.grid.context=[64]", "plan.search=none; plan.search=fastest or plan.search=largest reads it"),
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


def test_keys_that_a_search_replaces() -> None:
    """A key is without effect in a search that takes its values from the grid, and in one that makes its own models."""
    assert list(OF_GRID) == [field.name for field in dataclasses.fields(Grid)]
    lists = {"master_dtype": "[float32]", "state_dtype": "[int8]", "context": "[32]", "tensor": "[1]"}
    lists |= {"context_shards": "[1]", "expert": "[1]", "replicas": "[1]", "phases": "[flat]"}
    lists |= {"overlap_gathers": "[true]"}  # the others are lists by default

    def replaced(search: str, *overrides: str) -> set[str]:
        config = typed(compose("mode=plan", f"plan.search={search}", *overrides))
        planned = {*OF_GRID.values(), "model.size", "model.override"}
        return {key for key, _ in config.without_effect()} & planned

    grid = [f"plan.grid.{name}={values}" for name, values in lists.items()]
    by_default = {"zero.stage", "plan.micro_batch", "training.gradient_accumulation_steps", "zero.remat"}
    of_models = {"model.size", "model.override", "data.max_context"}
    assert replaced("none") == replaced("none", *grid) == set()
    assert replaced("stages") == replaced("stages", *grid) == {"zero.stage"}
    assert replaced("fastest") == by_default
    assert replaced("fastest", *grid) == {*OF_GRID.values()}
    assert replaced("largest") == of_models
    assert replaced("largest", *grid) == of_models | {"zero.master_dtype", "optimizer.state_dtype"}
    given = compose("mode=plan", "plan.search=fastest", "zero.remat=full")
    with pytest.raises(UserError, match=r"^zero\.remat=full: it has no effect, as plan\.grid\.remat replaces it$"):
        check(given, SIZES, ["zero.remat"])
