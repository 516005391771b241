"""The four stages of ZeRO as placements of two operations: gather parameters, reduce-scatter gradients.

| stage | parameters are gathered                    | gradients are reduce-scattered        |
|-------|--------------------------------------------|---------------------------------------|
| 0     | never: plain data parallel                 | all-reduced                           |
| 1     | once, at the start of a step: `gather`     | once, at its end: `scatter_sum`       |
| 2     | once, at the start of a step: `gather`     | each layer, backward: `fully_shard`   |
| 3     | each layer, forward and again backward: `fully_shard`                              |

Stages 2 and 3 rest on one trick, `borrow`: a layer computes with a given whole weight, and the gradient of that
weight flows to the shard. Source: ZeRO (Rajbhandari et al., arXiv 1910.02054), sections 5 and 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout as ArrayLayout
from jax.experimental.layout import with_layout_constraint
from jax.typing import DTypeLike

from zero.partition.collectives import arrays, coalesced
from zero.partition.collectives.axis import Axis, AxisLike, as_axis, check_shards, check_untracked
from zero.partition.collectives.rounded import gather_rounded
from zero.partition.layout import Layout, LeafLayout, PyTree
from zero.partition.model_parallel import RoundedWeight, Rounding
from zero.partition.sharded_state import ShardedState, check_not_vmapped, check_structure, is_marked, is_own

if TYPE_CHECKING:
    import flax.linen as nn

Target = TypeVar("Target", bound=Callable[..., Any])


def shard(tree: PyTree, layout: Layout, axis: AxisLike) -> PyTree:
    """This device's shards of a whole tree; no communication.

    Per device: whole leaves in, shards out. Call inside pmap.

    >>> import numpy as np; import zero
    >>> n = jax.local_device_count()
    >>> params = {"w": np.arange(2.0 * n)}
    >>> layout = zero.make_layout(params, n)
    >>> jax.pmap(lambda _: zero.shard(params, layout, "batch"), "batch")(np.ones(n))["w"][0].tolist()
    [0.0, 1.0]
    """
    on = checked_axis(layout, axis)
    layout.without_parts().gathered_of(tree)  # raises if a leaf is not whole
    with jax.named_scope("zero_shard"):
        index = on.shard_index()
        return layout.map(lambda leaf, x: arrays.slice_array(jnp.asarray(x), leaf, index), tree)


def gather(
    tree: PyTree,
    layout: Layout | None = None,
    axis: AxisLike | None = None,
    dtype: DTypeLike | None = None,
    *,
    wire_dtype: DTypeLike | None = None,
) -> PyTree:
    """The whole tree from slices with a layout, or the whole state from the state of a sharded optimizer.

    One `all_gather` per split leaf, small ones together, in `dtype` on the wire. The state of a sharded optimizer,
    alone or in a tree with others, knows its layout and axis, and becomes optax's state, with NaN in place of slices
    that are not the device's own.

    Per device: shards in, whole leaves out. `dtype=None` keeps each leaf's own. With `wire_dtype=jnp.int8` blocks
    of 256 floats travel as int8 with a scale, each element off by at most its block's largest / 254. Call inside pmap.

    >>> import numpy as np; import zero
    >>> n = jax.local_device_count()
    >>> layout = zero.make_layout({"w": jax.ShapeDtypeStruct((2 * n,), np.float32)}, n)
    >>> full = jax.pmap(lambda shards: zero.gather(shards, layout, "batch"), "batch")({"w": np.ones((n, 2))})
    >>> full["w"].shape == (n, 2 * n)
    True
    """
    if layout is None:
        return _gather_states(tree, dtype, wire_dtype)
    if axis is None:
        raise TypeError("gather needs the axis of slices with a layout: zero.gather(tree, layout, axis)")
    axis = checked_axis(layout, axis)
    with jax.named_scope("zero_gather"):
        shards = layout.shards_of(tree)
        return layout.treedef.unflatten(coalesced.gather_arrays(shards, layout.leaves, axis, dtype, wire_dtype))


def _gather_states(tree: PyTree, dtype: DTypeLike | None, wire_dtype: DTypeLike | None) -> PyTree:
    """The tree with the whole state in place of each sharded one."""
    if not any(isinstance(x, ShardedState) for x in jax.tree.leaves(tree, is_leaf=is_marked)):
        raise TypeError(
            "gather needs the layout and the axis of slices that do not know theirs: zero.gather(tree, layout, axis)"
        )

    def one(x: Any) -> Any:
        if not isinstance(x, ShardedState):
            return x
        if not isinstance(x.shard, jax.core.Tracer):
            raise RuntimeError("zero.gather runs inside pmap; outside, zero.to_host(opt_state) gives the whole state")
        axis = as_axis(x.axis)
        check_not_vmapped(x.shard.ndim, 1)
        layout = x.layout(axis.shards)
        check_structure(x.slices, layout)
        return gather(
            nan_unless(is_own(x.shard[0], axis), x.slices, layout), layout, axis, dtype, wire_dtype=wire_dtype
        )

    return jax.tree.map(one, tree, is_leaf=is_marked)


def nan_unless(condition: jax.Array, shards: PyTree, layout: Layout) -> PyTree:
    """The shards, or NaN: a compiled program cannot raise, and a NaN is noticed, a loss that is 12 % off is not."""

    def one(leaf: LeafLayout, x: jax.Array) -> jax.Array:
        is_slice = leaf.splits and jnp.issubdtype(x.dtype, jnp.inexact)
        if not is_slice:
            return x
        return lax.select(condition, x, jnp.full_like(x, jnp.nan))  # jnp.where takes two operations more

    return layout.map(one, shards)


def scatter_sum(
    tree: PyTree,
    layout: Layout,
    axis: AxisLike,
    *,
    wire_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
) -> PyTree:
    """This device's shards of the sum over devices: `psum_scatter`, of small leaves together; of a whole leaf `psum`.

    A leaf keeps its dtype, as with `lax.psum`, although 16-bit floats are summed in float32. With `reduce_dtype`
    floats are summed and returned in that dtype. With `wire_dtype=jnp.int8` blocks of 256 floats of split leaves travel
    as int8 with a scale, each summand off by at most its block's largest / 254.

    Per device: whole leaves in, shards out. Call inside pmap.

    >>> import numpy as np; import zero
    >>> n = jax.local_device_count()
    >>> layout = zero.make_layout({"w": jax.ShapeDtypeStruct((2 * n,), np.float32)}, n)
    >>> sums = jax.pmap(lambda grads: zero.scatter_sum(grads, layout, "batch"), "batch")({"w": np.ones((n, 2 * n))})
    >>> sums["w"].tolist() == [[n, n]] * n
    True
    """
    sums = scatter_wide_sum(tree, layout, axis, wire_dtype=wire_dtype, reduce_dtype=reduce_dtype)
    if reduce_dtype is not None:
        return sums
    return jax.tree.map(as_own, sums, tree)


def scatter_wide_sum(
    tree: PyTree,
    layout: Layout,
    axis: AxisLike,
    *,
    wire_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
) -> PyTree:
    """`scatter_sum` without its last rounding: the sums of 16-bit floats are returned in float32."""
    axis = checked_axis(layout, axis)
    layout.check_numbers()
    with jax.named_scope("zero_scatter"):
        full = [jnp.asarray(x) for x in layout.gathered_of(tree)]
        shards = coalesced.scatter_sum_arrays(full, layout.leaves, axis, wire_dtype, reduce_dtype)
        return layout.treedef.unflatten(shards)


def as_own(reduced: jax.Array, own: Any) -> jax.Array:
    """Casts as `lax.pmean` does: a mean of narrow floats is as narrow, a mean of integers is a float."""
    dtype = jnp.result_type(own)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return reduced
    return reduced.astype(dtype)


def sum_copies(tree: PyTree, layout: Layout, axis: Axis) -> PyTree:
    """Sums shards over the copies, after a reduce-scatter on an axis with `sums_copies=False`.

    Per device: shards in, shards out. Whole leaves are summed already. Call inside pmap.

    >>> import numpy as np; import zero
    >>> n = jax.local_device_count()
    >>> axis = Axis("batch", (2, n // 2), sums_copies=False)
    >>> layout = zero.make_layout({"w": jax.ShapeDtypeStruct((n,), np.float32)}, n // 2)
    >>> def total(full):
    ...     return sum_copies(zero.scatter_sum(full, layout, axis), layout, axis)
    >>> sums = jax.pmap(total, "batch")({"w": np.ones((n, n))})
    >>> bool((sums["w"] == n).all())
    True
    """
    layout.shards_of(tree)  # raises if a leaf is not a shard
    with jax.named_scope("zero_sum_copies"):
        return layout.map(lambda leaf, x: arrays.sum_copies_of_array(x, axis) if leaf.splits else x, tree)


def scatter_mean(tree: PyTree, layout: Layout, axis: AxisLike, **dtypes: DTypeLike | None) -> PyTree:
    """`scatter_sum` divided by the number of devices on the axis; same shapes and arguments.

    >>> import numpy as np; import zero
    >>> n = jax.local_device_count()
    >>> layout = zero.make_layout({"w": jax.ShapeDtypeStruct((2 * n,), np.float32)}, n)
    >>> means = jax.pmap(lambda grads: zero.scatter_mean(grads, layout, "batch"), "batch")({"w": np.ones((n, 2 * n))})
    >>> means["w"].tolist() == [[1, 1]] * n
    True
    """
    axis = checked_axis(layout, axis)
    means = jax.tree.map(lambda x: x / axis.size, scatter_wide_sum(tree, layout, axis, **dtypes))
    if dtypes.get("reduce_dtype") is not None:
        return means
    return jax.tree.map(as_own, means, tree)


def checked_axis(layout: Layout, axis: AxisLike) -> Axis:
    """The axis, checked against the layout. Call inside pmap.

    Raises:
      ValueError: the layout was made for another number of shards, or this is `jax.shard_map` with `check_vma=True`.
    """
    axis = as_axis(axis)
    check_untracked(axis.shard_index())
    check_shards(axis, layout.shards)
    return axis


def fully_shard(
    target: Target,
    layout: Layout,
    axis: AxisLike,
    *,
    dtype: DTypeLike | None = None,
    wire_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
    gather_dtype: DTypeLike | None = None,
    rounding: Callable[[LeafLayout], Rounding | None] | None = None,
    methods: Sequence[str] | None = None,
) -> Target:
    """A Flax module, or a function of a parameter tree, whose parameters are shards: stages 2 and 3.

    The target sees whole parameters in `dtype`; shards are stored, differentiated and initialized. In the backward pass
    each gradient is reduce-scattered (summed over the axis) as soon as it exists. With `nn.remat` and `nn.scan` around
    one lifted layer, whole weights exist for one layer at a time: stage 3. Weights gathered before, passed as the
    variable collection "gathered" (a function: the keyword `gathered`), are used instead of a gather: stage 2.
    Gradients flow to the shards, or to the collection "gradients", a tree like the shards, in its dtype.

    Args:
      target: a `flax.linen.Module`, a class or an instance of one, or a function `f(params, ...)`. Modules of NNX,
        Equinox and Haiku are passed as such functions.
      layout: the layout of the target's own parameters; for a layer under `nn.scan`, `layout.at(name)`.
      axis: the pmap axis. Call the result inside pmap.
      dtype: dtype of whole parameters, on the wire and in the target; None keeps each leaf's own.
      wire_dtype: dtype of gradients on the wire.
      reduce_dtype: dtype of sums of gradients.
      gather_dtype: int8 to gather parameters with `wire_dtype=jnp.int8`.
      rounding: for the matrices that the target takes as `RoundedWeight`s, which are rounded before they are gathered;
        None for all other leaves.
      methods: the methods of a module class to lift, by default `__call__`; the others must not use parameters.

    Raises:
      TypeError: the target is a module of another library, or no function.

    Raises, when the result is called:
      ValueError: the layout was made for a different number of shards, or the shape of a leaf of the parameters, of
        "gathered" or of "gradients" does not match it.

    >>> import flax.linen as nn; import jax.numpy as jnp; from zero import make_layout
    >>> x = jnp.ones((jax.local_device_count(), 2, 5))
    >>> layout = make_layout(jax.eval_shape(nn.Dense(3).init, jax.random.key(0), x[0])["params"], len(x))
    >>> dense = fully_shard(nn.Dense, layout, "batch")(3)
    >>> shards = jax.pmap(lambda x: dense.init(jax.random.key(0), x), axis_name="batch")(x)
    >>> y = jax.pmap(dense.apply, axis_name="batch")(shards, x)
    >>> bool(jnp.allclose(y[0], nn.Dense(3).init_with_output(jax.random.key(0), x[0])[0]))
    True
    """

    def whole(shards: PyTree, gathered: PyTree | None, gradients: PyTree | None) -> PyTree:
        on = checked_axis(layout, axis)
        rounded: dict[int, RoundedWeight] = {}
        if gathered is None and rounding is not None:
            full, rounded = _gather_and_round(pinned(shards, dtype), layout, on, dtype, gather_dtype, rounding)
        elif gathered is None:
            full = gather(pinned(shards, dtype), layout, on, dtype, wire_dtype=gather_dtype)
        else:
            layout.shards_of(shards)
            full = layout.treedef.unflatten(layout.gathered_of(gathered))
        full = lax.stop_gradient(full)  # else zeros would be reduce-scattered to its shards
        with jax.named_scope("zero_borrow"):
            flow_to = shards if gradients is None else layout.treedef.unflatten(layout.shards_of(gradients))
            borrowed = _borrow(flow_to, full, layout, on, wire_dtype=wire_dtype, reduce_dtype=reduce_dtype)
        return _with_rounded(borrowed, rounded, layout)

    def on_shards(
        shards: PyTree, *args: Any, gathered: PyTree | None = None, gradients: PyTree | None = None, **kwargs: Any
    ) -> Any:
        return target(whole(shards, gathered, gradients), *args, **kwargs)

    if _is_of("flax.linen", target):
        module: Any = target
        lifted: Any = _lift(module if isinstance(module, type) else type(module), layout, axis, whole, methods)
        return cast(Target, lifted if isinstance(module, type) else lifted(**_arguments(module)))
    _check_function(target)
    return cast(Target, on_shards)


def _is_of(package: str, target: Any) -> bool:
    """Whether this is a class of a package's modules, or an instance of one."""
    bases = target.__mro__ if isinstance(target, type) else type(target).__mro__
    return any(f"{base.__module__}.".startswith(f"{package}.") for base in bases)


def _arguments(module: Any) -> dict[str, Any]:
    """The fields of a flax.linen module that is not part of another one yet."""
    if module.scope is not None:
        raise TypeError(
            f"zero.fully_shard: this {type(module).__name__} is bound to its parameters already: lift the class, or "
            "the instance before init and apply"
        )
    names = [field.name for field in dataclasses.fields(module) if field.init and field.name != "parent"]
    return {name: getattr(module, name) for name in names}


_WAYS = {  # for modules that hold their parameters, or find them in a frame of their library
    "flax.nnx": "graph, params = nnx.split(model), and the function lambda params, x: nnx.merge(graph, params)(x)",
    "equinox": "params, static = eqx.partition(model, eqx.is_array), and the function lambda params, x: "
    "eqx.combine(params, static)(x)",
    "haiku": "hk.without_apply_rng(hk.transform(lambda x: ...)).apply, a function of params and x",
}


def _check_function(target: Any) -> None:
    """Raises if this is not a function of parameters."""
    kind = f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__}"
    for package, way in _WAYS.items():
        holds_arrays = any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(target))
        if _is_of(package, target) and (holds_arrays or isinstance(target, type) or package == "haiku"):
            raise TypeError(
                f"zero.fully_shard takes flax.linen modules and functions of parameters, got {kind} of {package}: pass "
                f"{way}"
            )
    if isinstance(target, type) or not callable(target):
        raise TypeError(f"zero.fully_shard takes flax.linen modules and functions of parameters, got {kind}")


def _lift(
    target: type[nn.Module],
    layout: Layout,
    axis: AxisLike,
    whole: Callable[..., PyTree],
    methods: Sequence[str] | None,
) -> type[nn.Module]:
    """The module class on shards; `whole` takes "params", and "gathered" and "gradients" or None."""
    import flax.linen as nn  # whoever calls this has it; other programs need not install it

    def use(variables: PyTree) -> PyTree:
        return {"params": whole(variables["params"], variables.get("gathered"), variables.get("gradients"))}

    def make(variables: PyTree) -> PyTree:
        if "params" not in variables:
            return variables  # The first call at init: the module makes whole parameters.
        return {**use(variables), "shards": variables["params"]}

    def leave(variables: PyTree) -> PyTree:
        if "shards" in variables:  # A further call at init: the original shards, not rounded to dtype.
            return {"params": variables["shards"]}
        # Cast layer by layer: later, whole stacks would exist in both dtypes.
        cast = {name: layout.map(lambda leaf, x: x.astype(leaf.dtype), full) for name, full in variables.items()}
        return {name: shard(full, layout, axis) for name, full in cast.items()}

    # Two lifts: a module that maps its own variables in use, such as WeightNorm, would map "shards" as well.
    collections = ["params", "gathered", "gradients", "shards"]
    making = nn.map_variables(target, collections, make, leave, mutable=True, methods=methods)
    using = nn.map_variables(target, collections, use, mutable=False, methods=methods)

    def lifted(name: str) -> Callable[..., Any]:
        def method(module: Any, *args: Any, **kwargs: Any) -> Any:
            is_made = module.is_mutable_collection("params")
            return getattr(making if is_made else using, name)(module, *args, **kwargs)

        return method

    return type(target.__name__, (making,), {name: lifted(name) for name in methods or ["__call__"]})


def pinned(tree: PyTree, dtype: DTypeLike | None) -> PyTree:
    """The same shards, on which XLA for TPU cannot hoist work out of a loop over layers.

    Before the loop it would transpose the shards of all layers, if products with gathered weights prefer that, or round
    all of them to the dtype on the wire, and keep both versions. A fixed memory layout of the slice prevents the first,
    a bitcast to integers the second.
    """

    def one(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.float32 and (dtype is None or x.dtype == dtype):
            return x
        if x.ndim > 1:
            x = with_layout_constraint(x, ArrayLayout(tuple(range(x.ndim))))
        if x.dtype != jnp.float32:
            return x
        return lax.bitcast_convert_type(lax.optimization_barrier(lax.bitcast_convert_type(x, jnp.uint32)), x.dtype)

    return jax.tree.map(one, tree)


def _gather_and_round(
    shards: PyTree,
    layout: Layout,
    axis: Axis,
    dtype: DTypeLike | None,
    gather_dtype: DTypeLike | None,
    rounding: Callable[[LeafLayout], Rounding | None],
) -> tuple[PyTree, dict[int, RoundedWeight]]:
    """The whole tree, with zeros in place of the leaves that are rounded, and these by their numbers in the tree."""
    roundings = {i: form for i, leaf in enumerate(layout.leaves) if (form := rounding(leaf)) is not None}
    others = [i for i in range(len(layout.leaves)) if i not in roundings]
    x = layout.shards_of(shards)

    def of(numbers: Sequence[int]) -> tuple[list[jax.Array], list[LeafLayout]]:
        return [x[i] for i in numbers], [layout.leaves[i] for i in numbers]

    with jax.named_scope("zero_gather"):
        matrices = gather_rounded(*of([*roundings]), [*roundings.values()], axis, dtype)
        rest = coalesced.gather_arrays(*of(others), axis, dtype, gather_dtype)
    rounded = dict(zip(roundings, matrices, strict=True))
    full = dict(zip(others, rest, strict=True)) | {i: matrix.flow for i, matrix in rounded.items()}
    return layout.treedef.unflatten([full[i] for i in range(len(layout.leaves))]), rounded


def _with_rounded(full: PyTree, rounded: Mapping[int, RoundedWeight], layout: Layout) -> PyTree:
    """The tree with these leaves in their places; their gradient flows to the leaves that were there."""
    if not rounded:
        return full
    leaves = layout.leaves_of(full)
    for i, matrix in rounded.items():
        leaves[i] = matrix._replace(flow=leaves[i])
    return layout.treedef.unflatten(leaves)


def _borrow(shards: PyTree, full: PyTree, layout: Layout, axis: Axis, **dtypes: DTypeLike | None) -> PyTree:
    """`full`, whose gradient is reduce-scattered to `shards` instead of flowing to `full`; dtypes as `scatter_sum` has.

    Scatter and gather are each other's derivative, so higher derivatives are right in reverse mode, for any wire
    dtype. jax refuses forward mode.
    """
    shard_dtypes, full_dtypes = (jax.tree.map(lambda x: x.dtype, tree) for tree in (shards, full))

    def cast(tree: PyTree, dtypes: PyTree) -> PyTree:
        return jax.tree.map(lambda x, dtype: x.astype(dtype), tree, dtypes)

    @jax.custom_vjp
    def borrow(shards: PyTree, full: PyTree) -> PyTree:
        return full

    @jax.custom_vjp
    def scatter(full_grads: PyTree) -> PyTree:
        return cast(scatter_wide_sum(full_grads, layout, axis, **dtypes), shard_dtypes)

    borrow.defvjp(lambda shards, full: (borrow(shards, full), None), lambda _, grads: (scatter(grads), None))
    scatter.defvjp(lambda grads: (scatter(grads), None), lambda _, x: (cast(gather(x, layout, axis), full_dtypes),))
    return borrow(shards, full)
