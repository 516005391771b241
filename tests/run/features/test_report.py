"""The report of a run, drawn while it trains."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from zero.run.config import default_config
from zero.run.feature import Moment
from zero.run.features import report


def test_too_little_memory_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run of very many lines may need more memory for its report than there is."""

    def draw(run_directory: Path, defaults: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(report, "draw", draw)
    run: Any = SimpleNamespace(directory=SimpleNamespace(path=tmp_path))
    report.Report({}).do(run, Moment(7, is_evaluation=True, is_last=True), {})
    assert "step 7: the report of the run could not be written: MemoryError" in caplog.text


EVALUATION = Moment(7, is_evaluation=True, is_last=False)


def a_run(directory: Path) -> Any:
    return SimpleNamespace(directory=SimpleNamespace(path=directory))


@pytest.fixture
def feature(monkeypatch: pytest.MonkeyPatch) -> Iterator[report.Report]:
    monkeypatch.setattr(report, "REPORT_SECONDS", 0)
    feature = report.Report({})
    yield feature
    feature.close()


def ended(feature: report.Report) -> report.Report:
    assert feature._drawing is not None
    feature._drawing.wait(900)  # it yields to all others
    return feature


@pytest.mark.wide
def test_a_report_is_drawn_beside_training(feature: report.Report, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 5.0, "learning_rate": 0.1}\n')
    OmegaConf.save(default_config(), tmp_path / "config.yaml")
    feature.do(a_run(tmp_path), EVALUATION, {})
    assert not (tmp_path / "report.html").exists()  # nothing waits for it
    assert ended(feature)._is_idle() and not caplog.messages
    assert (tmp_path / "report.html").exists() and (tmp_path / "run.png").exists()


def test_one_process_draws_at_a_time(
    feature: report.Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It yields to training, and ends with the run."""
    code = "import time; time.sleep(60)"
    monkeypatch.setattr(report, "COMMAND", (sys.executable, "-c", code))
    feature.do(a_run(tmp_path), EVALUATION, {})
    first = feature._drawing
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert first is not None and os.getpriority(os.PRIO_PROCESS, first.pid) == max(report._NICE, own)
    feature.do(a_run(tmp_path), EVALUATION, {})
    assert feature._drawing is first
    feature.close()
    assert first.returncode == -9 and not caplog.messages


def test_the_process_that_draws_ends_with_the_run(
    feature: report.Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a run that is killed, which cannot end it: its input ends then."""
    assert report.COMMAND[-1] == "--beside-a-run"
    code = "import time; from zero.base.child_process import end_with_input; end_with_input()"
    monkeypatch.setattr(report, "COMMAND", (sys.executable, "-c", f"{code}; time.sleep(60)"))
    feature.do(a_run(tmp_path), EVALUATION, {})
    drawing = feature._drawing
    assert drawing is not None and drawing.stdin is not None and drawing.poll() is None
    drawing.stdin.close()
    assert drawing.wait(50) == 1


def test_a_process_that_fails_is_told(
    feature: report.Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the next evaluation, in one line; also where the kernel has killed it."""
    for code, reason in (
        ("import sys; sys.exit('Traceback:\\nerror: metrics.jsonl has no metrics')", "metrics.jsonl has no metrics"),
        ("import os; os.kill(os.getpid(), 9)", "its process ended with status -9"),
    ):
        caplog.clear()
        monkeypatch.setattr(report, "COMMAND", (sys.executable, "-c", code))
        feature.do(a_run(tmp_path), EVALUATION, {})
        assert ended(feature)._is_idle()
        assert caplog.messages == [f"step 7: the report of the run could not be written: {reason}"]
