"""Metrics on disk and in W&B: what a killed, resumed or keyless run leaves behind."""

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.disks import fill
from tests.helpers.events import scalars
from zero.base.errors import UserError
from zero.config.saved_config import flat_config
from zero.record.history import read_history
from zero.record.metrics_file import read_metrics, read_resumes
from zero.record.run_files import save_config
from zero.report.html_report import write_report
from zero.run.config import default_config
from zero.tracking.tracker import open_tracker
from zero.tracking.weights_and_biases import _has_login, _run_id


def track(directory: Path, steps: range, *, resumed_from: int | None = None, project: str | None = None) -> None:
    with open_tracker(directory, project=project, config={"seed": 7}, resumed_from=resumed_from) as tracker:
        for step in steps:
            tracker({"step": step, "train/loss": 1 / step})


def steps_of(directory: Path) -> list[int]:
    return [metrics["step"] for metrics in read_metrics(directory / "metrics.jsonl")]


def test_later_lines_count(tmp_path: Path) -> None:
    """A resumed run keeps every line, and the later ones count."""
    track(tmp_path, range(1, 8))
    with open_tracker(tmp_path, project=None, config={}, resumed_from=4) as tracker:
        tracker({"step": 5, "train/loss": 0.5})
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5]  # 6 and 7 are not reached again yet
    assert metrics[-1]["train/loss"] == 0.5
    assert read_resumes(tmp_path / "metrics.jsonl") == [4]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 9 and json.loads(lines[7]) == {"event": "resume", "step": 4}


def test_discarded_and_replaced_lines(tmp_path: Path) -> None:
    """Each resume discards the steps above it, and a later line replaces an earlier one."""
    path = tmp_path / "metrics.jsonl"
    for resumed_from, steps in ((None, range(1, 6)), (4, range(5, 8)), (1, range(2, 3))):
        with open_tracker(tmp_path, project=None, config={}, resumed_from=resumed_from) as tracker:
            for step in steps:
                tracker({"step": step, "from": resumed_from or 0})
    assert [(line["step"], line["from"]) for line in read_metrics(path)] == [(1, 0), (2, 1)]
    with path.open("a") as file:
        file.write('{"step": 2, "from": 9}\n')
    assert [(line["step"], line["from"]) for line in read_metrics(path)] == [(1, 0), (2, 9)]


def test_not_finite_is_null(tmp_path: Path) -> None:
    """Numbers that are not finite are null."""
    with open_tracker(tmp_path, project=None, config={}, resumed_from=None) as tracker:
        tracker({"step": 1, "train/loss": math.nan, "gradient_norm": math.inf, "learning_rate": 0.5})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "train/loss": null, "gradient_norm": null, "learning_rate": 0.5}\n'
    )


def test_steps_are_logged_in_order(tmp_path: Path) -> None:
    """A step is logged once and in order."""
    with open_tracker(tmp_path, project=None, config={}, resumed_from=None) as tracker:
        tracker({"step": 2})
        with pytest.raises(ValueError, match="step 2 is logged after step 2"):
            tracker({"step": 2})


@given(cut=st.integers(min_value=0))
def test_kill_at_any_byte(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """A kill at any byte costs at most the last line."""
    directory = tmp_path_factory.mktemp("run")
    track(directory, range(1, 5))
    path = directory / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    cut %= len(lines[-1]) + 1
    path.write_bytes(b"".join(lines)[: len(b"".join(lines)) - cut])
    left = 4 if cut <= 1 else 3  # without its newline alone a line is whole
    assert steps_of(directory) == list(range(1, left + 1))
    track(directory, range(left + 1, 7), resumed_from=left)
    assert steps_of(directory) == [1, 2, 3, 4, 5, 6]


@pytest.mark.wide
def test_process_killed_while_it_logs(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, zero.tracking.tracker as t\n"
        f"with t.open_tracker(pathlib.Path({str(tmp_path)!r}), project=None, config={{}}, resumed_from=None) as log:\n"
        "    for step in range(1, 101): log({'step': step})\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert steps_of(tmp_path) == list(range(1, 101))


def test_death_before_the_first_checkpoint(tmp_path: Path) -> None:
    """A run that ended before its first checkpoint starts again."""
    track(tmp_path, range(1, 9))
    track(tmp_path, range(1, 3))
    assert steps_of(tmp_path) == [1, 2]


TORN = [b'{"step": 2, "trai', b'{"step": 2, "tr{"step": 3}', bytes(9)]
DAMAGED = [*TORN, b"[1]", b'{"train/loss": 1.0}', b'{"step": NaN}']


@pytest.mark.parametrize("middle", DAMAGED)
def test_damaged_line_is_set_aside(tmp_path: Path, middle: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged line is reported once, passed over, and at the next start moved to a file of its own."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + middle + b'\n{"step": 4}\n')
    for _ in range(2):
        assert steps_of(tmp_path) == [1, 4] and read_resumes(path) == []
    (warning,) = caplog.messages
    assert warning.startswith(f"{path}: skipped line 2, which is damaged: expected")
    track(tmp_path, range(5, 7), resumed_from=4)
    assert steps_of(tmp_path) == [1, 4, 5, 6]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == middle + b"\n"
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [1, 4, 4, 5, 6]
    assert caplog.messages[1:] == [f"{path}: moved 1 damaged lines to metrics.jsonl.damaged"]


def test_full_disk_costs_no_line(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training continues while the disk is full, and afterwards all lines are in metrics.jsonl and the event file."""
    with open_tracker(small_disk, project=None, config={}, resumed_from=None, tensorboard=True) as tracker:
        tracker({"step": 1, "train/loss": 1.0})
        filler = fill(small_disk)
        for step in range(2, 400):
            tracker({"step": step, "train/loss": 1.0})
        assert max(steps_of(small_disk)) < 399
        filler.unlink()
        tracker({"step": 400, "train/loss": 1.0})
    assert steps_of(small_disk) == list(range(1, 401)) == list(map(int, scalars(small_disk, "train/loss")))
    assert sorted(message.partition(": ")[2][:30] for message in caplog.messages) == [
        "a line of TensorBoard's metric",
        "a line of metrics could not be",
    ]
    assert all("(No space left on device)" in message for message in caplog.messages)


def test_reports_leave_no_parts_on_a_full_disk(small_disk: Path) -> None:
    """A picture or a page for which there is no room takes none from the checkpoints."""
    from zero.report.plot import draw_run  # here, as every worker imports every module of tests

    track(small_disk, range(1, 9))
    save_config(small_disk, default_config())
    filler = fill(small_disk)
    os.truncate(filler, filler.stat().st_size - 2**14)
    before = sorted(small_disk.iterdir())
    with pytest.raises(OSError, match=r"No space left on device: '.*run\.png'"):
        draw_run(small_disk, read_history(small_disk / "metrics.jsonl"))
    with pytest.raises(OSError, match=r"No space left on device: '.*report\.html'"):
        write_report([small_disk], small_disk / "report.html", flat_config(default_config()))
    assert sorted(small_disk.iterdir()) == before


def test_damaged_line_on_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing can be set aside a torn last line stays, and the next line is not glued to it."""
    path = small_disk / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "tra')
    filler = fill(small_disk)
    with open_tracker(small_disk, project=None, config={}, resumed_from=1) as tracker:
        filler.unlink()
        tracker({"step": 2})
    assert steps_of(small_disk) == [1, 2] and read_resumes(path) == [1]
    assert path.read_bytes().count(b"\n") == 4
    assert "damaged lines could not be moved aside: [Errno 28] No space left on device: " in caplog.text


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    teardown()  # W&B would keep using the environment of its first start
    yield
    teardown()


def teardown() -> None:
    import wandb  # here, as every worker imports every module of tests

    wandb.teardown()


def wandb_runs(directory: Path) -> list[bytes]:
    teardown()  # finish() does not wait until W&B's process has written the end of its file
    return [path.read_bytes() for path in sorted(directory.glob("wandb/offline-run-*/*.wandb"))]


def test_wandb_offline(tmp_path: Path, no_login: None, capfd: pytest.CaptureFixture[str]) -> None:
    """wandb is offline, quiet and writes inside the run directory."""
    run = tmp_path / "run"
    run.mkdir()
    track(run, range(1, 4), project="zero-tests")
    first_id = (run / "wandb_run_id").read_text()
    time.sleep(1)  # W&B names its directories by the second
    track(run, range(3, 5), project="zero-tests", resumed_from=2)
    time.sleep(1)

    with open_tracker(run, project="zero-tests", config={"seed": 7}, resumed_from=4) as tracker:
        tracker({"step": 5, "train/loss": 0.2, "mfu": 0.5, "samples_checksum": 9})
        tracker.text(5, "def main(")
    *written, last = wandb_runs(run)
    assert len(written) == 2
    assert b"perf/mfu" in last and b"samples_checksum" not in last and b"samples" in last
    (table,) = run.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    content = json.loads(table.read_text())
    assert (content["columns"], content["data"]) == (["step", "text"], [[5, "def main("]])
    for record in written:
        assert first_id.encode() in record and b"train/loss" in record and b"seed" in record
    assert (run / "wandb_run_id").read_text() == first_id
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert capfd.readouterr() == ("", "")


def test_wandb_without_servers(
    tmp_path: Path, no_login: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """wandb works offline when its servers cannot be reached."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    track(tmp_path, range(1, 4), project="zero-tests")
    assert len(wandb_runs(tmp_path)) == 1
    assert "http://127.0.0.1:9 cannot be reached" in caplog.text


def test_login_is_found_without_asking(tmp_path: Path, no_login: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not _has_login("https://wandb.example.org")
    (tmp_path / "netrc").write_text("machine wandb.example.org login user password secret\n")
    assert _has_login("https://wandb.example.org")
    assert not _has_login("https://elsewhere.example.org")


def is_running() -> bool:
    import wandb

    return wandb.run is not None


def test_wandb_starts_with_the_first_line(tmp_path: Path, no_login: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a login wandb starts with the first line of metrics; with a login it starts at once."""
    with open_tracker(tmp_path, project="zero-tests", config={}, resumed_from=None) as tracker:
        assert (tmp_path / "wandb_run_id").exists() and not is_running()
        tracker({"step": 1})
        assert is_running()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    teardown()
    with open_tracker(tmp_path, project="zero-tests", config={}, resumed_from=1):
        assert is_running()


def test_wandb_that_is_killed_ends_no_run(tmp_path: Path, no_login: None, caplog: pytest.LogCaptureFixture) -> None:
    """A run whose process of W&B is killed, as a machine without memory does, continues with one warning."""
    with open_tracker(tmp_path, project="zero-tests", config={}, resumed_from=None) as tracker:
        tracker({"step": 1})
        for process in psutil.Process().children():
            if process.name().startswith("wandb"):
                process.kill()
                process.wait()
        for step in range(2, 5):
            tracker({"step": step})
            time.sleep(0.1)
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert caplog.text.count("W&B failed") == 1


@pytest.mark.parametrize("content", [b"", b"\0\0\xff", b"two words"])
def test_damaged_id_of_wandb(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An id that W&B would refuse is replaced, with a warning."""
    path = tmp_path / "wandb_run_id"
    path.write_bytes(content)
    new_id = _run_id(path)
    assert path.read_text() == new_id and re.fullmatch("[0-9a-f]{8}", new_id)
    assert f"{path} is damaged" in caplog.text
    assert _run_id(path) == new_id and len(caplog.messages) == 1


def test_id_of_wandb_on_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk does not stop a run at W&B's id."""
    fill(small_disk)
    assert re.fullmatch("[0-9a-f]{8}", _run_id(small_disk / "wandb_run_id"))
    assert "No space left on device: " in caplog.text and "as a new run" in caplog.text


def test_wandb_cannot_start(
    tmp_path: Path, no_login: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure of wandb to start is an error before the first step; a run that trains continues, and says it once."""
    track(tmp_path, range(1, 3), project="no/slashes")
    assert steps_of(tmp_path) == [1, 2]
    assert caplog.text.count("W&B could not start") == 1
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"W&B could not start .*wandb_project=null"):
        track(tmp_path, range(3, 4), project="no/slashes")
