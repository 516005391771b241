"""Proximal policy optimization of a point mass, environment included: all updates of a step are one scan inside pmap.

python train.py --steps 30 --checkpoint /tmp/ppo.msgpack
python train.py --steps 60 --checkpoint /tmp/ppo.msgpack --resume
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, serialization
from jax import lax

ENVIRONMENTS, LENGTH, MINIBATCHES, EPOCHS = 8, 16, 4, 2  # environments are per device


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, observation):
        x = nn.tanh(nn.Dense(32)(observation))
        x = nn.tanh(nn.Dense(32)(x))
        return nn.Dense(1)(x)[..., 0], nn.Dense(1)(x)[..., 0]  # the mean of the action, the value of the state


model = ActorCritic()
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))


@flax.struct.dataclass
class TrainingState:
    step: Any
    params: Any
    opt_state: Any
    scale: Any  # a running mean of squared observations, by which they are normalized


def create_state():
    params = jax.jit(model.init)(jax.random.PRNGKey(0), jnp.zeros(2))
    return TrainingState(step=jnp.int32(0), params=params, opt_state=optimizer.init(params), scale=jnp.ones(2))


def to_devices(state):
    return jax_utils.replicate(state)


def to_host(state):
    return jax.tree.map(lambda x: np.asarray(x[0]), state)


def environment_step(position, action):
    """A mass with position and velocity is pushed; the reward is for standing at 0."""
    x, v = position[:, 0], position[:, 1]
    v = 0.95 * v + 0.1 * jnp.clip(action, -2, 2)
    x = x + 0.1 * v
    return jnp.stack([x, v], -1), -jnp.square(x) - 0.1 * jnp.square(v)


def log_probability(mean, action):
    return -0.5 * jnp.square((action - mean) / 0.5)


def rollout(params, scale, key):
    def one(position, key):
        observation = position / jnp.sqrt(scale + 1e-3)[None]
        mean, value = model.apply(params, observation)
        action = mean + 0.5 * jax.random.normal(key, mean.shape)
        later, reward = environment_step(position, action)
        return later, (position, observation, action, log_probability(mean, action), value, reward)

    start_key, key = jax.random.split(key)
    start = jax.random.normal(start_key, (ENVIRONMENTS, 2))
    _, (positions, *steps, values, rewards) = lax.scan(one, start, jax.random.split(key, LENGTH))

    def advantage(later, now):
        later_value, later_advantage = later
        value, reward = now
        advantage = reward + 0.95 * later_value - value + 0.95 * 0.9 * later_advantage
        return (value, advantage), advantage

    zeros = jnp.zeros(ENVIRONMENTS)
    _, advantages = lax.scan(advantage, (values[-1], zeros), (values, rewards), reverse=True)
    data = (*steps, advantages, advantages + values)
    flat = jax.tree.map(lambda x: x.reshape(MINIBATCHES, -1, *x.shape[2:]), data)
    return flat, jnp.mean(jnp.square(positions), (0, 1)), rewards.mean()


def loss_fn(params, data):
    observation, action, old_log_probability, advantage, target = data
    mean, value = model.apply(params, observation)
    ratio = jnp.exp(log_probability(mean, action) - old_log_probability)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    policy = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
    return policy + 0.5 * jnp.square(value - target).mean()


@partial(jax.pmap, axis_name="batch", donate_argnums=0)
def train_step(state, key):
    def update(carry, data):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, data)
        grads = lax.pmean(grads, "batch")
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    data, squares, reward = rollout(state.params, state.scale, key)
    data = jax.tree.map(lambda x: jnp.concatenate([x] * EPOCHS), data)
    (params, opt_state), losses = lax.scan(update, (state.params, state.opt_state), data)
    # One all-reduce, which needs the losses and so comes after those in the loop: XLA for CPU keeps no other order.
    means = lax.pmean(jnp.stack([losses.mean(), reward, *squares]), "batch")
    scale = 0.9 * state.scale + 0.1 * means[2:]
    state = TrainingState(step=state.step + 1, params=params, opt_state=opt_state, scale=scale)
    return state, means[0], means[1]


def batch(step):
    """A key for each device of this process."""
    keys = jax.random.split(jax.random.PRNGKey(step), jax.device_count())
    return [np.split(np.asarray(keys), jax.process_count())[jax.process_index()]]


def train(steps, checkpoint=None, resume=False):
    """The losses of each step, and the state on the devices; the checkpoint is written at the end."""
    state = create_state()
    if resume:
        state = serialization.from_bytes(state, Path(checkpoint).read_bytes())
    first = int(state.step)
    state = to_devices(state)
    losses = []
    for step in range(first, steps):
        state, loss, reward = train_step(state, *batch(step))
        losses.append(float(loss[0]))
    print(f"reward {float(reward[0]):.3f}")
    if checkpoint:
        whole = to_host(state)
        if jax.process_index() == 0:
            Path(checkpoint).write_bytes(serialization.to_bytes(whole))
    return losses, state


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--checkpoint")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--processes", nargs=3, metavar=("COORDINATOR", "NUMBER", "INDEX"))
    arguments = parser.parse_args()
    if arguments.processes:
        jax.distributed.initialize(arguments.processes[0], *map(int, arguments.processes[1:]))
    print(*train(arguments.steps, arguments.checkpoint, arguments.resume)[0])
