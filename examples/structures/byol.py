"""BYOL's structure: LARS of its own with a filter by path, rebuilt in each step with a traced rate; batch statistics.

The state is made under pmap, the target network is an average, and a checkpoint is the first device's row.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from jax import lax

DEVICES = jax.devices()


def is_scaled(path):
    return not path[-1].key.startswith("b")


def scale_by_lars(momentum, eta):
    def adapted(path, g, p):
        ratio = eta * jnp.linalg.norm(p) / jnp.linalg.norm(g)
        return g * jnp.where(ratio > 0, ratio, 1.0) if is_scaled(path) else g

    def update(updates, mu, params):
        updates = jax.tree_util.tree_map_with_path(adapted, updates, params)
        mu = jax.tree.map(lambda m, g: momentum * m + g, mu, updates)
        return mu, mu

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def optimizer(rate):
    decay = optax.add_decayed_weights(
        1e-2, lambda params: jax.tree_util.tree_map_with_path(lambda k, _: is_scaled(k), params)
    )
    return optax.chain(decay, scale_by_lars(0.9, 0.1), optax.scale(-rate))


def create_state():
    rng = np.random.default_rng(0)
    sizes = {"first": (12, 40), "second": (40, 20), "predictor": (20, 20)}
    params = {name: rng.normal(size=size).astype(np.float32) / size[0] ** 0.5 for name, size in sizes.items()}
    params["bias"] = np.zeros(20, np.float32)
    statistics = {"mean": jnp.zeros(40), "variance": jnp.ones(40)}
    return {
        "step": 0,
        "online": params,
        "target": params,
        "statistics": statistics,
        "opt_state": optimizer(0.0).init(params),
    }


def first_state():
    return jax.pmap(lambda _: create_state(), "i", devices=DEVICES)(np.arange(len(DEVICES)))


def to_devices(state):
    return jax_utils.replicate(state, DEVICES)


def to_host(state):
    return jax.tree.map(lambda x: jax.device_get(x[0]), state)


def project(params, x):
    hidden = x @ params["first"]
    mean = lax.pmean(hidden.mean(0), "i")
    variance = lax.pmean(jnp.square(hidden).mean(0), "i") - jnp.square(mean)
    hidden = jax.nn.relu((hidden - mean[None]) * lax.rsqrt(variance + 1e-3)[None])
    return hidden @ params["second"] + params["bias"][None], {"mean": mean, "variance": variance}


def normalized(x):
    return x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)


@partial(jax.pmap, axis_name="i", devices=DEVICES)
def train_step(state, batch):
    def loss_fn(online):
        first, second = batch[:, 0], batch[:, 1]
        projected, statistics = project(online, first)
        wanted, _ = project(state["target"], second)
        difference = normalized(projected @ online["predictor"]) - lax.stop_gradient(normalized(wanted))
        return jnp.square(difference).sum(-1).mean(), statistics

    (loss, statistics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["online"])
    grads = lax.pmean(grads, "i")
    rate = 0.5 * jnp.minimum(1.0, (state["step"] + 1) / 4)
    updates, opt_state = optimizer(rate).update(grads, state["opt_state"], state["online"])
    online = optax.apply_updates(state["online"], updates)
    new = {
        "step": state["step"] + 1,
        "online": online,
        "target": optax.incremental_update(online, state["target"], 0.1),
        "statistics": optax.incremental_update(statistics, state["statistics"], 0.1),
        "opt_state": opt_state,
    }
    return new, lax.pmean(loss, "i")


def batch(step):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(len(DEVICES), 4, 1, 12))
    return (x + 0.1 * rng.normal(size=(len(DEVICES), 4, 2, 12))).astype(np.float32)
