"""The moving average of the weights: that of optax on whole parameters, at any stage and number of devices."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero
from tests.training.small_gpt import PLAIN, STEPS, Setup, advance, bits, setup
from zero.training.ema import EMA, update_ema
from zero.training.parts import TrainState

DECAY = 0.9
CASES: list[Any] = [(8, 3, 1), pytest.param((3, 1, 2), marks=pytest.mark.wide)]  # devices, stage, micro-batches
CASES += [pytest.param(case, marks=pytest.mark.slow) for case in ((8, 0, 1), (1, 2, 1))]


def averaging(devices: int, stage: int, micro_batches: int) -> Setup:
    return setup(devices, stage, micro_batches, config=PLAIN, ema_decay=DECAY)


@cache
def trained(devices: int, stage: int, micro_batches: int) -> tuple[TrainState, list[Any]]:
    """The state after `STEPS` steps, and the whole parameters after each of them."""
    on, params = averaging(devices, stage, micro_batches), []
    state = on.start()
    for step in range(STEPS):
        state, _ = advance(on, state, range(step, step + 1))
        params.append(on.whole(state.params, on.model.layout))
    return state, params


def assert_average(got: dict[str, np.ndarray], params: list[dict[str, np.ndarray]]) -> None:
    """It is what optax makes of these parameters, and differs from the last of them."""
    tx: Any = optax.ema(DECAY, debias=True)
    state = tx.init(params[0])
    for one in params:
        average, state = tx.update(one, state)
    for name, x in average.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-5, atol=1e-6, err_msg=name)
    assert np.abs(got["vocabulary/table"] - params[-1]["vocabulary/table"]).max() > 1e-3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_average_equals_optax(case: tuple[int, int, int]) -> None:
    """The average of shards equals optax.ema of whole parameters."""
    on, (state, params) = averaging(*case), trained(*case)
    assert_average(on.whole(state.averages[EMA], on.model.layout), params)


def test_first_average_and_slow_decay() -> None:
    """The first average is the first parameters, and a decay near one does not lose digits."""
    first, second = jnp.float32(3.0), jnp.float32(5.0)
    ema = update_ema(jnp.float32(100.0), first, 0.99999, updates=1)
    assert ema == first
    mean = (0.99999 * 3 + 5) / 1.99999
    np.testing.assert_allclose(update_ema(ema, second, 0.99999, updates=2), mean, rtol=3e-7)
    assert update_ema(first, second, 0.75, updates=10_000) == 3.5


def test_state_without_average() -> None:
    """State without an average is what it was."""
    with_ema, without = averaging(8, 3, 1), setup(8, 3, config=PLAIN)
    names = [leaf.name for leaf in without.layout.leaves]
    assert not any("ema" in name.split("/") for name in names)
    added = {leaf.name: leaf.splits for leaf in with_ema.layout.leaves if leaf.name not in names}
    assert added == {f"averages/ema/{leaf.name}": leaf.splits for leaf in with_ema.model.layout.leaves}
    assert [leaf for leaf in with_ema.layout.leaves if leaf.name not in added] == list(without.layout.leaves)


@pytest.mark.slow
def test_average_does_not_change_training() -> None:
    with_ema, without = averaging(8, 3, 1), setup(8, 3, config=PLAIN)
    (state, metrics), (plain, plain_metrics) = (advance(on, on.start(), range(2)) for on in (with_ema, without))
    assert metrics == plain_metrics
    for got, bare in zip(bits(state._replace(averages={})), bits(plain), strict=True):
        np.testing.assert_array_equal(got, bare)


def test_skipped_update_keeps_average() -> None:
    """Skipped update does not move the average."""
    on = averaging(8, 3, 1)
    state, _ = advance(on, on.start(), range(1))
    healthy = state.params
    poisoned = jax.tree.map(lambda x: jax.device_put(np.full(x.shape, np.nan, x.dtype), x.sharding), healthy)
    healthy = jax.tree.map(np.asarray, healthy)
    before = bits(state.averages[EMA])
    state, metrics = advance(on, state._replace(params=poisoned), range(1, 3))
    assert metrics[-1]["skipped_steps"] == 2
    for got, old in zip(bits(state.averages[EMA]), before, strict=True):
        np.testing.assert_array_equal(got, old)
    # The next update is the second one that counts.
    state = state._replace(params=jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), healthy, state.params))
    first = on.whole(state.params, on.model.layout)
    state, _ = advance(on, state, range(3, 4))
    assert_average(on.whole(state.averages[EMA], on.model.layout), [first, on.whole(state.params, on.model.layout)])


@pytest.mark.slow  # test_fused_update.py has an average
def test_fused_update_moves_the_average_too() -> None:
    on = setup(8, 3, config=PLAIN, max_norm=None, skip_bad_steps=False, fused_update=True, ema_decay=DECAY)
    state, params = on.start(), []
    for step in range(STEPS):
        state, _ = advance(on, state, range(step, step + 1))
        params.append(on.whole(state.params, on.model.layout))
    assert_average(on.whole(state.averages[EMA], on.model.layout), params)


@pytest.mark.wide  # tests/run/test_resume.py continues with an average
def test_average_on_other_devices() -> None:
    """The average continues on other devices and at another stage."""
    first, then = averaging(8, 3, 1), averaging(3, 1, 2)
    state, _ = advance(first, first.start(), range(2))
    whole = first.whole(state, first.layout)

    def padded(leaf: zero.groups.LeafLayout) -> np.ndarray:
        x = whole[leaf.name]
        return np.pad(x, [(0, p - n) for n, p in zip(x.shape, leaf.padded_shape, strict=True)]) if x.shape else x

    moved = zero.from_global(then.layout.map(padded), then.layout, then.model.axis, then.devices)
    params = trained(8, 3, 1)[1][:2]
    for step in range(2, STEPS):
        moved, _ = advance(then, moved, range(step, step + 1))
        params.append(then.whole(moved.params, then.model.layout))
    assert_average(then.whole(moved.averages[EMA], then.model.layout), params)
