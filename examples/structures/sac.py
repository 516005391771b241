"""SAC's structure as in brax: three optimizers in one state, gradient steps in a scan inside a scan of rollouts.

Updates are not given the parameters, and at the end the program asserts that its state is the same on all devices.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from jax import lax

DEVICES = jax.devices()
policy_optimizer = optax.adam(2.0**-7)
critic_optimizer = optax.adam(2.0**-6)
alpha_optimizer = optax.adam(2.0**-6)


def network(rng, inputs, outputs):
    return [rng.normal(size=size).astype(np.float32) / size[0] ** 0.5 for size in ((inputs, 32), (32, outputs))]


def apply(params, x):
    return jnp.tanh(x @ params[0]) @ params[1]


def create_state():
    rng = np.random.default_rng(0)
    policy, critic, log_alpha = network(rng, 3, 2), network(rng, 4, 1), np.float32(0)
    return {
        "policy": policy,
        "critic": critic,
        "target": critic,
        "log_alpha": log_alpha,
        "optimizers": {
            "policy": policy_optimizer.init(policy),
            "critic": critic_optimizer.init(critic),
            "alpha": alpha_optimizer.init(log_alpha),
        },
    }


def to_devices(state):
    return jax_utils.replicate(state, DEVICES)


def to_host(state):
    assert_is_replicated(state)
    return jax_utils.unreplicate(state)


def assert_is_replicated(tree):
    for x in jax.tree.leaves(tree):
        assert (np.asarray(x) == np.asarray(x)[:1]).all()


def act(policy, observation, key):
    mean, log_std = jnp.split(apply(policy, observation), 2, -1)
    noise = jax.random.normal(key, mean.shape)
    return jnp.tanh(mean + jnp.exp(log_std) * noise), -0.5 * jnp.square(noise)[:, 0] - log_std[:, 0]


def critic_loss(critic, state, data):
    observation, action, reward, key = data
    following, entropy = act(state["policy"], 0.9 * observation, key)
    value = apply(state["target"], jnp.concatenate([0.9 * observation, following], -1))[:, 0]
    wanted = reward + 0.9 * (value - jnp.exp(state["log_alpha"]) * entropy)
    return jnp.square(apply(critic, jnp.concatenate([observation, action], -1))[:, 0] - wanted).mean()


def policy_loss(policy, state, data):
    action, entropy = act(policy, data[0], data[3])
    value = apply(state["critic"], jnp.concatenate([data[0], action], -1))[:, 0]
    return (jnp.exp(state["log_alpha"]) * entropy - value).mean()


def alpha_loss(log_alpha, state, data):
    _, entropy = act(state["policy"], data[0], data[3])
    return (jnp.exp(log_alpha) * lax.stop_gradient(-entropy + 1)).mean()


def gradient_step(state, data):
    def one(loss_fn, optimizer, params, opt_state):
        loss, grads = jax.value_and_grad(loss_fn)(params, state, data)
        grads = lax.pmean(grads, "i")
        updates, opt_state = optimizer.update(grads, opt_state)
        return loss, optax.apply_updates(params, updates), opt_state

    held = state["optimizers"]
    _, log_alpha, alpha = one(alpha_loss, alpha_optimizer, state["log_alpha"], held["alpha"])
    loss, critic, critic_state = one(critic_loss, critic_optimizer, state["critic"], held["critic"])
    _, policy, policy_state = one(policy_loss, policy_optimizer, state["policy"], held["policy"])
    new = {
        "policy": policy,
        "critic": critic,
        "target": optax.incremental_update(critic, state["target"], 0.1),
        "log_alpha": log_alpha,
        "optimizers": {"policy": policy_state, "critic": critic_state, "alpha": alpha},
    }
    return new, loss


def rollout_and_learn(state, keys):
    observation = jax.random.normal(keys[0], (8, 3))
    action, _ = act(state["policy"], observation, keys[1])
    data = (observation, action, -jnp.square(observation).sum(-1) - action[:, 0])
    repeated = jax.tree.map(lambda x: jnp.stack([x] * 2), data)
    state, losses = lax.scan(gradient_step, state, (*repeated, keys[2:]))
    return state, losses.mean()


@partial(jax.pmap, axis_name="i", devices=DEVICES)
def train_step(state, batch):
    state, losses = lax.scan(rollout_and_learn, state, batch)
    return state, lax.pmean(losses.mean(), "i")


def batch(step):
    keys = jax.random.split(jax.random.PRNGKey(step), len(DEVICES) * 2 * 4)
    return np.asarray(keys).reshape(len(DEVICES), 2, 4, 2)
