"""A pmap program that reads `zero.corpus.Rows`: stopped anywhere, it continues exactly, on any number of devices.

    zero-prepare stdlib --row-tokens 129
    python examples/rows/train.py data/index/stdlib_train.index --steps 200
    python examples/rows/train.py data/index/stdlib_train.index --steps 400     # continues at step 200

Each process is a host: it reads its part of every batch. With one process, `jax.process_count()` is 1.
"""

import argparse
import json
from functools import partial
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zero.corpus import Rows

BATCH, CONTEXT, VOCAB, WIDTH = 32, 128, 256, 64
tx = optax.adam(3e-3)


def loss_fn(params, tokens):
    """Predicts a token from the two before it; `tokens` are int32 (rows, context + 1), -1 where there is none."""
    ids = jnp.maximum(tokens, 0)
    h = jnp.tanh(params["last"][ids[:, 1:-1]] + params["one_before"][ids[:, :-2]])
    losses = optax.softmax_cross_entropy_with_integer_labels(h @ params["out"], ids[:, 2:])
    is_scored = tokens[:, 2:] >= 0
    return jnp.sum(losses * is_scored), jnp.sum(is_scored)


@partial(jax.pmap, axis_name="devices")
def train_step(params, opt_state, tokens):
    (total, count), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, tokens)
    total, count, grads = jax.lax.psum((total, count, grads), "devices")
    updates, opt_state = tx.update(jax.tree.map(lambda g: g / count, grads), opt_state)
    return optax.apply_updates(params, updates), opt_state, total / count


def train(index: str, steps: int, checkpoint: Path) -> list[float]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"last": (VOCAB, WIDTH), "one_before": (VOCAB, WIDTH), "out": (WIDTH, VOCAB)}
    params = {
        name: 0.1 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    state = params, tx.init(params)
    position = None
    if checkpoint.exists():
        leaves, structure = jax.tree.flatten(state)
        with np.load(checkpoint, allow_pickle=False) as saved:
            state = jax.tree.unflatten(structure, [saved[str(number)] for number in range(len(leaves))])
            position = json.loads(str(saved["position"]))
    rows = Rows(
        index,
        batch=BATCH,
        context=CONTEXT,
        last_target=True,
        host=jax.process_index(),
        hosts=jax.process_count(),
        state=position,
    )
    devices = jax.local_device_count()
    params, opt_state = jax.tree.map(lambda leaf: np.stack([leaf] * devices), state)  # replicated
    losses = []
    for tokens in islice(rows, max(0, steps - rows.state()["batches"])):
        params, opt_state, loss = train_step(params, opt_state, tokens.reshape(devices, -1, tokens.shape[1]))
        losses.append(float(loss[0]))
    leaves = [np.asarray(leaf[0]) for leaf in jax.tree.leaves((params, opt_state))]
    arrays = {str(number): leaf for number, leaf in enumerate(leaves)}
    np.savez(checkpoint, position=json.dumps(rows.state()), **arrays)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, default=Path("rows.npz"))
    options = parser.parse_args()
    losses = train(options.index, options.steps, options.checkpoint)
    print(f"{len(losses)} steps" + (f", loss {losses[0]:.3f} to {losses[-1]:.3f}" if losses else ""))
