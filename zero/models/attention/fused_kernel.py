"""Causal attention in two kernels for TPU, forward and backward, written in Pallas.

Scores of a block have keys along sublanes and queries along lanes. Maxima and sums over keys are then elementwise, the
log-sum-exp of queries is a vector of lanes, ALiBi's bias is one addition, and the three products of the backward pass
that take scores or their gradients as operands need no transposition. A kernel holds a chunk of queries and one of keys
in VMEM; its loops over tiles are unrolled, and scores come before the softmax of earlier tiles, so that products run
beside it. Pairs of chunks outside a window are not computed, and VMEM holds gradients of as many chunks as it touches.

Scores are in units of log2: queries come multiplied by log2(e). Shapes are named by suffix: B rows, H heads of queries,
G heads of keys, T and S positions of queries and keys, K head dimension.

Sources: Dao, FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2; Press et al., ALiBi, arXiv 2108.12409.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from zero.models.attention.tpu_kernels import TpuKernel, chunks_reached
from zero.models.stack import ATTENTION_OUTPUT, ATTENTION_SUMS

LOG2E = math.log2(math.e)
_ROWS = (((1,), (1,)), ((), ()))  # contracts the last dimensions of both
_PLAIN = (((1,), (0,)), ((), ()))  # a product of matrices
_LOWEST = -1e30
_LANES = 128
_EARLIER = 2  # tiles by which scores come before their softmax (benchmarks/measured/attention.md)


class Tile(NamedTuple):
    """A block of queries and some keys.

    Attributes:
      query: the first query, counted in its chunk.
      key: the first key, counted in its chunk.
      keys: how many.
      first: the first key, counted from the first query. Where all queries see all keys, as if the chunk of keys were
        the one before.
    """

    query: int
    key: int
    keys: int
    first: int


class Problem(NamedTuple):
    """The sizes and the features of one call of both kernels. A row has `chunks * blocks * block` positions."""

    rows: int
    heads: int  # of keys
    shared: int  # heads of queries per head of keys
    width: int  # head dimension
    block: int  # queries of a tile, and keys of one in the backward pass
    tile_keys: int  # keys of a tile in the forward pass
    blocks: int  # per chunk
    chunks: int
    in_float32: bool  # whether products take operands in float32
    has_alibi: bool
    has_segments: bool
    window: int  # positions that a query sees, itself included
    cap: float | None  # of scores in units of log2
    vmem: int | None  # bytes of VMEM; None for the compiler's limit
    interpret: bool

    @property
    def chunk(self) -> int:
        return self.block * self.blocks

    @property
    def reach(self) -> int:
        """How many chunks before its own the earliest key that a query sees can lie."""
        return min(self.chunks - 1, chunks_reached(self.window, self.chunk))

    @property
    def inside(self) -> int:
        """How many chunks before its own all queries of a chunk see whole."""
        return max(0, min(self.reach, self.window // self.chunk - 1))

    @property
    def held(self) -> int:
        """Chunks of queries whose gradients the backward kernel holds: more are never begun and incomplete at once."""
        return self.reach + 1

    def computed(self, keys: int) -> int:
        """The number of computed scores, in tiles of a block of queries and `keys` keys."""
        starts = range(0, self.chunks * self.chunk, self.block)
        seen = sum((start + self.block) // keys - max(0, (start - self.window + 1) // keys) for start in starts)
        return self.rows * self.heads * self.shared * seen * self.block * keys

    @property
    def is_flat(self) -> bool:
        """Whether arrays are `(B, T, H K)`, as products make them, with heads of whole tiles; else `(B H, T, K)`."""
        return self.width % _LANES == 0

    def tiles(self, query: int, chunks_before: int, keys: int) -> list[Tile]:
        """The tiles of a block of queries in a chunk of keys, this many before its own, with keys that it sees."""
        shift = query + chunks_before * self.chunk
        tiles = [Tile(query, key, keys, key - shift) for key in range(0, self.chunk, keys)]
        return [tile for tile in tiles if tile.first < self.block and tile.first + keys > 1 - self.window]

    def first_keys(self, i: Any) -> Any:
        """The earliest chunk of keys that a chunk of queries sees."""
        return jnp.maximum(i - self.reach, 0)

    def pairs(self, by_keys: bool) -> tuple[np.ndarray, np.ndarray]:
        """Chunks of queries and of keys, one pair after the other: all keys of a chunk of queries, or the reverse.

        In both orders a chunk of queries meets its keys from the earliest to those on the diagonal.
        """
        queries, keys = np.tril_indices(self.chunks)
        is_near = queries - keys <= self.reach
        queries = queries[is_near]
        keys = keys[is_near]
        if by_keys:
            order = np.lexsort((queries, keys))
            queries, keys = queries[order], keys[order]
        return queries.astype(np.int32), keys.astype(np.int32)


def fused_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    slopes_H: jax.Array | None,
    starts_BT: jax.Array | None,
    *,
    scale: float,
    generation: TpuKernel,
    window: int = 0,
    cap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention `(B, T, H, K)`; T is a multiple of 128.

    Args:
      q_BTHK, k_BTGK, v_BTGK: queries, keys and values; `H / G` heads of queries share one of keys.
      slopes_H: ALiBi's slopes, which are constants: their gradient is zero; None for no bias.
      starts_BT: the first position that each query sees, int32; None for 0.
      scale: factor of the products of queries and keys.
      generation: the TPU generation.
      window: number of positions that a query sees, itself included; 0 for all before it.
      cap: scores p become `cap tanh(p / cap)`; not with slopes.
      interpret: whether to emulate the kernels on CPU.
    """
    rows, positions, heads, width = q_BTHK.shape
    shared = heads // k_BTGK.shape[2]
    in_float32 = generation.in_float32
    block, blocks, chunks = generation.cut(positions, width, q_BTHK.dtype.itemsize)
    problem = Problem(
        rows,
        heads // shared,
        shared,
        width,
        block,
        min(generation.tile_keys, block),
        blocks,
        chunks,
        in_float32,
        slopes_H is not None,
        starts_BT is not None,
        min(window or positions, positions),
        None if cap is None else cap * LOG2E,
        generation.vmem,
        interpret,
    )
    slopes = jnp.zeros(heads) if slopes_H is None else slopes_H * LOG2E
    starts = jnp.zeros((rows, positions), jnp.int32) if starts_BT is None else starts_BT

    def viewed(x_BTHK: jax.Array) -> jax.Array:
        if problem.is_flat:
            return lax.collapse(x_BTHK, 2)
        return lax.collapse(x_BTHK.swapaxes(1, 2), 0, 2)

    # In float32: as a number of bfloat16 the factor would be wrong by up to 0.4 %.
    scaled_BTHK = (q_BTHK.astype(jnp.float32) * (scale * LOG2E)).astype(q_BTHK.dtype)
    out = _attention(*map(viewed, (scaled_BTHK, k_BTGK, v_BTGK)), slopes, starts[:, None], problem)
    if problem.is_flat:
        return out.reshape(q_BTHK.shape)
    return out.reshape(rows, heads, positions, width).swapaxes(1, 2)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, slopes: jax.Array, starts: jax.Array, problem: Problem) -> Any:
    return _forward(q, k, v, slopes, starts, problem)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, slopes: jax.Array, starts: jax.Array, problem: Problem) -> Any:
    """The output, and what the backward pass needs: also log2 of each query's sum of exponentials, `(B, H, 1, T)`."""
    width = problem.width
    chunk = problem.chunk
    operands = [x.astype(jnp.float32) if problem.in_float32 else x for x in (q, k, v)]
    call = _call(
        partial(_forward_kernel, problem),
        problem,
        inputs=("queries", "keys", "keys", "starts"),
        outputs=[("queries", q), ("of queries", _query_sums(problem))],
        scratch=[
            pltpu.VMEM((width, chunk), operands[0].dtype),
            *[pltpu.VMEM((1, chunk), jnp.float32)] * 2,
            pltpu.VMEM((width, chunk), jnp.float32),
        ],
        products=2,
        computed=problem.computed(problem.tile_keys),
        by_keys=False,
        name=f"zero_attention_fwd_{width}",
    )
    out, lse = call(slopes, *operands, starts)
    out, lse = checkpoint_name(out, ATTENTION_OUTPUT), checkpoint_name(lse, ATTENTION_SUMS)
    return out, (q, k, v, slopes, starts, out, lse)


def _backward(problem: Problem, saved: Any, grad: jax.Array) -> Any:
    q, k, v, slopes, starts, out, lse = saved
    width = problem.width
    chunk = problem.chunk
    shared = problem.shared
    operands = [x.astype(jnp.float32) if problem.in_float32 else x for x in (q, k, v, grad)]
    call = _call(
        partial(_backward_kernel, problem),
        problem,
        inputs=("queries", "keys", "keys", "queries", "queries", "of queries", "starts"),
        outputs=[("last queries", q), ("keys", k), ("keys", v)],
        scratch=[
            pltpu.VMEM((width, chunk), operands[0].dtype),
            pltpu.VMEM((shared, problem.held, 1, chunk), jnp.float32),
            pltpu.VMEM((shared, problem.held, width, chunk), jnp.float32),
            *[pltpu.VMEM((chunk, width), jnp.float32)] * 2,
        ],
        products=5,
        computed=problem.computed(problem.block),
        by_keys=True,
        name=f"zero_attention_bwd_{width}",
    )
    grads = call(slopes, *operands, out, lse, starts)
    return *grads, jnp.zeros_like(slopes), np.zeros(starts.shape, jax.dtypes.float0)


_attention.defvjp(_forward, _backward)


def _forward_kernel(problem: Problem, queries: Any, keys: Any, slopes: Any, *refs: Any) -> None:
    """A chunk of queries and one of keys; the last chunk of keys is the one on the diagonal.

    `refs` are inputs, outputs and scratch, as `_forward` lists them.
    """
    q_ref, k_ref, v_ref, starts_ref, out_ref, lse_ref, v_KS, most_1T, sum_1T, out_KT = refs
    head = pl.program_id(1) * problem.shared + pl.program_id(2)
    pair = pl.program_id(3)
    i = queries[pair]
    j = keys[pair]
    v_KS[...] = v_ref[0].T
    sums = (most_1T, _LOWEST), (sum_1T, 0.0), (out_KT, 0.0)

    def score(tile: Tile) -> jax.Array:
        return _scores(problem, q_ref, k_ref, slopes[head], starts_ref, i, j, tile)[0]

    def attend(chunks_before: int) -> None:
        """Adds a chunk of keys to the sums of a chunk of queries."""
        firsts = range(0, problem.chunk, problem.block)
        tiles = [tile for query in firsts for tile in problem.tiles(query, chunks_before, problem.tile_keys)]
        scores = _begun_early(score, tiles)
        for query in firsts:
            at = pl.ds(query, problem.block)
            if problem.chunks == 1:
                most, total, out = (jnp.full((x.shape[0], problem.block), first) for x, first in sums)
            else:
                is_first = j == problem.first_keys(i)
                most, total, out = (jnp.where(is_first, first, x[:, at]) for x, first in sums)
            for tile in tiles:
                if tile.query != query:
                    continue
                s_ST = next(scores)
                more = jnp.maximum(most, s_ST.max(0, keepdims=True))
                p_ST = jnp.exp2(s_ST - more)
                shrink = jnp.exp2(most - more)
                total = total * shrink + p_ST.sum(0, keepdims=True)
                values = v_KS[:, pl.ds(tile.key, tile.keys)]
                out = out * shrink + _dot(values, p_ST.astype(values.dtype), _PLAIN)
                most = more
            if chunks_before == 0:
                out_ref[0, at] = (out / total).T.astype(out_ref.dtype)
                lse_ref[0, 0, :, at] = most + jnp.log2(total)
            else:
                most_1T[:, at] = most
                sum_1T[:, at] = total
                out_KT[:, at] = out

    _for_each_pair(problem, i, j, attend)


def _begun_early(compute: Any, items: Sequence[Any]) -> Iterator[Any]:
    """`compute(item)` for each; in the program it comes `_EARLIER` items before it is taken.

    The compiler mostly keeps the order of a program, so products run beside the softmax of the tiles before.
    """
    begun: deque[Any] = deque()
    for item in items:
        begun.append(compute(item))
        if len(begun) > _EARLIER:
            yield begun.popleft()
    yield from begun


def _backward_kernel(problem: Problem, queries: Any, keys: Any, slopes: Any, *refs: Any) -> None:
    """A chunk of queries and one of keys; the first chunk of queries is the one on the diagonal.

    It is also the one to which no later keys add: its gradient of queries is complete. `refs` are inputs, outputs and
    scratch, as `_backward` lists them.
    """
    q_ref, k_ref, v_ref, grad_ref, out_ref, lse_ref, starts_ref, *rest = refs
    dq_ref, dk_ref, dv_ref, k_KS, delta_1T, dq_KT, dk_SK, dv_SK = rest
    pair = pl.program_id(2)
    member = pl.program_id(3)
    i = queries[pair]
    j = keys[pair]
    at_i = i % problem.held
    head = pl.program_id(1) * problem.shared + member
    k_KS[...] = k_ref[0].T

    def delta_of(at: Any) -> jax.Array:
        """The products of outputs and their gradients, summed over the head dimension."""
        products = out_ref[0, at].astype(jnp.float32) * grad_ref[0, at].astype(jnp.float32)
        return products.T.sum(0, keepdims=True)

    if problem.chunks > 1:

        @pl.when(j == problem.first_keys(i))
        def _() -> None:
            delta_1T[member, at_i] = delta_of(slice(None))

    def attend_block(query: int, chunks_before: int) -> None:
        """Adds what a block of queries sends back to itself and to a chunk of keys."""
        at = pl.ds(query, problem.block)
        if problem.chunks == 1:
            delta = delta_of(at)
            dq = jnp.zeros((problem.width, problem.block), jnp.float32)
        else:
            delta = delta_1T[member, at_i, :, at]
            dq = _unless(j == problem.first_keys(i), dq_KT[member, at_i, :, at])
        for tile in problem.tiles(query, chunks_before, problem.block):
            key_rows = pl.ds(tile.key, tile.keys)
            s_ST, bend_ST = _scores(problem, q_ref, k_ref, slopes[head], starts_ref, i, j, tile)
            p_ST = jnp.exp2(s_ST - lse_ref[0, 0, :, at])
            dp_ST = _dot(v_ref[0, key_rows], grad_ref[0, at], _ROWS)
            ds_ST = p_ST * (dp_ST - delta)
            if bend_ST is not None:
                ds_ST *= bend_ST
            ds_ST = ds_ST.astype(k_KS.dtype)
            dv = _dot(p_ST.astype(k_KS.dtype), grad_ref[0, at], _PLAIN)
            dk = _dot(ds_ST, q_ref[0, at], _PLAIN)
            if tile.first == 0:  # the first that these keys receive from a head of queries
                dk_SK[key_rows] = _unless(problem.shared == 1 or member == 0, dk_SK[key_rows]) + dk
                dv_SK[key_rows] = _unless(problem.shared == 1 or member == 0, dv_SK[key_rows]) + dv
            else:
                dk_SK[key_rows] += dk
                dv_SK[key_rows] += dv
            dq += _dot(k_KS[:, key_rows], ds_ST, _PLAIN)
        if chunks_before == 0:
            dq_ref[0, at] = (dq / LOG2E).T.astype(dq_ref.dtype)
        else:
            dq_KT[member, at_i, :, at] = dq

    def attend(chunks_before: int) -> None:
        for query in range(0, problem.chunk, problem.block):
            attend_block(query, chunks_before)

    _for_each_pair(problem, i, j, attend)

    def finish() -> None:
        dk_ref[0] = (dk_SK[...] / LOG2E).astype(dk_ref.dtype)
        dv_ref[0] = dv_SK[...].astype(dv_ref.dtype)

    if problem.chunks * problem.shared == 1:
        finish()
    else:
        pl.when((i == jnp.minimum(j + problem.reach, problem.chunks - 1)) & (member == problem.shared - 1))(finish)


def _for_each_pair(problem: Problem, i: Any, j: Any, attend: Any) -> None:
    """Calls `attend(chunks before)` for a pair of chunks: how many chunks the keys are before the queries.

    All pairs in which every query sees every key have the program of 1.
    """
    if problem.chunks == 1:
        attend(0)
        return
    pl.when(i == j)(partial(attend, 0))
    if problem.inside:
        pl.when((i > j) & (i - j <= problem.inside))(partial(attend, 1))
    for chunks_before in range(problem.inside + 1, problem.reach + 1):
        pl.when(i - j == chunks_before)(partial(attend, chunks_before))


def _unless(is_first: Any, x: jax.Array) -> jax.Array:
    return jnp.where(is_first, jnp.zeros_like(x), x)


def _scores(
    problem: Problem, q_ref: Any, k_ref: Any, slope: Any, starts_ref: Any, i: Any, j: Any, tile: Tile
) -> tuple[jax.Array, jax.Array | None]:
    """Scores `(keys, queries)` of a tile, and the derivative of the cap (`bend_ST`) if there is one.

    ALiBi counts positions from the first query of the tile, because a term that all keys of a query share changes
    nothing.
    """
    at = pl.ds(tile.query, problem.block)
    s_ST = _dot(k_ref[0, pl.ds(tile.key, tile.keys)], q_ref[0, at], _ROWS)
    bend_ST = None
    if problem.cap is not None:
        bounded_ST = jnp.tanh(s_ST * (1 / problem.cap))
        s_ST = problem.cap * bounded_ST
        bend_ST = 1 - bounded_ST**2
    offset = (j - i) * problem.chunk + tile.key - tile.query  # of the first key from the first query
    key_S1 = lax.broadcasted_iota(jnp.int32, (tile.keys, 1), 0) + offset
    if problem.has_alibi:
        s_ST += slope * key_S1.astype(jnp.float32)
    later_ST = lax.broadcasted_iota(jnp.int32, s_ST.shape, 0) - lax.broadcasted_iota(jnp.int32, s_ST.shape, 1)
    if tile.first + tile.keys > 1:
        s_ST = jnp.where(later_ST <= -tile.first, s_ST, _LOWEST)
    if problem.block - tile.first > problem.window:
        s_ST = jnp.where(later_ST > -tile.first - problem.window, s_ST, _LOWEST)
    if problem.has_segments:
        s_ST = jnp.where(key_S1 + i * problem.chunk + tile.query >= starts_ref[0, :, at], s_ST, _LOWEST)
    return s_ST, bend_ST


def _dot(a: jax.Array, b: jax.Array, dims: Any) -> jax.Array:
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _query_sums(problem: Problem) -> jax.ShapeDtypeStruct:
    heads = problem.heads * problem.shared
    positions = problem.chunk * problem.chunks
    return jax.ShapeDtypeStruct((problem.rows, heads, 1, positions), jnp.float32)


def block_index(problem: Problem, kind: str, b: Any, g: Any, member: Any, i: Any, j: Any) -> tuple[Any, ...]:
    """The block of an array of this kind that a step of a kernel has in VMEM.

    A block of an output is written back when it is left, so the steps that have it follow one another.

    Args:
      kind: "queries", also of outputs and gradients; "last queries", complete at the diagonal; "keys"; "of queries", a
        number for each; "starts".
      b, g, member: the row, the head of keys, and which of its heads of queries.
      i, j: the chunks of queries and of keys.
    """
    shared = problem.shared
    if kind == "starts":
        return b, 0, i
    if kind == "last queries":  # below the diagonal nothing is written, and the last block stays
        member = jnp.where(i == j, member, shared - 1)
    at = j if kind in ("keys", "last queries") else i
    head, heads = (g, problem.heads) if kind == "keys" else (g * shared + member, problem.heads * shared)
    if kind == "of queries":
        return b, head, 0, at
    return (b, at, head) if problem.is_flat else (b * heads + head, at, 0)


def _call(
    kernel: Any,
    problem: Problem,
    *,
    inputs: tuple[str, ...],
    outputs: list[tuple[str, Any]],
    scratch: list[Any],
    products: int,
    computed: int,
    by_keys: bool,
    name: str,
) -> Any:
    """A kernel over rows, heads of keys, and heads of queries and pairs of chunks, the latter first if `by_keys`.

    The slopes of all heads come before its inputs.
    """
    shared = problem.shared
    chunk = problem.chunk
    pairs = problem.pairs(by_keys)

    def spec(kind: str) -> pl.BlockSpec:
        def index(b: Any, g: Any, x: Any, y: Any, queries: Any, keys: Any, _: Any) -> tuple[Any, ...]:
            member, pair = (y, x) if by_keys else (x, y)
            return block_index(problem, kind, b, g, member, queries[pair], keys[pair])

        shapes = {"starts": (1, 1, chunk), "of queries": (1, 1, 1, chunk)}
        return pl.BlockSpec(shapes.get(kind, (1, chunk, problem.width)), index)

    grid = (problem.rows, problem.heads, *((len(pairs[0]), shared) if by_keys else (shared, len(pairs[0]))))
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=grid,
            in_specs=[spec(kind) for kind in inputs],
            out_specs=[spec(kind) for kind, _ in outputs],
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=problem.vmem
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * computed * _LANES * math.ceil(problem.width / _LANES),  # of whole units
            transcendentals=computed,
            bytes_accessed=sum(x.size * x.dtype.itemsize for _, x in outputs),
        ),
        interpret=problem.interpret,
        name=name,
    )
    return partial(call, *map(jnp.asarray, pairs))
