"""A causal language model as in the Flax examples of Hugging Face: warmup, decay mask, clipping, a checkpoint folder.

python train.py --steps 30 --checkpoint /tmp/language-model
python train.py --steps 60 --checkpoint /tmp/language-model --resume
"""

import argparse
import json
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import jax_utils, serialization, traverse_util
from flax.training import train_state
from jax import lax


class LanguageModel(nn.Module):
    vocabulary: int = 97
    width: int = 32

    @nn.compact
    def __call__(self, tokens, deterministic):
        embed = nn.Embed(self.vocabulary, self.width)
        x = embed(tokens)
        attention = nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=deterministic)
        x = x + attention(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
        x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x))


class TrainState(train_state.TrainState):
    dropout_rng: jax.Array


def decay_mask(params):
    """No decay for biases and layer norms."""
    flat = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict({path: path[-1] not in ("bias", "scale") for path in flat})


model = LanguageModel()
schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100)
optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(schedule, weight_decay=0.1, mask=decay_mask),
)


def create_state():
    init = jax.jit(partial(model.init, deterministic=True))
    params = init(jax.random.key(0), np.zeros((1, 16), np.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer, dropout_rng=jax.random.PRNGKey(1))


def loss_fn(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


@partial(jax.pmap, axis_name="batch", donate_argnums=0)
def train_step(state, tokens):
    dropout_rng = jax.random.fold_in(jax.random.fold_in(state.dropout_rng, state.step), lax.axis_index("batch"))

    def compute_loss(params):
        rngs = {"dropout": dropout_rng}
        return loss_fn(state.apply_fn({"params": params}, tokens, deterministic=False, rngs=rngs), tokens)

    loss, grads = jax.value_and_grad(compute_loss)(state.params)
    grads = lax.pmean(grads, "batch")
    return state.apply_gradients(grads=grads), lax.pmean(loss, "batch")


@partial(jax.pmap, axis_name="batch")
def eval_step(state, tokens):
    return lax.pmean(loss_fn(state.apply_fn({"params": state.params}, tokens, deterministic=True), tokens), "batch")


def to_devices(state):
    return jax_utils.replicate(state)


def to_host(state):
    return jax_utils.unreplicate(state)


def save(state, folder):
    state = to_host(state)
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "flax_model.msgpack").write_bytes(serialization.to_bytes(state.params))
        (folder / "opt_state.msgpack").write_bytes(serialization.to_bytes(state.opt_state))
        (folder / "training_state.json").write_text(json.dumps({"step": int(state.step)}))


def restore(state, folder):
    return state.replace(
        params=serialization.from_bytes(state.params, (folder / "flax_model.msgpack").read_bytes()),
        opt_state=serialization.from_bytes(state.opt_state, (folder / "opt_state.msgpack").read_bytes()),
        step=json.loads((folder / "training_state.json").read_text())["step"],
    )


def batch(step):
    """This process's rows of a global batch of 32 arithmetic sequences, a row of devices in front."""
    rng = np.random.default_rng(step)
    start, stride = rng.integers(0, 97, (32, 1)), rng.integers(1, 4, (32, 1))
    tokens = (start + stride * np.arange(16)) % 97
    rows = np.split(tokens, jax.process_count())[jax.process_index()]
    return [rows.reshape(jax.local_device_count(), -1, 16)]


def train(steps, checkpoint=None, resume=False):
    """The losses of each step, and the state on the devices; the checkpoint is written at the end."""
    state = create_state()
    if resume:
        state = restore(state, Path(checkpoint))
    first = int(state.step)
    state = to_devices(state)
    losses = []
    for step in range(first, steps):
        state, loss = train_step(state, *batch(step))
        losses.append(float(loss[0]))
    print(f"validation loss: {float(eval_step(state, *batch(10_000))[0]):.3f}")
    if checkpoint:
        save(state, Path(checkpoint))
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
