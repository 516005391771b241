"""Random pairs of keys at other valid values: each run is what its parts promise, or is refused by name.

Here a few; benchmarks/pairs.py runs hundreds, with the reasons in docs/decisions/tests.md.
"""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.helpers import pairs

QUICK = (
    ("data.keep_every=3", "optimizer.b1=0.8"),  # no part of the step
    ("zero.fused_update=true", "training.gradient_accumulation_steps=2"),  # refused
)
REMAT = ("zero.remat=full", "optimizer.b1=0.8")  # the same losses of another program, as in tests/training/test_step.py


@pytest.fixture(scope="module")
def tried(workplace: Path) -> pairs.Tried:
    return pairs.Tried(workplace)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(*QUICK[0], marks=pytest.mark.wide),
        QUICK[1],
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (REMAT, *pairs.random_pairs(40, seed=1))),
    ],
)
def test_pair(one: str, other: str, tried: pairs.Tried) -> None:
    """Each override keeps its promise beside the other, as alone, or one is refused by name."""
    verdict = tried.verdict(one, other)
    assert verdict.kind != pairs.WRONG, verdict.reason
    assert (verdict.kind == pairs.REFUSED) == ("fused" in one) or (one, other) not in QUICK


@pytest.mark.parametrize(
    "overrides",
    [pytest.param(group, marks=pytest.mark.slow, id=" ".join(group)) for group in pairs.random_groups(20, 1)],
)
def test_group(overrides: tuple[str, ...], tried: pairs.Tried) -> None:
    """Three to six keys at once."""
    verdict = tried.verdict(*overrides)
    assert verdict.kind != pairs.WRONG, verdict.reason


def test_what_was_tried_is_kept(tmp_path: Path) -> None:
    """A second start reads the runs of the first from its file, and does not run them again."""
    line = {"overrides": ["seed=1", "zero.stage=1"], "losses": [5.0], "programs": ["a"], "refusal": "", "traceback": ""}
    (tmp_path / "tried.jsonl").write_text(json.dumps(line) + "\n")
    tried = pairs.Tried(tmp_path, tmp_path / "tried.jsonl")
    assert tried.outcome("zero.stage=1", "seed=1") == pairs.Outcome([5.0], ["a"])


NEUTRAL, PLACED, VALUE, OF_DATA = "data.keep_every=3", "zero.stage=1", "optimizer.b1=0.8", "seed=1"


@pytest.mark.parametrize(
    ("overrides", "losses", "program", "reason"),
    [
        ((NEUTRAL, VALUE), 3.0, "b1", None),
        ((NEUTRAL, VALUE), 3.0, "other", "the program differs"),
        ((NEUTRAL, VALUE), 3.1, "b1", "in place of"),
        ((PLACED, VALUE), 3.00001, "b1 of stage 1", None),
        ((PLACED, VALUE), 3.001, "b1 of stage 1", "in place of"),
        ((PLACED, VALUE), 3.0, "b1", "zero.stage=1: it has no effect"),
        ((NEUTRAL, PLACED, VALUE), 3.0, "stage 1", "optimizer.b1=0.8: it has no effect"),
        ((OF_DATA, VALUE), 2.9, "b1", None),
        ((OF_DATA, VALUE), 3.0, "b1", "seed=1: it has no effect"),
        ((NEUTRAL, VALUE), math.nan, "b1", "losses"),
    ],
)
def test_broken_promises_are_found(
    overrides: tuple[str, ...],
    losses: float,
    program: str,
    reason: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a key that is accepted without an effect, and of one that changes what it must not."""
    ended = {(): (5.0, "base"), (VALUE,): (3.0, "b1"), (PLACED,): (5.0, "stage 1"), (NEUTRAL, PLACED): (5.0, "stage 1")}
    ended |= {(OF_DATA,): (4.0, "base"), (NEUTRAL,): (5.0, "base"), (NEUTRAL, VALUE): (3.0, "b1")}
    ended[overrides] = losses, program
    lines = [asdict(pairs.Outcome([loss], [text])) | {"overrides": of} for of, (loss, text) in ended.items()]
    (tmp_path / "tried.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(pairs.Tried, "step_of", lambda _, *of: ended[of][1])
    verdict = pairs.Tried(tmp_path, tmp_path / "tried.jsonl").verdict(*overrides)
    assert verdict.kind == (pairs.EQUAL if reason is None else pairs.WRONG)
    assert (reason or "") in verdict.reason


def test_refusals_name_a_key() -> None:
    assert pairs.of_refusal("zero.remat=full: expected none", "zero.remat=full", "seed=1").kind == pairs.REFUSED
    assert pairs.of_refusal("something is wrong", "zero.remat=full", "seed=1").kind == pairs.WRONG
