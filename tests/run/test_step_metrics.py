"""The metrics of the steps between two lines."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.helpers.runs import in_steps, make_run, values
from zero.models.experts import METRICS
from zero.run.features.validate import means
from zero.run.step_metrics import StepMetrics
from zero.run.step_programs import StepPrograms
from zero.tracking.goodput import Goodput
from zero.tracking.progress import figures
from zero.training.objectives.objective import Mean


def test_utilization_in_metrics(tmp_path: Path) -> None:
    """A line of metrics tells how well the devices are used."""
    run = make_run(tmp_path)
    line = run.read_line()
    assert line["tokens_per_second"] == pytest.approx(128 / line["step_time"])
    assert line["tokens_per_second_per_device"] == pytest.approx(line["tokens_per_second"] / 8)
    assert line["mfu"] == pytest.approx(500 / line["step_time"] / 1e6)
    assert run.metrics.is_empty and run.read_line() == {}


def test_predicted_time_in_metrics(tmp_path: Path) -> None:
    """A line of metrics compares the step time with the predicted one."""
    run = make_run(tmp_path)
    assert not {"predicted_speed", "device_wait"} & run.read_line().keys()
    run.metrics.restart()
    run.metrics.add(values(), leave=0, flops=500, predicted=0.25)
    line = run.read_line()
    assert line["predicted_speed"] == pytest.approx(0.25 / line["step_time"])
    assert 0 < line["device_wait"] < 1
    assert any("of the predicted speed" in figure for figure in figures(line))


def test_slow_run_is_explained_once(caplog: pytest.LogCaptureFixture) -> None:
    """A slow run logs once where its time goes."""
    metrics = StepMetrics(8, None, Goodput())
    for predicted, warnings in ((1e3, 0), (1e-9, 1), (1e-9, 1)):
        for _ in metrics.timed(iter([None])):
            time.sleep(0.01)
        metrics.add(values(), leave=0, flops=0, predicted=predicted)
        metrics.read()
        metrics.restart()
        assert caplog.text.count("of the predicted speed: the host waits") == warnings


def test_planned_time_of_planned_length(tmp_path: Path) -> None:
    """The planned time is used only for the planned rows."""
    run = make_run(tmp_path)
    profile: Any = SimpleNamespace(step_time=0.25)
    programs = StepPrograms(profile, in_flight=0)
    assert programs.predicted_seconds(run, None, True) == 0.25
    assert programs.predicted_seconds(run, None, False) is None


def test_one_transfer_per_step(transfers: list[Any]) -> None:
    """Metrics of a step are one transfer."""
    metrics = StepMetrics(8, peak_flops=None, goodput=in_steps())
    for count in range(1, 4):
        metrics.add(values(), leave=0)
        assert len(transfers) == count
    metrics.read()
    assert len(transfers) == 3


def test_memory_in_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress bar shows the memory where the device reports it."""
    assert not any("GiB" in figure for figure in figures(make_run(tmp_path).read_line()))
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 3 << 29, "bytes_in_use": 5})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert figures(make_run(tmp_path).read_line())[-1] == "peak 1.50 GiB"


def test_metrics_of_experts() -> None:
    """Metrics of experts are logged where there are experts."""
    metrics = StepMetrics(8, peak_flops=None, goodput=in_steps())
    metrics.add(values(), leave=0)
    assert not set(METRICS) & set(metrics.read())
    metrics.add(values() | {name: jnp.float32(i) for i, name in enumerate(METRICS)}, leave=0)
    line = metrics.read()
    assert [line[name] for name in METRICS] == [0, 1, 2, 3]


def test_unread_steps_are_read_in_order() -> None:
    """Steps that are still in flight when a line is read keep their order: the newest values are the last step's."""
    metrics = StepMetrics(8, peak_flops=None, goodput=in_steps())
    for step in range(1, 4):
        metrics.add(values(learning_rate=float(step), loss=float(step)), leave=8)
    line = metrics.read()
    assert line["learning_rate"] == 3.0 and line["train/loss"] == 2.0


def test_wait_is_for_all_dispatched_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: waited.extend(jax.tree.leaves(tree)))
    metrics = StepMetrics(8, peak_flops=None, goodput=in_steps())
    for _ in range(2):
        metrics.add({"loss": jnp.float32(1)}, leave=8)
    metrics.wait()
    assert len(waited) == 2 and all(isinstance(leaf, jax.Array) for leaf in waited)


def test_no_mfu_without_peak() -> None:
    """MFU is not shown where the peak is unknown; the wait for devices is."""
    metrics = StepMetrics(8, peak_flops=None, goodput=in_steps())
    metrics.add(values(), leave=0, flops=0, predicted=0.25)
    line = metrics.read()
    assert "mfu" not in line and 0 < line["device_wait"] < 1


def test_means_over_some_terms() -> None:
    """A metric of some terms counts each step by its share of them, and is left out where there are none."""
    objective_metrics = (Mean("share", "", ""), Mean("chosen", "", "", over="share"))
    metrics = StepMetrics(8, None, in_steps(), objective_metrics=objective_metrics)
    step = values()
    for share, chosen in ((0.25, 4.0), (0.75, 8.0), (0.0, 0.0)):
        metrics.add(step | {"share": jnp.float32(share), "chosen": jnp.float32(chosen)}, leave=0)
    line = metrics.read()
    assert (line["share"], line["chosen"]) == pytest.approx((1 / 3, 7.0))
    metrics.restart()
    metrics.add(step | {"share": jnp.float32(0), "chosen": jnp.float32(0)}, leave=0)
    assert "chosen" not in metrics.read()
    assert means("", {"loss": 2.0, "tokens": 2.0, "bytes": 0.0, "share": 0.0, "chosen": 0.0}, objective_metrics) == {
        "loss": 1.0,
        "share": 0.0,
    }
