"""A run with each optimizer, continued from the middle: the same state at the end, to the bit."""

import numpy as np
import pytest

from tests.helpers import cli
from tests.helpers.checkpoints import leaves
from zero.training.optimizers.optimizer import NAMES

LAST = 8
RUN = (*cli.TINY, "training.evaluation_frequency=4", f"training.total_steps={LAST}", "data.max_context=16")
CASES = {
    **{name: (f"optimizer={name}",) for name in NAMES},
    "adafactor": ("optimizer=adafactor", "optimizer.factored_from=8"),
    "mup": ("model.size=bytes_mup",),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_resumed_run_equals_uninterrupted(forks: cli.Forks, case: str) -> None:
    """A resumed run ends as one that was not interrupted."""
    expected = leaves(forks.train(case, *RUN, *CASES[case]), LAST)
    got = leaves(forks.fork(case, 4), LAST)
    assert any(name.startswith("opt_state") for name in expected) and got.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)
