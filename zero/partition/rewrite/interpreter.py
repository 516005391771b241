"""An interpreter of jaxprs on values that are whole or split, one operation at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from zero.partition.collectives.arrays import fill_padding, gather_array, slice_array
from zero.partition.collectives.axis import Axis
from zero.partition.jaxprs import bind, closed_jaxpr, evaluate
from zero.partition.layout import LeafLayout, Split
from zero.partition.rewrite.joined import Joined

_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
igamma_grad_a igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or
polygamma population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
INLINED = {"jit": "jaxpr", "closed_call": "call_jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr"}
RANDOM = frozenset(["random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"])
ACROSS_SHARDS = "zero_across_shards"  # the name of the jitted function that marks a region
_ACROSS = "use zero.across_shards({}(...)), which communicates"
REMEDIES = {  # if it is not the transform under its own name
    "flatten": "leave optax.flatten out: zero sends small leaves together, and a flat state could not be cut",
    "scale_by_factored_rms": _ACROSS.format("optax.adafactor") + ", or optax.scale_by_factored_rms",
    "scale_by_muon": _ACROSS.format("optax.contrib.muon"),
    "scale_by_trust_ratio": _ACROSS.format("optax.lamb") + ", or optax.lars, or optax.scale_by_trust_ratio",
}


def _across(transform: str) -> str:
    """The remedy for an optax transform, by name, or for one of the user's.

    >>> _across("zero_nans"), _across("muon"), _across("mine (train.py:3)")  # doctest: +NORMALIZE_WHITESPACE
    ('use zero.across_shards(optax.zero_nans(...)), which communicates',
     'use zero.across_shards(optax.contrib.muon(...)), which communicates',
     'use zero.across_shards(...) around it, which communicates')
    """
    if hasattr(optax, transform):
        return _ACROSS.format(f"optax.{transform}")
    if hasattr(optax.contrib, transform):
        return _ACROSS.format(f"optax.contrib.{transform}")
    return "use zero.across_shards(...) around it, which communicates"


_HELPERS = frozenset(  # of optax; they call functions that the user wrote
    ["chain", "named_chain", "with_extra_args_support", "stateless", "stateless_with_tree_map", "inject_hyperparams"]
)
_LIBRARIES = tuple(str(module.__file__).removesuffix("__init__.py") for module in (jax, optax))
_ENTRY_POINTS = __file__.replace("interpreter.py", "entry_points.py")


class NotElementwiseError(ValueError):
    """Raised for a transform that would be wrong on shards; the message names it, the operation and the remedy.

    >>> import zero
    >>> params = {"w": jnp.ones((8, 3))}
    >>> tx = zero.shard_optimizer(optax.clip_by_block_rms(1.0), "batch")
    >>> def updates(params):
    ...     return tx.update(zero.local(params), tx.init(params), params)[0]
    >>> try:
    ...     jax.vmap(updates, axis_name="batch", axis_size=8, in_axes=None)(params)
    ... except zero.NotElementwiseError as error:
    ...     print(error)
    clip_by_block_rms is not element-wise: ...
    """


AnySplit = Split | Joined


class Value(NamedTuple):
    """A device's part of an array: its shard along one dimension, or (no split) the whole array.

    The padding of a shard is undefined. No array without elements is split, so that sizes may divide.

    Attributes:
      x: the array.
      split: how it is split.
      shard: for a whole array made from indices or constants: computes a shard of it without the whole.
    """

    x: Any
    split: AnySplit | None
    shard: Callable[[Split], Any] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole shape."""
        match self.split:
            case None:
                return jax.typeof(self.x).shape
            case Split(dim, size) | Joined(dim, size):
                return replaced(jax.typeof(self.x).shape, dim, size)

    @property
    def dim(self) -> int:
        """The dimension along which this value is split."""
        assert self.split
        return self.split.dim

    @property
    def size(self) -> int:
        """The whole size of the split dimension."""
        return self.shape[self.dim]

    @property
    def shard_size(self) -> int:
        """The size of the split dimension on a device, padding included."""
        return jax.typeof(self.x).shape[self.dim]

    def moved(self, dim: int) -> AnySplit:
        """This value's split, along another dimension."""
        assert self.split
        return dataclasses.replace(self.split, dim=dim)

    def filled(self, axis: Axis, fill: Any) -> jax.Array:
        """The array with `fill` in its padding."""
        if isinstance(self.split, Joined):
            return self.split.filled(self.x, axis.shard_index(), fill)
        return fill_padding(self.x, leaf_of(self.x, self.shape, self.split), axis, fill)


def leaf_of(x: Any, shape: tuple[int, ...], split: Split | None) -> LeafLayout:
    """The layout of an array of this whole shape."""
    return LeafLayout((), shape, jax.typeof(x).dtype, (split,) if split else ())


def replaced(sizes: Sequence[Any], dim: int, size: Any) -> tuple[Any, ...]:
    """The sizes, with another one at `dim`."""
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def arrays(values: Sequence[Value]) -> list[Any]:
    """The array of each value."""
    return [value.x for value in values]


def split_alike(xs: Sequence[Any], split: AnySplit | None) -> list[Value]:
    """Values that are all split in the same way, or (None) whole."""
    return [Value(x, split) for x in xs]


def largest_split(args: Sequence[Value]) -> AnySplit:
    """The split of the largest value, of which at least one is split."""
    split = max((arg for arg in args if arg.split), key=lambda arg: math.prod(arg.shape)).split
    assert split
    return split


def _without_elements(value: Value) -> Value:
    """An array without elements is whole on every device."""
    if value.split and 0 in value.shape:
        return Value(jnp.empty(value.shape, jax.typeof(value.x).dtype), None)
    return value


def whole_shape(value: Value) -> jax.ShapeDtypeStruct:
    """The shape on which a function of whole arrays is traced.

    It has the sharding of arrays inside pmap: jax would insert a `reshard` between arrays with and without it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    aval = jax.typeof(value.x)
    here = None if mesh.empty else NamedSharding(mesh, PartitionSpec(*[None] * len(value.shape)))
    return jax.ShapeDtypeStruct(value.shape, aval.dtype, weak_type=aval.weak_type, sharding=here)


# A rule evaluates an operation on values of which at least one is split; None if it does not apply to them.
Rule = Callable[["Interpreter", JaxprEqn, Sequence[Value]], Sequence[Value] | None]


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """Evaluates operations on values.

    Attributes:
      axis: the pmap axis.
      rules: rules keyed by primitive, for all that are not element-wise.
      may_communicate: whether the operation is inside `across_shards`.
      callers: the calls around the current operation, innermost first.
      owned: elements of work assigned to each device so far.
    """

    axis: Axis
    rules: Mapping[str, Rule]
    may_communicate: bool = False
    callers: tuple[JaxprEqn, ...] = ()
    owned: dict[int, int] = dataclasses.field(default_factory=dict)

    def run(self, closed: ClosedJaxpr | Jaxpr, args: Sequence[Value]) -> list[Value]:
        """The results of a traced function."""
        return evaluate(closed_jaxpr(closed), args, self.apply, lambda x: Value(x, None))

    def apply(self, eqn: JaxprEqn, args: Sequence[Value]) -> Sequence[Value]:
        """The results of one operation."""
        return list(map(_without_elements, self._results(eqn, args)))

    def _results(self, eqn: JaxprEqn, args: Sequence[Value]) -> Sequence[Value]:
        name = eqn.primitive.name
        if name in INLINED:
            return self.call(eqn, args)
        if name in RANDOM and not self.may_communicate:
            self.refuse(eqn, "draws random numbers for the whole array on every device")
        if all(arg.split is None for arg in args):
            shard = self.shard_of_made(eqn, args)
            xs = bind(eqn, arrays(args))
            return [Value(x, None, shard) for x in xs]
        rule: Rule | None = Interpreter.elementwise if name in ELEMENTWISE else self.rules.get(name)
        results = rule(self, eqn, args) if rule else None
        if results is not None:
            return results
        return split_alike(bind(eqn, self.placed(args, None, eqn)), None)

    def call(self, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value]:
        """The results of a call. Only inside `across_shards` can joined dimensions be separated again."""
        may_communicate = self.may_communicate or eqn.params.get("name") == ACROSS_SHARDS
        nested = self.inside(eqn, may_communicate)
        results = nested.run(eqn.params[INLINED[eqn.primitive.name]], args)
        if self.may_communicate or not may_communicate:
            return results
        return [nested.place(x, x.split.of_neighbors, eqn) if isinstance(x.split, Joined) else x for x in results]

    def elementwise(self, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value] | None:
        """Slices all operands like the largest one, except those that are broadcast along the split."""
        out: Any = eqn.outvars[0].aval
        full = [arg for arg in args if arg.split and arg.size == out.shape[arg.dim]]
        if not full:
            return None
        split = largest_split(full)

        def operand(arg: Value) -> Any:
            is_broadcast = arg.split != split and (not arg.shape or arg.shape[split.dim] != out.shape[split.dim])
            return self.place(arg, None if is_broadcast else split, eqn).x

        return split_alike(bind(eqn, [operand(arg) for arg in args]), split)

    def shard_of_made(self, eqn: JaxprEqn, args: Sequence[Value]) -> Callable[[Split], Any] | None:
        """The `Value.shard` of a result: of an iota, a broadcast scalar, or element-wise operations on these.

        If only shards are used, XLA removes the computation of the whole array.
        """
        name = eqn.primitive.name
        params = eqn.params

        def positions(split: Split) -> jax.Array:
            index = lax.broadcasted_iota(
                params["dtype"], replaced(params["shape"], split.dim, split.shard_size), params["dimension"]
            )
            first = self.axis.shard_index() * split.shard_size if split.dim == params["dimension"] else 0
            return index + jnp.asarray(first, index.dtype)

        def repeated(split: Split) -> jax.Array:
            return lax.broadcast_in_dim(args[0].x, replaced(params["shape"], split.dim, split.shard_size), ())

        def elementwise(split: Split) -> jax.Array:
            is_full = [arg.shape[split.dim : split.dim + 1] == (split.size,) for arg in args]
            placed = [self.place(arg, split, eqn) if full else arg for arg, full in zip(args, is_full, strict=True)]
            results = self.elementwise(eqn, placed)
            assert results
            return results[0].x

        if name == "iota" and not args:
            return cache(positions)
        if name == "broadcast_in_dim" and len(args) == 1 and not args[0].shape:
            return cache(repeated)
        if name in ELEMENTWISE and any(arg.shard for arg in args):
            return cache(elementwise)
        return None

    def place(self, value: Value, split: AnySplit | None, eqn: JaxprEqn | None) -> Value:
        """The value split like this, for an operation; only slicing a whole value needs no other device."""
        if value.split == split:
            return value
        if isinstance(value.split, Joined):
            in_chunks = Value(value.split.in_chunks(value.x), value.split.apart)
            joined = value.split.joined(self.place(in_chunks, None, eqn).x)
            whole = Value(lax.slice_in_dim(joined, 0, value.size, axis=value.dim), None)
            return self.place(whole, split, eqn)
        if isinstance(split, Joined):
            whole = self.place(value, None, eqn)
            sliced = self.place(Value(split.whole_in_chunks(whole.x), None), split.apart, eqn)
            return Value(split.joined(sliced.x), split)
        if split and value.shard:
            return Value(value.shard(split), split)
        x = value.x
        if value.split:
            if eqn and not self.may_communicate:
                self.refuse(eqn, "needs whole arrays")
            x = gather_array(x, leaf_of(x, value.shape, value.split), self.axis)
        if split:
            x = jnp.asarray(x)
            x = slice_array(x, leaf_of(x, x.shape, split), self.axis.shard_index())
        return Value(x, split)

    def placed(self, values: Sequence[Value], split: AnySplit | None, eqn: JaxprEqn) -> list[Any]:
        """The arrays of the values, all split like this, for an operation."""
        return [self.place(value, split, eqn).x for value in values]

    def inside(self, eqn: JaxprEqn, may_communicate: bool) -> Interpreter:
        """The interpreter for the functions that an operation calls."""
        return dataclasses.replace(self, may_communicate=may_communicate, callers=(eqn, *self.callers))

    def splits(self, closed: ClosedJaxpr, args: Sequence[Value]) -> list[AnySplit | None]:
        """The splits of the results of a traced function; nothing is computed."""
        splits: list[AnySplit | None] = []

        def run(*xs: Any) -> None:
            dry = dataclasses.replace(self, owned=dict(self.owned))
            results = dry.run(closed, [Value(x, arg.split) for x, arg in zip(xs, args, strict=True)])
            splits.extend(value.split for value in results)

        jax.eval_shape(run, *(arg.x for arg in args))
        return splits

    def refuse(self, eqn: JaxprEqn, why: str) -> NoReturn:
        """Raises `NotElementwiseError`."""
        transform = _transform((eqn, *self.callers))
        right = REMEDIES.get(transform) or _across(transform)
        wrong = f"{transform} is not element-wise: {eqn.primitive.name} {why}. Unchanged, it would be wrong on shards"
        raise NotElementwiseError(f"{wrong}; {right}")


def _transform(eqns: Sequence[JaxprEqn]) -> str:
    """The function that made an operation's transform (and its callers), such as `clip_by_global_norm`.

    If optax only calls a user's function, that function with its location.
    """
    helper = "the transform"
    tracebacks: list[Any] = [eqn.source_info.traceback for eqn in eqns]
    for traceback in tracebacks:
        for frame in traceback.frames if traceback else ():
            if frame.file_name == _ENTRY_POINTS:
                break  # frames beyond it belong to the program
            maker, _, inner = frame.function_name.partition(".<locals>.")
            is_of_transform = inner.split(".")[0] in ("update_fn", "init_fn", "update", "init")
            if is_of_transform and maker not in _HELPERS:
                return maker
            if is_of_transform:
                helper = maker
            elif not frame.file_name.startswith(_LIBRARIES):
                file = frame.file_name.replace("\\", "/").rpartition("/")[2]
                return f"{maker} ({file}:{frame.line_num})"
    return helper
