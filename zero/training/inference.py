"""The model in use: losses of held-out rows and text drawn from it, on state sharded as in training."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from zero.models.gpt import init_cache
from zero.partition.layout import PyTree
from zero.training.step import ShardedGPT


def evaluate_step(params: PyTree, tokens: jax.Array, *, model: ShardedGPT) -> tuple[jax.Array, jax.Array]:
    """Summed losses in nats and tokens scored, over all devices' rows; both the same on every device.

    Per device: shards of parameters and int32 tokens `(rows, context)`, -1 where there is none. Call inside pmap.
    """
    losses, scored = model.losses(model.enter(params), tokens, None)
    return lax.psum(losses, model.axis.name), lax.psum(scored, model.axis.name)


def generate(
    params: PyTree, prompt: jax.Array, seed: jax.Array, *, model: ShardedGPT, length: int, temperature: float
) -> jax.Array:
    """Draws `length` tokens after a prompt, one at a time, with a key-value cache; every device draws its own text.

    Per device: shards of parameters, int32 prompt `(tokens,)`, an int32 seed; int32 `(length,)` out. Call inside pmap.
    """
    key = jax.random.fold_in(jax.random.key(seed), lax.axis_index(model.axis.name))
    variables = model.enter(params)
    cache = init_cache(model.config, 1, len(prompt) + length, model.compute_dtype)
    logits_BV, cache = model.apply(variables, prompt[None], cache, 0, method="logits")

    def draw(carry: tuple, position: jax.Array) -> tuple[tuple, jax.Array]:
        logits_BV, cache = carry
        token_B = jax.random.categorical(jax.random.fold_in(key, position), logits_BV / temperature)
        return model.apply(variables, token_B[:, None], cache, position, method="logits"), token_B[0]

    positions = jnp.arange(len(prompt), len(prompt) + length)
    _, tokens = lax.scan(draw, (logits_BV, cache), positions)
    return tokens
