"""Kills before, within and after everything that a run writes: the run ends as one that was left alone.

A run of 12 steps is killed at one moment after the other (tests/helpers/effects.py), each time resumed by the same
command, and compared at its end. A short form is in tests/run/test_train_until_durable.py.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import pytest

from tests.helpers import effects
from tests.helpers.effects import Effect, Run
from zero.run.feature_table import FEATURES

pytestmark = pytest.mark.timeout(4 * 3600)  # on a busy machine


class Open(Protocol):
    def __call__(self, workplace: Path, count: int = 1) -> AbstractContextManager[Run]: ...


def moments(count: int) -> list[tuple[Effect, int, int]]:
    """Each effect, for the how manieth time, and the host that is killed."""
    found = []
    for effect in effects.EFFECTS:
        times = (1, 2) if effect.feature == "mirror" else (1,)  # of the start, and before its first save
        victims = range(count) if effect.feature == "protect" else (0,)  # the others are of host 0
        found += [(effect, nth, host) for nth in times for host in victims]
    return found


def test_every_feature_has_its_effects() -> None:
    """Those that write are killed before and after it; the mirror is written by the feature that saves."""
    named = {effect.feature for effect in effects.EFFECTS}
    assert named == {kind.name for kind in FEATURES if not kind.changes_nothing} | {"mirror"}


@pytest.mark.slow
@pytest.mark.parametrize("count", (1, 2))
@pytest.mark.parametrize("open_run", (effects.on_disk, effects.in_bucket))
def test_kills_at_every_effect(open_run: Open, count: int, tmp_path: Path) -> None:
    with effects.on_disk(tmp_path / "calm", count) as calm, open_run(tmp_path / "killed", count) as run:
        calm.finish()
        for effect, nth, host in moments(count):
            run.killed(effect, nth, host)
        run.finish()
        run.check(calm)


@pytest.mark.slow
@pytest.mark.parametrize("count", (1, 2))
def test_kills_at_the_reference(count: int, tmp_path: Path) -> None:
    """The log-probabilities of preferences are written whole or not at all."""
    with effects.on_pairs(tmp_path / "calm", count) as calm, effects.on_pairs(tmp_path / "killed", count) as run:
        calm.finish()
        for effect in effects.PAIRS:
            run.killed(effect)
        run.finish()
        run.check(calm)
        (one,), (other,) = ([*run_.workplace.glob("data/index/pairs_train.reference-*.npy")] for run_ in (run, calm))
        assert one.name == other.name and one.read_bytes() == other.read_bytes()
