"""Optimizers of recent years on a small network: schedule-free AdamW, DoG, Prodigy, and Muon for matrices alone.

The loss that is returned is that of the parameters for evaluation.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import jax_utils
from jax import lax

DEVICES = jax.devices()
NAME = "schedule_free"


def kinds(params):
    return {name: "matrix" if x.ndim > 1 else "vector" for name, x in params.items()}


OPTIMIZERS = {
    "schedule_free": optax.contrib.schedule_free_adamw(2.0**-7, warmup_steps=2),
    "dog": optax.contrib.dog(1.0, ("distance", 2.0**-7)),
    "prodigy": optax.contrib.prodigy(1.0),
    "muon": optax.partition({"matrix": optax.contrib.muon(2.0**-6), "vector": optax.adamw(2.0**-7)}, kinds),
}
optimizer = OPTIMIZERS[NAME]


def create_state():
    rng = np.random.default_rng(0)
    shapes = {"first": (8, 48), "bias": (48,), "second": (48, 8)}
    params = {name: rng.normal(size=shape).astype(np.float32) / shape[0] ** 0.5 for name, shape in shapes.items()}
    return params, optimizer.init(params)


def to_devices(state):
    return jax_utils.replicate(state, DEVICES)


def to_host(state):
    return jax_utils.unreplicate(jax.device_get(state))


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["first"] + params["bias"][None])
    return jnp.square(hidden @ params["second"] - jnp.flip(x, -1)).mean()


def evaluated(params, opt_state):
    """The parameters for evaluation."""
    if NAME != "schedule_free":
        return params
    return optax.contrib.schedule_free_eval_params(opt_state, params)


@partial(jax.pmap, axis_name="batch", devices=DEVICES)
def train_step(state, x):
    params, opt_state = state
    grads = jax.grad(loss_fn)(params, x)
    grads = lax.pmean(grads, "batch")
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return (params, opt_state), lax.pmean(loss_fn(evaluated(params, opt_state), x), "batch")


def batch(step):
    return np.random.default_rng(step).normal(size=(len(DEVICES), 16, 8)).astype(np.float32)
