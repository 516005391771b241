"""The order of features after a step, and what becomes of their actions at a stop."""

from pathlib import Path
from typing import Any

from tests.helpers.runs import make_run
from zero.record.metrics_file import Line
from zero.run.feature import Feature, Moment, Stopped
from zero.run.feature_table import FEATURES
from zero.run.pending import still_pending
from zero.run.requests import STOP
from zero.run.train import act, catch_up, loop


class Recorded(Feature):
    """Records when it acts, and what is pending then."""

    def __init__(self, name: str, is_due: bool = True, is_deferrable: bool = False, is_stopped: bool = False) -> None:
        self.name = name  # type: ignore[misc]
        self.is_deferrable = is_deferrable  # type: ignore[misc]
        self._is_due = is_due
        self._is_stopped = is_stopped
        self.pending: list[list[str]] = []

    def due(self, now: Moment) -> bool:
        return self._is_due or (self.name == "save" and now.is_stop)

    def do(self, run: Any, now: Moment, line: Line) -> None:
        waiting = run.position.pending
        self.pending.append([] if waiting is None else waiting["features"])
        if self._is_stopped:
            raise Stopped


def features(**validate: Any) -> list[Recorded]:
    return [
        Recorded("validate", is_deferrable=True, **validate),
        Recorded("track"),
        Recorded("save"),
        Recorded("sample", is_deferrable=True),
        Recorded("report", is_deferrable=True),
    ]


def test_later_actions_are_pending_in_a_checkpoint(tmp_path: Path) -> None:
    """What is saved names the actions that follow it, and afterwards nothing is pending."""
    run = make_run(tmp_path)
    table = features()
    assert act(run, table, Moment(3, True, False), {"step": 3})
    assert [feature.pending for feature in table] == [
        [["sample", "report"]],
        [["sample", "report"]],
        [["sample", "report"]],
        [["report"]],
        [[]],
    ]
    assert run.position.pending is None


def test_actions_wait_at_a_stop(tmp_path: Path) -> None:
    """At a stop the state is saved, and what may wait is pending in it."""
    run = make_run(tmp_path)
    table = features()
    assert not act(run, table, Moment(3, True, False, frozenset([STOP])), {"step": 3})
    waiting = ["validate", "sample", "report"]
    assert [feature.pending for feature in table] == [[], [waiting], [waiting], [], []]
    assert run.position.pending == {"features": waiting, "line": {"step": 3}}


def test_stop_in_the_middle_of_an_action(tmp_path: Path) -> None:
    """An action that a stop request ended waits with those that follow; the state is saved although it was not due."""
    run = make_run(tmp_path)
    table = features(is_stopped=True)
    table[2]._is_due = False
    assert not act(run, table, Moment(3, True, False), {"step": 3})
    assert table[2].pending == [["validate", "sample", "report"]]
    assert table[3].pending == []


def test_asked_features_act_alone(tmp_path: Path) -> None:
    """At the start of a resume pending actions are done, and no others, although these are due at such a step."""
    run = make_run(tmp_path)
    table = [Recorded("protect"), Recorded("sample", is_due=False), Recorded("report", is_due=False)]
    run.position.pending = {"features": ["sample"], "line": {"step": 3}}
    assert catch_up(run, table)
    assert [len(feature.pending) for feature in table] == [0, 1, 0]
    assert run.position.pending is None and catch_up(run, table)
    assert [len(feature.pending) for feature in table] == [0, 1, 0]


def test_fewer_steps_than_were_trained(tmp_path: Path) -> None:
    """A run that is told to end before its step does what is pending, and is finished; no host has stopped it."""
    run = make_run(tmp_path)
    run.last_step = 2
    nothing: list[Any] = []
    run.batches = lambda: (batch for batch in nothing)
    run.position.pending = {"features": ["sample"], "line": {"step": 3}}
    table = [Recorded("sample", is_due=False)]
    no_steps: Any = None
    assert loop(run, no_steps, table)
    assert len(table[0].pending) == 1 and run.position.pending is None


def test_line_for_features_that_take_each(tmp_path: Path) -> None:
    """Features that take every line act with it, and without a line they do not."""
    run = make_run(tmp_path)
    features = [Recorded("bar", is_due=False), Recorded("track")]
    for feature in features:
        feature.acts_on_every_line = True  # type: ignore[misc]
    act(run, features, Moment(3, False, False), {"step": 3})
    act(run, features, Moment(3, False, False, frozenset([STOP])), {})
    assert [len(feature.pending) for feature in features] == [1, 1]


def test_pending_by_the_files_of_a_run(tmp_path: Path) -> None:
    """What an earlier process completed after its checkpoint is not done again."""
    position = make_run(tmp_path).position
    assert still_pending(position, tmp_path, 3, is_durable=True) is None
    position.pending = {"features": ["sample", "report"], "line": {"step": 3}}
    assert still_pending(position, tmp_path, 3, is_durable=True) == position.pending
    (tmp_path / "samples.txt").write_text("--- step 3\nshard\n")
    assert still_pending(position, tmp_path, 3, is_durable=True) == {"features": ["report"], "line": {"step": 3}}
    assert still_pending(position, tmp_path, 4, is_durable=True) is None  # the next page replaces that of this step


def test_state_that_only_memory_holds_is_saved_first(tmp_path: Path) -> None:
    """A resume from an emergency checkpoint saves it with the loss of its line, before anything else."""
    position = make_run(tmp_path).position
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "validation/loss": 2.5}\n')
    pending = still_pending(position, tmp_path, 3, is_durable=False)
    assert pending == {"features": ["save"], "line": {"step": 3, "validation/loss": 2.5}}


def test_resume_makes_the_page_older(tmp_path: Path) -> None:
    """A page that an earlier process has drawn is drawn again after anything else, which adds a line to the metrics."""
    position = make_run(tmp_path).position
    position.pending = {"features": ["report"], "line": {}}
    for name in ("metrics.jsonl", "report.html"):
        (tmp_path / name).write_text("")
    assert still_pending(position, tmp_path, 3, is_durable=True) is None
    assert still_pending(position, tmp_path, 3, is_durable=False) == {"features": ["save", "report"], "line": {}}
    assert still_pending(position, tmp_path, 4, is_durable=False) == {"features": ["save"], "line": {}}


def test_order_of_effects() -> None:
    """The order that the table of features promises: results, the line, checkpoints, samples, pages."""
    order = [kind.name for kind in FEATURES]
    promised = ["limits", "validate", "harness", "track", "save", "protect", "sample", "report"]
    assert [name for name in order if name in promised] == promised
    assert len(set(order)) == len(order)
