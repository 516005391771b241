"""VDM's structure: a scan of substeps in one call; a train state of its own, with an average of the parameters.

The state holds the function that makes the optimizer, of a rate that each substep computes.
"""

from functools import partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from jax import lax

DEVICES = jax.devices()
SUBSTEPS = 3


def optimizer(rate):
    mask = {"in": True, "out": True, "bias": False}
    return optax.adamw(rate, weight_decay=2.0**-6, mask=mask)


@flax.struct.dataclass
class TrainState:
    step: Any
    params: Any
    ema_params: Any
    opt_state: Any
    make: Any = flax.struct.field(pytree_node=False)

    def apply_gradients(self, grads, rate):
        updates, opt_state = self.make(rate).update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        ema_params = optax.incremental_update(params, self.ema_params, 0.1)
        return self.replace(step=self.step + 1, params=params, ema_params=ema_params, opt_state=opt_state)


def create_state():
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(5, 40)).astype(np.float32) / 2, "out": np.zeros((40, 4), np.float32)}
    params["bias"] = np.zeros(4, np.float32)
    return TrainState(step=0, params=params, ema_params=params, opt_state=optimizer(1.0).init(params), make=optimizer)


def to_devices(state):
    return jax_utils.replicate(state, DEVICES)


def to_host(state):
    return jax_utils.unreplicate(state)


def substep(state, x):
    def loss_fn(params):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.PRNGKey(1), state.step), lax.axis_index("i"))
        time = jax.random.uniform(key, (len(x), 1))
        noise = jax.random.normal(jax.random.fold_in(key, 1), x.shape)
        noisy = jnp.concatenate([jnp.sqrt(1 - time) * x + jnp.sqrt(time) * noise, time], -1)
        return jnp.square(jnp.tanh(noisy @ params["in"]) @ params["out"] + params["bias"][None] - noise).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads = lax.pmean(grads, "i")
    rate = 2.0**-7 * jnp.minimum(1.0, (state.step + 1) / 8)
    return state.apply_gradients(grads, rate), lax.pmean(loss, "i")


@partial(jax.pmap, axis_name="i", devices=DEVICES)
def train_step(state, batch):
    state, losses = lax.scan(substep, state, batch)
    return state, lax.pmean(losses.mean(), "i")


def batch(step):
    return np.random.default_rng(step).normal(size=(len(DEVICES), SUBSTEPS, 8, 4)).astype(np.float32)
