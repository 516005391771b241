"""A program of flax.nnx: the model and `nnx.Optimizer` are split into a graph and a state that pmap takes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, nnx
from jax import lax

DEVICES = jax.devices()
optimizer = optax.adamw(2.0**-6)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 40, rngs=rngs)
        self.second = nnx.Linear(40, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


def create_state():
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)


def to_devices(state):
    return nnx.merge(nnx.graphdef(state), jax_utils.replicate(nnx.state(state), DEVICES))


def to_host(state):
    return nnx.merge(nnx.graphdef(state), jax_utils.unreplicate(nnx.state(state)))


def train_step(state, batch):
    graph, arrays = nnx.split(state)
    arrays, loss = pmapped_step(graph, arrays, batch)
    return nnx.merge(graph, arrays), loss


@partial(jax.pmap, axis_name="i", devices=DEVICES, static_broadcasted_argnums=0)
def pmapped_step(graph, arrays, batch):
    def loss_fn(model):
        return jnp.square(model(batch) - jnp.tanh(2 * batch[:, :3])).mean()

    model, optimizer = nnx.merge(graph, arrays)
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    grads = lax.pmean(grads, "i")
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), lax.pmean(loss, "i")


def batch(step):
    return np.random.default_rng(step).normal(size=(len(DEVICES), 4, 8)).astype(np.float32)
