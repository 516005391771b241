"""A Haiku classifier in float16 with dynamic loss scaling: steps whose gradients are not finite are skipped.

python train.py --steps 30 --checkpoint /tmp/haiku.npz
python train.py --steps 60 --checkpoint /tmp/haiku.npz --resume
"""

import argparse
from functools import partial
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from flax import jax_utils
from jax import lax

# float16 in the matrix products; batch statistics, the loss and the parameters are float32.
POLICY = jmp.get_policy("params=float32,compute=float16,output=float32")


def forward(images, is_training):
    with hk.mixed_precision.push_policy(hk.Linear, POLICY):
        x = hk.Flatten()(images)
        for width in (64, 48):
            x = hk.Linear(width, with_bias=False)(x)
            x = jax.nn.relu(hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, is_training))
        return hk.Linear(10)(x)


network = hk.without_apply_rng(hk.transform_with_state(forward))
optimizer = optax.adamw(2.0**-10)  # a power of two, so that no rounding of the last product meets float16


class State(NamedTuple):
    step: Any
    params: Any
    statistics: Any
    opt_state: Any
    loss_scale: Any


def create_state():
    init = jax.jit(partial(network.init, is_training=True))
    params, statistics = init(jax.random.PRNGKey(0), jnp.zeros((1, 8, 8, 3)))
    # Too large for float16 on purpose: the first steps overflow, are skipped, and halve it.
    loss_scale = jmp.DynamicLossScale(jnp.float32(2.0**24), period=10)
    return State(jnp.int32(0), params, statistics, optimizer.init(params), loss_scale)


def to_devices(state):
    return jax_utils.replicate(state)


def to_host(state):
    return jax_utils.unreplicate(state)


@partial(jax.pmap, axis_name="batch", donate_argnums=0)
def train_step(state, images, labels):
    def loss_fn(params):
        logits, statistics = network.apply(params, state.statistics, images, is_training=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return state.loss_scale.scale(loss), (loss, statistics)

    grads, (loss, statistics) = jax.grad(loss_fn, has_aux=True)(state.params)
    grads = lax.pmean(grads, "batch")
    grads = state.loss_scale.unscale(grads)
    is_finite = jmp.all_finite(grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    params, opt_state = jmp.select_tree(is_finite, (params, opt_state), (state.params, state.opt_state))
    loss_scale = state.loss_scale.adjust(is_finite)
    return State(state.step + 1, params, lax.pmean(statistics, "batch"), opt_state, loss_scale), lax.pmean(
        loss, "batch"
    )


def batch(step):
    """This process's rows of a global batch of 128, a row of devices in front."""
    rng = np.random.default_rng(step)
    labels = rng.integers(0, 10, 128)
    images = rng.normal(size=(128, 8, 8, 3)).astype(np.float32) + 0.3 * labels[:, None, None, None]
    rows = np.split(np.arange(128), jax.process_count())[jax.process_index()]
    return [x[rows].reshape(jax.local_device_count(), -1, *x.shape[1:]) for x in (images, labels)]


def train(steps, checkpoint=None, resume=False):
    """The losses of each step, and the state on the devices; the checkpoint is written at the end."""
    state = create_state()
    if resume:
        with np.load(checkpoint, allow_pickle=False) as saved:
            state = jax.tree.unflatten(jax.tree.structure(state), [saved[name] for name in saved.files])
    first = int(state.step)
    state = to_devices(state)
    losses = []
    for step in range(first, steps):
        state, loss = train_step(state, *batch(step))
        losses.append(float(loss[0]))
    if checkpoint:
        whole = to_host(state)
        if jax.process_index() == 0:
            with open(checkpoint, "wb") as file:
                np.savez(file, *jax.tree.leaves(whole))
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
