"""Optax on shards: any transform, the drop-in wrapper, and transforms that communicate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from zero.partition.collectives.arrays import fill_padding
from zero.partition.collectives.axis import Axis, AxisLike, as_axis, check_untracked
from zero.partition.layout import Layout, LeafLayout, PyTree, Split, derive_layout, make_layout, match_layout, path_of
from zero.partition.local_gradients import arrays_of
from zero.partition.rewrite.entry_points import run_on_shards, with_extra_args
from zero.partition.rewrite.interpreter import NotElementwiseError
from zero.partition.sharded_state import (
    ShardedState,
    WholeState,
    after_update,
    check_structure,
    is_marked,
    is_own,
    origin_of,
    register_with_flax,
    require_sharded,
)
from zero.partition.stages import as_own, checked_axis, gather, nan_unless, scatter_mean, scatter_sum, shard


def global_norm(shards: PyTree, layout: Layout, axis: AxisLike) -> jax.Array:
    """The Euclidean norm of a whole tree from its shards, float32, the same on every device: one `psum` of a scalar.

    A leaf that is whole on every device counts once. Not finite if an element is not, or if a square overflows.

    Per device: shards in, a scalar out. Call inside pmap.

    >>> n = jax.local_device_count()
    >>> layout = make_layout({"w": jax.ShapeDtypeStruct((n * n,), jnp.float32)}, n)
    >>> norm = jax.pmap(lambda shards: global_norm(shards, layout, "batch"), "batch")({"w": jnp.ones((n, n))})
    >>> float(norm[0]) == n
    True
    """
    axis = checked_axis(layout, axis)
    layout.check_numbers()
    return norm_of(squares(shards, layout, axis), axis)


class Squares(NamedTuple):
    """This device's part of a sum of squares, over split leaves and over whole leaves."""

    split: jax.Array
    whole: jax.Array


def squares(shards: PyTree, layout: Layout, axis: Axis) -> Squares:
    """The input of `norm_of`; may first be summed over several trees."""
    split = jnp.float32(0)
    whole = jnp.float32(0)
    for leaf, x in zip(layout.leaves, layout.shards_of(shards), strict=True):
        size = jnp.abs(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
        square = jnp.sum(jnp.square(fill_padding(size, leaf, axis, 0).astype(jnp.float32)))
        split, whole = (split + square, whole) if leaf.splits else (split, whole + square)
    return Squares(split, whole)


def norm_of(sums: Squares, axis: Axis) -> jax.Array:
    """The norm from `squares`: one `psum` of a scalar."""
    with jax.named_scope("zero_global_norm"):
        return jnp.sqrt(lax.psum(sums.split, axis.name) / axis.replicas + sums.whole)


def clip(tree: PyTree, norm: jax.Array, max_norm: float) -> PyTree:
    """A tree of this norm, or its shards, scaled down to `max_norm` if the norm is larger.

    >>> clip({"w": jnp.asarray([3.0, 4.0])}, jnp.float32(5), 1.0)["w"].tolist()
    [0.600..., 0.800...]
    """
    shrink = jnp.minimum(1.0, max_norm / norm)
    return jax.tree.map(lambda x: x * shrink, tree)


_LINE_SEARCH = "line searches and Hessian estimates do not work on shards"


def on_shards(
    tx: optax.GradientTransformation, layout: Layout, axis: AxisLike, *, trust: bool = False
) -> optax.GradientTransformationExtraArgs:
    """An optax transform whose parameters, gradients, state and updates are shards.

    Gives the result of `tx` on whole arrays, or raises. `derive_layout(tx.init, layout)` is the layout of its state.

    Args:
      tx: any transform; wrap one that is not element-wise in `across_shards`.
      layout: layout of the parameters.
      axis: the pmap axis. Call `init` and `update` inside pmap.
      trust: run `tx` on shards unchanged, if you know that it is correct there.

    `update` raises:
      NotElementwiseError: `tx` needs other devices, draws random numbers, or calls a function of the parameters (line
        searches).
      ValueError: the shape of a leaf does not match the layout.

    >>> n = jax.local_device_count()
    >>> layout = make_layout({"w": jax.ShapeDtypeStruct((4 * n,), jnp.float32)}, n)
    >>> tx = on_shards(optax.sgd(0.5), layout, "batch")
    >>> shards = {"w": jnp.ones((n, 4))}
    >>> updates, _ = jax.pmap(lambda g: tx.update(g, tx.init(g)), "batch")(shards)
    >>> updates["w"].shape == (n, 4)
    True
    """
    inner = with_extra_args(tx)
    if trust:
        return inner
    layout = layout.without_parts()  # an optimizer gathers whole arrays

    def init(params: PyTree) -> PyTree:
        return _init(inner, layout, checked_axis(layout, axis), params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        layout_of_updates = match_layout(updates, layout)
        return _update(inner, checked_axis(layout, axis), (updates, layout_of_updates), state, (params, layout), extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _never_called(name: str) -> Callable[..., NoReturn]:
    """Stands for a function among the extra arguments: a chain hands it to all of its transforms, used or not."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotElementwiseError(
            f"{name} is a function of whole parameters, which no device has: {_LINE_SEARCH}. Put a line search after "
            "the sharded optimizer, where updates are whole: optax.chain(zero.shard_optimizer(..., reduction=None), "
            "optax.scale_by_backtracking_linesearch(...)); use other such optimizers without zero.shard_optimizer, on "
            "reduced gradients"
        )

    return refuse


def _init(inner: optax.GradientTransformation, layout: Layout, axis: Axis, params: PyTree) -> PyTree:
    return run_on_shards(inner.init, axis, [(params, layout)], lambda _: derive_layout(inner.init, layout).leaves)


def _update(
    inner: optax.GradientTransformationExtraArgs,
    axis: Axis,
    updates: tuple[PyTree, Layout],
    state: PyTree,
    params: tuple[PyTree, Layout],
    extra: dict[str, Any],
) -> tuple[PyTree, PyTree]:
    """New updates and state. The parameters may be None, their layout may not."""
    extra = {name: _never_called(name) if callable(value) else value for name, value in extra.items()}
    state_layout = derive_layout(inner.init, params[1])
    check_structure(state, state_layout, may_lack=True)

    def layout_of(result: tuple[PyTree, PyTree]) -> tuple[LeafLayout, ...]:
        if differences := state_layout.differences(result[1], may_lack=True):
            raise ValueError(
                f"the optimizer's update returns a different state from its init: {differences}. Put transforms that "
                "only measure, such as optax.monitor, after the sharded optimizer, where updates are whole: "
                "optax.chain(zero.shard_optimizer(...), optax.monitor(...))"
            )
        layouts = match_layout(result[0], params[1], updates[1]), match_layout(result[1], state_layout)
        for kind, tree, layout in zip(("update", "state"), result, layouts, strict=True):
            for leaf, x in zip(layout.leaves, jax.tree.leaves(tree), strict=True):
                if x.shape != leaf.shape:
                    raise ValueError(
                        f"leaf {leaf.name}: the optimizer changed the shape of its {kind} from {leaf.shape} to "
                        f"{x.shape}; on shards shapes must not change"
                    )
        return layouts[0].leaves + layouts[1].leaves

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return inner.update(updates, state, params, **extra)

    inputs = [updates, (state, match_layout(state, state_layout))] + ([] if params[0] is None else [params])
    return run_on_shards(update, axis, inputs, layout_of)


class Init(Protocol):
    """`init` of a sharded optimizer, for type checkers."""

    def __call__(self, params: PyTree) -> Any: ...


class Update(Protocol):
    """`update` of a sharded optimizer, for type checkers. Extra arguments that it reads are arrays and numbers."""

    def __call__(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: ArrayLike | Callable[..., Any]
    ) -> tuple[Any, Any]: ...


class ShardedOptimizer(optax.GradientTransformationExtraArgs):
    """The result of `shard_optimizer`: `init` and `update`, and their inputs.

    Attributes:
      init: makes a state from whole parameters: slices inside pmap, whole outside.
      update: maps a device's gradients, its state and whole parameters to whole updates and the new state.
      unsharded: the wrapped transform.
      axis: the `axis_name` of `shard_optimizer`.

    >>> adam = optax.adam(0.1)
    >>> tx = shard_optimizer(adam, "batch")
    >>> isinstance(tx, ShardedOptimizer), tx.unsharded.init is adam.init, tx.axis
    (True, True, 'batch')
    """

    init: Init
    update: Update
    unsharded: optax.GradientTransformationExtraArgs
    axis: AxisLike

    def _replace(self, **fields: Any) -> ShardedOptimizer:
        replaced = super()._replace(**fields)
        replaced.unsharded = self.unsharded
        replaced.axis = self.axis
        return replaced


def shard_optimizer(
    tx: optax.GradientTransformation,
    axis_name: AxisLike,
    *,
    reduction: Literal["mean", "sum", "scattered"] | None = "mean",
    wire_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
    trust: bool = False,
) -> ShardedOptimizer:
    """Holds the state of an optax transform as one slice per device: the drop-in for data-parallel pmap code (stage 1).

    `init` takes whole parameters, the same on all devices; outside pmap it makes the whole state, as optax does.
    `update` takes each device's own gradients, not reduced and marked by `zero.local`, and returns whole updates: a
    reduce-scatter, the update of a slice, and a gather. Extra arguments of `update` are passed to `tx`; arrays in them
    are whole and the same on all devices. `zero.to_devices` and `zero.to_host` convert state. Taking one device's slice
    out of the state raises, and another device's slice gives NaN updates.

    Args:
      tx: any transform; one that is not element-wise needs `across_shards`, or has a version in `zero`.
      axis_name: the pmap axis, or an `Axis` of groups.
      reduction: how gradients are reduced over devices, "mean" or "sum". None if they are whole, already reduced, and
        not marked; "scattered" if `scatter_mean` or `scatter_sum` reduced them to slices, which the program marks after
        its last computation with them.
      wire_dtype: dtype of gradients on the wire; None for their own.
      reduce_dtype: dtype of their sums; None for their own, but at least float32. `tx` gets the result in the dtype of
        the gradients.
      trust: run `tx` on shards unchanged, if you know that it is correct there.

    Raises:
      ValueError: `reduction` is none of these, or `tx` is sharded already.

    Both functions raise:
      NotElementwiseError: as in `on_shards`.

    `init` raises:
      RuntimeError: called inside a pmap over another axis, or over one without a name.

    `update` raises:
      RuntimeError: called outside pmap.
      ValueError: the shape of a leaf differs from its parameter's, or `wire_dtype` or `reduce_dtype` is of integers.
      TypeError: gradients are not marked, or reduced gradients are; or the state does not belong to a sharded
        optimizer.

    >>> n = jax.local_device_count()
    >>> tx = shard_optimizer(optax.adam(0.1), "batch")
    >>> params = {"w": jnp.ones((n, 4 * n))}
    >>> state = jax.pmap(tx.init, axis_name="batch")(params)
    >>> state.slices[0].mu["w"].shape == (n, 4)
    True
    """
    if reduction not in ("mean", "sum", "scattered", None):
        raise ValueError(f"reduction must be 'mean', 'sum', 'scattered' or None, got {reduction!r}")
    if isinstance(tx, ShardedOptimizer):
        raise ValueError("this optimizer is sharded already: zero.shard_optimizer takes the optax transform itself")
    inner = with_extra_args(tx)

    def init(params: PyTree) -> ShardedState | WholeState:
        register_with_flax()
        origin = origin_of(inner.init, params, axis_name)
        _check_not_nested(inner.init, params)
        if not _is_bound(axis_name):
            _check_outside_pmap(axis_name)
            is_shape = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))
            shapes = make_layout(params, 1).shapes()
            return WholeState(jax.eval_shape(inner.init, shapes) if is_shape else inner.init(params), origin)
        axis = _bound(axis_name)
        layout = make_layout(params, axis.shards)
        shards = shard(params, layout, axis)
        state = jax.tree.map(jnp.asarray, inner.init(shards)) if trust else _init(inner, layout, axis, shards)
        return ShardedState(state, axis.shard_index().astype(jnp.int32)[None], origin)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        axis = _bound(axis_name)
        state = require_sharded(state)
        updates = arrays_of(updates, axis.name, reduction)
        layout_of_grads, layout = _layouts(updates, params, axis, is_scattered=reduction == "scattered")
        if reduction is None:
            grads = shard(updates, layout_of_grads, axis)
        elif reduction == "scattered":
            grads = updates
        else:
            scatter = scatter_mean if reduction == "mean" else scatter_sum
            over_copies = dataclasses.replace(axis, sums_copies=True)  # no program can call `sum_copies` before `tx`
            reduced = scatter(updates, layout_of_grads, over_copies, wire_dtype=wire_dtype, reduce_dtype=reduce_dtype)
            grads = jax.tree.map(as_own, reduced, updates)
        param_shards = None if params is None else shard(params, layout, axis)
        if trust:
            new, new_state = jax.tree.map(jnp.asarray, inner.update(grads, state.slices, param_shards, **extra))
        else:
            inputs = (grads, layout_of_grads), state.slices, (param_shards, layout)
            try:
                new, new_state = _update(inner, axis, *inputs, extra)
            except NotElementwiseError:
                raise
            except ValueError as error:
                if differences := _differences(updates, layout):
                    raise ValueError(
                        "the gradients are those of other parameters, which this optimizer does not allow: "
                        f"{differences}. Differentiate by the tree that update gets as params"
                    ) from error
                raise
        new_layout = match_layout(new, layout, layout_of_grads)
        number = state.shard[0]
        new = nan_unless(is_own(number, axis), new, new_layout)
        updates, is_alike = _gather_updates(new, new_layout, number, axis)
        shard_after = after_update(number, is_alike, axis)[None]
        # Keeps the state's origin, so that a state made by an equal optimizer keeps its structure.
        return updates, dataclasses.replace(state, slices=new_state, shard=shard_after)

    sharded = ShardedOptimizer(init, update)
    sharded.unsharded = inner
    sharded.axis = axis_name
    return sharded


def _gather_updates(new: PyTree, layout: Layout, number: jax.Array, axis: Axis) -> tuple[PyTree, jax.Array]:
    """Whole updates, and whether all devices took the same updates so far: a number gathered along with them."""
    is_odd = number >= axis.shards
    floats = [x.dtype for x in jax.tree.leaves(new) if _is_float(x)]
    parity = is_odd.astype(floats[0] if floats else jnp.float32)[None]
    leaf = LeafLayout(("parity",), (axis.shards,), np.dtype(parity.dtype), (Split(0, axis.shards, axis.shards),))
    joined = Layout(jax.tree.structure((new, parity)), (*layout.leaves, leaf), layout.shards)
    updates, parities = gather((new, parity), joined, axis)
    return updates, jnp.all(parities == parity)


def _layouts(updates: PyTree, params: PyTree, axis: Axis, *, is_scattered: bool) -> tuple[Layout, Layout]:
    """Layouts of the gradients, which are whole unless scattered, and of the parameters."""
    if not is_scattered:
        layout_of_grads = make_layout(updates, axis.shards)
        layout = layout_of_grads if params is None else make_layout(params, axis.shards)
        _check_gradients(layout_of_grads, layout)
        return layout_of_grads, layout
    if params is None:
        raise ValueError("update needs params where gradients are slices: their shapes determine the slices")
    layout = make_layout(params, axis.shards)
    return match_layout(updates, layout), layout


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _differences(updates: PyTree, layout: Layout) -> str:
    """The leaves that gradients have beside those of the parameters, or lack; None and MaskedNode leave leaves out."""

    def is_left_out(x: Any) -> bool:
        return x is None or isinstance(x, optax.MaskedNode)

    flat = [(path_of(keys), x) for keys, x in jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_left_out)]
    left_out = [path for path, x in flat if is_left_out(x)]
    given = {path for path, x in flat if not is_left_out(x)}
    expected = {leaf.path for leaf in layout.leaves}
    lacking = {path for path in expected - given if not any(path[: len(part)] == part for part in left_out)}
    return layout.differences(updates) if lacking or given - expected else ""


def _check_gradients(given: Layout, layout: Layout) -> None:
    shapes = {leaf.path: leaf.shape for leaf in layout.leaves}
    shards = {leaf.path: leaf.shard_shape for leaf in layout.leaves}
    for leaf in given.leaves:
        shape = shapes.get(leaf.path, leaf.shape)
        if leaf.shape != shape:
            slices = "; slices need reduction='scattered'" if leaf.shape == shards.get(leaf.path) else ""
            raise ValueError(f"leaf {leaf.name}: the parameter has shape {shape}, its gradient {leaf.shape}{slices}")
        if leaf.dtype == jax.dtypes.float0:
            raise ValueError(
                f"leaf {leaf.name}: its gradient is float0, that of an integer. Keep integers out of the parameters, "
                "or make this gradient None"
            )


def _check_not_nested(init: Callable[[PyTree], PyTree], params: PyTree) -> None:
    """Raises if the state contains the state of another sharded optimizer."""
    if any(map(is_marked, jax.tree.leaves(jax.eval_shape(init, params), is_leaf=is_marked))):
        raise ValueError(
            "zero.shard_optimizer inside zero.shard_optimizer: only one of them may cut state into slices. Keep the "
            "outermost, and put the optax transforms into it as they are"
        )


def _is_bound(axis: AxisLike) -> bool:
    """Whether this runs inside pmap over the axis."""
    try:
        lax.axis_size(axis.name if isinstance(axis, Axis) else axis)
    except NameError:
        return False
    return True


def _check_outside_pmap(axis: AxisLike) -> None:
    """Raises inside pmap: the optimizer's axis is not bound there, so each device would make the whole state."""
    name = axis.name if isinstance(axis, Axis) else axis
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and name not in mesh.axis_names:
        raise RuntimeError(
            f"no axis {name!r} here: init of a sharded optimizer runs inside pmap over another axis, or without "
            f"axis_name, where each device would hold the whole state: jax.pmap(tx.init, axis_name={name!r}), or "
            "tx.init(params) outside pmap and zero.to_devices"
        )


def _bound(axis: AxisLike) -> Axis:
    name = axis.name if isinstance(axis, Axis) else axis
    try:
        size = lax.axis_size(name)
    except NameError as error:
        raise RuntimeError(
            f"no axis {name!r} here: update of a sharded optimizer runs inside pmap over {name!r}, where each device "
            f"has its own slice: jax.pmap(train_step, axis_name={name!r})"
        ) from error
    check_untracked(lax.axis_index(name))
    on = as_axis(axis)
    if on.size != size:
        raise ValueError(f"axis {name!r} has {size} devices, but its Axis describes {on.size}")
    return on
