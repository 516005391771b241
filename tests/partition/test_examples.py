"""Two programs of other people, before and after: the same losses, and one eighth of the optimizer's bytes."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training.common_utils import shard, shard_prng_key
from flax.training.train_state import TrainState
from jax import lax

import zero


def bytes_per_device(tree: Any) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


class MLP(nn.Module):
    """A classifier of digits, in the manner of Flax's own examples."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.relu(nn.Dense(256)(x))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(10)(x)


def flax_program(sharded: bool) -> tuple[list[float], int]:
    """A data-parallel loop with `flax.jax_utils`; the three lines that change are marked."""
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(4, 64, 28)).astype(np.float32), rng.integers(0, 10, (4, 64))
    model = MLP()
    params = model.init(jax.random.key(0), images[0], train=False)["params"]
    tx = optax.adamw(1e-2)
    if sharded:
        tx = zero.shard_optimizer(tx, axis_name="batch")  # 1: wrap

    @partial(jax.pmap, axis_name="batch")
    def create(params: Any) -> TrainState:
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @partial(jax.pmap, axis_name="batch", donate_argnums=0)
    def train_step(
        state: TrainState, images: jax.Array, labels: jax.Array, key: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, images, train=True, rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        if not sharded:
            grads = lax.pmean(grads, "batch")  # 2: no pmean
        return state.apply_gradients(grads=grads), lax.pmean(loss, "batch")

    if sharded:
        state = create(jax_utils.replicate(params))  # 3: the state is made inside pmap
    else:
        state = jax_utils.replicate(TrainState.create(apply_fn=model.apply, params=params, tx=tx))
    losses = []
    for epoch in range(3):
        for i in range(4):
            keys = shard_prng_key(jax.random.PRNGKey(4 * epoch + i))
            state, loss = train_step(state, shard(images[i]), shard(labels[i]), keys)
            losses.append(float(loss[0]))
    zero.check_replicated(state.params, "batch")
    return losses, bytes_per_device(state.opt_state)


def plain_program(sharded: bool) -> tuple[list[float], int]:
    """Linear regression in plain JAX, with a schedule and clipping."""
    rng = np.random.default_rng(1)
    x, weights = rng.normal(size=(8, 32, 24)).astype(np.float32), rng.normal(size=(24, 40)).astype(np.float32)
    y = x @ weights
    params: Any = {"layers": [(jnp.zeros((24, 40)), jnp.zeros(40))], "scale": jnp.ones(())}
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 12)
    clip = zero.clip_by_global_norm(1.0) if sharded else optax.clip_by_global_norm(1.0)
    tx = optax.chain(clip, optax.lion(schedule))
    if sharded:
        tx = zero.shard_optimizer(tx, axis_name="devices")

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for w, b in params["layers"]:
            x = x @ w + b[None]
        return jnp.mean(jnp.square(x * params["scale"] - y))

    @partial(jax.pmap, axis_name="devices", donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        if not sharded:
            grads = lax.pmean(grads, "devices")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, lax.pmean(loss, "devices")

    params = jax_utils.replicate(params)
    opt_state = jax.pmap(tx.init, axis_name="devices")(params)
    losses = []
    for _ in range(12):
        params, opt_state, loss = step(params, opt_state, x, y)
        losses.append(float(loss[0]))
    return losses, bytes_per_device(opt_state)


def test_flax_program() -> None:
    before, bytes_before = flax_program(sharded=False)
    after, bytes_after = flax_program(sharded=True)
    np.testing.assert_allclose(after, before, rtol=1e-5)
    assert before[-1] < 0.8 * before[0]
    # Moments of 28 x 256 + 256 + 256 x 10 and of ten biases, which split into eight with six of padding; the count; and
    # the number of the slice.
    assert bytes_before == 2 * 4 * (28 * 256 + 256 + 256 * 10 + 10) + 4
    assert bytes_after == 2 * 4 * ((28 * 256 + 256 + 256 * 10) // 8 + 2) + 4 + 4


def test_plain_program() -> None:
    before, bytes_before = plain_program(sharded=False)
    after, bytes_after = plain_program(sharded=True)
    np.testing.assert_allclose(after, before, rtol=1e-5)
    assert before[-1] < before[0]
    assert bytes_before == 4 * (24 * 40 + 40 + 1) + 8  # the moment, and the counts of Lion and of the schedule
    assert bytes_after == 4 * ((24 * 40 + 40) // 8 + 1) + 8 + 4
