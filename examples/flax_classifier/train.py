"""A convolutional classifier in Flax with batch statistics and an average of its weights, data parallel by pmap.

python train.py --steps 30 --checkpoint /tmp/classifier.msgpack
python train.py --steps 60 --checkpoint /tmp/classifier.msgpack --resume
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import jax_utils, serialization
from flax.training import train_state
from jax import lax


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, images, train):
        x = nn.Conv(16, (3, 3), strides=2)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.Conv(32, (3, 3), strides=2)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(10)(x.mean((1, 2)))


model = Classifier()
optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, 100), weight_decay=1e-2)


class TrainState(train_state.TrainState):
    batch_stats: Any
    ema: Any  # an average of the parameters, with which the classifier is evaluated


def create_state():
    """On the host, one copy."""
    variables = jax.jit(partial(model.init, train=False))(jax.random.key(0), np.zeros((1, 8, 8, 3), np.float32))
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optimizer,
        batch_stats=variables["batch_stats"],
        ema=variables["params"],
    )


def to_devices(state):
    return jax_utils.replicate(state)


def to_host(state):
    return jax_utils.unreplicate(state)


@partial(jax.pmap, axis_name="batch", donate_argnums=0)
def train_step(state, images, labels):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, changed["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = lax.pmean(grads, "batch")
    state = state.apply_gradients(grads=grads, batch_stats=lax.pmean(batch_stats, "batch"))
    ema = optax.incremental_update(state.params, state.ema, 0.1)
    return state.replace(ema=ema), lax.pmean(loss, "batch")


@partial(jax.pmap, axis_name="batch")
def eval_step(state, images, labels):
    ema = state.ema
    logits = state.apply_fn({"params": ema, "batch_stats": state.batch_stats}, images, train=False)
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
    print(f"accuracy of the average: {float(eval_step(state, *batch(10_000))[0]):.3f}")
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
