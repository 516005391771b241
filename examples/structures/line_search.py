"""Adam with a backtracking line search, full-batch, as in optax's gallery of examples.

The search evaluates the loss over all devices in a loop, until it has decreased enough.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from jax import lax

DEVICES = jax.devices()
directions = optax.scale_by_adam()
search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=12, decrease_factor=0.5)
solver = optax.chain(directions, optax.scale(-1.0), search)


def create_state():
    rng = np.random.default_rng(0)
    sizes = {"in": (7, 29), "hidden": (29,), "out": (29, 3), "bias": (3,), "scale": ()}
    params = {name: rng.normal(size=size).astype(np.float32) / 3 for name, size in sizes.items()}
    return params, solver.init(params)


def to_devices(state):
    return jax_utils.replicate(state, DEVICES)


def to_host(state):
    return jax_utils.unreplicate(state)


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["in"] + params["hidden"][None])
    predicted = params["scale"] * (hidden @ params["out"]) + params["bias"][None]
    return jnp.square(predicted - y).mean() + 2.0**-10 * optax.tree.norm(params, squared=True)


@partial(jax.pmap, axis_name="i", devices=DEVICES)
def train_step(state, batch):
    params, opt_state = state

    def value_fn(params):
        return lax.pmean(loss_fn(params, *batch), "i")

    loss, grads = lax.pmean(jax.value_and_grad(loss_fn)(params, *batch), "i")
    updates, opt_state = solver.update(grads, opt_state, params, value=loss, grad=grads, value_fn=value_fn)
    return (optax.apply_updates(params, updates), opt_state), loss


def batch(step):
    """The same rows in every step, so that the search continues from its last rate."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(len(DEVICES), 5, 7)).astype(np.float32)
    return x, np.sin(2 * x[..., :3])
