"""Runs whose state has every kind of part: resumed bit for bit, continued in other dtypes, scored, and averaged."""

import signal
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests.config.composing import compose
from tests.helpers import cli
from tests.helpers.checkpoints import leaves
from zero.base.errors import UserError
from zero.checkpoints.manager import Checkpoints
from zero.commands.modes import check
from zero.exchange.average import average
from zero.inference.trained_model import load_weights
from zero.job.job import make_job, place_model
from zero.job.sizes import load_sizes
from zero.models.gpt import parameter_axes
from zero.record.metrics_file import read_metrics
from zero.record.run_files import saved_steps
from zero.run.restore import TrainingPosition, restore
from zero.training.optimizers.optimizer import adamw
from zero.training.sharded_gpt import ShardedGPT

LAST = 8
JOB = (
    *cli.TINY,
    "training.evaluation_frequency=4",
    f"training.total_steps={LAST}",
    "data.max_context=16",
)
STEPS_PER_ROW = 2
AVERAGE = ("training.ema=0.6",)
BYTES = ("optimizer.state_dtype=int8", "zero.master_dtype=bfloat16")
FLOAT32 = ("optimizer.state_dtype=float32", "zero.master_dtype=float32")
CODEBOOK = ("model.size=test_vq",)
STAGED = ("training.warmup_train_context=8", "training.staged_warmup_steps=2")
PARTS = (
    "model.override={update_tokens: 8, distance_dropout: 0.2, layer_dropout: 0.2}",
    f"training.log_frequency={STEPS_PER_ROW}",
)
SIZE = load_sizes()["test_vq"]
ALL = (*AVERAGE, *BYTES, *CODEBOOK, *PARTS)
FURTHER = (
    "model.size=test",
    "model.override={predictor: true, N: 3, first_dense: 1, shared_dim: 16, experts: 8, experts_per_token: 2, "
    "router: sigmoid, mlp_bias: false, router_groups: 2, router_groups_per_token: 1, router_bias_rate: 0.01}",
    "objective=multi_token",
)
EXPERTS = "mlp_bias: false, experts: 4, experts_per_token: 2, router: sigmoid, router_bias_rate: 0.01"
DELTA = "alibi_attn: false, positions: rotary, N: 2, mixers: [delta, attention], delta_key_heads: 2, delta_key_dim: 5"
LINEAR = "N: 2, mixers: [linear, attention], linear_features: relu"
LATENTS = (
    "alibi_attn: false, positions: rotary, qkv_bias: false, head_dim: 12, rotary_dim: 4, latent_dim: 13, value_dim: 9"
)
ON_HOST = (
    "zero.offload=both",
    "zero.fused_update=true",
    "training.gradient_accumulation_steps=1",
    "zero.gradient_dtype=bfloat16",
)
SINGLE = {
    "latents": (f"model.override={{{LATENTS}, {EXPERTS}}}", *AVERAGE, *BYTES),
    "latents on the host": (f"model.override={{{LATENTS}}}", *AVERAGE, *BYTES, *ON_HOST),
    "delta on the host": (f"model.override={{{DELTA}}}", *AVERAGE, *BYTES, *ON_HOST),
    "linear": (f"model.override={{{LINEAR}}}", *AVERAGE, *BYTES),
    "average": AVERAGE,
    "bytes": BYTES,
    "codebook of a staged warmup": (*CODEBOOK, *STAGED),
    "a further layer": FURTHER,
    "delta": (f"model.override={{{DELTA}, {EXPERTS}}}", *AVERAGE, *BYTES),
}


class Whole(NamedTuple):
    """A run that has ended, and what can continue it."""

    runs: cli.Lasting
    run: Path

    def continued(self, *overrides: str) -> Path:
        """The same run from its middle on."""
        run = self.runs.fork(self.run.name, LAST // 2, *overrides)
        assert saved_steps(run) == [LAST]
        return run


@pytest.fixture(scope="module")
def whole(lasting: cli.Lasting) -> Whole:
    return Whole(lasting, lasting.train("all", *JOB, *ALL))


def check_resume(whole: Whole) -> None:
    """A run that continues from its middle logs and saves what the undisturbed one does."""
    run = whole.continued()
    assert cli.metrics(run) == cli.metrics(whole.run)
    assert_same_leaves(leaves(run, LAST), leaves(whole.run, LAST))
    assert "other dtypes" not in (run / "main_zero.log").read_text()


def assert_same_leaves(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, x in got.items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


def test_resumed_bit_for_bit(whole: Whole) -> None:
    check_resume(whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SINGLE)
def test_one_kind_resumed_bit_for_bit(kind: str, lasting: cli.Lasting) -> None:
    check_resume(Whole(lasting, lasting.train(kind.replace(" ", "-"), *JOB, *SINGLE[kind])))


@pytest.mark.wide
def test_killed_and_resumed_bit_for_bit(lasting: cli.Lasting) -> None:
    """With a further layer, and the biases of its router and of the others."""
    name = "a-further-layer"
    job = cli.later_values(*JOB, *SINGLE["a further layer"])
    forks = cli.Forks(lasting.workplace)
    whole = forks.train(f"{name}-undisturbed", *job)
    run = lasting.workplace / f"{name}-killed"
    process = forks.start(*job, f"hydra.run.dir={run.name}")
    process.wait_for(run / "checkpoints" / str(LAST // 2))
    process.kill()
    assert process.finish().returncode == -signal.SIGKILL
    assert saved_steps(run) == [LAST // 2]
    forks.check("--resume", f"hydra.run.dir={run.name}")
    assert cli.metrics(run) == cli.metrics(whole)
    saved = leaves(run, LAST)
    assert_same_leaves(saved, leaves(whole, LAST))
    assert "averages/router_bias/predictor_blocks/experts/bias" in saved


def test_lines_come_after_whole_rows(whole: Whole) -> None:
    """Steps take parts of rows, and a row is counted once."""
    lines = [line for line in cli.metrics(whole.run) if "train/loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert [line["tokens_seen"] for line in lines] == [16 * 16 * rows for rows in (1, 2, 3, 4)]


def test_kinds_of_state(whole: Whole) -> None:
    """Its state has moments of a byte, weights of two, an average and a codebook, which the tests here are about."""
    saved = leaves(whole.run, LAST)
    kinds = {name: x.dtype.name for name, x in saved.items()}
    assert "int8" in {kinds[name] for name in kinds if name.startswith("opt_state/")}
    assert "bfloat16" in {kinds[name] for name in kinds if name.startswith("params/")}
    assert {name.split("/")[1] for name in kinds if name.startswith("averages/")} == {"ema", "codebook"}


def test_restored_in_float32(whole: Whole, caplog: pytest.LogCaptureFixture) -> None:
    """The state of bytes is restored in float32, as a run finds it that continues so."""
    sizes = load_sizes()
    config = check(compose(*JOB, *ALL, *FLOAT32), sizes)
    job = make_job(config, place_model(config, sizes.chosen(config.model)))
    with Checkpoints(whole.run / "checkpoints", None) as checkpoints, caplog.at_level("INFO"):
        _, state = restore(checkpoints, LAST, job.model.config, job.storage, is_own=False, check=lambda position: None)
    assert "opt_state from int8 to float32" in caplog.text and "params from bfloat16 to float32" in caplog.text
    restored = job.storage.to_global(state)
    saved = leaves(whole.run, LAST, "params/vocabulary/table")["params/vocabulary/table"]
    table = np.asarray(restored.params["vocabulary"]["table"])[tuple(map(slice, saved.shape))]  # without padding
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table, saved.astype(np.float32))
    assert {x.dtype.name for x in jax.tree.leaves(restored.opt_state) if x.ndim > 1} == {"float32"}


def test_position_is_checked_before_the_state_is_read(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that this machine cannot divide is refused from the metadata, not after minutes of reading."""
    sizes = load_sizes()
    config = check(compose(*JOB, *ALL), sizes)
    job = make_job(config, place_model(config, sizes.chosen(config.model)))

    def refuse(position: TrainingPosition) -> None:
        raise UserError(f"{position.global_rows} sequences")

    with Checkpoints(whole.run / "checkpoints", None) as checkpoints:
        monkeypatch.delattr(Checkpoints, "restore")
        with pytest.raises(UserError, match=r"^16 sequences"):
            restore(checkpoints, None, job.model.config, job.storage, is_own=False, check=refuse)


@pytest.mark.wide
def test_continued_in_float32(whole: Whole) -> None:
    """The run continues in float32, with larger checkpoints."""
    wide = whole.continued(*FLOAT32)
    (line,) = [line for line in (wide / "main_zero.log").read_text().splitlines() if "other dtypes" in line]
    assert "opt_state from int8 to float32" in line and "params from" in line
    np.testing.assert_allclose(cli.losses(wide, "validation/loss"), cli.losses(whole.run, "validation/loss"), rtol=2e-2)
    dtypes = {name: x.dtype for name, x in leaves(wide, LAST, "opt_state/", "params/").items()}
    assert {dtype for name, dtype in dtypes.items() if "/count" not in name} == {np.dtype(np.float32)}
    for part, share in (("opt_state/", 0.3), ("params/", 0.55)):
        assert stored(whole.run, part) < share * stored(wide, part)


def stored(run: Path, part: str) -> int:
    """Bytes of a part of the state in the last checkpoint."""
    with Checkpoints(run / "checkpoints", None) as checkpoints:
        meta = checkpoints.meta(LAST)
    return sum(
        int(np.prod(shape)) * jnp.dtype(meta["dtypes"][name]).itemsize
        for name, shape in meta["shapes"].items()
        if name.startswith(part)
    )


@pytest.mark.slow  # tests/training/test_step_offload.py has a step with them, and without
def test_continued_with_activations_on_the_host(lasting: cli.Lasting) -> None:
    """Where activations lie changes nothing, so the run continues bit for bit with another value of the key."""
    whole = Whole(lasting, lasting.train("on-the-device", *JOB, "zero.remat=full"))
    run = whole.continued("zero.offload=activations")
    assert cli.metrics(run) == cli.metrics(whole.run)
    expected = leaves(whole.run, LAST)
    for name, x in leaves(run, LAST).items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


def evaluated(whole: Whole, place: str, *options: str) -> dict[str, Any]:
    return whole.runs.evaluate(place, f"model.model_path={whole.run.name}", *options)


@pytest.fixture(scope="module")
def at_once(whole: Whole) -> dict[str, Any]:
    """An evaluation of the weights in which a context is a row."""
    return evaluated(whole, "evaluated-at-once", "evaluate.context=32", "evaluate.ema=false")


def test_scores_of_longer_rows(whole: Whole, at_once: dict[str, Any]) -> None:
    """Rows longer than the context are scored as if read at once, by the memory of the codebook's layers."""
    carried = evaluated(whole, "evaluated-carried", "evaluate.context=8", "evaluate.carry=true", "evaluate.ema=false")
    assert carried["tokens"] == at_once["tokens"]
    np.testing.assert_allclose(carried["loss"], at_once["loss"], rtol=1e-6)


@pytest.mark.wide
def test_scores_of_longer_rows_without_memory(whole: Whole, at_once: dict[str, Any]) -> None:
    """Without it they are others."""
    cut = evaluated(whole, "evaluated-cut", "evaluate.context=8", "evaluate.stride=7", "evaluate.ema=false")
    assert abs(cut["loss"] - at_once["loss"]) > 1e-4


def test_average_is_evaluated(whole: Whole) -> None:
    """The average is evaluated beside the weights."""
    lines = [line for line in read_metrics(whole.run / "metrics.jsonl") if "validation/loss" in line]
    assert [line["step"] for line in lines] == [4, 8]
    for line in lines:
        assert line["validation/ema_loss"] != line["validation/loss"]
        assert abs(line["validation/ema_loss"] - line["validation/loss"]) < 0.5


def test_evaluate_uses_the_average(whole: Whole, at_once: dict[str, Any]) -> None:
    """`mode=evaluate` uses the average, and refuses evaluate.ema=true where there is none."""
    run, place = whole.run, whole.runs.workplace
    model = ShardedGPT(SIZE, zero.Axis("zero", (1, 1)), 0)
    saved = leaves(run, LAST, "params/", "averages/ema/")
    for ema, prefix in ((False, "params"), (True, "averages/ema")):
        params, _ = model.split(load_weights(run, model, None, ema)[0])
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            np.testing.assert_array_equal(np.asarray(x)[0], saved[f"{prefix}/{name}"], err_msg=name)
    loss = evaluated(whole, "evaluated-average", "evaluate.context=32", "evaluate.ema=true")["loss"]
    assert loss != at_once["loss"] and abs(loss - at_once["loss"]) < 0.5
    average(str(run), place / "mean")
    done = whole.runs.run("mode=evaluate", "model.model_path=mean", "evaluate.ema=true", "hydra.run.dir=refused")
    assert done.returncode and "has no moving average of the weights; training.ema keeps one" in done.stderr
    done = whole.runs.run("--resume", f"hydra.run.dir={run.name}", "training.ema=null")
    assert done.returncode and "training.ema=null: expected 0.6, the value of the run" in done.stderr


def test_another_model_is_refused(whole: Whole) -> None:
    """Other overrides of the model than those of the run are refused."""
    done = whole.runs.run("--resume", f"hydra.run.dir={whole.run.name}", "model.override.layer_dropout=0.1")
    cli.check_refusal(done, "'layer_dropout': 0.1}: expected {", "'layer_dropout': 0.2}, the value of the run")


def test_average_in_the_layout_file(whole: Whole) -> None:
    """The memory of the average is in the layout file."""
    weights = ShardedGPT(SIZE, zero.Axis("zero", (1, 8)), 3, master_dtype=jnp.bfloat16).layout
    shapes = weights.shapes()
    placed = {"stacked": [name for name in SIZE.stacked if name in shapes], "compute_dtypes": ["float32"]}
    bare = zero.memory(shapes, adamw(0.1, axes=parameter_axes(SIZE), state_dtype="int8"), 8, **placed)
    table = (whole.run / "layout.txt").read_text().replace(",", "").splitlines()[-4:]
    for row, line in zip(bare.rows, table, strict=True):
        held = (weights if row.stage else weights.whole()).bytes_per_device()
        assert line.split() == [
            str(row.stage),
            "float32",
            *map(str, (row.parameters, row.state + held, row.gathered)),
            *map(str, (row.gradients, row.total + held)),
        ]
