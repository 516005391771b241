"""A diffusion model of points on a spiral in plain JAX: gradients are clipped by hand, their norm is logged.

Parameters enter and leave pmap as one copy, with `in_axes=None`; Orbax stores them.

python train.py --steps 30 --checkpoint /tmp/diffusion
python train.py --steps 60 --checkpoint /tmp/diffusion --resume
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import lax

optimizer = optax.adam(2e-3)


class State(NamedTuple):
    step: Any
    params: Any
    opt_state: Any
    ema: Any  # an average of the parameters, from which samples are drawn


def create_state():
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    sizes = [(2 + 8, 64), (64, 64), (64, 2)]
    params = [
        {"w": jax.random.normal(key, size) / np.sqrt(size[0]), "b": jnp.zeros(size[1])}
        for key, size in zip(keys, sizes, strict=True)
    ]
    return State(jnp.int32(0), params, optimizer.init(params), params)


IN_DEVICES = State(step=None, params=None, opt_state=None, ema=None)  # in_axes: one copy of everything


def to_devices(state):
    return state


def to_host(state):
    return jax.tree.map(np.asarray, state)


def predict_noise(params, x, time):
    angles = time[:, None] * 2.0 ** jnp.arange(4)[None]
    x = jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles)], -1)
    for layer in params[:-1]:
        x = jax.nn.silu(x @ layer["w"] + layer["b"][None])
    return x @ params[-1]["w"] + params[-1]["b"][None]


@partial(jax.pmap, axis_name="batch", in_axes=(IN_DEVICES, 0), out_axes=(IN_DEVICES, None, None))
def train_step(state, points):
    def loss_fn(params):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.PRNGKey(1), state.step), lax.axis_index("batch"))
        time = jax.random.uniform(key, points.shape[:1])
        noise = jax.random.normal(jax.random.fold_in(key, 1), points.shape)
        noisy = jnp.cos(time * jnp.pi / 2)[:, None] * points + jnp.sin(time * jnp.pi / 2)[:, None] * noise
        return jnp.mean(jnp.square(predict_noise(params, noisy, time) - noise))

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads = lax.pmean(grads, "batch")
    norm = optax.tree.norm(grads)
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = optax.incremental_update(params, state.ema, 0.05)
    return State(state.step + 1, params, opt_state, ema), lax.pmean(loss, "batch"), norm


@partial(jax.pmap, axis_name="batch", in_axes=(IN_DEVICES, 0))
def sample(state, noise):
    """Ten deterministic steps from noise to points."""
    params = state.ema
    x = noise
    for i in range(10, 0, -1):
        time, later = i / 10 * jnp.pi / 2 * 0.99, (i - 1) / 10 * jnp.pi / 2 * 0.99
        eps = predict_noise(params, x, jnp.full(x.shape[:1], 2 / jnp.pi * time))
        x = jnp.cos(later) * (x - jnp.sin(time) * eps) / jnp.cos(time) + jnp.sin(later) * eps
    return x


def batch(step):
    """This process's rows of a global batch of 64 points, a row of devices in front."""
    rng = np.random.default_rng(step)
    angle = 3 * np.pi * rng.uniform(size=(64, 1))
    points = np.concatenate([np.cos(angle), np.sin(angle)], 1) * angle / 6 + 0.02 * rng.normal(size=(64, 2))
    rows = np.split(points.astype(np.float32), jax.process_count())[jax.process_index()]
    return [rows.reshape(jax.local_device_count(), -1, 2)]


def train(steps, checkpoint=None, resume=False):
    """The losses of each step, and the state on the devices; the checkpoint is written at the end."""
    state = create_state()
    with ocp.StandardCheckpointer() as checkpointer:
        if resume:
            state = checkpointer.restore(Path(checkpoint).absolute(), jax.tree.map(np.asarray, state))
        first = int(state.step)
        state = to_devices(state)
        losses = []
        for step in range(first, steps):
            state, loss, norm = train_step(state, *batch(step))
            losses.append(float(loss))
        drawn = sample(state, np.random.default_rng(0).normal(size=(jax.local_device_count(), 4, 2)).astype(np.float32))
        print(f"gradient norm {float(norm):.3f}, radius of samples {float(np.linalg.norm(drawn, axis=-1).mean()):.3f}")
        if checkpoint:
            checkpointer.save(Path(checkpoint).absolute(), to_host(state), force=True)
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
