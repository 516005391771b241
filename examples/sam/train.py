"""An AlgoPerf submission: sharpness-aware minimization (SAM) in a pmapped update, whole gradients taken twice.

python train.py --steps 30 --checkpoint /tmp/sam.msgpack
python train.py --steps 60 --checkpoint /tmp/sam.msgpack --resume
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, serialization
from jax import lax

RHO, CLIP, SMOOTHING = 0.05, 1.0, 0.1


class State(NamedTuple):
    params: Any
    opt_state: Any
    step: Any


class Mixer(nn.Module):
    """Two blocks that mix patches, then channels."""

    @nn.compact
    def __call__(self, images):
        x = nn.Dense(24)(images.reshape(len(images), 16, 12))
        for _ in range(2):
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x).swapaxes(1, 2)))).swapaxes(1, 2)
            x = x + nn.Dense(24)(nn.gelu(nn.Dense(48)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x.mean(1))


model = Mixer()
optimizer = optax.chain(
    optax.scale_by_adam(b1=0.9, b2=0.99, eps=1e-8),
    optax.add_decayed_weights(0.05),
    optax.scale_by_schedule(optax.warmup_cosine_decay_schedule(0.0, -5e-3, 5, 100)),
)


def create_state():
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 8, 8, 3), np.float32))["params"]
    return State(params, optimizer.init(params), np.int32(0))


def to_devices(state):
    return jax_utils.replicate(state)


def to_host(state):
    return jax_utils.unreplicate(state)


def loss_fn(params, images, labels):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), SMOOTHING)
    return optax.softmax_cross_entropy(model.apply({"params": params}, images), targets).mean()


def perturbed(params, grads):
    """Up the slope of the whole batch: source Foret et al., arXiv 2010.01412."""
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda p, g: p + RHO * g / norm, params, grads)


def pmapped_update_params(update_fn, params, opt_state, images, labels):
    grads = lax.pmean(jax.grad(loss_fn)(params, images, labels), "batch")
    loss, grads = jax.value_and_grad(loss_fn)(perturbed(params, grads), images, labels)
    grads = lax.pmean(grads, "batch")
    norm = optax.tree.norm(grads)
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / norm), grads)
    updates, opt_state = update_fn(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, lax.pmean(loss, "batch")


@partial(jax.pmap, axis_name="batch", donate_argnums=0)
def train_step(state, images, labels):
    params, opt_state, loss = pmapped_update_params(optimizer.update, *state[:2], images, labels)
    return State(params, opt_state, state.step + 1), loss


@partial(jax.pmap, axis_name="batch")
def eval_step(state, images, labels):
    logits = model.apply({"params": state.params}, images)
    return lax.pmean((logits.argmax(-1) == labels).mean(), "batch")


def batch(step):
    """This process's rows of a global batch of 32, a row of devices in front."""
    rng = np.random.default_rng(step)
    labels = rng.integers(0, 10, 32)
    images = rng.normal(size=(32, 8, 8, 3)).astype(np.float32) + 0.3 * labels[:, None, None, None]
    rows = np.split(np.arange(32), jax.process_count())[jax.process_index()]
    return [x[rows].reshape(jax.local_device_count(), -1, *x.shape[1:]) for x in (images, labels)]


def train(steps, checkpoint=None, resume=False):
    """The losses of each step, and the state on the devices; the checkpoint is written at the end."""
    state = create_state()
    if resume:
        state = serialization.from_bytes(state, Path(checkpoint).read_bytes())
    first = int(state.step)
    state = to_devices(state)
    losses = []
    for step in range(first, steps):
        state, loss = train_step(state, *batch(step))
        losses.append(float(loss[0]))
    print(f"accuracy: {float(eval_step(state, *batch(10_000))[0]):.3f}")
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
