"""PPO as in Stoix, Mava and PureJaxRL: a device learns from several members of a vmapped axis inside pmap.

Gradients are averaged over both axes. Parameters and optimizer state are the same for all members, and held by each.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from jax import lax

DEVICES = jax.devices()
MEMBERS, ENVIRONMENTS, LENGTH, MINIBATCHES = 2, 8, 8, 2
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.0**-7, eps=1e-5))


class Learner(NamedTuple):
    params: Any
    opt_state: Any


def create_state():
    rng = np.random.default_rng(0)
    sizes = {"policy": (2, 32), "mean": (32, 1), "critic": (2, 32), "value": (32, 1)}
    params = {name: rng.normal(size=size).astype(np.float32) / size[0] ** 0.5 for name, size in sizes.items()}
    return Learner(params, optimizer.init(params))


def to_devices(state):
    members = jax.tree.map(lambda x: jnp.stack([x] * MEMBERS), state)
    return jax_utils.replicate(members, DEVICES)


def to_host(state):
    return jax.tree.map(lambda x: np.asarray(x[0, 0]), state)


def apply(params, observation):
    mean = jnp.tanh(observation @ params["policy"]) @ params["mean"]
    value = jnp.tanh(observation @ params["critic"]) @ params["value"]
    return mean[..., 0], value[..., 0]


def log_probability(mean, action):
    return -0.5 * jnp.square((action - mean) / 0.5)


def rollout(params, key):
    """A mass with position and velocity is pushed; the reward is for standing at 0."""

    def one(state, key):
        mean, value = apply(params, state)
        action = mean + 0.5 * jax.random.normal(key, mean.shape)
        velocity = 0.9 * state[:, 1] + 0.2 * jnp.clip(action, -2, 2)
        later = jnp.stack([state[:, 0] + 0.2 * velocity, velocity], -1)
        return later, (state, action, log_probability(mean, action), value, -jnp.square(later[:, 0]))

    keys = jax.random.split(key, LENGTH + 1)
    _, (*steps, value, reward) = lax.scan(one, jax.random.normal(keys[0], (ENVIRONMENTS, 2)), keys[1:])
    returns = lax.associative_scan(lambda a, b: a + 0.9 * b, reward, reverse=True)
    return jax.tree.map(lambda x: x.reshape(MINIBATCHES, -1, *x.shape[2:]), (*steps, returns - value, returns))


def loss_fn(params, data):
    observation, action, before, advantage, target = data
    mean, value = apply(params, observation)
    ratio = jnp.exp(log_probability(mean, action) - before)
    policy = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return 0.5 * jnp.square(value - target).mean() - policy.mean()


def learn(state, key):
    """One member of the axis "batch"."""

    def update(state, data):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, data)
        grads = lax.pmean(grads, "batch")
        grads = lax.pmean(grads, "device")
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return Learner(optax.apply_updates(state.params, updates), opt_state), loss

    state, losses = lax.scan(update, state, rollout(state.params, key))
    return state, losses.mean()


@partial(jax.pmap, axis_name="device", devices=DEVICES)
def train_step(state, keys):
    state, losses = jax.vmap(learn, axis_name="batch")(state, keys)
    return state, lax.pmean(losses.mean(), "device")


def batch(step):
    keys = jax.random.split(jax.random.PRNGKey(step), len(DEVICES) * MEMBERS)
    return np.asarray(keys).reshape(len(DEVICES), MEMBERS, 2)
