"""The codebook of vector-quantized keys: a moving average of the keys assigned to each code.

Shapes are named by suffix: S codes, K width of a key. Every leaf has a leading dimension of layers.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from zero.models.gated_unit import UNITS, GatedUnits
from zero.models.part import STACK

# A code with fewer keys per step than this is not updated, so that its sums do not underflow.
_FEWEST_KEYS = 0.01
# A code with fewer keys than `_UNUSED` times the average moves next to another code, at `_SPLIT_BY` times its norm, and
# takes half of its keys.
_UNUSED, _SPLIT_BY = 0.1, 0.01


def init_codebook(config: GatedUnits, key: jax.Array) -> Any:
    """The codebook of a new model: per layer and unit `counts` (S) and `sums` (S, K); a code is sums / counts.

    Codes start with norm 1, nearer to the origin than keys (K^(1/4)), so that keys far from every used code get an
    unused one.
    """

    def unit(number: int) -> dict[str, jax.Array]:
        shape = (config.N, config.codes, config.key_width)
        codes = jax.random.normal(jax.random.fold_in(key, number), shape) / math.sqrt(config.key_width)
        return {"counts": jnp.ones(shape[:2]), "sums": codes}

    return {STACK: {f"unit_{number}": unit(number) for number in range(UNITS)}}


def with_commitment(config: GatedUnits, codebook: Any, positions: int) -> Any:
    """The codebook with the weight of the commitment loss, for a mean over this many positions."""
    weight = config.commitment / positions

    def unit(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {**state, "commitment": jnp.full(state["counts"].shape[:-1], weight)}

    return {STACK: {name: unit(state) for name, state in codebook[STACK].items()}}


def update_codebook(config: GatedUnits, codebook: Any, found: Any, key: jax.Array) -> Any:
    """The codebook after a step whose counts and sums of assigned keys, over all devices, are `found`.

    In each layer and unit an unused code is then moved next to another one (`_split`). The result depends only on the
    arguments, so it is the same on every device.

    Sources: averages: van den Oord et al., arXiv 1711.00937, appendix A.1; splits: Linde, Buzo and Gray,
    An algorithm for vector quantizer design (1980).
    """

    def unit(old: dict[str, jax.Array], found: dict[str, jax.Array], key: jax.Array) -> dict[str, jax.Array]:
        decay = config.codebook_decay
        moved = {name: decay * old[name] + (1 - decay) * found[name] for name in old}
        is_used = moved["counts"] >= _FEWEST_KEYS
        counts = jnp.where(is_used, moved["counts"], old["counts"])
        sums = jnp.where(is_used[..., None], moved["sums"], old["sums"])
        counts, sums = jax.vmap(_split)(counts, sums, jax.random.normal(key, (*counts.shape[:-1], sums.shape[-1])))
        return {"counts": counts, "sums": sums}

    units = enumerate(codebook[STACK].items())
    return {STACK: {name: unit(x, found[STACK][name], jax.random.fold_in(key, i)) for i, (name, x) in units}}


METRICS = ("codebook/entropy", "codebook/perplexity", "codebook/unused", "codebook/error")


def codebook_metrics(codebook: Any) -> dict[str, jax.Array]:
    """Metrics averaged over layers and units: float32 scalars, keyed by `METRICS`.

    Entropy (nats) and perplexity of the shares of keys; the share of codes with less than a tenth of the mean number of
    keys; and the error of rounding relative to the norm of keys, by the averages: all keys have norm K^(1/4), so the
    squared error of n keys with mean c is n (K^(1/2) - |c|^2).
    """

    def unit(state: dict[str, jax.Array]) -> jax.Array:
        counts_LS = state["counts"]
        squares_LS = jnp.square(state["sums"] / state["counts"][..., None]).sum(-1)
        shares_LS = counts_LS / counts_LS.sum(-1, keepdims=True)
        entropy_L = -jnp.sum(shares_LS * jnp.log(shares_LS), -1)
        unused_L = jnp.mean(counts_LS < _UNUSED * counts_LS.mean(-1, keepdims=True), -1)
        error_L = 1 - jnp.sum(shares_LS * squares_LS, -1) / math.sqrt(state["sums"].shape[-1])
        return jnp.stack([entropy_L, jnp.exp(entropy_L), unused_L, jnp.sqrt(jnp.maximum(error_L, 0))]).mean(-1)

    means = jnp.stack([unit(state) for state in codebook[STACK].values()]).mean(0)
    return dict(zip(METRICS, means, strict=True))


def _split(counts: jax.Array, sums: jax.Array, direction: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gives half of the keys of the code with the largest error to an unused code, if there is one.

    `(S,)`, `(S, K)` and `(K,)` in, the first two out. All keys have norm K^(1/4), so the squared error of n keys with
    mean c is n (K^(1/2) - |c|^2).
    """
    codes = sums / counts[:, None]
    least = counts.argmin()
    most = (counts * (math.sqrt(sums.shape[1]) - jnp.square(codes).sum(-1))).argmax()
    half = counts[most] / 2
    code = codes[most]
    new_code = code + _SPLIT_BY * jnp.linalg.norm(code) * direction / jnp.linalg.norm(direction)
    is_due = counts[least] < _UNUSED * counts.mean()
    new_counts = counts.at[most].set(half).at[least].set(half)
    new_sums = sums.at[most].set(half * code).at[least].set(half * new_code)
    return jnp.where(is_due, new_counts, counts), jnp.where(is_due, new_sums, sums)
