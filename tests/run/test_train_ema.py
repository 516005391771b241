"""A run with a moving average of its weights is moved to other devices; test_resume.py resumes and evaluates one."""

import numpy as np
import pytest

from tests.helpers import cli
from zero.record.run_files import saved_steps

LAST = 8
EMA = (
    *cli.TINY,
    "training.ema=0.6",
    "training.staged_warmup_steps=0",
    "training.evaluation_frequency=4",
    f"training.total_steps={LAST}",
    "data.max_context=16",
)


@pytest.mark.slow
def test_average_on_fewer_devices(lasting: cli.Lasting, forks: cli.Forks) -> None:
    """The average continues on fewer devices and at another stage."""
    whole = lasting.train("whole", *EMA)
    run = forks.fork(whole.name, LAST // 2, "distributed.cpu_devices=4", "zero.stage=1")
    assert saved_steps(run) == [LAST]
    got, expected = (cli.losses(one, "validation/ema_loss") for one in (run, whole))
    np.testing.assert_allclose(got, expected, rtol=1e-4)
