"""Translation as in flax's WMT example before it left pmap: padded pairs, label smoothing, a loss weighted by tokens.

python train.py --steps 30 --checkpoint /tmp/translation.msgpack
python train.py --steps 60 --checkpoint /tmp/translation.msgpack --resume
"""

import argparse
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, serialization
from flax.training import train_state
from jax import lax

VOCABULARY, WIDTH, LENGTH = 61, 32, 12
PAD, START = 0, 1


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask, source=None, source_mask=None):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4)(y, mask=mask)
        if source is not None:
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), source, mask=source_mask)
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class Translator(nn.Module):
    @nn.compact
    def __call__(self, inputs, targets):
        embed = nn.Embed(VOCABULARY, WIDTH)
        place = self.param("place", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        is_source = inputs != PAD
        encoded = Block()(embed(inputs) + place[None], nn.make_attention_mask(is_source, is_source))
        shifted = jnp.pad(targets, ((0, 0), (1, 0)), constant_values=START)[:, :-1]
        causal = nn.combine_masks(nn.make_causal_mask(targets), nn.make_attention_mask(targets != PAD, targets != PAD))
        across = nn.make_attention_mask(targets != PAD, is_source)
        return embed.attend(Block()(embed(shifted) + place[None], causal, encoded, across)) / WIDTH**0.5


model = Translator()
learning_rate = optax.join_schedules(
    [optax.linear_schedule(0.0, 1e-2, 10), lambda step: 1e-2 * (10 / (step + 10)) ** 0.5], [10]
)
optimizer = optax.adamw(learning_rate, b2=0.98, eps=1e-9, weight_decay=1e-4)


def create_state():
    pair = np.zeros((1, LENGTH), np.int32)
    params = jax.jit(model.init)(jax.random.key(0), pair, pair)["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def to_devices(state):
    return jax_utils.replicate(state)


def to_host(state):
    return jax_utils.unreplicate(state)


def weighted_loss(logits, targets):
    """Sums over the tokens of this device, and their number."""
    smooth = optax.smooth_labels(jax.nn.one_hot(targets, VOCABULARY), 0.1)
    weights = targets != PAD
    return jnp.sum(optax.softmax_cross_entropy(logits, smooth) * weights), jnp.sum(weights)


@partial(jax.pmap, axis_name="batch", donate_argnums=0)
def train_step(state, inputs, targets):
    count = lax.psum(jnp.sum(targets != PAD), "batch")

    def loss_fn(params):
        total, _ = weighted_loss(state.apply_fn({"params": params}, inputs, targets), targets)
        return total / count

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads = lax.psum(grads, "batch")
    return state.apply_gradients(grads=grads), lax.psum(loss, "batch")


@partial(jax.pmap, axis_name="batch")
def eval_step(state, inputs, targets):
    total, count = weighted_loss(state.apply_fn({"params": state.params}, inputs, targets), targets)
    return lax.psum(total, "batch") / lax.psum(count, "batch")


def batch(step):
    """This process's rows of a global batch of 32 pairs, a row of devices in front: targets are inputs reversed."""
    rng = np.random.default_rng(step)
    lengths = rng.integers(4, LENGTH + 1, 32)
    inputs = np.where(np.arange(LENGTH) < lengths[:, None], rng.integers(2, 14, (32, LENGTH)), PAD)
    targets = np.stack([np.pad(row[:n][::-1], (0, LENGTH - n)) for row, n in zip(inputs, lengths, strict=True)])
    rows = np.split(np.arange(32), jax.process_count())[jax.process_index()]
    return [x[rows].reshape(jax.local_device_count(), -1, LENGTH) for x in (inputs, targets)]


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
    print(f"loss of other pairs: {float(eval_step(state, *batch(10_000))[0]):.3f}")
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
