"""The formulas and optimizers of two recipes' sources in plain jax, for one device: GPT-Neo and Transformer-VQ.

From the files that docs/sources/recipes.yaml names: models/gpt2/gpt2.py and optimizers.py of GPT-Neo; nn/attn.py,
nn/vq.py and ops/train.py of Transformer-VQ. They share nothing with zero; recipe_losses.py trains both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zero.models.config import GPTConfig

GPT_NEO, VQ = "gpt-neo-125m", "transformer-vq-enwik8"
Tree = Any
Loss = Callable[..., tuple[jax.Array, Any]]


class Source(NamedTuple):
    """How a source trains.

    Attributes:
      loss: `(params, codebook, memory, position, tokens, targets)` to what is minimized, and `(the logged loss, the
        codebook after the update, the memory after these tokens)`.
      optimizer: see `Adam`.
      empty_memory: from the size and the number of rows.
    """

    loss: Callable[[GPTConfig], Loss]
    optimizer: Adam
    empty_memory: Callable[[GPTConfig, int], Tree]


class Schedule(NamedTuple):
    """Steps of a run in all, and of its warmup."""

    total: int
    warmup: int

    def ramp(self, number: jax.Array) -> jax.Array:
        return jnp.minimum(number / self.warmup, 1)


class Adam(NamedTuple):
    """Adam as a source has it.

    Attributes:
      clip: largest global norm.
      decay: from the path of a leaf and the learning rate to the share of the weight that goes in a step.
      rate: from the number of the update, counted from 1, and the schedule to the learning rate.
    """

    clip: float
    b2: float
    eps: float
    is_corrected: bool
    decay: Callable[[tuple[str, ...], jax.Array], jax.Array | float]
    rate: Callable[[jax.Array, Schedule], jax.Array]

    def update(
        self, params: Tree, grads: Tree, moments: Tree, number: jax.Array, schedule: Schedule
    ) -> tuple[Tree, Tree]:
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1, self.clip / norm), grads)
        means, squares = moments
        means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, grads)
        squares = jax.tree.map(lambda v, g: self.b2 * v + (1 - self.b2) * g**2, squares, grads)
        rate = self.rate(number, schedule)

        def moved(path: Any, x: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            if self.is_corrected:
                m, v = m / (1 - 0.9**number), v / (1 - self.b2**number)
            share = self.decay(tuple(key.key for key in path), rate)
            return x - rate * m / (jnp.sqrt(v) + self.eps) - share * x

        return jax.tree_util.tree_map_with_path(moved, params, means, squares), (means, squares)


def cosine(done: jax.Array, end: float) -> jax.Array:
    return end + (1 - end) * (1 + jnp.cos(jnp.pi * jnp.clip(done, 0, 1))) / 2


def normed(x: jax.Array, epsilon: float) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + epsilon)


def layer_norm(x: jax.Array, p: Tree) -> jax.Array:
    return normed(x - x.mean(-1, keepdims=True), 1e-5) * p["scale"][None, None] + p["bias"][None, None]


def dense(x: jax.Array, p: Tree) -> jax.Array:
    y = x @ p["kernel"]
    return y + p["bias"][None, None] if "bias" in p else y


def gpt_neo(size: GPTConfig) -> Loss:
    """Unscaled scores, global and local layers in turn, z-loss."""

    def loss(
        p: Tree, book: Tree, memory: Tree, position: jax.Array, tokens: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, Any]:
        rows, length = tokens.shape
        table = p["vocabulary"]["table"][0]
        x = table[tokens] + p["positions"]["table"][None, :length]
        distance = np.arange(length)[:, None] - np.arange(length)[None]
        for number in range(size.N):
            own = jax.tree.map(lambda w, number=number: w[number], p["blocks"])
            h = layer_norm(x, own["norm_attention"])

            def heads(name: str, own: Tree = own, h: jax.Array = h) -> jax.Array:
                return dense(h, own[name]).reshape(rows, length, size.num_head, -1).swapaxes(1, 2)

            window = size.windows[number % len(size.windows)] or length
            scores = heads("query") @ heads("key").swapaxes(2, 3)
            is_seen = (distance >= 0) & (distance < window)
            weights = jax.nn.softmax(jnp.where(is_seen[None, None], scores, -1e9))
            x = x + dense((weights @ heads("value")).swapaxes(1, 2).reshape(rows, length, -1), own["attention_out"])
            h = dense(layer_norm(x, own["norm_mlp"]), own["mlp_in"])
            h = 0.5 * h * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
            x = x + dense(h, own["mlp_out"])
        logits = layer_norm(x, p["norm"]) @ table.T
        log_z = jax.nn.logsumexp(logits, axis=-1)
        value = jnp.mean(log_z - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0])
        return value + 1e-4 * jnp.mean(log_z**2), (value, book, memory)

    return loss


class Remembered(NamedTuple):
    """Of the positions of a row so far: codes, rounded keys and values of a unit; those to come are zeros."""

    codes: jax.Array
    keys: jax.Array
    values: jax.Array


UNITS = ("unit_0", "unit_1")


def no_positions(size: GPTConfig, rows: int) -> dict[str, Remembered]:
    """Of both units, with a leading dimension of layers."""
    shape = (size.N, rows, size.block_size)
    empty = Remembered(
        jnp.zeros(shape, jnp.int32),
        jnp.zeros((*shape, size.key_width)),
        jnp.zeros((*shape, 2 * size.embedding_dim)),
    )
    return dict.fromkeys(UNITS, empty)


def transformer_vq(size: GPTConfig) -> Loss:
    """All pairs of positions: the same attention as with the source's cache, in quadratic time."""
    scale = size.key_width**-0.25
    angles = (
        np.arange(size.vq_block + 1)[:, None] * 1e5 ** (-np.arange(0, size.embedding_dim, 2) / size.embedding_dim)[None]
    )
    features = jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], 1), jnp.float32)

    def unit(x: jax.Array, own: Tree, book: Tree, old: Remembered, position: jax.Array) -> Any:
        """The output, the commitment, and the codebook and the memory after these tokens."""
        length = x.shape[1]
        query_at = position + jnp.arange(length)
        key_at = jnp.arange(size.block_size)
        distance = query_at[:, None] - key_at[None]
        is_near = key_at[None] // size.vq_block >= query_at[:, None] // size.vq_block - 1
        codes = book["sums"] / jnp.maximum(book["counts"], 0.01)[:, None]
        h = normed(x, 1e-6) * own["norm"]["scale"][None, None] + own["norm"]["bias"][None, None]
        q = normed(dense(h, own["query"]), 1e-6) * scale
        k = normed(dense(h, own["key"]), 1e-6) * scale
        z = jnp.argmin(jnp.sum(codes**2, -1)[None, None] - 2 * k @ codes.T, axis=-1)
        commitment = jnp.mean(jnp.sum((k - codes[z]) ** 2, -1))
        is_code = jax.nn.one_hot(z, size.codes)
        decay = size.codebook_decay
        new_book = {
            "counts": decay * book["counts"] + (1 - decay) * is_code.sum((0, 1)),
            "sums": decay * book["sums"] + (1 - decay) * jnp.einsum("bts,btk->sk", is_code, k),
        }
        straight = codes[z] + k - lax.stop_gradient(k)
        v = jax.nn.silu(dense(h, own["value"]))
        at = (0, position, 0)
        seen = Remembered(
            lax.dynamic_update_slice(old.codes, z.astype(jnp.int32), at[:2]),
            lax.dynamic_update_slice(old.keys, straight, at),
            lax.dynamic_update_slice(old.values, v, at),
        )
        q_key = q + own["key_bias"][None, None] * scale
        near = jnp.einsum("btk,bsk->bts", q_key, seen.keys)
        far = jnp.einsum("btk,bsk->bts", q_key, codes[seen.codes])
        by_distance = (q + own["distance_bias"][None, None] * scale) @ (
            dense(features[None], own["distance"])[0] * scale
        ).T
        reach = jnp.clip(distance, 0, size.vq_block)
        bias = jnp.take_along_axis(by_distance, jnp.broadcast_to(reach[None], near.shape), axis=2)
        bias = jnp.where((distance <= size.vq_block)[None], bias, 0)
        scores = jnp.where((distance >= 0)[None], jnp.where(is_near[None], near + bias, far), -1e9)
        out = jax.nn.softmax(scores) @ seen.values
        x = x + dense(out * jax.nn.silu(dense(h, own["gate"])), own["attention_out"])
        return x, commitment, new_book, seen

    def loss(
        p: Tree, book: Tree, memory: Tree, position: jax.Array, tokens: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, Any]:
        def layer(carry: tuple[jax.Array, jax.Array], of_layer: Tree) -> tuple[Any, Any]:
            x, commitment = carry
            weights, books, memories = of_layer
            new_books, new_memories = {}, {}
            for name in UNITS:
                old = (weights[name], books[name], memories[name])
                x, of_unit, new_books[name], new_memories[name] = unit(x, *old, position)
                commitment += of_unit
            return (x, commitment), (new_books, new_memories)

        x = p["vocabulary"]["table"][0][tokens]
        layers = (p["blocks"], book["blocks"], memory)
        (x, commitment), (new_book, new_memory) = lax.scan(layer, (x, jnp.float32(0)), layers)
        logits = x @ p["head"]["table"][0].T + p["head_bias"]["bias"][None, None]
        log_z = jax.nn.logsumexp(logits, axis=-1)
        value = jnp.mean(log_z - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0])
        return value + size.commitment * commitment, (value, {"blocks": new_book}, new_memory)

    return loss


def with_splits(book: Tree, key: jax.Array) -> Tree:
    """The codebook once a code with less than a tenth of the mean number of keys has half of another's.

    In each layer and unit the code with the largest squared error of its keys gives them, and the other one is put at a
    hundredth of its norm beside it, in a direction drawn from the key.
    """
    units = {}
    for number, (name, unit) in enumerate(book["blocks"].items()):
        directions = jax.random.normal(jax.random.fold_in(key, number), unit["sums"].shape[::2])
        layers = [split(*one) for one in zip(unit["counts"], unit["sums"], directions, strict=True)]
        units[name] = {"counts": jnp.stack([x for x, _ in layers]), "sums": jnp.stack([x for _, x in layers])}
    return {"blocks": units}


def split(counts: jax.Array, sums: jax.Array, direction: jax.Array) -> tuple[jax.Array, jax.Array]:
    means = sums / counts[:, None]
    poorest = jnp.argmin(counts)
    # Keys have the squared norm K^(1/2), so their squared distances from the mean add up to this.
    richest = jnp.argmax(counts * (sums.shape[1] ** 0.5 - jnp.sum(means**2, -1)))
    step = 0.01 * jnp.sqrt(jnp.sum(means[richest] ** 2)) * direction / jnp.sqrt(jnp.sum(direction**2))
    is_split = jnp.any(counts[poorest] < counts.mean() / 10)
    number = np.arange(len(counts))
    is_one = (number == poorest) | (number == richest)
    half = counts[richest] / 2
    beside = means[richest] + jnp.where(number == poorest, 1.0, 0.0)[:, None] * step
    new_counts = jnp.where(is_one, half, counts)
    new_sums = jnp.where(is_one[:, None], half * beside, sums)
    return jnp.where(is_split, new_counts, counts), jnp.where(is_split, new_sums, sums)


MATRICES = ("kernel", "table")
SOURCES = {
    GPT_NEO: Source(
        gpt_neo,
        Adam(
            1.0, 0.95, 1e-8, False,
            # All but biases and the norms of layers.
            lambda path, rate: 0.1 * rate if path[-1] in MATRICES or path[0] == "norm" else 0.0,
            lambda number, steps: 6e-4 * cosine(number / steps.total, 0.1) * steps.ramp(number),
        ),
        lambda size, rows: None,
    ),
    VQ: Source(
        transformer_vq,
        Adam(
            0.1, 0.98, 1e-9, True,
            lambda path, rate: 2e-4 if path[-1] in MATRICES else 0.0,
            lambda number, steps: (
                4e-4 * steps.ramp(number) * cosine((number - steps.warmup) / (steps.total - steps.warmup), 0.1)
            ),
        ),
        no_positions,
    ),
}  # fmt: skip
