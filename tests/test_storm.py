"""Short storms (benchmarks/storm.py makes long ones)."""

from pathlib import Path

import pytest

from benchmarks.storm import weather

pytestmark = pytest.mark.timeout(900)


def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Bit for bit: each start has the same devices, and so reads its programs from the cache."""
    storm = weather(tmp_path, kills=2, steps=12, seed=146, is_steady=True, is_bucket=True)
    assert storm.kills.total() == 2 and storm.lost_directories == 1 and storm.refused > 0
    assert any(hit != "starting" for _, hit in storm.kills)  # compiling or training, as the machine has it


@pytest.mark.slow
def test_a_run_of_changing_hosts_meets_every_kind_of_fault_and_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    storm = weather(tmp_path, kills=6, steps=60, seed=3, most_hosts=3)
    assert storm.kills.total() >= 6 and storm.lost_memories > 0


@pytest.mark.slow
def test_a_run_that_is_killed_on_changing_devices_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    storm = weather(tmp_path, kills=2, steps=20, seed=1, is_bucket=True)
    assert storm.kills.total() == 2 and storm.refused > 0
