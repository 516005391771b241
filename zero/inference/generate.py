"""Generates text in chunks of tokens; programs are compiled once per bucket of lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from zero.base.errors import UserError
from zero.partition.layout import PyTree
from zero.training.programs import Inference

SMALLEST_BUCKET = 16


def bucket(length: int) -> int:
    """A length rounded up to one of four per power of two, so that many lengths share a compiled program.

    >>> [bucket(length) for length in (1, 16, 17, 301, 1000)]
    [16, 16, 20, 320, 1024]
    """
    if length <= SMALLEST_BUCKET:
        return SMALLEST_BUCKET
    step = 1 << ((length - 1).bit_length() - 3)
    return -(-length // step) * step


def generate(
    programs: Inference, params: PyTree, prompts: Sequence[np.ndarray], count: int, *, seed: int, chunk: int
) -> Iterator[np.ndarray]:
    """Yields all rows, int32 `(prompts, positions)`, every `chunk` tokens until each has `count` after its prompt.

    Each prompt has at least one token id. Sampled tokens depend on the seed, the row and the position, not on devices.

    Raises:
      UserError: the frequencies of rotary positions would change within a text.
    """
    local = len(jax.tree.leaves(params)[0])
    places = programs.host_rows
    shortest = min(map(len, prompts))
    longest = max(map(len, prompts))
    chunks = -(-(longest + count - shortest) // chunk)
    rows = -(-len(prompts) // places.count)
    end = shortest + chunks * chunk
    tokens = np.full((places.count * rows, _width(programs, shortest, end)), -1, np.int32)
    tokens[:, :shortest] = 0
    for row, prompt in zip(tokens, prompts, strict=False):
        row[: len(prompt)] = prompt
    keys = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), np.arange(len(tokens))))

    def split(x: Any) -> np.ndarray:
        return places.split_global(np.asarray(x))

    lengths = np.full(local, shortest, np.int32)
    state = programs.prefill(params, split(tokens), lengths, bucket(shortest))
    for done in range(1, chunks + 1):
        state, every = programs.extend(params, state, split(keys), chunk)
        yield np.asarray(every)[: len(prompts), : shortest + done * chunk]


def until_end(tokens: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """The tokens before the first that ends a text.

    >>> until_end(np.array([5, 6, 2, 7, 1]), [1, 2])
    array([5, 6])
    """
    places = np.flatnonzero(np.isin(tokens, ends))
    if not len(places):
        return tokens
    return tokens[: places[0]]


def _width(programs: Inference, shortest: int, end: int) -> int:
    """The cache's number of positions for texts of up to `end`; rotary frequencies depend on it."""
    switch = programs.switch
    if switch is not None and end <= switch:
        return min(bucket(end), switch)
    if switch is not None and (shortest <= switch or programs.grows):
        longer = "" if programs.grows else f", or that all prompts are longer than {switch}"
        raise UserError(
            f"texts of up to {end} tokens: the model's rotary frequencies change beyond {switch} positions, but keys "
            f"in the cache have the old ones; expected at most {switch} tokens with the prompt{longer}"
        )
    return bucket(end)
