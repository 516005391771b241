"""Each feature by itself, on a run without devices."""

import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.runs import make_run
from zero import make_layout
from zero.base.errors import Unavailable, UserError
from zero.checkpoints.emergency import EmergencyKeys
from zero.corpus.reading.batch_schedule import BatchSchedule
from zero.corpus.reading.keys import ScoredKeys
from zero.corpus.reading.loader import HostBatch
from zero.partition.collectives.axis import Axis
from zero.record.metrics_file import Line, read_metrics
from zero.run.feature import Moment, Stopped
from zero.run.features import harness, report
from zero.run.features.examination import checked_sums
from zero.run.features.harness import Harness
from zero.run.features.limits import Limits
from zero.run.features.profile import Profile
from zero.run.features.protect import Protect
from zero.run.features.report import Report
from zero.run.features.sample import Sample, heading
from zero.run.features.save import Save
from zero.run.features.statistics import Statistics
from zero.run.features.track import Track
from zero.run.features.validate import Validate
from zero.run.position import Position
from zero.tracking.tracker import TrackerKeys
from zero.training.batch import Batch
from zero.training.state_storage import OnDevices


def at(step: int, *requested: str, is_evaluation: bool = False, is_last: bool = False) -> Moment:
    return Moment(step, is_evaluation, is_last, frozenset(requested))


# Statistics, limits


def limits(run: Any, **keys: Any) -> Limits:
    config: Any = SimpleNamespace(max_skipped_rows=0, max_skipped_in_a_row=20, skip_spikes=None, total_steps=100)
    vars(config).update(keys)
    return Limits(config, config, config)


def test_statistics_of_their_steps_alone() -> None:
    """Statistics make a line of their steps, and None is no step at all."""
    feature = Statistics(Statistics.Keys(every=4), SimpleNamespace())  # type: ignore[arg-type]
    assert [feature.due(at(step)) for step in (3, 4, 8)] == [False, True, True]
    never = Statistics(Statistics.Keys(every=None), SimpleNamespace())  # type: ignore[arg-type]
    assert not never.due(at(4))


@pytest.mark.parametrize(
    ("metrics", "keys", "message"),
    [
        (
            {"gradient_norm": np.nan},
            {"max_skipped_in_a_row": 0},
            "step 3: the gradient is not finite and training.max_skipped_in_a_row=0",
        ),
        ({"skipped_in_a_row": 21}, {}, "step 3: 21 steps in a row had no finite gradient; lower"),
        ({"skipped_in_a_row": 21}, {"skip_spikes": 3.0}, "or were spikes by training.skip_spikes=3.0; lower"),
    ],
)
def test_limits_end_a_run(metrics: dict[str, float], keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, **metrics)
    with pytest.raises(UserError, match=message):
        limits(run, **keys).do(run, at(3), run.read_line())


def test_limit_of_skipped_rows(tmp_path: Path) -> None:
    """Skipped rows are in the line, and end the run beyond their limit."""
    run = make_run(tmp_path)
    feature = limits(run, max_skipped_rows=2)
    line = run.read_line()
    run.position.skipped_rows = 2
    feature.do(run, at(3), line)
    assert line["skipped_rows"] == 2
    run.position.skipped_rows = 3
    with pytest.raises(UserError, match=r"step 3: 3 rows of the data were skipped, but data.max_skipped_rows=2"):
        feature.do(run, at(3), line)


def test_the_end_of_the_data_is_marked(tmp_path: Path) -> None:
    """The last line says that the data have ended, unless the schedule ends there too."""
    run = make_run(tmp_path)
    lines = [run.read_line() for _ in range(3)]
    feature = limits(run, total_steps=5)
    feature.do(run, at(3), lines[0])
    feature.do(run, at(4, is_last=True), lines[1])
    feature.do(run, at(5, is_last=True), lines[2])
    assert ["end_of_data" in line for line in lines] == [False, True, False]


# Profile


@pytest.mark.parametrize(
    ("steps", "traced"), [([6, 7], [8]), ([4, 5], [4, 8]), ([5, 5], [8]), ([9, 20], [12]), ([13, 14], [])]
)
def test_steps_that_share_rows_are_traced_together(steps: list[int], traced: list[int], tmp_path: Path) -> None:
    """A step of the range is traced with those of its rows, of which the features see the last one."""
    run = make_run(tmp_path)
    run.start = Position(0, BatchSchedule(8, steps_per_batch=4), 16)
    feature = Profile(Profile.Keys(steps=steps), run)
    seen = []
    for step in (4, 8, 12):
        feature.before_step(run, step)
        if feature._is_tracing:
            seen.append(step)
        feature.after_step(run, step, Batch(np.zeros(()), np.zeros(())))
    feature.close()
    assert seen == traced
    assert len(list(run.directory.path.rglob("perfetto_trace.json.gz"))) == bool(traced)


# Validate, harness


VALIDATION = Validate.Keys(maximum_evaluation_steps=3), ScoredKeys()
TASKS = Harness.Keys(tasks=["a.yaml"])


def with_validation(run: Any) -> Any:
    batch = HostBatch(np.zeros((8, 4), np.int32), {}, np.zeros(8, bool))
    loader = SimpleNamespace(batches=lambda: iter([batch] * 5), rows=40)
    run.data.validation = {"": loader}
    run.job.programs = SimpleNamespace(evaluate=lambda *_: (jnp.float32(6.0), jnp.int32(4), {}))
    return run


def test_transfers_of_a_validation(tmp_path: Path, transfers: list[Any]) -> None:
    """A validation adds the loss to the line by one transfer per batch."""
    run = with_validation(make_run(tmp_path))
    line: Line = {"step": 3}
    Validate(*VALIDATION, run).do(run, at(3, is_evaluation=True), line)
    assert line == {"step": 3, "validation/loss": 1.5}
    assert len(transfers) == 3


def test_stop_within_a_validation(tmp_path: Path) -> None:
    """A stop request ends a validation, which adds nothing to the line."""
    run = with_validation(make_run(tmp_path))
    run.requests.signals.append(15)
    line: Line = {"step": 3}
    with pytest.raises(Stopped):
        Validate(*VALIDATION, run).do(run, at(3, is_evaluation=True), line)
    assert line == {"step": 3}


def test_checkpoint_learns_its_validation_loss(tmp_path: Path) -> None:
    """The checkpoint of a step that is evaluated after it was saved learns the loss."""
    run = with_validation(make_run(tmp_path))
    losses: dict[int, float] = {}
    run.directory.checkpoints = SimpleNamespace(steps=lambda: [3], set_validation_loss=losses.__setitem__)
    Validate(*VALIDATION, run).do(run, at(3, "validate"), {"step": 3})
    assert losses == {3: 1.5}


@pytest.mark.parametrize(("step", "is_last"), [(40, False), (60, False), (70, True)])
def test_harness_at_evaluations(step: int, is_last: bool, tmp_path: Path) -> None:
    """Tasks run at every evaluation, at that of the last step too; without tasks nothing does."""
    run = make_run(tmp_path)
    feature = Harness(TASKS, run)
    assert feature.due(at(step, is_evaluation=True, is_last=is_last))
    assert not feature.due(at(step))
    assert not Harness(Harness.Keys(tasks=[]), run).due(at(step, is_evaluation=True, is_last=is_last))


def test_harness_results_in_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks are logged by name, without their standard errors."""
    results = {"choice": {"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": "choice"}}
    monkeypatch.setattr(harness, "Scorer", lambda *arguments: None)
    monkeypatch.setattr(harness, "run_tasks", lambda scorer, tasks: results)
    run = make_run(tmp_path)
    line: dict[str, Any] = {}
    Harness(TASKS, run).do(run, at(3, is_evaluation=True), line)
    assert line == {"harness/choice/acc": 0.5}


# Save, protect


def test_no_checkpoint_of_nan(tmp_path: Path) -> None:
    """Neither a durable nor an emergency checkpoint is made of a state that is not finite."""
    run = make_run(tmp_path)
    run.directory.emergency = SimpleNamespace(save=lambda *_: pytest.fail("saved"))
    run.directory.checkpoints.save = lambda *_, **__: pytest.fail("saved")
    layout = make_layout({"w": jax.ShapeDtypeStruct((8,), np.float32)}, 8)
    run.job.storage = OnDevices(layout, Axis("zero", (1, 8)))
    run.state = {"w": jax.pmap(lambda x: x, "zero")(np.asarray([[np.nan], *7 * [[1]]], np.float32))}
    with pytest.raises(UserError, match=r"step 3: w not finite; this state is not saved"):
        Protect(EmergencyKeys(emergency_steps=3), run).do(run, at(3), {})
    with pytest.raises(UserError, match=r"step 3: w not finite; this state is not saved"):
        checked_sums(run)
    run.state = {"w": jax.pmap(lambda x: x, "zero")(np.ones((8, 1), np.float32))}
    with pytest.raises(UserError, match=r"step 3: validation/loss=nan not finite"):
        checked_sums(run, float("nan"))


def test_no_checkpoint_of_differing_replicas(tmp_path: Path) -> None:
    """Replicas that differ end the run with a status that launchers repeat."""
    run = make_run(tmp_path)
    run.job.storage = OnDevices(make_layout({"w": jax.ShapeDtypeStruct((), np.float32)}, 8), Axis("zero", (1, 8)))
    run.state = {"w": jax.pmap(lambda x: x, "zero")(np.asarray([1, 1, 1, 2, 1, 1, 1, 1], np.float32))}
    with pytest.raises(Unavailable, match=r"^step 3: leaves differ .*: w; .*not saved; --resume contin"):
        checked_sums(run)


def saving(run: Any, emergency_steps: int | None = None, **keys: Any) -> Save:
    return Save(Save.Keys(**{"checkpoint_minutes": None} | keys), EmergencyKeys(emergency_steps), run)


@pytest.mark.parametrize(
    ("keys", "now", "is_due"),
    [
        ({}, at(3), False),
        ({}, at(20, is_evaluation=True), True),
        ({"save_every": 3}, at(3), True),
        ({"save_every": 3}, at(20, is_evaluation=True), False),
        ({"save_every": 3}, at(10, is_evaluation=True, is_last=True), True),
        ({"save_every": 1000}, at(5, "stop"), True),
    ],
)
def test_steps_that_are_saved(keys: dict[str, Any], now: Moment, is_due: bool, tmp_path: Path) -> None:
    assert saving(make_run(tmp_path), **keys).due(now) is is_due


def test_saved_step_is_not_saved_again_at_a_stop(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.directory.checkpoints.steps = lambda: [3]
    for keys in ({}, {"save_every": 3}):
        assert not saving(run, **keys).due(at(3, "stop"))


def test_first_emergency_checkpoint_needs_a_durable_one(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    save = saving(run, emergency_steps=3, save_every=1000)
    assert save.due(at(3)) and not save.due(at(4))
    run.directory.checkpoints.steps = lambda: [3]
    assert not save.due(at(6))


def test_checkpoint_by_the_clock_is_asked_for_until_it_is_made(tmp_path: Path) -> None:
    """A checkpoint that is due by the clock is not lost where hosts agree on it during an evaluation."""
    run = make_run(tmp_path)
    run.directory.was_removed = lambda *_: False
    save = saving(run, checkpoint_minutes=1)
    assert run.requests.agree(3) == frozenset()
    save._begun_at = time.monotonic() - 61
    heard: list[tuple[bool, ...]] = [(False, False)]

    def any_host(step: int, *flags: bool) -> tuple[bool, ...]:
        heard.append(flags)
        return heard[-2]  # hosts know a call later

    run.requests._any_host = any_host
    assert run.requests.agree(4) == frozenset()
    assert not run.requests.is_stop(4)  # of an evaluation
    assert heard == [(False, False), (False, True), (False, False)]
    assert run.requests.agree(5) == frozenset(["save"])
    run.requests.answer("save")
    assert run.requests.agree(6) == frozenset()


# Track, sample, report


def test_lines_at_their_steps(tmp_path: Path) -> None:
    """A line every ten steps and at each evaluation, with the clock of the run."""
    run = make_run(tmp_path)
    track = Track(Track.Keys(), TrackerKeys(wandb_project=None), run)
    assert [track.due(at(step)) for step in (3, 10)] == [False, True] and track.due(at(3, is_evaluation=True))
    track.do(run, at(3), {"step": 3, "train/loss": 2.0})
    track.close()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line["train/loss"] == 2.0 and line["wall_time"] > 0


def test_samples_of_steps_that_are_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start at step 3 drops later samples, which it writes again; text that looks like a heading is no step."""
    monkeypatch.setattr("zero.run.features.sample.make_inference", lambda model: None)
    path = tmp_path / "samples.txt"
    kept = f"{heading(3)}\n--- step by step\n"
    path.write_text(f"{kept}{heading(6)}\ntext\n")
    sample = Sample(Sample.Keys(), make_run(tmp_path))
    assert path.read_text() == kept and sample.is_done(tmp_path, at(3)) and not sample.is_done(tmp_path, at(6))
    path.unlink()
    Sample(Sample.Keys(), make_run(tmp_path))
    assert not path.exists()


def test_pending_actions_that_files_show_to_be_done(tmp_path: Path) -> None:
    """A sample is done when its heading is in the file; a validation when its loss is in the metrics."""
    now = at(6, is_last=True)
    assert not Sample.is_done(tmp_path, now) and not Validate.is_done(tmp_path, now)
    (tmp_path / "samples.txt").write_text(f"{heading(60)}\ntext\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 6, "train/loss": 2.0}\n')
    assert not Sample.is_done(tmp_path, now) and not Validate.is_done(tmp_path, now)
    with (tmp_path / "samples.txt").open("a") as file:
        file.write(f"{heading(6)}\ntext\n")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train/loss": 2.0, "validation/loss": 3.0}\n')
    assert Sample.is_done(tmp_path, now) and Validate.is_done(tmp_path, now)
    assert not Harness.is_done(tmp_path, now)
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["validation/loss"] == 3.0


def test_page_older_than_the_metrics_is_drawn_again(tmp_path: Path) -> None:
    """After the last step a page is drawn that knows all metrics; before it, the next page replaces it."""
    assert Report.is_done(tmp_path, at(6))
    last = at(6, is_last=True)
    assert not Report.is_done(tmp_path, last)
    (tmp_path / "report.html").write_text("page")
    (tmp_path / "metrics.jsonl").write_text("{}")
    assert not Report.is_done(tmp_path, last)
    (tmp_path / "report.html").write_text("page")
    assert Report.is_done(tmp_path, last)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("no font")])
def test_failed_report_ends_no_training(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A report that cannot be written does not end training."""

    def fail(directory: Path, defaults: Mapping[str, str]) -> None:
        raise error

    monkeypatch.setattr(report, "draw", fail)
    run = make_run(tmp_path)
    Report({}).do(run, at(10, is_evaluation=True, is_last=True), {"step": 10})
    assert f"step 10: the report of the run could not be written: {error}" in caplog.text


@pytest.mark.parametrize(
    ("is_last", "seconds_ago", "is_drawn"), [(False, 0, False), (False, 11, True), (True, 0, True)]
)
def test_reports_are_seldom(
    is_last: bool, seconds_ago: float, is_drawn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report is drawn every ten seconds at most, and at the last step."""
    drawn: list[Path] = []
    monkeypatch.setattr(report, "draw", lambda directory, defaults: drawn.append(directory))
    monkeypatch.setattr(Report, "_start", lambda self, directory, step: drawn.append(directory))
    run = make_run(tmp_path)
    feature = Report({})
    feature._drawn_at = before = time.monotonic() - seconds_ago
    feature.do(run, at(3, is_evaluation=True, is_last=is_last), {"step": 3})
    assert (drawn, feature._drawn_at > before) == ([tmp_path] if is_drawn else [], is_drawn and not is_last)
