"""What is bound from a configuration before any device is used."""

import pytest

from tests.runtime.config.composing import compose
from zero.runtime.build import learning_rate
from zero.runtime.config.check import check
from zero.runtime.config.files import load_sizes


@pytest.mark.parametrize(("warmup", "total"), [(2, 5), (0, 1), (19, 20), (20, 100)])
def test_constant_rate_with_a_linear_end_reaches_it_also_in_short_runs(warmup: int, total: int) -> None:
    keys = ("schedule.name=wsd", f"training.warmup_steps={warmup}", f"training.total_steps={total}")
    rate = learning_rate(check(compose(*keys, "training.end_learning_rate=0"), load_sizes()))
    assert float(rate(total - 1)) == 0
    if total - warmup > 1:
        assert float(rate(total - 1 - max(1, total // 10))) == pytest.approx(3e-3)
