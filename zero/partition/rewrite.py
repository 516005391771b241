"""Rewrites a function of whole arrays into one of shards, or says which of its operations stands in the way.

An optimizer is written for whole arrays. Run on shards as it is, an element-wise one is right and any other is
silently wrong: a norm becomes the norm of a slice. So the function is traced on whole shapes, without computing
anything, and its operations are carried out one by one on what the device holds, each value known to be whole or split
along a dimension:

- an element-wise operation works on slices; a whole operand that meets a split one is sliced first;
- a broadcast, transpose, reduction or product along other dimensions moves the split dimension along;
- everything else needs the other devices. Inside `across_shards` a reduction over the split dimension is completed by
  a collective, a loop or a factorisation runs on one device, which owns it, and what has no rule is gathered. Elsewhere
  it is refused, by name.

Whatever passes is right by construction: sizes, masks and factorings that depend on a shape see the whole one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from zero.partition.collectives import Axis, gather_array, scatter_sum_array, slice_array
from zero.partition.layout import Layout, LeafLayout, PyTree, Split

_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac
imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or polygamma
population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
INLINED = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
RANDOM = frozenset(["random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"])
OWNED = frozenset(["scan", "while", "cholesky", "eig", "eigh", "lu", "qr", "schur", "svd", "triangular_solve"])
ACROSS_SHARDS = "zero_across_shards"  # the name of the jitted function that marks a region
REMEDIES = {
    "adafactor": "adafactor",
    "clip_by_global_norm": "clip_by_global_norm",
    "scale_by_factored_rms": "adafactor",
    "scale_by_muon": "muon",
    "scale_by_trust_ratio": "lamb or zero.lars",
}


class NotElementwiseError(ValueError):
    """A transform would be wrong on shards; the message names it, the operation and what is right."""


def across_shards(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Lets an optax transform that is not element-wise communicate between shards, so that it is right on them.

    Where arrays are split, its reductions over the split dimension end in an all-reduce; loops and factorisations run
    on gathered arrays, each on one device that owns it; other operations that have no such form on every device alike.
    Everywhere else it is the transform itself. Use it on the part of a chain that needs it.

    >>> clip = across_shards(optax.adaptive_grad_clip(0.1))
    >>> tx = optax.chain(clip, optax.adam(1e-3))
    """
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> PyTree:
        return _marked(inner.init)(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        return _marked(lambda *trees: inner.update(*trees, **extra))(updates, state, params)

    return optax.GradientTransformationExtraArgs(init, update)


def _marked(fn: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any) -> Any:
        return fn(*args)

    marked.__name__ = ACROSS_SHARDS
    return jax.jit(marked)


def run_on_shards(
    fn: Callable[..., PyTree], axis: Axis, inputs: Sequence[tuple[PyTree, Layout]], outputs: Layout | Sequence[Layout]
) -> PyTree:
    """`fn(*trees)` of whole trees, computed from shards.

    Per device: for each `(tree, layout)` of `inputs` shards in; shards as `outputs` says out. Call inside pmap.

    Raises:
      NotElementwiseError: an operation outside `across_shards` needs other devices, or draws random numbers.
    """
    whole = [_whole_shapes(tree, layout) for tree, layout in inputs]
    closed, out_shapes = jax.make_jaxpr(fn, return_shape=True)(*whole)
    values = [
        Value(x, leaf.splits[0] if leaf.splits else None)
        for tree, layout in inputs
        for x, leaf in zip(layout.treedef.flatten_up_to(tree), layout.leaves, strict=True)
    ]
    results = _Runner(axis, may_communicate=False).closed(closed, values)
    layouts = [outputs] if isinstance(outputs, Layout) else outputs
    leaves = [leaf for layout in layouts for leaf in layout.leaves]
    place = _Runner(axis, may_communicate=True).place
    placed = [
        place(x, leaf.splits[0] if leaf.splits else None, None).x for x, leaf in zip(results, leaves, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(out_shapes), placed)


def _whole_shapes(tree: PyTree, layout: Layout) -> PyTree:
    def one(leaf: LeafLayout, x: jax.Array) -> jax.ShapeDtypeStruct:
        if np.shape(x) != leaf.shard_shape:
            remedy = "; it is whole: zero.shard slices it inside pmap" if np.shape(x) == leaf.shape else ""
            raise ValueError(f"leaf {leaf.name}: expected a shard of {leaf.shard_shape}, got {np.shape(x)}{remedy}")
        aval = jax.typeof(x)
        return jax.ShapeDtypeStruct(leaf.shape, aval.dtype, weak_type=aval.weak_type)

    return layout.map(one, tree)


class Value(NamedTuple):
    """What a device holds of an array: its shard along one dimension, or (no split) the whole, alike on all devices.

    What lies in the padding of a shard is undefined.
    """

    x: Any
    split: Split | None


@dataclasses.dataclass(frozen=True)
class _Runner:
    axis: Axis
    may_communicate: bool
    callers: tuple[JaxprEqn, ...] = ()
    owned: dict[int, int] = dataclasses.field(default_factory=dict)  # elements of the work that each device owns

    def closed(self, closed: ClosedJaxpr, args: Sequence[Value]) -> list[Value]:
        return self.run(closed.jaxpr, closed.consts, args)

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        values = dict(zip(jaxpr.invars, args, strict=True))
        values |= {var: Value(x, None) for var, x in zip(jaxpr.constvars, consts, strict=True)}

        def read(atom: Any) -> Value:
            return Value(atom.val, None) if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            results = self.apply(eqn, [read(atom) for atom in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def apply(self, eqn: JaxprEqn, args: list[Value]) -> list[Value]:
        """One operation."""
        name = eqn.primitive.name
        if name in INLINED:
            inner = eqn.params[INLINED[name]]
            may_communicate = self.may_communicate or eqn.params.get("name") == ACROSS_SHARDS
            runner = _Runner(self.axis, may_communicate, (eqn, *self.callers), self.owned)
            return runner.closed(inner, args) if isinstance(inner, ClosedJaxpr) else runner.run(inner, (), args)
        if name == "cond" and args[0].split is None:
            return self.cond(eqn, args)
        if name in RANDOM and not self.may_communicate:
            self.refuse(eqn, "draws random numbers, which shards would draw alike")
        if all(arg.split is None for arg in args):
            return [Value(x, None) for x in _bind(eqn, [arg.x for arg in args])]
        if name in ELEMENTWISE:
            split = next(arg.split for arg in args if arg.split)
            aligned = [arg if _is_broadcast(arg, split) else self.place(arg, split, eqn) for arg in args]
            return [Value(x, split) for x in _bind(eqn, [arg.x for arg in aligned])]
        if name in OWNED:
            return _own(self, eqn, *args)
        rule = _RULES.get(name)
        result = rule(self, eqn, *args) if rule else None
        if result is not None:
            return [result]
        return [Value(x, None) for x in _bind(eqn, [self.place(arg, None, eqn).x for arg in args])]

    def place(self, value: Value, split: Split | None, eqn: JaxprEqn | None) -> Value:
        """The value, split like this, for an operation; only slicing a whole one needs no other device."""
        if value.split == split:
            return value
        x = value.x
        if value.split:
            if eqn and not self.may_communicate:
                self.refuse(eqn, "needs whole arrays")
            x = gather_array(x, _leaf(value), self.axis)
        if split:
            x = slice_array(jnp.asarray(x), LeafLayout((), x.shape, x.dtype, (split,)), self.axis)
        return Value(x, split)

    def cond(self, eqn: JaxprEqn, args: list[Value]) -> list[Value]:
        """Both branches run on shards; a result is split if it is in any branch."""
        index, operands = args[0].x, args[1:]
        splits: list[list[Split | None]] = []

        def branch(jaxpr: ClosedJaxpr, wanted: Sequence[Split | None] | None) -> Callable[..., list[Any]]:
            def run(*xs: Any) -> list[Any]:
                values = self.closed(jaxpr, [Value(x, arg.split) for x, arg in zip(xs, operands, strict=True)])
                if wanted is None:
                    splits.append([value.split for value in values])
                    return []
                return [self.place(value, split, eqn).x for value, split in zip(values, wanted, strict=True)]

            return run

        xs = [arg.x for arg in operands]
        for jaxpr in eqn.params["branches"]:
            jax.eval_shape(branch(jaxpr, None), *xs)
        wanted = [next((split for split in column if split), None) for column in zip(*splits, strict=True)]
        results = lax.switch(index, [branch(jaxpr, wanted) for jaxpr in eqn.params["branches"]], *xs)
        return [Value(x, split) for x, split in zip(results, wanted, strict=True)]

    def refuse(self, eqn: JaxprEqn, why: str) -> NoReturn:
        transform = _transform((eqn, *self.callers))
        right = f"use zero.{REMEDIES[transform]}, or " if transform in REMEDIES else "use "
        raise NotElementwiseError(
            f"{transform} is not element-wise: {eqn.primitive.name} {why}. Run on shards as it is, it would be wrong; "
            f"{right}zero.across_shards(...) around it, which communicates"
        )


def _bind(eqn: JaxprEqn, xs: Sequence[Any]) -> list[Any]:
    result = eqn.primitive.bind(*xs, **eqn.params)
    return list(result) if eqn.primitive.multiple_results else [result]


def _leaf(value: Value) -> LeafLayout:
    assert value.split
    shape = list(value.x.shape)
    shape[value.split.dim] = value.split.size
    return LeafLayout((), tuple(shape), np.dtype(value.x.dtype), (value.split,))


def _is_broadcast(value: Value, split: Split) -> bool:
    return value.split is None and (np.ndim(value.x) == 0 or np.shape(value.x)[split.dim] == 1)


def _moved(value: Value, dim: int) -> Split:
    assert value.split
    return dataclasses.replace(value.split, dim=dim)


def _transform(eqns: Sequence[JaxprEqn]) -> str:
    """The function that made the transform which an operation (and its callers) belongs to: `clip_by_global_norm`."""
    tracebacks: list[Any] = [eqn.source_info.traceback for eqn in eqns]
    for frame in [frame for traceback in tracebacks if traceback for frame in traceback.frames]:
        maker, _, inner = frame.function_name.partition(".<locals>.")
        if inner.split(".")[0] in ("update_fn", "init_fn", "update", "init"):
            return maker
    return "the transform"


# Rules for operations that are not element-wise, but have a form on shards. None: there is none for these arguments.


def _broadcast_in_dim(runner: _Runner, eqn: JaxprEqn, value: Value, *_: Value) -> Value | None:
    assert value.split
    dims = eqn.params["broadcast_dimensions"]
    split = _moved(value, dims[value.split.dim])
    shape = list(eqn.params["shape"])
    shape[split.dim] = split.shard_size
    return Value(lax.broadcast_in_dim(value.x, shape, dims), split)


def _reshape(runner: _Runner, eqn: JaxprEqn, value: Value, *_: Value) -> Value | None:
    """Where the split dimension survives."""
    assert value.split
    before = math.prod(_leaf(value).shape[: value.split.dim])
    sizes = list(eqn.params["new_sizes"])
    for dim, size in enumerate(sizes):
        if size == value.split.size and math.prod(sizes[:dim]) == before and eqn.params["dimensions"] is None:
            sizes[dim] = value.split.shard_size
            return Value(lax.reshape(value.x, sizes), _moved(value, dim))
    return None


def _squeeze(runner: _Runner, eqn: JaxprEqn, value: Value) -> Value | None:
    assert value.split
    gone = sum(dim < value.split.dim for dim in eqn.params["dimensions"])
    return Value(_bind(eqn, [value.x])[0], _moved(value, value.split.dim - gone))


def _transpose(runner: _Runner, eqn: JaxprEqn, value: Value) -> Value | None:
    assert value.split
    return Value(_bind(eqn, [value.x])[0], _moved(value, eqn.params["permutation"].index(value.split.dim)))


def _slice(runner: _Runner, eqn: JaxprEqn, value: Value) -> Value | None:
    """Along other dimensions."""
    assert value.split
    dim, (start, limit) = value.split.dim, (list(eqn.params[name]) for name in ("start_indices", "limit_indices"))
    strides = eqn.params["strides"]
    if start[dim] or limit[dim] != value.split.size or (strides and strides[dim] != 1):
        return None
    limit[dim] = value.split.shard_size
    return Value(lax.slice(value.x, start, limit, strides), value.split)


def _concatenate(runner: _Runner, eqn: JaxprEqn, *values: Value) -> Value | None:
    """Along other dimensions."""
    split = next(value.split for value in values if value.split)
    if eqn.params["dimension"] == split.dim:
        return None
    return Value(_bind(eqn, [runner.place(value, split, eqn).x for value in values])[0], split)


def _reduction(collective: Callable[..., jax.Array], identity: Callable[[Any], Any]) -> Callable[..., Value | None]:
    def reduce(runner: _Runner, eqn: JaxprEqn, value: Value) -> Value | None:
        assert value.split
        axes = eqn.params["axes"]
        if value.split.dim not in axes:
            gone = sum(dim < value.split.dim for dim in axes)
            return Value(_bind(eqn, [value.x])[0], _moved(value, value.split.dim - gone))
        if not runner.may_communicate:
            runner.refuse(eqn, "reduces over a dimension that is split")
        part = _bind(eqn, [_fill_padding(value, identity(value.x.dtype), runner.axis)])[0]
        return Value(collective(part, runner.axis), None)

    return reduce


def _fill_padding(value: Value, fill: Any, axis: Axis) -> jax.Array:
    split = value.split
    assert split
    if not split.padding:
        return value.x
    position = axis.shard_index() * split.shard_size + lax.broadcasted_iota(jnp.int32, value.x.shape, split.dim)
    return jnp.where(position < split.size, value.x, jnp.asarray(fill, value.x.dtype))


def _psum(x: jax.Array, axis: Axis) -> jax.Array:
    # Over all replicas, so that no two devices can round differently.
    total = lax.psum(x, axis.name)
    return total if axis.replicas == 1 else lax.div(total, jnp.asarray(axis.replicas, total.dtype))


def _pmax(x: jax.Array, axis: Axis) -> jax.Array:
    return lax.pmax(x, axis.name)


def _pmin(x: jax.Array, axis: Axis) -> jax.Array:
    return lax.pmin(x, axis.name)


def _all(x: jax.Array, axis: Axis) -> jax.Array:
    return lax.pmin(x.astype(jnp.int32), axis.name).astype(x.dtype)


def _any(x: jax.Array, axis: Axis) -> jax.Array:
    return lax.pmax(x.astype(jnp.int32), axis.name).astype(x.dtype)


def _least(dtype: Any) -> Any:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _greatest(dtype: Any) -> Any:
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _own(runner: _Runner, eqn: JaxprEqn, *args: Value) -> list[Value]:
    """One device computes, the others wait: results like an operand are split like it, the rest are sent to all."""
    full = [runner.place(arg, None, eqn).x for arg in args]
    owner = min(range(runner.axis.size), key=lambda device: runner.owned.get(device, 0))
    runner.owned[owner] = runner.owned.get(owner, 0) + sum(np.size(x) for x in full)
    avals: list[Any] = [var.aval for var in eqn.outvars]

    def idle(*_: Any) -> list[Any]:
        return [jnp.zeros(aval.shape, aval.dtype) for aval in avals]

    is_owner = lax.axis_index(runner.axis.name) == owner
    splits = {np.shape(x): arg.split for arg, x in zip(args, full, strict=True) if arg.split}
    results = []
    for x in lax.cond(is_owner, lambda *xs: _bind(eqn, xs), idle, *full):
        split = splits.get(x.shape)
        leaf = LeafLayout((), x.shape, x.dtype, (split,) if split else ())
        number = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
        received = scatter_sum_array(number, leaf, runner.axis, reduce_dtype=number.dtype)
        results.append(Value(received.astype(x.dtype), split))
    return results


def _dot_general(runner: _Runner, eqn: JaxprEqn, lhs: Value, rhs: Value) -> Value | None:
    """A contraction over the split dimension is completed by a sum; one free split dimension stays split."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    if lhs.split and lhs.split.dim in lhs_contract:
        other = rhs_contract[lhs_contract.index(lhs.split.dim)]
        rhs = runner.place(rhs, _moved(lhs, other), eqn)
    elif rhs.split and rhs.split.dim in rhs_contract:
        other = lhs_contract[rhs_contract.index(rhs.split.dim)]
        lhs = runner.place(lhs, _moved(rhs, other), eqn)
    elif lhs.split and rhs.split is None and lhs.split.dim not in lhs_batch:
        free = [dim for dim in range(lhs.x.ndim) if dim not in lhs_batch and dim not in lhs_contract]
        out = _moved(lhs, len(lhs_batch) + free.index(lhs.split.dim))
        return Value(_bind(eqn, [lhs.x, rhs.x])[0], out)
    elif rhs.split and lhs.split is None and rhs.split.dim not in rhs_batch:
        free = [dim for dim in range(rhs.x.ndim) if dim not in rhs_batch and dim not in rhs_contract]
        lhs_free = lhs.x.ndim - len(lhs_batch) - len(lhs_contract)
        out = _moved(rhs, len(rhs_batch) + lhs_free + free.index(rhs.split.dim))
        return Value(_bind(eqn, [lhs.x, rhs.x])[0], out)
    else:
        return None
    if not runner.may_communicate:
        runner.refuse(eqn, "sums over a dimension that is split")
    parts = [_fill_padding(value, 0, runner.axis) for value in (lhs, rhs)]
    return Value(_psum(_bind(eqn, parts)[0], runner.axis), None)


_RULES: dict[str, Callable[..., Value | None]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "dot_general": _dot_general,
    "reduce_and": _reduction(_all, lambda dtype: True),
    "reduce_max": _reduction(_pmax, _least),
    "reduce_min": _reduction(_pmin, _greatest),
    "reduce_or": _reduction(_any, lambda dtype: False),
    "reduce_sum": _reduction(_psum, lambda dtype: 0),
    "reshape": _reshape,
    "slice": _slice,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
