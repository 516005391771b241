"""TD3's structure as in Stoix and ACME: actor and critic with an optimizer each; every second step updates the actor.

The update of the actor, its all-reduce included, is one branch of a `lax.cond`. The critic is a pair of networks in
one tree of parameters.
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
OBSERVATION, ACTION, WIDTH = 5, 2, 26


def clipped_adam(rate):
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate, eps=1e-5))


actor_optimizer = clipped_adam(2.0**-7)
critic_optimizer = clipped_adam(2.0**-6)


class OnlineAndTarget(NamedTuple):
    online: Any
    target: Any


class LearnerState(NamedTuple):
    actor: OnlineAndTarget
    critic: OnlineAndTarget
    actor_opt_state: Any
    critic_opt_state: Any
    steps: Any
    key: Any


def network(rng, members, inputs, outputs):
    sizes = {"hidden": (inputs, WIDTH), "out": (WIDTH, outputs)}
    params = {name: rng.normal(size=(*members, *size)) / size[0] ** 0.5 for name, size in sizes.items()}
    params["bias"] = np.zeros((*members, WIDTH))
    return jax.tree.map(np.float32, params)


def apply(params, x):
    return jnp.tanh(x @ params["hidden"] + params["bias"][None]) @ params["out"]


def act(actor, observation):
    return jnp.tanh(apply(actor, observation))


def values(critic, observation, action):
    """(2, examples): of both members."""
    return jax.vmap(apply, (0, None))(critic, jnp.concatenate([observation, action], -1))[..., 0]


def create_state():
    rng = np.random.default_rng(0)
    actor = network(rng, (), OBSERVATION, ACTION)
    critic = network(rng, (2,), OBSERVATION + ACTION, 1)
    opt_states = actor_optimizer.init(actor), critic_optimizer.init(critic)
    key = np.asarray(jax.random.PRNGKey(1))
    return LearnerState(OnlineAndTarget(actor, actor), OnlineAndTarget(critic, critic), *opt_states, np.int32(0), key)


def to_devices(state):
    return jax_utils.replicate(state, DEVICES)


def to_host(state):
    return jax_utils.unreplicate(state)


def critic_loss(critic, state, data, key):
    observation, action, reward, later = data
    noise = jnp.clip(0.2 * jax.random.normal(key, action.shape), -0.5, 0.5)
    following = jnp.clip(act(state.actor.target, later) + noise, -1.0, 1.0)
    wanted = reward + 0.9 * values(state.critic.target, later, following).min(0)
    return jnp.square(values(critic, observation, action) - wanted[None]).mean()


def actor_loss(actor, critic, observation):
    return -values(critic, observation, act(actor, observation))[0].mean()


def learn(loss_fn, optimizer, networks, opt_state, *inputs):
    loss, grads = jax.value_and_grad(loss_fn)(networks.online, *inputs)
    grads = lax.pmean(grads, "device")
    updates, opt_state = optimizer.update(grads, opt_state)
    online = optax.apply_updates(networks.online, updates)
    return OnlineAndTarget(online, optax.incremental_update(online, networks.target, 0.125)), opt_state, loss


@partial(jax.pmap, axis_name="device", devices=DEVICES)
def train_step(state, data):
    key, of_step = jax.random.split(state.key)
    of_device = jax.random.fold_in(of_step, lax.axis_index("device"))
    inputs = state, data, of_device
    critic, critic_opt_state, loss = learn(critic_loss, critic_optimizer, state.critic, state.critic_opt_state, *inputs)

    def update_actor():
        inputs = critic.online, data[0]
        return learn(actor_loss, actor_optimizer, state.actor, state.actor_opt_state, *inputs)

    kept = state.actor, state.actor_opt_state, jnp.zeros(())
    actor, actor_opt_state, loss_of_actor = lax.cond(state.steps % 2 == 0, update_actor, lambda: kept)
    losses = lax.pmean(jnp.stack([loss, loss_of_actor]), "device")  # after the branch, which it depends on
    return LearnerState(actor, critic, actor_opt_state, critic_opt_state, state.steps + 1, key), losses[0]


def batch(step):
    """Transitions that each device draws from a buffer of its own."""
    rng = np.random.default_rng(step)
    observation = rng.normal(size=(len(DEVICES), 16, OBSERVATION))
    action = np.tanh(rng.normal(size=(len(DEVICES), 16, ACTION)))
    reward = -np.square(observation[..., :ACTION] + action).sum(-1)
    later = 0.8 * observation + 0.2 * np.pad(action, ((0, 0), (0, 0), (0, OBSERVATION - ACTION)))
    return jax.tree.map(np.float32, (observation, action, reward, later))
