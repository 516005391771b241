"""What is bound from a configuration before any device is used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.runtime.config.composing import compose
from zero.runtime.config.check import check
from zero.runtime.config.files import load_sizes
from zero.runtime.job import learning_rate, make_job, make_model


@pytest.mark.parametrize(("warmup", "total"), [(2, 5), (0, 1), (19, 20), (20, 100)])
def test_linear_end_of_short_runs(warmup: int, total: int) -> None:
    """A constant rate with a linear end reaches the end also in short runs."""
    keys = ("schedule.name=wsd", f"training.warmup_steps={warmup}", f"training.total_steps={total}")
    rate = learning_rate(check(compose(*keys, "training.end_learning_rate=0"), load_sizes()))
    assert float(rate(total - 1)) == 0
    if total - warmup > 1:
        assert float(rate(total - 1 - max(1, total // 10))) == pytest.approx(3e-3)


@pytest.mark.parametrize(("size", "share"), [("bytes_mup", 64 / 192), ("bytes", 1.0)])
def test_rates_of_mup_matrices(size: str, share: float) -> None:
    """Matrices of a model in mup learn at their share of the rate."""
    config = check(compose(f"model.size={size}"), load_sizes())
    tx = make_job(config, load_sizes()[size]).tx
    params = {
        "blocks": {"query": {"kernel": jnp.zeros(3), "bias": jnp.zeros(3)}},
        "vocabulary": {"table": jnp.zeros(3)},
    }
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    np.testing.assert_allclose(updates["blocks"]["query"]["kernel"], share, rtol=1e-6)
    for update in (updates["blocks"]["query"]["bias"], updates["vocabulary"]["table"]):
        np.testing.assert_allclose(update, 1, rtol=1e-6)


@pytest.mark.parametrize(("attention", "lacks"), [("kernel", ["a kernel for this device"]), ("auto", [])])
def test_kernel_falls_back_to_auto(attention: str, lacks: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Where a kernel does not support the attention, this is logged once, and attention falls back to auto."""
    config = check(compose(f"model.attention={attention}"), load_sizes())
    model = make_model(config, load_sizes()["bytes"])
    said = [record.message for record in caplog.records if "kernel" in record.message]
    assert model.kernel is None and model.blockwise_from == 512
    assert said == [
        f"model.attention=kernel lacks {x}: attention is computed as with model.attention=auto" for x in lacks
    ]
