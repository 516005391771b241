"""Flow matching as in qiaosungithub/flow-matching: network and average are both parameters, but only one is trained.

The train state gives its optimizer the trained part, and writes the result back. The average's decay follows the step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, struct
from jax import lax

DEVICES = jax.devices()
PIXELS, CLASSES, WIDTH = 16, 4, 22
schedule = optax.join_schedules([optax.linear_schedule(0.0, 2.0**-7, 4), optax.constant_schedule(2.0**-7)], [4])
tx = optax.radam(schedule, b2=0.95)


@struct.dataclass
class TrainState:
    step: Any
    params: Any
    opt_state: Any
    tx: Any = struct.field(pytree_node=False)

    def apply_gradients(self, grads, params):
        updates, opt_state = self.tx.update(grads, self.opt_state, params)
        params = {**self.params, **optax.apply_updates(params, updates)}
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state)


def trained(params):
    return {"net": params["net"]}


def create_state():
    rng = np.random.default_rng(0)
    sizes = {"in": (PIXELS, WIDTH), "time": (8, WIDTH), "label": (CLASSES + 1, WIDTH), "scale": (WIDTH, WIDTH)}
    net = {name: rng.normal(size=size).astype(np.float32) / size[0] ** 0.5 for name, size in sizes.items()}
    net["out"] = np.zeros((WIDTH, PIXELS), np.float32)
    params = {"net": net, "net_ema": net}
    return TrainState(step=np.int32(0), params=params, opt_state=tx.init(trained(params)), tx=tx)


def to_devices(state):
    return jax_utils.replicate(state, DEVICES)


def to_host(state):
    return jax_utils.unreplicate(state)


def velocity(net, x, time, label):
    angles = time[:, None] * 2.0 ** jnp.arange(4)[None]
    features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    condition = jax.nn.silu(features @ net["time"] + net["label"][label])
    hidden = jax.nn.silu(x @ net["in"]) * (1 + condition @ net["scale"])
    return hidden @ net["out"]


def loss_fn(params, images, labels, key):
    keys = jax.random.split(key, 3)
    time = jax.nn.sigmoid(jax.random.normal(keys[0], labels.shape))
    noise = jax.random.normal(keys[1], images.shape)
    labels = jnp.where(jax.random.uniform(keys[2], labels.shape) < 0.1, CLASSES, labels)
    between = (1 - time[:, None]) * images + time[:, None] * noise
    return jnp.square(velocity(params["net"], between, time, labels) - (noise - images)).mean()


def step_fn(state, batch):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.PRNGKey(1), state.step), lax.axis_index("batch"))
    params = trained(state.params)
    loss, grads = jax.value_and_grad(loss_fn)(params, *batch, key)
    grads = lax.pmean(grads, "batch")
    rate = schedule(state.step)
    decay = jnp.minimum(0.9, state.step / 8)
    state = state.apply_gradients(grads, params)
    net, net_ema = state.params["net"], state.params["net_ema"]
    net_ema = jax.tree.map(lambda old, new: old * decay + new * (1 - decay), net_ema, net)
    metrics = {"loss": loss, "rate": rate, "decay": decay}
    return state.replace(params={"net": net, "net_ema": net_ema}), lax.all_gather(metrics, "batch")


p_train_step = jax.pmap(step_fn, axis_name="batch", devices=DEVICES)


def train_step(state, batch):
    state, metrics = p_train_step(state, batch)
    return state, metrics["loss"].mean(1)


def batch(step):
    rng = np.random.default_rng(step)
    labels = rng.integers(0, CLASSES, (len(DEVICES), 8)).astype(np.int32)
    images = np.sin(labels[..., None] + np.arange(PIXELS) / 3) + 0.1 * rng.normal(size=(*labels.shape, PIXELS))
    return images.astype(np.float32), labels
