"""The guard: updates far above the running statistics of loss and gradient norm are skipped at any stage."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests.training.small_gpt import (
    RATE,
    STEPS,
    Run,
    Setup,
    advance,
    assert_close,
    assert_equal,
    batch,
    bits,
    reference,
    run_on,
    setup,
)
from zero.training.guard import add_to_running, is_spike
from zero.training.parts import TrainState


def with_running(state: TrainState, running: Any) -> TrainState:
    before = state.guard.running
    copies = np.stack([np.asarray(running, np.float32)] * len(before))
    return state._replace(guard=state.guard._replace(running=jax.device_put(copies, before.sharding)))


def spiky(devices: int, stage: int, limit: tuple[float, float], deviations: float = 6.0) -> tuple[Setup, TrainState]:
    """A run that skips spikes, and its start, as if loss and norm had often been so far below these limits."""
    on = setup(devices, stage, skip_spikes=deviations)
    mean, deviation = np.asarray(limit) - 1e-3, 1e-3 / deviations
    return on, with_running(on.start(), np.stack([mean, np.full(2, deviation**2), np.ones(2)], axis=1))


def test_running_statistics() -> None:
    """Running statistics are weighted means of the values seen so far."""
    values = np.random.default_rng(0).normal([100, 2], [0.01, 1], (200, 2))  # a variance of 1e-8 of the square
    running, add = jnp.zeros((2, 3)), jax.jit(add_to_running)
    for n, value in enumerate(values, 1):
        running = add(running, jnp.asarray(value, jnp.float32))
        if n in (1, 2, 63, 64, 200):
            weights = (127 / 128) ** np.arange(n)[::-1]
            mean = np.average(values[:n], axis=0, weights=weights)
            variance = np.average((values[:n] - mean) ** 2, axis=0, weights=weights)
            np.testing.assert_allclose(running[:, 0], mean, rtol=1e-5)
            np.testing.assert_allclose(running[:, 1], variance, rtol=5e-3, atol=1e-9)
            for kind in range(2):
                for deviations, is_above in ((5.9, True), (6.1, False)):
                    value = mean.copy()
                    value[kind] += 6 * np.sqrt(variance[kind])
                    judged = is_spike(running, jnp.asarray(value, jnp.float32), deviations)
                    assert judged.item() == (is_above and n >= 64), (n, kind)
    assert not is_spike(running, jnp.asarray([np.nan, 2], jnp.float32), 6.0)
    assert not is_spike(running, jnp.asarray([0.0, -1e9], jnp.float32), 6.0)


@pytest.mark.parametrize("kind", ["loss", "gradient_norm"])
@pytest.mark.parametrize(
    ("stage", "devices"),
    [
        (3, 8),
        pytest.param(0, 8, marks=pytest.mark.slow),
        pytest.param(1, 3, marks=pytest.mark.wide),
        pytest.param(2, 1, marks=pytest.mark.slow),
    ],
)
def test_spike_is_skipped(stage: int, devices: int, kind: str) -> None:
    """A spike is skipped and leaves everything as it was."""
    usual = reference().metrics[kind][0]
    limits = {"loss": 1e3, "gradient_norm": 1e3, kind: usual * 0.99}
    on, state = spiky(devices, stage, (limits["loss"], limits["gradient_norm"]))
    before = bits((state.params, state.opt_state, state.guard.running))
    state, metrics = advance(on, state, range(2))
    for got, expected in zip(bits((state.params, state.opt_state, state.guard.running)), before, strict=True):
        np.testing.assert_array_equal(got, expected)
    for name in ("skipped_spikes", "skipped_steps", "skipped_in_a_row"):
        assert [m[name] for m in metrics] == [1, 2]
    assert metrics[0][kind] == pytest.approx(usual, rel=1e-5)
    assert [m["learning_rate"] for m in metrics] == [np.float32(RATE(0)), np.float32(RATE(1))]
    assert np.asarray(state.clock).tolist() == [2] * devices

    never = [[1e3, 1, 1], [1e3, 1, 1]]
    state, metrics = advance(on, with_running(state, never), range(2, 3))
    assert [metrics[0][name] for name in ("skipped_spikes", "skipped_steps", "skipped_in_a_row")] == [2, 2, 0]
    zero.check_replicated((state.clock, state.guard), "zero", on.devices)
    # As if the two steps had not been, but for the place in the schedule.
    start = with_running(on.start(), never)
    other, _ = advance(on, start._replace(clock=start.clock + 2), range(2, 3))
    for got, expected in zip(bits((state.params, state.opt_state)), bits((other.params, other.opt_state)), strict=True):
        np.testing.assert_array_equal(got, expected)


@cache
def spiky_run(devices: int, stage: int) -> Run:
    losses = reference().metrics["loss"]
    low, high = sorted(losses)[1:3]
    on, state = spiky(devices, stage, ((low + high) / 2, 1e3))
    return run_on(on, state)


@pytest.mark.slow
def test_all_agree_on_spikes() -> None:
    """Stages and devices agree on what is a spike."""
    runs = [spiky_run(8, stage) for stage in range(4)]
    assert 0 < runs[0].metrics["skipped_spikes"][-1] < STEPS
    assert_equal(runs[1], runs[0])
    assert_equal(runs[3], runs[2])
    for other in (*runs[1:], spiky_run(3, 3), spiky_run(1, 3)):
        for name in ("skipped_spikes", "skipped_steps", "skipped_in_a_row"):
            assert other.metrics[name] == runs[0].metrics[name]
        np.testing.assert_allclose(other.metrics["loss"], runs[0].metrics["loss"], rtol=1e-5)
        assert other.state is not None and runs[0].state is not None
        np.testing.assert_allclose(other.state.guard.running[0], runs[0].state.guard.running[0], rtol=1e-3)


def test_unreached_limit() -> None:
    """A limit that nothing reaches changes nothing."""
    got = run_on(*spiky(8, 3, (1e3, 1e3)))
    assert got.metrics["skipped_steps"] == [0] * STEPS
    assert_close(got, reference(), rtol=1e-6)


def test_shuffled_tokens_are_skipped() -> None:
    """Shuffled tokens are skipped once enough updates were made and after a checkpoint."""
    on = setup(8, 3, skip_spikes=6.0)
    text = batch(on, 0)._replace(tokens=np.broadcast_to(np.arange(12, dtype=np.int32), (8, 3, 12)))
    noise = text._replace(tokens=np.random.default_rng(0).permuted(text.tokens, axis=-1))
    # The model has learned the text before the statistics begin; what is left is the noise of dropout.
    state, seen = on.start(), []
    for _ in range(20):
        state, metrics = on.programs.step(state, text)
        seen.append([metrics["loss"], metrics["gradient_norm"]])
    values, running = np.asarray(seen[-8:], np.float32), jnp.zeros((2, 3))
    for update in range(62):
        running = add_to_running(running, values[update % 8])
    state = with_running(state, running)
    spikes = []
    for _ in range(2):  # the 63rd update, after which nothing is judged, and the 64th
        state, metrics = on.programs.step(state, text)
        assert metrics["skipped_steps"].item() == 0
        arrays = zero.to_global(state, on.layout, on.model.axis, on.devices)
        judged = zero.from_global(arrays, on.layout, on.model.axis, on.devices)
        before = bits(judged.params)
        judged, metrics = on.programs.step(judged, noise)
        spikes.append(metrics["skipped_spikes"].item())
        is_same = all((got == x).all() for got, x in zip(bits(judged.params), before, strict=True))
        assert is_same == bool(spikes[-1])
    assert spikes == [0, 1]


UNGUARDED: dict[str, Any] = {"max_norm": None, "skip_bad_steps": False}


@pytest.mark.parametrize("poison", [np.nan, pytest.param(np.inf, marks=pytest.mark.wide)])
@pytest.mark.parametrize(
    "options",
    [
        {"skip_spikes": 6.0},
        pytest.param(UNGUARDED, marks=pytest.mark.wide),
        pytest.param({"skip_spikes": 6.0, "skip_bad_steps": False}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "-".join(options),
)
def test_not_finite_is_no_spike(poison: float, options: dict[str, Any]) -> None:
    """Values that are not finite are no spikes and never enter the statistics."""
    on = setup(8, 3, **options)
    state = with_running(on.start(), [[5, 1, 1], [1, 1, 1]])
    before = bits(state.guard.running)
    sick = jax.tree.map(lambda x: x * poison, state.params)
    state, metrics = on.programs.step(state._replace(params=sick), batch(on, 0))
    assert not np.isfinite(metrics["gradient_norm"].item())
    is_skipped = options.get("skip_bad_steps", True)
    assert (metrics["skipped_spikes"].item(), metrics["skipped_steps"].item()) == (0, int(is_skipped))
    np.testing.assert_array_equal(bits(state.guard.running), before)


@pytest.mark.wide  # test_fused_update.py has them
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.slow)])  # test_fused_update.py has them
def test_statistics_without_skipping(fused: bool) -> None:
    """Statistics are kept where nothing is skipped."""
    on = setup(8, 3, fused_update=fused, **UNGUARDED)
    state, metrics = advance(on, on.start(), range(2))
    running = jnp.zeros((2, 3))
    for m in metrics:
        running = add_to_running(running, jnp.asarray([m["loss"], m["gradient_norm"]]))
    np.testing.assert_allclose(state.guard.running, np.stack([running] * 8), rtol=1e-6, atol=1e-7)
