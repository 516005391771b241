"""Adam and Lion with one byte per moment, and stochastic rounding of bfloat16 weights: plain optax transforms.

Every code is element-wise. No two elements share a scale, so a slice has the same codes as the whole array. Adam
needs no scale because each of its moments is the scale of the other:

- `nu`, the mean square, is a float of 8 bits: 3 levels per octave (factor of 2) over 85 octaves, from far below eps.
- `mu`, the mean, is stored as mu / sqrt(nu), the direction of the update. By the Cauchy-Schwarz inequality it has a
  bound that depends only on b1 and b2; 255 equally spaced levels divide that interval.

Rounding is stochastic: otherwise a moment that changes by less than a level per step would never change. The random
bits are a hash of step, leaf path and index in the whole array: the same for any number of devices and after a resume.
Measured against scales per block: docs/decisions/narrow-numbers.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from zero.partition.checksums import mix
from zero.partition.layout import PyTree

__all__ = ["adamw", "lion", "round_stochastically"]  # as `zero.quantized`

Mask = PyTree | Callable[[PyTree], PyTree]

_TO_INTEGER = 1.5 * 2**23
_TO_INTEGER_BITS = 0x4B400000
_LION_LOWEST = -32  # exponent of the smallest level of Lion's momentum; the largest is 2^9.7


def is_large(params: PyTree) -> PyTree:
    """The default choice of leaves to quantize: those of at least 4,096 elements.

    >>> is_large({"w": jnp.ones((64, 64)), "b": jnp.ones(64)})
    {'b': False, 'w': True}
    """
    return jax.tree.map(lambda x: x.size >= 4096, params)


def scale_by_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    state_dtype: DTypeLike = jnp.int8,
    mask: Mask = is_large,
    bias_correction: bool = True,
) -> optax.GradientTransformation:
    """Optax's `scale_by_adam` with moments held in int8, bfloat16 or float32, exact on shards.

    The state is an `optax.ScaleByAdamState`. Updates are computed in float32; only the stored moments are rounded.

    Args:
      b1, b2, eps: as in optax.
      state_dtype: dtype of the moments of floating-point leaves that `mask` selects; all others are float32.
      mask: a tree of booleans, or a function from the parameters to one.
      bias_correction: whether to divide moments by the sums of their weights, 1 - b^n after n updates.

    Raises:
      ValueError: `state_dtype` is none of the three, or int8 with b1 * b1 >= b2, where mu / sqrt(nu) has no bound.

    Source: Kingma and Ba, arXiv 1412.6980; moments in 8 bits: Dettmers et al., arXiv 2110.02861, with scales per block.

    >>> tx = scale_by_adam()
    >>> state = tx.init({"w": jnp.ones((64, 64)), "b": jnp.ones(64)})
    >>> [str(state.mu[name].dtype) for name in ("w", "b")]
    ['int8', 'float32']
    """
    dtype = _checked(state_dtype)
    code = AdamCode.of(b1, b2, eps) if dtype == np.int8 else None

    def init(params: PyTree) -> optax.ScaleByAdamState:
        unsigned = np.dtype(np.uint8) if dtype == np.int8 else dtype
        mu = _zeros(params, dtype, mask)
        nu = _zeros(params, unsigned, mask)  # separate zeros, so that both can be donated
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), mu, nu)

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, optax.ScaleByAdamState]:
        count = optax.safe_increment(state.count)
        correction1, correction2 = (1 - b1**count, 1 - b2**count) if bias_correction else (1.0, 1.0)

        def one(name: str, g: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            m, v = code.decode(mu, nu) if code and mu.dtype == np.int8 else (_wide(mu), _wide(nu))
            g = _wide(g)
            m = (1 - b1) * g + b1 * m
            v = (1 - b2) * jnp.square(jnp.abs(g)) + b2 * v
            if mu.dtype not in (np.int8, jnp.bfloat16):  # bit for bit as in optax
                return (m / correction1) / (jnp.sqrt(v / correction2) + eps), m.astype(mu.dtype), v.astype(nu.dtype)
            new = m * (1 / correction1) / (jnp.sqrt(v * (1 / correction2)) + eps)
            high, low = _random_halves(g.shape, name, count)
            if code and mu.dtype == np.int8:
                return new, *code.encode(m, v, high, low)
            return new, to_bfloat16(m, high), to_bfloat16(v, low)

        new, mu, nu = _map_leaves(one, updates, state.mu, state.nu)
        return new, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_lion(
    b1: float = 0.9, b2: float = 0.99, *, state_dtype: DTypeLike = jnp.int8, mask: Mask = is_large
) -> optax.GradientTransformation:
    """Optax's `scale_by_lion` with its momentum held in int8, bfloat16 or float32, exact on shards.

    Int8 has a sign and 3 levels per octave from 2^-32 to 2^9.7. Arguments and errors as for `scale_by_adam`.

    Source: Chen et al., arXiv 2302.06675.

    >>> state = scale_by_lion().init({"w": jnp.ones((64, 64))})
    >>> str(state.mu["w"].dtype)
    'int8'
    """
    dtype = _checked(state_dtype)

    def init(params: PyTree) -> optax.ScaleByLionState:
        return optax.ScaleByLionState(jnp.zeros((), jnp.int32), _zeros(params, dtype, mask))

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, optax.ScaleByLionState]:
        count = optax.safe_increment(state.count)

        def one(name: str, g: jax.Array, mu: jax.Array) -> tuple[jax.Array, jax.Array]:
            g = _wide(g)
            m = _signed(mu, _LION_LOWEST) if mu.dtype == np.int8 else _wide(mu)
            new = jnp.sign((1 - b1) * g + b1 * m)
            m = (1 - b2) * g + b2 * m
            if mu.dtype not in (np.int8, jnp.bfloat16):
                return new, m.astype(mu.dtype)
            high, _ = _random_halves(g.shape, name, count)
            if mu.dtype == jnp.bfloat16:
                return new, to_bfloat16(m, high)
            level = _to_level(jnp.abs(m), _LION_LOWEST, high, 127)
            return new, jnp.where(m < 0, -level, level).astype(jnp.int8)

        new, mu = _map_leaves(one, updates, state.mu)
        return new, optax.ScaleByLionState(count, mu)

    return optax.GradientTransformation(init, update)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Mask | None = None,
    *,
    state_dtype: DTypeLike = jnp.int8,
) -> optax.GradientTransformation:
    """Optax's `adamw` with moments of one byte each, for leaves of at least 4,096 elements; exact on shards.

    Arguments as in optax; `state_dtype` and errors as in `scale_by_adam`.

    >>> tx = adamw(1e-3)
    >>> params = {"w": jnp.ones((64, 64))}
    >>> sum(x.nbytes for x in jax.tree.leaves(tx.init(params))) / params["w"].nbytes  # optax.adamw: 2
    0.500244140625
    """
    return optax.chain(
        scale_by_adam(b1, b2, eps, state_dtype=state_dtype),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 1e-3,
    mask: Mask | None = None,
    *,
    state_dtype: DTypeLike = jnp.int8,
) -> optax.GradientTransformation:
    """Optax's `lion` with a momentum of one byte, for leaves of at least 4,096 elements; exact on shards.

    Arguments as in optax; `state_dtype` and errors as in `scale_by_lion`.

    >>> tx = lion(1e-4)
    >>> params = {"w": jnp.ones((64, 64))}
    >>> sum(x.nbytes for x in jax.tree.leaves(tx.init(params))) / params["w"].nbytes  # optax.lion: 1
    0.250244140625
    """
    return optax.chain(
        scale_by_lion(b1, b2, state_dtype=state_dtype),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


class RoundingState(NamedTuple):
    """The number of updates so far, int32."""

    step: jax.Array


def round_stochastically() -> optax.GradientTransformation:
    """Trains bfloat16 parameters without a float32 copy: the last transform of a chain, exact on shards.

    `optax.apply_updates` then rounds parameters up or down at random, without bias. Rounded to nearest, a weight would
    ignore updates below 1/512 of itself. Parameters of other dtypes are not rounded.

    Source: Zamirai et al., arXiv 2010.06192, section 3.

    >>> tx = optax.chain(optax.sgd(1.0), round_stochastically())
    >>> params = jnp.ones(1000, jnp.bfloat16)
    >>> updates, _ = tx.update(jnp.full(1000, -1 / 1024), tx.init(params), params)
    >>> moved = optax.apply_updates(params, updates)
    >>> bool((moved > 1).sum() > 80), str(moved.dtype)  # by 1/128 in one of eight
    (True, 'bfloat16')
    """

    def update(updates: PyTree, state: RoundingState, params: PyTree = None) -> tuple[PyTree, RoundingState]:
        if params is None:
            raise ValueError("round_stochastically rounds parameters: update needs params")
        return rounded_updates(updates, params, state.step), RoundingState(optax.safe_increment(state.step))

    return optax.GradientTransformation(lambda params: RoundingState(jnp.zeros((), jnp.int32)), update)


def rounded_updates(updates: PyTree, params: PyTree, step: jax.Array) -> PyTree:
    """Updates after which bfloat16 parameters are rounded stochastically; others are returned unchanged.

    `p + update` is exact up to bits that the cast to bfloat16 drops.
    """

    def one(name: str, u: jax.Array, p: jax.Array) -> tuple[jax.Array]:
        if p.dtype != jnp.bfloat16:
            return (u,)
        before = p.astype(jnp.float32)
        high, _ = _random_halves(p.shape, name, step, salt=1)
        return (to_bfloat16(before + u, high).astype(jnp.float32) - before,)

    return _map_leaves(one, updates, params)[0]


def convert_adam(
    state: optax.ScaleByAdamState, dtypes: optax.ScaleByAdamState, b1: float, b2: float, eps: float = 1e-8
) -> optax.ScaleByAdamState:
    """Casts moments to other dtypes, rounded to nearest; `dtypes` is a state of dtypes.

    Element-wise: shards or whole arrays in and out, no communication.
    """

    def one(mu: jax.Array, nu: jax.Array, mu_dtype: np.dtype, nu_dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
        if (mu.dtype, nu.dtype) == (mu_dtype, nu_dtype):
            return mu, nu
        m, v = AdamCode.of(b1, b2, eps).decode(mu, nu) if mu.dtype == np.int8 else (mu, nu)
        if mu_dtype != np.int8:
            return m.astype(mu_dtype), v.astype(nu_dtype)
        middle = jnp.uint32(1 << 15)
        return AdamCode.of(b1, b2, eps).encode(_wide(m), _wide(v), middle, middle)

    pairs = jax.tree.map(one, state.mu, state.nu, dtypes.mu, dtypes.nu)
    mu, nu = (jax.tree.map(lambda _, pair, i=i: pair[i], state.mu, pairs) for i in range(2))
    return optax.ScaleByAdamState(state.count, mu, nu)


@dataclasses.dataclass(frozen=True)
class AdamCode:
    """The encoding of Adam's two moments in a byte each.

    Attributes:
      bound: the bound of mu / sqrt(nu).
      lowest: the exponent of the smallest level of nu above 0, even.
    """

    bound: float
    lowest: int

    @classmethod
    def of(cls, b1: float, b2: float, eps: float) -> AdamCode:
        """The code for these decay rates; its smallest level of sqrt(nu) is at most eps / 32, or 2^-32."""
        if b1 * b1 >= b2:
            raise ValueError(f"int8 moments need b1 * b1 < b2, got b1={b1} and b2={b2}: mu / sqrt(nu) has no bound")
        bound = (1 - b1) / math.sqrt((1 - b2) * (1 - b1 * b1 / b2))
        return cls(bound, 2 * max(math.floor(math.log2(eps / 32)), -32) if eps else -64)

    def encode(self, m: jax.Array, v: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The int8 mean and the uint8 mean square of float32 ones; 16 random bits for each."""
        nu = _to_level(v, self.lowest, low, 255)
        # With nu before rounding: rounding nu then scales mu too, and the direction of the update is kept.
        scaled = jnp.where(v > 0, m * (127 / self.bound) * lax.rsqrt(v), 0)
        # Adds noise of up to 1/2, then rounds to nearest: a float plus 1.5 * 2^23 has its integer in its last bits.
        moved = jnp.clip(scaled, -127, 127) + (high.astype(jnp.int32) - 32767.5) * 2.0**-16
        mu = lax.bitcast_convert_type(moved + _TO_INTEGER, jnp.int32) - _TO_INTEGER_BITS
        return mu.astype(jnp.int8), nu.astype(jnp.uint8)

    def decode(self, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The decoded float32 mean and mean square."""
        root, v = _from_level(nu.astype(jnp.int32), self.lowest)
        return mu.astype(jnp.float32) * (self.bound / 127) * root, v


def _to_level(x: jax.Array, lowest: int, random: jax.Array, highest: int) -> jax.Array:
    """The int32 level, 0 to `highest`, of float32 numbers that are not negative; 2^lowest is level 1.

    Rounding has no bias: between two levels floats are linear in their bits. Numbers far below level 1 become 0.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) - _first(lowest)
    bits = jnp.clip(bits, -(1 << 23), (highest - 1) * (1 << 23) // 3)  # three times this fits into an int32
    return jnp.maximum(((3 * bits + (random.astype(jnp.int32) << 7)) >> 23) + 1, 0)


def _from_level(level: jax.Array, lowest: int) -> tuple[jax.Array, jax.Array]:
    """The square root of the float32 number of an int32 level, and the number: 2^octave (1 + third / 3)."""
    above = level + 2  # counted from one octave below, so that no octave is negative
    octave = (above * 171) >> 9  # above // 3, for above < 258
    third = above - 3 * octave
    octave = octave - 1
    is_odd = (octave & 1) == 1
    root = [jnp.where(is_odd, math.sqrt(2 + 2 * i / 3), math.sqrt(1 + i / 3)).astype(jnp.float32) for i in range(3)]
    fraction = jnp.where(third == 0, root[0], jnp.where(third == 1, root[1], root[2]))
    power = lax.bitcast_convert_type(((octave >> 1) + (lowest // 2 + 127)) << 23, jnp.float32)
    x = jnp.where(level > 0, power * fraction, 0)
    return x, x * x


def _signed(level: jax.Array, lowest: int) -> jax.Array:
    """The float32 numbers of signed int8 levels."""
    wide = level.astype(jnp.int32)
    x = _from_level(jnp.abs(wide), lowest)[1]
    return jnp.where(wide < 0, -x, x)


def _first(lowest: int) -> int:
    """The bits of 2^lowest."""
    return (lowest + 127) << 23


def to_bfloat16(x: jax.Array, random: jax.Array) -> jax.Array:
    """Float32 numbers rounded up or down at random, from 16 random bits for each; NaN stays NaN."""
    bits = (lax.bitcast_convert_type(x, jnp.uint32) + random) & np.uint32(0xFFFF0000)
    return jnp.where(jnp.isnan(x), x, lax.bitcast_convert_type(bits, jnp.float32)).astype(jnp.bfloat16)


def _random_halves(shape: tuple[int, ...], name: str, step: jax.Array, salt: int = 0) -> tuple[jax.Array, jax.Array]:
    """Two arrays of 16 random bits as uint32, which depend only on the arguments and the index.

    Indices are made along each dimension by `iota`, which the rewriter for shards shifts to the slice.
    """
    seed = salt
    for byte in name.encode():
        seed = (seed ^ byte) * 0x01000193 % 2**32  # FNV-1a
    key = mix(mix(jnp.uint32(seed)) ^ jnp.asarray(step).astype(jnp.uint32))
    position = key
    for dim in range(len(shape)):
        index = lax.broadcasted_iota(jnp.uint32, shape, dim)
        position = position + index * np.uint32(pow(0x9E3779B1, dim + 1, 2**32))
    bits = mix(position)
    return bits >> 16, bits & np.uint32(0xFFFF)


def _checked(state_dtype: DTypeLike) -> np.dtype:
    dtype = np.dtype(state_dtype)
    if dtype not in (np.dtype(np.int8), np.dtype(jnp.bfloat16), np.dtype(np.float32)):
        raise ValueError(f"state_dtype must be int8, bfloat16 or float32, got {dtype.name}")
    return dtype


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _zeros(params: PyTree, dtype: np.dtype, mask: Mask) -> PyTree:
    def zeros(is_chosen: bool, p: jax.Array) -> jax.Array:
        is_narrow = is_chosen and jnp.issubdtype(p.dtype, jnp.floating)
        return jnp.zeros_like(p, dtype if is_narrow else jnp.promote_types(p.dtype, jnp.float32))

    return jax.tree.map(zeros, mask(params) if callable(mask) else mask, params)


def _map_leaves(fn: Callable[..., tuple[jax.Array, ...]], first: PyTree, *others: PyTree) -> tuple[PyTree, ...]:
    """Trees of the results of `fn(path, *leaves)`; where the first tree has None, leaves stay as they are."""
    treedef: Any
    flat, treedef = jax.tree_util.tree_flatten_with_path(first, is_leaf=lambda x: x is None)
    rows: list[tuple[Any, ...]] = []
    for (path, x), *rest in zip(flat, *map(treedef.flatten_up_to, others), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        rows.append((None, *rest) if x is None else fn(name, x, *rest))
    columns = zip(*rows, strict=True) if rows else [()] * (1 + len(others))
    return tuple(map(treedef.unflatten, columns))
