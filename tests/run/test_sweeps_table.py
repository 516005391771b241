"""The table of a sweep, which ends no sweep: neither a damaged job nor a full disk is an error."""

import csv
from pathlib import Path

import pytest

from tests.helpers.disks import fill
from zero.commands.modes import default_config
from zero.record.run_files import save_config
from zero.run.sweeps import write_table


def make_job(sweep: Path, number: int) -> None:
    run = sweep / str(number)
    run.mkdir()
    save_config(run, default_config())
    (run / "metrics.jsonl").write_text(
        f'{{"step": 1, "train/loss": {number}.5, "validation/loss": 3.0}}\n{{"step": 2, "train/loss": {number}.25}}\n'
    )


def rows(sweep: Path) -> list[tuple[str, ...]]:
    with (sweep / "sweep.csv").open(newline="") as file:
        return [tuple(row) for row in csv.reader(file)]


HEAD = ("job", "seed", "step", "train/loss", "validation/loss")


def test_damaged_job_has_no_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        make_job(tmp_path, number)
    (tmp_path / "1" / "config.yaml").write_text("data: [")
    with (tmp_path / "2" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "tra')
    write_table(tmp_path, ["seed"])
    assert rows(tmp_path) == [HEAD, ("0", "0", "2", "0.25", "3.0"), ("2", "0", "2", "2.25", "3.0")]
    (warning,) = caplog.messages
    assert warning.startswith(f"{tmp_path}/sweep.csv has no row for this job: {tmp_path}/1/config.yaml is damaged")


def test_table_on_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A table that cannot be written stays as it was, and the sweep goes on."""
    make_job(small_disk, 0)
    write_table(small_disk, ["seed"])
    make_job(small_disk, 1)
    fill(small_disk)
    write_table(small_disk, ["seed"])
    assert rows(small_disk) == [HEAD, ("0", "0", "2", "0.25", "3.0")]
    (warning,) = caplog.messages
    assert f"No space left on device: '{small_disk}/sweep.csv'; the table of the sweep lacks" in warning
