"""What a run does between steps, on a run without devices: stand-ins take the place of what is not looked at."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zero.run.active_run import ActiveRun

from zero import make_layout
from zero.corpus.reading.loader import HostBatch
from zero.errors import UserError
from zero.models.experts import METRICS
from zero.partition.collectives.axis import Axis
from zero.report import plot
from zero.run import active_run, train
from zero.run.restore import TrainingPosition
from zero.run.step_metrics import StepMetrics
from zero.tracking.goodput import Goodput
from zero.tracking.metrics_file import Log
from zero.tracking.tracker import open_tracker
from zero.training.objective import LIKELIHOOD
from zero.training.schedules import SequenceLengths


def values(**other: float) -> dict[str, Any]:
    usual = {"loss": 2.0, "gradient_norm": 1.0, "learning_rate": 0.1}
    counts = {"skipped_steps": 0, "skipped_in_a_row": 0, "skipped_spikes": 0}
    return {name: jnp.asarray(value) for name, value in (usual | counts | other).items()}


def in_steps() -> Goodput:
    """A clock as it is during the training loop."""
    clock = Goodput()
    clock._phase = "steps"
    return clock


class NoCheckpoints:
    """Refuses to save."""

    def check(self) -> None: ...

    def steps(self) -> list[int]:
        return []


def make_run(directory: Path, tracker: Log | None, **metrics: float) -> ActiveRun:
    training = SimpleNamespace(
        max_skipped_in_a_row=20, skip_bad_steps=False, skip_spikes=None, sample_tokens=0, harness_frequency=2
    )
    run: Any = object.__new__(ActiveRun)
    run.config = SimpleNamespace(
        training=training,
        data=SimpleNamespace(max_skipped_rows=0),
        evaluate=SimpleNamespace(harness=["a.yaml"]),
    )
    run.directory, run.tracker, run.checkpoints = directory, tracker, NoCheckpoints()
    model = SimpleNamespace(axis=Axis("zero", (1, 8)), weights=lambda params, averages, frozen: params)
    run.job = SimpleNamespace(model=model, objective=LIKELIHOOD)
    run.state, run.frozen = SimpleNamespace(params=0.0, averages={}), None
    run.position = TrainingPosition(8, step=3, cursor={"batches": 3})
    run.loader = SimpleNamespace(rows_seen=lambda batches: {}, epochs_seen=lambda batches: {})
    run.statistics = SimpleNamespace(read=dict)
    run.context, run.last_step, run.stop_requests = SequenceLengths(16), 10, [15]
    run.goodput = in_steps()
    run.metrics = StepMetrics(128, 8, peak_flops=1e6, goodput=run.goodput)
    run._uncounted, run.reported_at = (0, 0), time.monotonic()
    run.metrics.add(values(**metrics), leave=1, flops=500)
    return run


def test_stop_saves_no_nan(tmp_path: Path) -> None:
    """A run that stops between steps saves no state that is not finite."""
    with pytest.raises(UserError, match=r"step 3: the gradient is not finite and training.skip_bad_steps=false"):
        make_run(tmp_path, None, gradient_norm=np.nan).stop()


def test_emergency_checkpoints_hold_no_nan(tmp_path: Path) -> None:
    """A state that is not finite ends the run at the next emergency checkpoint, which keeps the one before."""
    run: Any = make_run(tmp_path, None)
    run.emergency = SimpleNamespace(save=lambda *_: pytest.fail("saved"))
    run.job.layout = make_layout({"w": jax.ShapeDtypeStruct((8,), np.float32)}, 8)
    run.state = {"w": jax.pmap(lambda x: x, "zero")(np.asarray([[np.nan], *7 * [[1]]], np.float32))}
    with pytest.raises(UserError, match=r"step 3: w not finite; this state is not saved"):
        run.protect()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("no font")])
def test_failed_report_ends_no_training(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A report that cannot be written does not end training."""

    def fail(directory: Path) -> None:
        raise error

    monkeypatch.setattr(plot, "draw_run", fail)
    with open_tracker(tmp_path, project=None, config={}, resumed_from=None) as tracker:
        run = make_run(tmp_path, tracker)
        train._report(run, {"step": 10, "train/loss": 2.0})
    assert f"step 10: the report of the run could not be written: {error}" in caplog.text


@pytest.mark.parametrize(("step", "seconds_ago", "is_drawn"), [(3, 0, False), (3, 11, True), (10, 0, True)])
def test_reports_are_seldom(
    step: int, seconds_ago: float, is_drawn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report is drawn every ten seconds at most, and at the last step; each evaluation writes its sample."""
    drawn: list[Path] = []
    monkeypatch.setattr(train, "_draw", drawn.append)
    with open_tracker(tmp_path, project=None, config={}, resumed_from=None) as tracker:
        run = make_run(tmp_path, tracker)
        run.reported_at = before = time.monotonic() - seconds_ago
        train._report(run, {"step": step, "train/loss": 2.0})
    assert (drawn, run.reported_at > before) == ([tmp_path] if is_drawn else [], is_drawn)
    assert (tmp_path / "samples.txt").read_text() == f"--- step {step}\n\n"


def test_checkpoint_that_an_evaluation_hears_of(tmp_path: Path) -> None:
    """A checkpoint that is due by the clock is not lost where hosts agree on it during an evaluation."""
    run: Any = make_run(tmp_path, None)
    run.tracker, run.saved_at, run.emergency, run.stop_requests = object(), time.monotonic() - 61, None, []
    run.config.data = SimpleNamespace(checkpoint_minutes=1, save_every=1000)
    run.config.training.evaluation_frequency = run.config.training.log_frequency = 1000
    run.statistics.is_due = lambda step: False
    requested: list[bool] = [False]

    def any_host(step: int, stop: bool, due: bool) -> tuple[bool, bool]:
        requested.append(due)
        return stop, requested[-2]  # hosts know a call later

    run.any_host = any_host
    assert not run.due(3).save
    assert not run.poll()  # of an evaluation
    assert requested == [False, True, False]
    assert run.due(4).save


def test_utilization_in_metrics(tmp_path: Path) -> None:
    """A line of metrics tells how well the devices are used."""
    run = make_run(tmp_path, None)
    line = run.read_metrics()
    assert line["tokens_per_second"] == pytest.approx(128 / line["step_time"])
    assert line["tokens_per_second_per_device"] == pytest.approx(line["tokens_per_second"] / 8)
    assert line["mfu"] == pytest.approx(500 / line["step_time"] / 1e6)
    assert run.metrics.is_empty


def test_predicted_time_in_metrics(tmp_path: Path) -> None:
    """A line of metrics compares the step time with the predicted one."""
    run = make_run(tmp_path, None)
    assert not {"predicted_speed", "device_wait"} & run.read_metrics().keys()
    run.metrics.restart()
    run.metrics.add(values(), leave=0, flops=500, predicted=0.25)
    line = run.read_metrics()
    assert line["predicted_speed"] == pytest.approx(0.25 / line["step_time"])
    assert 0 < line["device_wait"] < 1
    assert "of the predicted speed" in train._summary(line)


def test_slow_run_is_explained_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A slow run logs once where its time goes."""
    metrics = StepMetrics(128, 8, None, Goodput())
    for predicted, warnings in ((1e3, 0), (1e-9, 1), (1e-9, 1)):
        for _ in metrics.timed(iter([None])):
            time.sleep(0.01)
        metrics.add(values(), leave=0, flops=0, predicted=predicted)
        metrics.read()
        metrics.restart()
        assert caplog.text.count("of the predicted speed: the host waits") == warnings


def test_planned_time_of_planned_length(tmp_path: Path) -> None:
    """The planned time is used only for the planned length."""
    run: Any = make_run(tmp_path, None)
    run.config.profile = SimpleNamespace(step_time=0.25)
    assert run._predict(None, 16) == 0.25 and run._predict(None, 8) is None


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What has been read from the devices so far."""
    read: list[Any] = []
    device_get = jax.device_get

    def counted(tree: Any) -> Any:
        read.append(tree)
        return device_get(tree)

    monkeypatch.setattr(jax, "device_get", counted)
    return read


def test_one_transfer_per_step(transfers: list[Any]) -> None:
    """Metrics of a step are one transfer."""
    metrics = StepMetrics(128, 8, peak_flops=None, goodput=in_steps())
    for count in range(1, 4):
        metrics.add(values(), leave=0)
        assert len(transfers) == count
    metrics.read()
    assert len(transfers) == 3


@pytest.mark.parametrize(("step", "has_tasks"), [(40, True), (60, False), (70, True)])
def test_transfers_and_tasks_of_evaluation(
    step: int, has_tasks: bool, tmp_path: Path, transfers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation is one transfer per batch, and runs tasks at the last step too."""
    run: Any = make_run(tmp_path, None)
    run.config.training.maximum_evaluation_steps, run.config.training.evaluation_frequency = 3, 20
    run.last_step = 70
    batch = HostBatch(np.zeros((8, 4), np.int32), {}, 0)
    run.validation = {"": SimpleNamespace(batches=lambda: iter([batch] * 5), rows=40)}
    run.job.programs = SimpleNamespace(evaluate=lambda *_: (jnp.float32(6.0), jnp.int32(4), {}))
    monkeypatch.setattr(ActiveRun, "poll", lambda run: False)
    monkeypatch.setattr(ActiveRun, "harness_results", lambda run: {"harness/choice/acc": 0.5})
    line = {"step": step}
    assert train._evaluate(run, line)
    assert line == {"step": step, "validation/loss": 1.5, **({"harness/choice/acc": 0.5} if has_tasks else {})}
    assert len(transfers) == 3


def test_memory_in_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress bar shows the memory where the device reports it."""
    assert "GiB" not in train._summary(make_run(tmp_path, None).read_metrics())
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 3 << 29, "bytes_in_use": 5})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert train._summary(make_run(tmp_path, None).read_metrics()).endswith(", peak 1.50 GiB")


def test_metrics_of_experts() -> None:
    """Metrics of experts are logged where there are experts."""
    metrics = StepMetrics(128, 8, peak_flops=None, goodput=in_steps())
    metrics.add(values(), leave=0)
    assert not set(METRICS) & set(metrics.read())
    metrics.add(values() | {name: jnp.float32(i) for i, name in enumerate(METRICS)}, leave=0)
    line = metrics.read()
    assert [line[name] for name in METRICS] == [0, 1, 2, 3]


def test_unread_steps_are_read_in_order() -> None:
    """Steps that are still in flight when a line is read keep their order: the newest values are the last step's."""
    metrics = StepMetrics(128, 8, peak_flops=None, goodput=in_steps())
    for step in range(1, 4):
        metrics.add(values(learning_rate=float(step), loss=float(step)), leave=8)
    line = metrics.read()
    assert line["learning_rate"] == 3.0 and line["train/loss"] == 2.0


def test_no_mfu_without_peak() -> None:
    """MFU is not shown where the peak is unknown; the wait for devices is."""
    metrics = StepMetrics(128, 8, peak_flops=None, goodput=in_steps())
    metrics.add(values(), leave=0, flops=0, predicted=0.25)
    line = metrics.read()
    assert "mfu" not in line and 0 < line["device_wait"] < 1


def test_tasks_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks are logged by name, without their standard errors."""
    results = {"choice": {"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": "choice"}}
    monkeypatch.setattr(active_run, "Scorer", lambda *arguments: None)
    monkeypatch.setattr(active_run, "run_tasks", lambda scorer, tasks: results)
    run: Any = make_run(tmp_path, None)
    run.config.training.batch_size = 8
    run.tokenizer = None
    assert run.harness_results() == {"harness/choice/acc": 0.5}
