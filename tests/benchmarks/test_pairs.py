"""Random pairs of keys at other valid values: each run is what its parts promise, or is refused by name.

Here a few; benchmarks/pairs.py runs hundreds, with the reasons in docs/decisions/tests.md.
"""

import json
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


def test_what_was_tried_is_kept(tmp_path: Path) -> None:
    """A second start reads the runs of the first from its file, and does not run them again."""
    line = {"overrides": ["seed=1", "zero.stage=1"], "losses": [5.0], "programs": ["a"], "refusal": "", "traceback": ""}
    (tmp_path / "tried.jsonl").write_text(json.dumps(line) + "\n")
    tried = pairs.Tried(tmp_path, tmp_path / "tried.jsonl")
    assert tried.outcome("zero.stage=1", "seed=1") == pairs.Outcome([5.0], ["a"])


def test_broken_promises_are_found() -> None:
    """Of a key that is accepted without an effect, of one that changes what it must not, and of a nameless refusal."""
    base = pairs.Outcome([5.0, 4.0, 3.0], ["a"])
    other = pairs.Outcome([5.0, 3.9, 2.9], ["b"])

    def broken(own: str, both: pairs.Outcome) -> str:
        return pairs.broken_promise(own, other, both, is_rounding=False)

    assert broken("optimizer.b1=0.8", other) == "the program is the same"
    assert broken("optimizer.b1=0.8", base) == ""
    assert broken("data.keep_every=3", base) == "the program differs"
    assert "losses" in broken("data.keep_every=3", pairs.Outcome(base.losses, ["b"]))
    assert broken("data.keep_every=3", other) == ""
    assert "losses" in broken("zero.stage=1", pairs.Outcome(base.losses, ["c"]))
    assert broken("seed=1", other) == "the losses are the same"
    assert pairs.of_refusal("zero.remat=full: expected none", "zero.remat=full", "seed=1").kind == pairs.REFUSED
    assert pairs.of_refusal("something is wrong", "zero.remat=full", "seed=1").kind == pairs.WRONG
