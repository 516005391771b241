"""evaluations.jsonl, which no damage and no full disk makes an error."""

import json
import math
from pathlib import Path

import pytest

from tests.helpers.disks import fill
from zero.record.evaluations_file import append_evaluation, read_evaluations
from zero.record.run_files import save_config


def make_run(directory: Path) -> Path:
    """A run directory with only a configuration; returns its file of evaluations."""
    save_config(directory, {"data": {"bucket_path": None, "checkpoint_directory": "checkpoints"}})
    return directory / "evaluations.jsonl"


def test_damaged_lines_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged line is reported once and stays; a torn last line is not glued to the next one."""
    path = make_run(tmp_path)
    path.write_bytes(b'{"step": 8}\n{"st{"step": 4}\n{"step": 2}\n{"step": 9, "evalu')
    append_evaluation(tmp_path, {"step": 6, "evaluation/loss": math.inf})
    for _ in range(2):
        lines = read_evaluations(tmp_path)
    assert [line["step"] for line in lines] == [2, 6, 8]
    assert lines[1]["evaluation/loss"] is None
    named = [message.partition(",")[0] for message in caplog.messages]
    assert named == [f"{path}: skipped line 2", f"{path}: skipped line 4"]
    assert path.read_bytes().splitlines()[1] == b'{"st{"step": 4}'


def test_evaluations_on_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk costs an evaluation that the next start repeats, and none of those before."""
    path = make_run(small_disk)
    append_evaluation(small_disk, {"step": 2})
    filler = fill(small_disk)
    append_evaluation(small_disk, {"step": 4})
    assert [line["step"] for line in read_evaluations(small_disk)] == [2]
    (warning,) = caplog.messages
    assert f"No space left on device: '{path}'; the evaluation of step 4 is not recorded" in warning
    filler.unlink()
    append_evaluation(small_disk, {"step": 4})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 2}, {"step": 4}]
