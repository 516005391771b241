"""Short storms (benchmarks/storm.py makes long ones).

A fault comes when a run has logged so many steps, drawn from a fixed seed: a busy machine only takes longer.
"""

from pathlib import Path

import pytest

from benchmarks.storm import weather


# test_train_until_durable.py kills a run, test_sweeps.py a sweep, and test_main_zero_in_a_bucket.py replaces a machine.
@pytest.mark.slow
@pytest.mark.parametrize(("kills", "seed"), [(1, 71), (2, 71)])
def test_repeated_kills(kills: int, seed: int, tmp_path: Path) -> None:
    """A run that is killed, and again and again, ends as one that was not.

    Bit for bit: each start has the same devices, and so reads its programs from the cache.
    """
    storm = weather(tmp_path, kills=kills, steps=12, seed=seed, is_steady=True, is_bucket=True)
    assert storm.kills.total() == kills and storm.lost_directories == 1 and storm.refused > 0
    assert any(hit != "starting" for _, hit in storm.kills)  # compiling or training, as the machine has it


@pytest.mark.slow
def test_faults_on_two_hosts(tmp_path: Path) -> None:
    """A run on two hosts is refused with another configuration, loses a host, and ends as one that met no fault."""
    storm = weather(tmp_path, kills=2, steps=24, seed=12043, most_hosts=2)
    assert storm.kills.total() == 2 and storm.refused_configurations == 1 and storm.finished >= 1


@pytest.mark.slow
def test_every_fault_on_changing_hosts(tmp_path: Path) -> None:
    """A run on changing hosts meets every kind of fault and ends as one that met none."""
    storm = weather(tmp_path, kills=6, steps=60, seed=4070, most_hosts=3)
    assert storm.kills.total() >= 6 and storm.lost_memories > 0


@pytest.mark.slow
def test_kills_on_changing_devices(tmp_path: Path) -> None:
    """A run that is killed on changing devices ends as one that was not."""
    storm = weather(tmp_path, kills=2, steps=20, seed=1, is_bucket=True)
    assert storm.kills.total() == 2 and storm.refused > 0
