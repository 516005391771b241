"""A run with each optimizer, continued from the middle: the same state at the end, to the bit; on other devices too."""

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
RTOL = {"muon": 1e-3, "int8": 1e-3, "int8 and bfloat16": 1e-2}  # rounded to bfloat16, or to bytes in other blocks
# Whose updates look at whole leaves, or whose state is in blocks; others are tried by tests/partition.
ELSEWHERE = {
    **{name: CASES[name] for name in ("lamb", "muon", "adafactor")},
    "int8": ("optimizer.state_dtype=int8",),
    "int8 and bfloat16": ("optimizer.state_dtype=int8", "zero.master_dtype=bfloat16"),
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


@pytest.mark.slow
@pytest.mark.parametrize("case", ELSEWHERE)
def test_resumed_on_other_devices(forks: cli.Forks, case: str) -> None:
    """On 1, 3 or 8 devices a resumed run sees the same samples, and has the same losses to rounding."""
    run = forks.train(
        f"{case} on 8", *RUN, *ELSEWHERE[case], "training.batch_size=24", "training.gradient_accumulation_steps=1"
    )
    for devices in (1, 3, 8):
        resumed = forks.fork(run.name, 4, f"distributed.cpu_devices={devices}")
        got, expected = (cli.metrics(path)[-4:] for path in (resumed, run))
        assert [line["samples_checksum"] for line in got] == [line["samples_checksum"] for line in expected]
        for name in ("train/loss", "validation/loss", "gradient_norm"):
            values, wanted = ([line[name] for line in lines if name in line] for lines in (got, expected))
            np.testing.assert_allclose(values, wanted, rtol=0 if devices == 8 else RTOL.get(case, 1e-5), err_msg=name)
