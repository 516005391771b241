"""A bias ahead of batch norm: its exact gradient is zero, and Adam divides what rounding leaves of it by its own size.

Losses of such a program drift in float32, sharded or with its devices in another order. In float64 they are equal,
which they would not be if the drift were a fault.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zero

STEPS = 20


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    h = x @ params["w"] + params["b"][None]
    mean = lax.pmean(h.mean(0), "batch")
    variance = lax.pmean(jnp.square(h).mean(0), "batch") - jnp.square(mean)
    h = jax.nn.relu((h - mean[None]) * lax.rsqrt(variance + 1e-5)[None])
    return jnp.mean(jnp.square(h @ params["v"] - jnp.square(x).mean(1)))


def losses(plain: Any, dtype: Any, *, is_sharded: bool, devices: Any = slice(None)) -> np.ndarray:
    """The losses of some steps on eight devices, whose data are in this order."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(8, 16)), "b": np.zeros(16), "v": rng.normal(size=16) / 4}
    params = jax.tree.map(lambda p: np.stack([p.astype(dtype)] * 8), params)
    tx = zero.shard_optimizer(plain, "batch") if is_sharded else plain
    state = jax.pmap(tx.init, "batch")(params)

    @partial(jax.pmap, axis_name="batch")
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        grads = zero.local(grads) if is_sharded else lax.pmean(grads, "batch")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, lax.pmean(loss, "batch")

    found = []
    for _ in range(STEPS):
        x = rng.normal(size=(8, 32, 8)).astype(dtype)
        params, state, loss = step(params, state, x[devices])
        found.append(float(loss[0]))
    return np.asarray(found)


@pytest.mark.parametrize("name", ["adam", pytest.param("sgd", marks=pytest.mark.wide)])
def test_losses_behind_batch_norm(name: str) -> None:
    """Adam's losses are equal in float64; those of SGD, which does not enlarge noise, in float32 too."""
    plain = {"adam": optax.adam(0.01), "sgd": optax.sgd(0.01)}[name]
    dtype = np.float64 if name == "adam" else np.float32
    with jax.enable_x64(name == "adam"):
        expected = losses(plain, dtype, is_sharded=False)
        found = losses(plain, dtype, is_sharded=True)
    np.testing.assert_allclose(found, expected, rtol=1e-11 if name == "adam" else 1e-6)
    assert expected[-1] < expected[0]
