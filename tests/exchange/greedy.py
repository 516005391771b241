"""`greedy`: the greedy text of random weights after a prompt, written by one device."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.exchange.random_weights import params, variables
from zero.models.config import GPTConfig
from zero.models.gpt import GPT, init_cache


@cache
def greedy(size: GPTConfig, prompt: tuple[int, ...], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `(length,)` and the logits `(length, V)` that they were chosen by, one device, with a cache."""
    apply: Any = jax.jit(partial(GPT(size, drops=False).apply, variables(size, params(size)), method="logits"))
    cache = init_cache(size, 1, len(prompt) + length, jnp.float32)
    first = apply(jnp.asarray([prompt]), cache)

    def write(carry: Any, position: jax.Array) -> Any:
        logits_BV, cache = carry
        token_B = jnp.argmax(logits_BV, axis=-1)
        return apply(token_B[:, None], cache, position), (token_B[0], logits_BV[0])

    positions = jnp.arange(len(prompt), len(prompt) + length)
    _, (tokens, logits) = jax.jit(partial(lax.scan, write))(first, positions)
    return np.asarray(tokens), np.asarray(logits)
