"""The state of a sharded optimizer, on the devices and whole; both forms know how they are cut."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from zero.partition.collectives.axis import Axis, AxisLike
from zero.partition.layout import (
    Layout,
    PyTree,
    derive_layout,
    follow_layout,
    make_layout,
    named_leaves,
    path_of,
)

REMEDY = (
    "Checkpoints hold the whole state: save zero.to_host(state), which all processes call, and restore with "
    "zero.to_devices(whole, like=state)"
)
OTHER_DEVICES = (
    "To go on with another number of devices, zero.to_devices(zero.to_host(state), like=state, devices=...), with the "
    "devices of the new pmap"
)
READING = (
    "to read the state of optax, use zero.gather(opt_state) inside pmap and zero.to_host(opt_state) outside. In "
    ".slices it is cut: a scalar is whole there, and every other leaf is this device's 1/N, which beside a whole array "
    "is wrong"
)
SAME_DECISIONS = (
    "Reduce what decides for all devices: value= of an update by lax.pmean(value, axis_name), whether gradients are "
    "finite by lax.pmin(is_finite.astype(jnp.int32), axis_name) == 1"
)
Cut = tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, int], ...]]  # of each dimension the axes; sizes of all axes


@dataclasses.dataclass(frozen=True)
class Origin:
    """How an optimizer's state is cut, for any number of devices, from shapes alone.

    Attributes:
      params: the parameters in one shard; the part that other mesh axes leave of them.
      state: the state of the optax transform, in one shard.
      axis: the `axis_name` of the optimizer.
      cuts: for each parameter the other mesh axes that cut it. Not compared, because they are unknown inside a mapped
        function.
    """

    params: Layout
    state: Layout
    axis: AxisLike
    cuts: tuple[Cut, ...] = dataclasses.field(default=(), compare=False)

    def layout(self, shards: int) -> Layout:
        """The layout of the state over this many shards."""
        return _layout(self, shards)


@functools.lru_cache(maxsize=64)
def _layout(origin: Origin, shards: int) -> Layout:
    return follow_layout(origin.state.shapes(), make_layout(origin.params.shapes(), shards))


@functools.lru_cache(maxsize=256)
def _known(origin: Origin, cuts: tuple[Cut, ...]) -> Origin:
    """The same object for equal origins, because each call of a mapped function compares pytrees of state."""
    return origin


def origin_of(init: Callable[[PyTree], PyTree], params: PyTree, axis: AxisLike) -> Origin:
    """The origin of the state that `init` makes for these parameters, or for their shapes."""
    whole = make_layout(params, 1)
    cuts = tuple(_cut(leaf.name, x, axis) for leaf, x in zip(whole.leaves, jax.tree.leaves(params), strict=True))
    shapes = [_shape_of_part(leaf.shape, *cut) for leaf, cut in zip(whole.leaves, cuts, strict=True)]
    parts = [jax.ShapeDtypeStruct(shape, leaf.dtype) for shape, leaf in zip(shapes, whole.leaves, strict=True)]
    layout = make_layout(whole.treedef.unflatten(parts), 1)
    return _known(Origin(layout, derive_layout(init, layout), axis, cuts), cuts)


def _cut(name: str, x: Any, axis: AxisLike) -> Cut:
    """The mesh axes that cut each dimension of a parameter, and the sizes of all axes."""
    sharding = getattr(x, "sharding", None)
    if isinstance(x, jax.core.Tracer) or not isinstance(sharding, NamedSharding):
        return ((),) * np.ndim(x), ()
    entries = [*sharding.spec, *[None] * (np.ndim(x) - len(sharding.spec))]
    axes = tuple(map(_axes_of_entry, entries))
    if any(axis in names for names in axes):
        raise ValueError(
            f"leaf {name}: {sharding.spec} cuts it along {axis!r}, the axis_name of the optimizer, along which "
            "parameters are replicated: outside pmap, pass one whole copy of them"
        )
    return axes, tuple(sharding.mesh.shape.items())


def _axes_of_entry(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The axes of an entry of a PartitionSpec.

    >>> _axes_of_entry("model"), _axes_of_entry(("model", "data")), _axes_of_entry(None)
    (('model',), ('model', 'data'), ())
    """
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _shape_of_part(
    shape: tuple[int, ...], axes: tuple[tuple[str, ...], ...], sizes: tuple[tuple[str, int], ...]
) -> tuple[int, ...]:
    """The shape that the axes leave; jax guarantees that every dimension divides."""
    size_of = dict(sizes)
    return tuple(size // parts_over(names, size_of) for size, names in zip(shape, axes, strict=True))


def parts_over(names: Sequence[str], size_of: Mapping[str, int]) -> int:
    """The number of parts that these axes of a mesh make of a dimension.

    >>> parts_over(("model", "data"), {"model": 2, "data": 4}), parts_over((), {"model": 2})
    (8, 1)
    """
    return math.prod(size_of[name] for name in names)


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedState:
    """The state of a sharded optimizer on the devices: one device's slice and its index.

    Taking one slice out of the stack of all devices, as `x[0]`, `flax.jax_utils.unreplicate` and pmap's `out_axes=None`
    do, raises a ValueError: it is 1/N of the state. A slice on the wrong device makes `update` return NaN.
    `zero.gather` gives the whole state inside pmap, `zero.to_host` outside. What is whole on every device, such as
    counts and rates, is also read as in optax: `state[1].hyperparams["learning_rate"]`.

    Attributes:
      slices: the state of the optax transform, in its own structure, each leaf this device's slice.
      shard: int32 `(1,)`, the index of the slice, plus the number of slices after an odd number of updates; -1 if
        devices did not take the same updates.
      origin: how the whole state is cut.

    >>> import optax, zero
    >>> n = jax.local_device_count()
    >>> tx = zero.shard_optimizer(optax.sgd(0.1, momentum=0.5), "batch")
    >>> state = zero.to_devices(tx.init({"w": np.ones((2 * n, 3), np.float32)}))
    >>> state.slices[0].trace["w"].shape == (n, 2, 3), state.axis, state.layout(n).leaves[0].name
    (True, 'batch', '0/trace/w')
    >>> rate = zero.to_devices(zero.shard_optimizer(optax.inject_hyperparams(optax.sgd)(0.5), "batch").init({}))
    >>> float(rate.hyperparams["learning_rate"][0])
    0.5
    >>> jax.tree.map(lambda x: x[0], state)
    Traceback (most recent call last):
    ValueError: this takes one device's slice of a sharded optimizer state and loses the rest. ...
    """

    slices: Any
    shard: Any
    origin: Origin | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _FIELDS:
            raise AttributeError(name)
        return getattr(_part(self), name)

    def __getitem__(self, key: Any) -> Any:
        return _part(self)[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(_part(self))

    def __len__(self) -> int:
        return len(_part(self))

    @property
    def axis(self) -> AxisLike:
        """The `axis_name` of the optimizer; raises as `layout`."""
        return self.known_origin.axis

    def layout(self, shards: int) -> Layout:
        """The layout of the slices, for the functions that take one.

        Raises:
          ValueError: the state was assembled by hand.
        """
        return self.known_origin.layout(shards)

    @property
    def known_origin(self) -> Origin:
        """The origin; raises as `layout`."""
        if self.origin is None:
            raise ValueError(
                "this ShardedState was put together without its origin: take one that tx.init or zero.to_devices made, "
                "and dataclasses.replace(state, slices=...)"
            )
        return self.origin


_FIELDS = frozenset(field.name for field in dataclasses.fields(ShardedState))


class StatePart:
    """A part of a sharded optimizer's state of which some leaves are cut; it is read as optax's.

    What is whole on every device is returned as it is stored, and a part of the state as a part. What is cut, or is a
    tree like the parameters with a leaf that is cut, raises an error with the way to read it: an AttributeError for an
    attribute, else a TypeError.
    """

    __slots__ = ("_layout", "_params", "_slices")

    def __init__(self, slices: Any, layout: Any, params: Any) -> None:
        self._slices = slices
        self._layout = layout
        self._params = params

    def __getattr__(self, name: str) -> Any:
        # Of a tuple's or dict's own names none is the state of optax.
        if name.startswith("_") or not hasattr(self._layout, name) or callable(getattr(self._layout, name)):
            raise AttributeError(f"the state of a sharded optimizer has no {name!r}: {READING}")
        return self._child(getattr(self._slices, name), getattr(self._layout, name), AttributeError, repr(name))

    def __getitem__(self, key: Any) -> Any:
        return self._child(self._slices[key], self._layout[key], TypeError, f"[{key!r}]")

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._slices, Mapping):
            return iter(self._slices)
        children = zip(self._slices, self._layout, strict=True)
        return iter([self._child(*child, None, "") for child in children])

    def __len__(self) -> int:
        return len(self._slices)

    def __repr__(self) -> str:
        return f"<a part of a sharded optimizer's state: {READING}>"

    def _child(self, slices: Any, layout: Any, error: type[Exception] | None, name: str) -> Any:
        leaves = jax.tree.leaves(layout)
        cut = [leaf for leaf in leaves if leaf.splits]
        if not cut:
            return slices
        is_like_params: bool = jax.tree.structure(layout) == self._params
        if error and (is_like_params or len(cut) == len(leaves)):
            raise error(f"the state of a sharded optimizer has no {name} that is whole: {READING}")
        return StatePart(slices, layout, self._params)


def _refuse_computing(*_: Any) -> NoReturn:
    raise TypeError(f"this computes with a part of a sharded optimizer's state, of which leaves are cut: {READING}")


# As a leaf it would reach the functions of trees, whose messages do not name the way.
jax.tree_util.register_pytree_node(StatePart, _refuse_computing, _refuse_computing)


def _part(state: ShardedState) -> StatePart:
    """The whole of the state, to be read."""
    layout = state.layout(_shards_of(state))
    return StatePart(state.slices, layout.map(lambda leaf: leaf), state.known_origin.params.treedef)


def _shards_of(state: ShardedState) -> int:
    """The number of slices of which this state has one, or all."""
    if isinstance(state.axis, Axis):
        return state.axis.shards
    shape = np.shape(numbers_of(state))
    if len(shape) > 1:
        return shape[0] * jax.process_count()
    try:
        return int(lax.axis_size(state.axis))
    except NameError:
        return shape[0]  # outside shard_map


def numbers_of(state: ShardedState) -> Any:
    """The numbers of the slices, also if flax.nnx has put them into a variable."""
    leaves = jax.tree.leaves(state.shard)
    if len(leaves) != 1:
        return state.shard
    return leaves[0]


def is_own(number: jax.Array, axis: Axis) -> jax.Array:
    """Whether `shard` belongs to this device, after the same updates as on the other devices."""
    return (number >= 0) & (number % axis.shards == axis.shard_index())


def after_update(number: jax.Array, is_alike: jax.Array, axis: Axis) -> jax.Array:
    """The `shard` after an update: -1 for good, where devices had not taken the same updates before."""
    is_odd = number >= axis.shards
    return jnp.where(is_alike & (number >= 0), jnp.where(is_odd, number - axis.shards, number + axis.shards), -1)


def slices_of(numbers: np.ndarray, shards: int) -> list[int]:
    """The numbers of the slices that devices hold, from their `shard`.

    Raises:
      ValueError: the devices have not taken the same updates.

    >>> slices_of(np.array([2, 3]), 2)
    [0, 1]
    """
    if (numbers < 0).any() or len(set((numbers >= shards).tolist())) > 1:
        raise ValueError(
            "devices did not take the same updates, because each decided for itself, as flax's DynamicScale without "
            f"axis_name and jmp.DynamicLossScale do; state and parameters are lost. {SAME_DECISIONS}. Restart from a "
            "checkpoint"
        )
    return (numbers % shards).tolist()


def check_stacked(state: ShardedState) -> None:
    """Raises if a leaf is no stack of slices while the numbers of the slices are."""
    numbers = numbers_of(state)
    if not _is_concrete(numbers) or np.ndim(numbers) != 2:  # one device, or not stacked
        return
    count = len(numbers)
    for name, x in named_leaves(state.slices):
        if np.shape(x)[:1] != (count,):
            raise ValueError(
                f"leaf {name}: expected a stack of one slice per "
                f"device, ({count}, ...), got shape {np.shape(x)}; a scalar is jnp.full({count}, value) there, or is "
                "set inside pmap"
            )


def _is_concrete(x: Any) -> bool:
    return _is_array(x) and x.dtype == np.int32


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic) and not isinstance(x, jax.core.Tracer)


def _check_numbers(state: ShardedState, numbers: Any) -> None:
    """Raises if the slices were averaged, or if these are some of all slices.

    Without slices of this process alone: then the number of all is unknown.
    """
    if _is_array(numbers) and np.ndim(numbers) and jnp.issubdtype(numbers.dtype, jnp.floating):
        raise ValueError(
            "this averages or casts the state of a sharded optimizer, and the numbers of its slices with it: every "
            f"device has another part of it, so that a mean means nothing. {REMEDY}"
        )
    if not _is_concrete(numbers) or np.ndim(numbers) != 2 or state.origin is None or jax.process_count() > 1:
        return
    rows = len(numbers)
    leaves = jax.tree.leaves(state.slices)
    layout = state.origin.layout(_shards_of(state)).leaves
    is_cut_so = [np.shape(x)[1:] == leaf.shard_shape for leaf, x in zip(layout, leaves, strict=False) if leaf.splits]
    if len(leaves) == len(layout) and not all(is_cut_so):
        raise ValueError(
            f"this has the slices of {rows} devices, but they were cut for another number of devices, so some are "
            f"missing or doubled. {OTHER_DEVICES}"
        )


def is_of_mesh(state: ShardedState) -> bool:
    """Whether it is that of shard_map, global arrays, and not the stack of a pmap."""
    return np.ndim(numbers_of(state)) == 1


def _flatten_with_keys(state: ShardedState) -> tuple[Any, Origin | None]:
    check_stacked(state)
    keys = map(jax.tree_util.GetAttrKey, ("slices", "shard"))
    return tuple(zip(keys, (state.slices, state.shard), strict=True)), state.origin


def _flatten(state: ShardedState) -> tuple[Any, Origin | None]:
    check_stacked(state)
    return (state.slices, state.shard), state.origin


def _unflatten(origin: Origin | None, children: Iterable[Any]) -> ShardedState:
    slices, shard = children
    state = ShardedState(slices, shard, origin)
    # Outside a trace the state has the number of every device, so a single number means a single slice; the check
    # needs no values. State of shard_map over one device has a single number too, with a sharding on its mesh.
    numbers = numbers_of(state)
    _check_numbers(state, numbers)
    if _is_concrete(numbers) and np.size(numbers) == 1 and np.ndim(numbers) < 2:
        sharding = getattr(numbers, "sharding", None)
        is_on_mesh = isinstance(sharding, NamedSharding) and (any(sharding.spec) or sharding.mesh.size == 1)
        if not (np.ndim(numbers) and is_on_mesh):
            raise ValueError(f"this takes one device's slice of a sharded optimizer state and loses the rest. {REMEDY}")
    return state


jax.tree_util.register_pytree_with_keys(ShardedState, _flatten_with_keys, _unflatten, _flatten)


@dataclasses.dataclass(frozen=True, eq=False)
class WholeState:
    """The state that `init` of a sharded optimizer makes outside pmap: that of optax, for `zero.to_devices` to cut.

    A pytree node with the children of the optax state and their names: its leaves, paths and files are those of the
    unsharded program.
    """

    state: Any
    origin: Origin

    @property
    def known_origin(self) -> Origin:
        return self.origin

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.state, name)

    def __getitem__(self, key: Any) -> Any:
        return self.state[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def _children(whole: WholeState) -> tuple[list[tuple[Any, Any]], Any]:
    """The children of the optax state with their keys, and its node without them."""
    pairs, node = jax.tree_util.tree_flatten_with_path(whole.state, is_leaf=lambda x: x is not whole.state)
    keyed = [(path[0] if path else jax.tree_util.GetAttrKey("state"), child) for path, child in pairs]
    return keyed, (node, whole.origin)


def _children_without_keys(whole: WholeState) -> tuple[list[Any], Any]:
    keyed, node = _children(whole)
    return [child for _, child in keyed], node


def _whole_of(node: Any, children: Iterable[Any]) -> WholeState:
    return WholeState(node[0].unflatten(list(children)), node[1])


jax.tree_util.register_pytree_with_keys(WholeState, _children, _whole_of, _children_without_keys)


def is_marked(x: Any) -> bool:
    """Whether this is the state of a sharded optimizer, on the devices or whole."""
    return isinstance(x, ShardedState | WholeState)


def require_sharded(state: Any) -> ShardedState:
    """Raises if the state is not one device's slice of a sharded optimizer."""
    if isinstance(state, WholeState):
        raise TypeError(
            "this state of a sharded optimizer is whole, because tx.init ran outside pmap: spread it over the devices "
            "by zero.to_devices(state), in place of jax_utils.replicate(state)"
        )
    if not isinstance(state, ShardedState):
        raise TypeError(
            f"expected the state of a sharded optimizer, a ShardedState, got a {type(state).__name__}: make it by "
            "tx.init, or convert what was restored by zero.to_devices(opt_state, like=...), where like is a state that "
            "tx.init made"
        )
    return state


def check_structure(state: PyTree, layout: Layout, *, may_lack: bool = False) -> None:
    """Raises if the state does not have the structure of this layout."""
    if jax.tree.structure(state) == layout.treedef:
        return
    if differences := layout.differences(state, may_lack=may_lack):
        raise ValueError(
            f"the state does not fit this optimizer and these parameters: {differences}. Pass those that it was made "
            "with; its leaves are those of tx.init(params)"
        )
    if not may_lack:
        raise ValueError(
            "the state has the same leaves in other containers, such as the dicts and lists that Orbax restores "
            "without a target: restore into the whole state, checkpointer.restore(path, create_state()), with what "
            "tx.init made outside pmap; or put them into it by flax.serialization.from_state_dict"
        )


def check_not_vmapped(dimensions: int, expected: int) -> None:
    """Raises if the numbers of the slices have more dimensions than outside of vmap."""
    if dimensions > expected:
        raise ValueError(
            "this state was made by vmap inside pmap, so its slices have a dimension more than the parameters. Where "
            "the members learn together, as with lax.pmean over the axis_name of the vmap, hand the state to vmap with "
            "in_axes=None and take it with out_axes=None. Put the members of an ensemble into one tree of parameters, "
            "(members, ...) per leaf, with one optimizer for all, and vmap the loss"
        )


def _beginnings(path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The path and those of all subtrees that it lies in.

    >>> _beginnings(("a", "b"))
    [(), ('a',), ('a', 'b')]
    """
    return [path[:end] for end in range(len(path) + 1)]


def check_not_dissolved(tree: PyTree) -> None:
    """Raises if a part of the tree was the state of a sharded optimizer, and is a plain tree of slices now.

    >>> check_not_dissolved({"opt_state": {"slices": 0, "shard": 1}})
    Traceback (most recent call last):
    ValueError: leaf opt_state: this was the state of a sharded optimizer, and is plain arrays now, ...
    """
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_marked)
    paths = {path_of(keys) for keys, _ in flat}
    parents = set(chain.from_iterable(map(_beginnings, paths)))
    for path in sorted(parents):
        if path[-1:] == ("shard",) and (*path[:-1], "slices") in parents:
            raise ValueError(
                f"leaf {'/'.join(path[:-1]) or '(root)'}: this was the state of a sharded optimizer, and is plain "
                "arrays now, because nnx.split, nnx.state or flax.serialization.to_state_dict has taken it apart. "
                "Convert the objects: zero.to_host(nnx.merge(graph, arrays)), and zero.to_devices((model, optimizer)) "
                "before nnx.split; to_state_dict(zero.to_host(state))"
            )


def register_with_flax() -> None:
    """Lets `flax.serialization` read and write these states, if the program has imported it."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is not None:
        _register(serialization)


@functools.cache
def _register(serialization: Any) -> None:
    to_dict = serialization.to_state_dict
    from_dict = serialization.from_state_dict

    def sharded_to_dict(state: ShardedState) -> dict[str, Any]:
        return {"slices": to_dict(state.slices), "shard": to_dict(state.shard)}

    def sharded_from_dict(state: ShardedState, read: Mapping[str, Any]) -> ShardedState:
        slices, shard = (from_dict(getattr(state, name), read[name], name) for name in ("slices", "shard"))
        return dataclasses.replace(state, slices=slices, shard=shard)

    def whole_from_dict(whole: WholeState, read: Any) -> WholeState:
        return dataclasses.replace(whole, state=from_dict(whole.state, read))

    serialization.register_serialization_state(ShardedState, sharded_to_dict, sharded_from_dict, override=True)
    serialization.register_serialization_state(
        WholeState, lambda whole: to_dict(whole.state), whole_from_dict, override=True
    )
