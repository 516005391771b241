"""A run with a moving average of its weights: moved to other devices, and evaluated; test_resumed.py resumes it."""

from pathlib import Path

import jax
import numpy as np
import pytest

import zero
from tests.helpers import cli
from tests.helpers.checkpoints import leaves
from zero.config.files import load_sizes
from zero.exchange.average import average
from zero.inference.trained_model import load_weights
from zero.run_directory import saved_steps
from zero.tracking.metrics_file import read_metrics
from zero.training.optimizer import adamw
from zero.training.sharded_gpt import ShardedGPT

SIZE = load_sizes()["test"]
LAST = 8
EMA = (
    *cli.TINY,
    "training.ema=0.6",
    "training.staged_warmup_steps=0",
    "training.evaluation_frequency=4",
    f"training.total_steps={LAST}",
    "data.max_context=16",
)


@pytest.fixture(scope="module")
def workplace(workplace: Path) -> Path:
    """With a run that has ended."""
    cli.Lasting(workplace).train("whole", *EMA)
    return workplace


def weights_and_average(run: Path) -> dict[str, np.ndarray]:
    return leaves(run, LAST, "params/", "averages/ema/")


def fork(forks: cli.Forks, *arguments: str) -> Path:
    run = forks.fork("whole", 4, *arguments)
    assert saved_steps(run) == [LAST]
    return run


def losses(run: Path) -> list[float]:
    return cli.losses(run, "validation/ema_loss")


def test_average_is_evaluated(workplace: Path) -> None:
    """The average is evaluated beside the weights."""
    whole = workplace / "whole"
    lines = [line for line in read_metrics(whole / "metrics.jsonl") if "validation/loss" in line]
    assert [line["step"] for line in lines] == [4, 8]
    for line in lines:
        assert line["validation/ema_loss"] != line["validation/loss"]
        assert abs(line["validation/ema_loss"] - line["validation/loss"]) < 0.5


@pytest.mark.slow
def test_average_on_fewer_devices(forks: cli.Forks) -> None:
    """The average continues on fewer devices and at another stage."""
    run = fork(forks, "distributed.cpu_devices=4", "zero.stage=1")
    np.testing.assert_allclose(losses(run), losses(forks.workplace / "whole"), rtol=1e-4)


def test_evaluate_uses_the_average(lasting: cli.Lasting) -> None:
    """`mode=evaluate` uses the average, and refuses evaluate.ema=true where there is none."""
    whole, mean = lasting.workplace / "whole", lasting.workplace / "mean"
    model = ShardedGPT(SIZE, zero.Axis("zero", (1, 1)), 0)
    saved = weights_and_average(whole)
    for ema, prefix in ((False, "params"), (True, "averages/ema")):
        params = load_weights(whole, model, None, ema)[0]
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            np.testing.assert_array_equal(np.asarray(x)[0], saved[f"{prefix}/{name}"], err_msg=name)
    found = []
    for value in ("false", "true"):
        evaluation = lasting.evaluate(f"evaluated-{value}", "model.model_path=whole", f"evaluate.ema={value}")
        found.append(evaluation["loss"])
    assert found[0] != found[1] and abs(found[0] - found[1]) < 0.5
    average(str(whole), mean)
    done = lasting.run("mode=evaluate", "model.model_path=mean", "evaluate.ema=true", "hydra.run.dir=refused")
    assert done.returncode and "holds no moving average of the weights; training.ema keeps one" in done.stderr
    done = lasting.run("--resume", "hydra.run.dir=whole", "training.ema=null")
    assert done.returncode and "training.ema=null: expected 0.6, the value of the run" in done.stderr


def test_average_in_the_layout_file(lasting: cli.Lasting) -> None:
    """The memory of the average is in the layout file."""
    weights = ShardedGPT(SIZE, zero.Axis("zero", (1, 8)), 3).layout
    bare = zero.memory(weights.shapes(), adamw(0.1), 8, stacked=SIZE.stacked, compute_dtypes=["float32"])
    table = (lasting.workplace / "whole" / "layout.txt").read_text().replace(",", "").splitlines()[-4:]
    for row, line in zip(bare.rows, table, strict=True):
        held = (weights if row.stage else weights.whole()).bytes_per_device()
        assert line.split() == [
            str(row.stage),
            "float32",
            *map(str, (row.parameters, row.state + held, row.gathered)),
            *map(str, (row.gradients, row.total + held)),
        ]
