"""`statistics.every` in runs: the losses are the same bits, and the lines of metrics have statistics.

So are they where `verify.every` compares devices as well, of which test_verify.py has the failures.
"""

import math

import pytest

from tests.helpers import cli
from zero.training.leaf_statistics import OF_LEAVES


@pytest.mark.wide  # training/test_statistics.py and training/test_verification.py have both
def test_statistics_change_no_loss(lasting: cli.Lasting) -> None:
    """A run with statistics that compares devices computes the same."""
    plain = lasting.train("plain", *cli.TINY)
    every = ("statistics.every=5", "training.log_frequency=4", "verify.every=2")
    lines = cli.metrics(lasting.train("statistics", *cli.TINY, *every))
    kinds = ("activation/", *(f"{kind}/" for kind in OF_LEAVES))
    assert [line["step"] for line in lines if any(name.startswith(kinds) for name in line)] == [5, 10]
    own = [{name: x for name, x in line.items() if not name.startswith(kinds)} for line in lines]
    per_step = {line["step"]: line for line in cli.metrics(plain)}
    for line in own:
        means = ("train/loss",)  # of the steps since the line before
        assert {k: v for k, v in line.items() if k not in means} == {
            k: v for k, v in per_step[line["step"]].items() if k not in means
        }
    for line in lines:
        if line["step"] in (5, 10):
            norms = [x for name, x in line.items() if name.startswith("gradient_norm/")]
            assert math.isclose(math.hypot(*norms), line["gradient_norm"], rel_tol=1e-5)
            assert all(math.isfinite(x) and x >= 0 for name, x in line.items() if name.startswith(kinds))
