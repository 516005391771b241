"""Random pairs of keys at other valid values: each run is what its parts promise, or is refused by name.

A pair of a key that changes no loss and one of the step has the losses of the second key alone.
"""

import random
from collections.abc import Callable, Iterable
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers import cli
from tests.helpers.key_values import ELSEWHERE, NEUTRAL, OF_THE_STEP

JOB = (
    *cli.TINY,
    *("training.total_steps=3", "training.warmup_steps=1", "training.evaluation_frequency=2"),
    "distributed.cpu_devices=4",
)
# Values for these devices and steps; another seed is another order of the data.
VALUES = {key: value for key, value in OF_THE_STEP.items() if key not in ("schedule.decay_end", "seed")}
VALUES |= {"schedule.decay_end": "3", "training.total_steps": "4"}
PAIRS = 250  # of each kind


class Outcome(NamedTuple):
    """The status of a run, the losses of its steps, and the end of what it printed."""

    status: int
    losses: tuple[float, ...]
    errors: str


@pytest.fixture(scope="module")
def outcome(forks: cli.Forks) -> Callable[..., Outcome]:
    """Runs the job with these overrides, once."""
    numbers = iter(range(10**6))

    @cache
    def run(*overrides: str) -> Outcome:
        directory = f"pair-{next(numbers)}"
        done = forks.run(*JOB, *overrides, f"hydra.run.dir={directory}")
        path: Path = forks.workplace / directory
        losses = tuple(cli.losses(path)) if (path / "metrics.jsonl").exists() else ()
        return Outcome(done.returncode, losses, done.stderr)

    return run


def chosen(every: Iterable[tuple[str, str]], seed: int) -> list[tuple[str, str]]:
    """`PAIRS` random ones."""
    pairs = list(every)
    return random.Random(seed).sample(pairs, min(PAIRS, len(pairs)))


def marked(cases: list[tuple[str, str]], quick: int) -> list[object]:
    return [pytest.param(*case, marks=[] if number < quick else pytest.mark.slow) for number, case in enumerate(cases)]


def value_of(key: str) -> str:
    return f"{key}={(VALUES | ELSEWHERE)[key]}"


def check_end(done: Outcome, *keys: str) -> None:
    """A run ends with status 0 and its losses, or with lines that name one of the keys or its value."""
    assert "Traceback" not in done.errors, done.errors
    if done.status == 0:
        assert done.losses and all(loss == loss for loss in done.losses)
        return
    assert done.status == 2, done.errors
    lines = [line for line in done.errors.splitlines() if line.startswith("error: ")]
    names = [key.rpartition(".")[2] for key in keys]
    assert lines and any(name in line for line in lines for name in names), done.errors


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("neutral", "key"), marked(chosen(product(NEUTRAL, VALUES), seed=0), quick=1))
def test_neutral_key_beside_one_of_the_step(neutral: str, key: str, outcome: Callable[..., Outcome]) -> None:
    """A key that changes no loss changes none beside another key either."""
    alone = outcome(value_of(key))
    both = outcome(*sorted((value_of(key), value_of(neutral))))
    check_end(both, neutral, key)
    if alone.status == both.status == 0 and neutral != "training.log_frequency":  # whose lines are means of steps
        assert both.losses == alone.losses


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("one", "other"), marked(chosen(combinations(VALUES, 2), seed=1), quick=0))
def test_two_keys_of_the_step(one: str, other: str, outcome: Callable[..., Outcome]) -> None:
    """Two keys of the step train together, or are refused by name."""
    check_end(outcome(value_of(one), value_of(other)), one, other)
