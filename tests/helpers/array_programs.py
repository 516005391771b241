"""Random programs on small float64 arrays: reshapes, products, loops, branches, sorts, factorizations.

`Program(seed)` is a function of a list of arrays that returns arrays of the same shapes. Every value that it computes
has a part in the result, weighted by position, so that a wrong or displaced element shows. Operations keep numbers of
order one and are smooth where sums may round differently; in float64 rounding stays below 1e-9.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.helpers.equations import equations

Operation = Callable[[jax.Array, int, int], jax.Array]
MOST_ELEMENTS = 500


def settle(x: jax.Array) -> jax.Array:
    """Floats between -1 and 1."""
    return lax.tanh(lax.convert_element_type(x, jnp.float64))


def weights(shape: tuple[int, ...]) -> np.ndarray:
    """A different number for each position."""
    return np.sin(1.7 * np.arange(math.prod(shape)) + 0.7).reshape(shape)


def apart(x: jax.Array) -> jax.Array:
    """The array without ties, of which rounding would choose one."""
    return x + weights(x.shape) / 99


def checksum(x: jax.Array) -> jax.Array:
    """The mean of all elements, weighted by position."""
    dims = tuple(range(x.ndim))
    return lax.dot_general(x, jnp.asarray(weights(x.shape) / x.size), ((dims, dims), ((), ())))


def ones_at(dim: int, v: jax.Array, size: int = 1, others: int = 0) -> list[int]:
    return [size if d == dim else others for d in range(v.ndim)]


def matrix(v: jax.Array) -> jax.Array:
    """At most 12 rows and columns."""
    return v.reshape(v.shape[0], -1)[:12, :12]


def positive(v: jax.Array) -> jax.Array:
    """A positive definite matrix, well conditioned."""
    m = v.reshape(v.shape[0], -1)
    return jnp.eye(m.shape[0]) + m @ m.T / m.shape[1]


def largest(v: jax.Array, dim: int, n: int) -> jax.Array:
    values, positions = lax.top_k(jnp.moveaxis(apart(v), dim, -1), 1)
    return values + positions


def squashed(w: jax.Array, u: jax.Array) -> jax.Array:
    """A function of a symmetric matrix, whatever the signs of its eigenvectors."""
    return (u * lax.tanh(w)[None]) @ u.T


def schur(v: jax.Array, dim: int, n: int) -> jax.Array:
    factors: Any = jax.scipy.linalg.schur(positive(v)[:12, :12])
    return factors[1] @ lax.tanh(factors[0]) @ factors[1].T


def polar(v: jax.Array, dim: int, n: int) -> jax.Array:
    m = v.reshape(v.shape[0], -1)
    u, _, w = thin_svd(m / 9 + jnp.eye(m.shape[0], m.shape[1]))
    return (u @ w).reshape(v.shape)


def reassembled(v: jax.Array, dim: int, n: int) -> jax.Array:
    u, _, w = thin_svd(positive(v))
    return u @ w


def thin_svd(m: jax.Array) -> Any:
    return jnp.linalg.svd(m, full_matrices=False)


def like(v: jax.Array, w: jax.Array) -> jax.Array:
    """`w` if it has the shape of `v`; else `v`, with a sum of `w` in it."""
    if w.shape == v.shape:
        return settle(w)
    return settle(v + checksum(settle(w))) if w.size else v


@jax.custom_jvp
def scaled(x: jax.Array) -> jax.Array:
    return x * 2


scaled.defjvp(lambda x, t: (scaled(*x), 3 * t[0]))
rounded = jax.custom_vjp(lambda x: jnp.round(x * 3 + 0.2345))
rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))

UNARY: list[Callable[[jax.Array], jax.Array]] = [
    *(jnp.abs, jnp.sin, jnp.cos, jnp.exp, jnp.expm1, jnp.square, jnp.negative, jnp.sign, jnp.arctan, jnp.sinh),
    *(jnp.cosh, jnp.arcsinh, jnp.cbrt, jax.nn.relu, lax.erf, lax.erfc, lax.logistic, jnp.nan_to_num, scaled, rounded),
    lambda v: jnp.sqrt(v + 2),
    lambda v: lax.rsqrt(v + 2),
    lambda v: jnp.log(v + 2) + jnp.log1p(v / 2),
    lambda v: jnp.arcsin(v / 2) + jnp.arccos(v / 2) + jnp.arctanh(v / 2) + jnp.arccosh(v + 3),
    lambda v: lax.lgamma(v + 2) + lax.digamma(v + 2) + lax.bessel_i1e(v),
    lambda v: jnp.floor(v * 3 + 0.321) + jnp.ceil(v * 3 + 0.123) + jnp.round(v * 5 + 0.111),
    lambda v: jnp.where(jnp.isfinite(v) & ~(v > 0.1234), v, 0.5),
    lambda v: jnp.clip(v, -0.5, 0.25) + v**3,
    lambda v: ((v * 99 + 0.5).astype(jnp.int32) ^ 5).astype(jnp.float64) / 99,
    lambda v: lax.reduce_precision(v, 8, 30),
    lambda v: (v + 1j * v).real + jnp.imag(1j * v),
    lambda v: lax.stop_gradient(v) + jax.checkpoint(lambda y: y * y)(v),
    lambda v: jax.grad(lambda y: jnp.sum(scaled(y) * rounded(y) + jax.nn.gelu(y)))(v),
    lambda v: jax.jit(lambda y: y * jnp.asarray(3.0))(v),
    lambda v: lax.optimization_barrier((v, v * 2))[1],
]
BINARY: list[Callable[[jax.Array, jax.Array], jax.Array]] = [
    *(jnp.add, jnp.subtract, jnp.multiply, jnp.minimum, jnp.maximum, jnp.arctan2, lax.nextafter),
    lambda v, w: v / (w + 3),
    lambda v, w: (v + 2) ** w,
    lambda v, w: jnp.fmod(v, w + 3),
    lambda v, w: jnp.where(v > w + 0.0123, v, w * 2),
    lambda v, w: lax.clamp(-0.3, v, 0.4) * w,
]

STRAIGHT: dict[str, Operation] = {
    "elementwise": lambda v, dim, n: UNARY[n % len(UNARY)](v),
    "positions": lambda v, dim, n: v * lax.sin(lax.broadcasted_iota(jnp.float64, v.shape, dim)),
    "constants": lambda v, dim, n: v * weights(v.shape),
    "roll": lambda v, dim, n: jnp.roll(v, n, dim),
    "flip": lambda v, dim, n: jnp.flip(v, dim),
    "sort": lambda v, dim, n: jnp.sort(v, dim),
    "sort by": lambda v, dim, n: lax.sort((apart(v), v * 2), dimension=dim)[1],
    "cumsum": lambda v, dim, n: jnp.cumsum(v, dim) / v.shape[dim],
    "cumprod": lambda v, dim, n: jnp.cumprod(v + 1, dim),
    "cummax": lambda v, dim, n: lax.cummax(v, dim) + lax.cummin(v, dim) + lax.cumlogsumexp(v, dim, reverse=bool(n % 2)),
    "transpose": lambda v, dim, n: jnp.moveaxis(v, dim, n % v.ndim),
    "expand": lambda v, dim, n: jnp.expand_dims(v, dim),
    "squeeze": lambda v, dim, n: lax.squeeze(lax.slice_in_dim(v, 0, 1, 1, dim), (dim,)),
    "broadcast": lambda v, dim, n: jnp.broadcast_to(v, (1 + n % 3, *v.shape)),
    "broadcast one": lambda v, dim, n: jnp.broadcast_to(
        lax.slice_in_dim(v, 0, 1, 1, dim), [3 if d == dim else size for d, size in enumerate(v.shape)]
    ),
    "sum": lambda v, dim, n: jnp.sum(v, dim, keepdims=bool(n % 2)),
    "center": lambda v, dim, n: v - jnp.mean(v, dim, keepdims=True),
    "normalize": lambda v, dim, n: v / (0.1 + jnp.linalg.norm(v)),
    "softmax": lambda v, dim, n: jax.nn.softmax(v, dim),
    "max": lambda v, dim, n: jnp.max(v, dim, keepdims=bool(n % 2)) + jnp.min(v),
    "prod": lambda v, dim, n: jnp.prod(1 + v / 9, dim),
    "any": lambda v, dim, n: jnp.any(v > 0.2345, dim) + 2 * jnp.all(v > -0.3456, dim),
    "xor": lambda v, dim, n: lax.reduce_xor((v * 9 + 0.3).astype(jnp.int32), (dim,)) % 7,
    "or": lambda v, dim, n: (
        lax.reduce((v * 9 + 0.3).astype(jnp.int32), jnp.int32(0), lax.bitwise_or, (dim,)) % 7
        + lax.reduce((v * 9 + 0.3).astype(jnp.int32), jnp.int32(-1), lax.bitwise_and, (dim,)) % 7
    ),
    "argmax": lambda v, dim, n: jnp.argmax(apart(v), dim) + jnp.argmin(apart(v), dim),
    "top_k": largest,
    "median": lambda v, dim, n: jnp.median(v, dim),
    "tile": lambda v, dim, n: jnp.tile(v, ones_at(dim, v, 2, 1)),
    "repeat": lambda v, dim, n: jnp.repeat(v, 2, dim),
    "pad": lambda v, dim, n: jnp.pad(v, [(s * (n % 2), s * (n % 5)) for s in ones_at(dim, v)], constant_values=0.5),
    "pad edge": lambda v, dim, n: jnp.pad(v, [(s * (n % 2), s * 2) for s in ones_at(dim, v)], mode="edge"),
    "pad wrap": lambda v, dim, n: jnp.pad(v, [(s, s) for s in ones_at(dim, v)], mode="wrap"),
    "dilate": lambda v, dim, n: lax.pad(v, jnp.float64(0.1), [(-s, 1 - s, s) for s in ones_at(dim, v)]),
    "concatenate": lambda v, dim, n: jnp.concatenate([v, v + 1], dim),
    "stack": lambda v, dim, n: jnp.stack([v, v + 1], dim),
    "split": lambda v, dim, n: jnp.concatenate(jnp.split(v, [n % (v.shape[dim] + 1)], dim)[::-1], dim),
    "slice": lambda v, dim, n: lax.slice_in_dim(v, n % v.shape[dim], None, 1 + n % 2, dim),
    "front": lambda v, dim, n: lax.slice_in_dim(v, 0, n % (v.shape[dim] + 1), 1, dim),
    "front refilled": lambda v, dim, n: jnp.pad(
        lax.slice_in_dim(v, 0, v.shape[dim] - 1, 1, dim), [(0, s) for s in ones_at(dim, v)], constant_values=0.25
    ),
    "empty": lambda v, dim, n: jnp.concatenate([v, lax.slice_in_dim(v, 0, 0, 1, dim)], dim),
    "dynamic slice": lambda v, dim, n: lax.dynamic_slice_in_dim(v, n % 2, max(1, v.shape[dim] - 1), dim),
    "update": lambda v, dim, n: lax.dynamic_update_slice_in_dim(v, lax.slice_in_dim(v, 0, 1, 1, dim) + 1, n, dim),
    "take": lambda v, dim, n: jnp.take(v, jnp.array([0, n % v.shape[dim]]), dim),
    "scatter": lambda v, dim, n: v.at[n % v.shape[0]].add(0.5),
    "flatten": lambda v, dim, n: v.reshape(-1),
    "fold": lambda v, dim, n: v.reshape(*v.shape[:dim], math.prod(v.shape[dim : dim + 2]), *v.shape[dim + 2 :]),
    "fold and unfold": lambda v, dim, n: UNARY[n % len(UNARY)](v.reshape(-1, v.shape[-1])).reshape(v.shape),
    "unfold": lambda v, dim, n: v.reshape(*v.shape[:dim], *halves(v.shape[dim]), *v.shape[dim + 1 :]),
    "blocks": lambda v, dim, n: in_blocks(v, 2 + n % 4),
    "bits": lambda v, dim, n: (
        lax.bitcast_convert_type(jnp.flip(lax.bitcast_convert_type(v.astype(jnp.float32), jnp.int16), 0), jnp.float32)
        * (n % 2)
    ),
    "square": lambda v, dim, n: jnp.einsum("...i,...j->ij", v, v) / v.size,
    "gram": lambda v, dim, n: jnp.einsum("i...,j...->ij", v, v) / v.size,
    "batched": lambda v, dim, n: jnp.einsum("i...,i...->i", v, v),
    "outer": lambda v, dim, n: jnp.outer(v.reshape(-1)[:9], v.reshape(-1)[:7]),
    "dot": lambda v, dim, n: jnp.tensordot(v, weights((v.shape[dim], 3)), ((dim,), (0,))),
    "convolve": lambda v, dim, n: jnp.convolve(v.reshape(-1), jnp.array([0.2, 0.5, 0.3]), mode="same"),
    "fft": lambda v, dim, n: jnp.abs(jnp.fft.fft(v, axis=dim)) / v.shape[dim],
    "random": lambda v, dim, n: v + jax.random.uniform(jax.random.key(n), v.shape, v.dtype),
    "shuffle": lambda v, dim, n: jax.random.permutation(jax.random.key(n), v, dim),
    "qr": lambda v, dim, n: jnp.matmul(*jnp.linalg.qr(v.reshape(v.shape[0], -1))),
    "svd": lambda v, dim, n: jnp.linalg.svd(matrix(v), compute_uv=False),
    "low rank": reassembled,
    "cholesky": lambda v, dim, n: jnp.linalg.cholesky(positive(v)),
    "triangular solve": lambda v, dim, n: lax.linalg.triangular_solve(
        jnp.linalg.cholesky(positive(v)), v.reshape(v.shape[0], -1), left_side=True, lower=True
    ).reshape(v.shape),
    "solve": lambda v, dim, n: jnp.linalg.solve(positive(v), v.reshape(v.shape[0], -1)).reshape(v.shape),
    "eigh": lambda v, dim, n: squashed(*jnp.linalg.eigh(positive(v)[:12, :12])),
    "eig": lambda v, dim, n: jnp.sort(jnp.linalg.eigvals(positive(v)[:12, :12]).real),
    "schur": schur,
    "polar": polar,
}


def halves(size: int) -> tuple[int, int]:
    """Two factors of the size, the first the smaller.

    >>> halves(12), halves(7)
    ((3, 4), (1, 7))
    """
    first = max(factor for factor in range(1, math.isqrt(size) + 1) if size % factor == 0)
    return first, size // first


def in_blocks(v: jax.Array, width: int) -> jax.Array:
    """Scaled by the maximum of each block of the flat array, padded to whole blocks, as 8-bit optimizers do."""
    flat = v.reshape(-1)
    blocks = jnp.pad(flat, (0, -flat.size % width)).reshape(-1, width)
    return (blocks / (0.5 + jnp.max(jnp.abs(blocks), 1, keepdims=True))).reshape(-1)[: flat.size].reshape(v.shape)


def newton_schulz(v: jax.Array, steps: int) -> jax.Array:
    """A loop of products, as in Muon."""
    m = v.reshape(v.shape[0], -1)
    start = m / (1 + jnp.linalg.norm(m))
    return lax.fori_loop(0, steps, lambda _, y: 1.5 * y - 0.5 * y @ (y.T @ y), start).reshape(v.shape)


def inner(n: int) -> Operation:
    """An operation for the body of a loop or a branch."""
    names = sorted(STRAIGHT)
    return STRAIGHT[names[n * 31 % len(names)]]


def body(dim: int, n: int) -> Callable[[jax.Array], jax.Array]:
    return lambda y: like(y, inner(n)(y, dim % y.ndim, n) if y.size else y)


def over_rows(v: jax.Array, dim: int, n: int) -> jax.Array:
    """A scan over the first dimension, with a carry of the shape of a row."""
    step = body(dim, n) if v.ndim > 1 else jnp.sin

    def run(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        return settle(carry + step(row)), step(carry) * row

    last, rows = lax.scan(run, jnp.zeros(v.shape[1:], v.dtype), v, reverse=bool(n % 2))
    return rows + last[None]


NESTED: dict[str, Operation] = {
    "newton schulz": lambda v, dim, n: newton_schulz(v, 1 + n % 3),
    "loop of halves": lambda v, dim, n: lax.fori_loop(0, 2, lambda i, y: settle(y * 0.5 + v + i), jnp.zeros_like(v)),
    "loop": lambda v, dim, n: lax.fori_loop(0, 2, lambda _, y: body(dim, n)(y), v),
    "loop that gathers results": lambda v, dim, n: lax.scan(lambda y, k: (body(dim, n)(y), y * k), v, jnp.arange(2.0))[
        1
    ],
    "scan over rows": over_rows,
    "map over rows": lambda v, dim, n: lax.map(body(dim, n) if v.ndim > 1 else jnp.sin, v),
    "while": lambda v, dim, n: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, body(dim, n)(c[1])), (0, v))[1],
    "while above": lambda v, dim, n: lax.while_loop(
        lambda c: (jnp.sum(c[1] ** 2) > 0.0123) & (c[0] < 3), lambda c: (c[0] + 1, c[1] * 0.4), (0, v)
    )[1],
    "branch": lambda v, dim, n: lax.cond(jnp.sum(v) > 0.0123, body(dim, n), lambda y: settle(y + jnp.min(y)), v),
    "branch on a constant": lambda v, dim, n: lax.switch(n % 3, [body(dim, n), jnp.zeros_like, jnp.sin], v),
    "vmap": lambda v, dim, n: jax.vmap(body(dim, n), dim, dim)(v) if v.ndim > 1 else v,
    "derivative": lambda v, dim, n: jax.grad(lambda y: jnp.sum(jnp.sin(y.reshape(-1, y.shape[-1]) * 2) ** 2))(v),
}
OPERATIONS = STRAIGHT | NESTED


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of arrays that the seed decides.

    Attributes:
      operations: how many, apart from those of `BINARY` between them.
      joins: whether it starts by joining two neighboring dimensions of each array.
      names: the operations to choose from.
    """

    seed: int
    operations: int = 5
    joins: bool = False
    names: tuple[str, ...] = tuple(OPERATIONS)

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Arrays of the same shapes."""
        rng = np.random.default_rng(self.seed)
        values = [self._joined(x, rng) if self.joins else x for x in arrays]
        for _ in range(self.operations if arrays else 0):
            v = values[max(0, len(values) - 1 - int(rng.exponential(1.5)))]
            name, dim, n = self.names[rng.integers(len(self.names))], int(rng.integers(8)), int(rng.integers(100))
            w = values[rng.integers(len(values))]
            if v.ndim and 0 < v.size:
                v = settle(OPERATIONS[name](v, dim % v.ndim, n))
            else:
                v = settle(v + 0.5)
            if v.size <= MOST_ELEMENTS and v.ndim < 5:
                values.append(v)
            if (
                rng.random() < 0.5
                and v.ndim == w.ndim
                and all(a == b or 1 in (a, b) for a, b in zip(v.shape, w.shape, strict=True))
            ):
                values.append(settle(BINARY[n % len(BINARY)](v, w)))
        return [self._result(x, values) for x in arrays]

    def _joined(self, x: jax.Array, rng: np.random.Generator) -> jax.Array:
        if x.ndim < 2:
            return x
        dim = int(rng.integers(x.ndim - 1))
        return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])

    def _result(self, x: jax.Array, values: Sequence[jax.Array]) -> jax.Array:
        """`x`, with all values of its size as arrays of its shape, and with sums of the others."""
        fitting = [lax.reshape(v, x.shape) for v in values if v.size == x.size]
        others = [checksum(v) for v in values if v.size and v.size != x.size]
        return settle(sum(fitting, x) + sum(others, jnp.float64(0)))


def traced_primitives() -> set[str]:
    """The names of the primitives of all operations."""
    v = jnp.zeros((3, 2, 2))
    programs = [jax.make_jaxpr(fn)(v) for fn in UNARY]
    programs += [jax.make_jaxpr(fn)(v, v) for fn in BINARY]
    programs += [jax.make_jaxpr(fn, (1, 2))(v, 0, n) for fn in OPERATIONS.values() for n in range(2)]
    return {equation.primitive.name for program in programs for equation in equations(program.jaxpr)}
