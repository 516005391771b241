"""An Equinox program: the model is a pytree that also holds functions; its arrays are trained under pmap."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from jax import lax

DEVICES = jax.devices()
optimizer = optax.adamw(2.0**-8, b2=0.95)
model = eqx.nn.MLP(8, 8, 32, 2, activation=jnp.tanh, key=jax.random.key(0))
_, STATIC = eqx.partition(model, eqx.is_inexact_array)


def create_state():
    params = eqx.filter(model, eqx.is_inexact_array)
    return params, optimizer.init(params)


def to_devices(state):
    return jax_utils.replicate(state, DEVICES)


def to_host(state):
    return jax_utils.unreplicate(jax.device_get(state))


def loss_fn(params, x):
    model = eqx.combine(params, STATIC)
    return jnp.square(jax.vmap(model)(x) - jnp.flip(x, -1)).mean()


@partial(jax.pmap, axis_name="batch", devices=DEVICES)
def train_step(state, x):
    params, opt_state = state
    loss, grads = eqx.filter_value_and_grad(loss_fn)(params, x)
    grads = lax.pmean(grads, "batch")
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (eqx.apply_updates(params, updates), opt_state), lax.pmean(loss, "batch")


def batch(step):
    return np.random.default_rng(step).normal(size=(len(DEVICES), 16, 8)).astype(np.float32)
