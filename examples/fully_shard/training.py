"""Stages 0, 2 and 3 for a model of any framework: functions of parameter trees, one for each layer.

Parameters, gradients and optimizer state are slices between steps. At stage 2 whole weights are gathered once per step,
at stage 3 for one layer at a time, and again in the backward pass; gradients are reduce-scattered layer by layer.
A checkpoint holds whole arrays, so a run may resume at another stage and on another number of devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import zero


def save(path, state, layouts):
    """All processes call it; one writes."""
    whole = [zero.to_host(tree, layout, "batch") for tree, layout in zip(state, layouts, strict=True)]
    if jax.process_index() == 0:
        np.savez(path, *jax.tree.leaves(whole))


def restore(path, layouts):
    treedef = jax.tree.structure([layout.shapes() for layout in layouts])
    with np.load(path) as arrays:
        whole = treedef.unflatten([arrays[f"arr_{i}"] for i in range(treedef.num_leaves)])
    return [zero.to_devices(tree, layout, "batch") for tree, layout in zip(whole, layouts, strict=True)]


def train(params, layers, stage, steps=5, checkpoint=None, resume=False):
    """The losses of some steps of AdamW, and the bytes of parameters and optimizer state per device.

    Args:
      params: a dict of parameter trees, by the name of the layer.
      layers: a dict of functions `f(params[name], x)`, in the order in which they are applied.
      stage: 0 for plain data parallelism, 2 or 3.
      steps: at which it ends.
      checkpoint: a file that ends in .npz, written at the end.
      resume: go on from that file.
    """
    devices = jax.device_count()
    layout = zero.make_layout(params, devices)
    layout = layout if stage else layout.whole()
    optimizer = optax.adamw(1e-3)
    tx = zero.on_shards(optimizer, layout, "batch")
    layouts = layout, zero.derive_layout(optimizer.init, layout)
    lifted = {name: zero.fully_shard(layer, layout.at(name), "batch") for name, layer in layers.items()}
    # Without rematerialization the backward pass would keep the whole weights of every layer.
    lifted = {name: jax.checkpoint(layer) for name, layer in lifted.items()}

    def loss_fn(shards, gathered, x, y):
        for name, layer in lifted.items():
            x = layer(shards[name], x, gathered=gathered and gathered[name])
        return jnp.mean(jnp.square(x - y))

    def init(_):
        shards = zero.shard(params, layout, "batch")
        return shards, tx.init(shards)

    def step(shards, opt_state, x, y):
        gathered = None if stage == 3 else zero.gather(shards, layout, "batch")
        loss, grads = jax.value_and_grad(loss_fn)(shards, gathered, x, y)
        grads = jax.tree.map(lambda g: g / devices, grads)  # fully_shard sums over devices
        updates, opt_state = tx.update(grads, opt_state, shards)
        return optax.apply_updates(shards, updates), opt_state, lax.pmean(loss, "batch")

    first, state = 0, jax.pmap(init, axis_name="batch")(np.arange(devices))
    if resume:
        state = restore(checkpoint, layouts)
        first = int(state[1][0].count[0])  # AdamW counts its steps
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    step = jax.pmap(step, axis_name="batch", donate_argnums=(0, 1))
    losses = []
    for i in range(first, steps):
        rng = np.random.default_rng(i)
        x = rng.normal(size=(devices, 4, 24)).astype(np.float32)
        *state, loss = step(*state, x, np.sin(3 * x))
        losses.append(float(loss[0]))
    if checkpoint:
        save(checkpoint, state, layouts)
    return losses, held


def report(params, layers):
    for stage in (0, 2, 3):
        losses, held = train(params, layers, stage)
        print(f"stage {stage}: {held:,} bytes per device, losses", *(f"{loss:.6f}" for loss in losses))
