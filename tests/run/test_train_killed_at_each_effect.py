"""Kills before, within and after everything that a run writes: the run ends as one that was left alone.

A run of 12 steps is killed at one moment after the other (tests/helpers/effects.py), each time resumed by the same
command, and compared at its end. A short form is in tests/run/test_train_until_durable.py.
"""

import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import pytest

from tests.helpers import effects
from tests.helpers.effects import Effect, Run
from zero.run.feature_table import FEATURES

pytestmark = pytest.mark.timeout(4 * 3600)  # on a busy machine


Moments = list[tuple[Effect, int, int]]  # effects, for the how manieth time each, and the host that is killed


class Open(Protocol):
    def __call__(self, workplace: Path, count: int = 1) -> AbstractContextManager[Run]: ...


def all_moments(count: int) -> Moments:
    found = []
    for effect in effects.EFFECTS:
        # At the start, and then: the mirror before the first save, the validation set in the first evaluation.
        times = (1, 2) if effect.feature in ("mirror", "validate") else (1,)
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
    """A run trains on while a checkpoint is written: if it ends before all moments, another has the rest."""
    with effects.on_disk(tmp_path / "calm", count) as calm:
        calm.finish()
        left = all_moments(count)
        while left:
            with open_run(tmp_path / f"killed-{len(left)}", count) as run:
                left = kill_at(run, left)
                run.finish()
                run.check(calm)


def kill_at(run: Run, moments: Moments) -> Moments:
    """Kills a run at one moment after the other; those that are left when it ends by itself."""
    for number, moment in enumerate(moments):
        done = run.attempt(*moment)
        if done.returncode == 0 and number > 0:
            return moments[number:]
        assert done.returncode == -signal.SIGKILL, (moment, done.stderr)
    return []


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
