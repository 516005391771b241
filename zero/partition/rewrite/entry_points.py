"""The entry points: a function of whole trees run on shards, and the permission to communicate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero.partition.collectives.axis import Axis
from zero.partition.layout import Layout, LeafLayout, PyTree, Split
from zero.partition.rewrite import control, reductions
from zero.partition.rewrite import shapes as shape_rules
from zero.partition.rewrite.interpreter import ACROSS_SHARDS, Interpreter, Rule, Value, whole_shape

RULES: dict[str, Rule] = {**shape_rules.RULES, **reductions.RULES, **control.RULES}


def across_shards(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Lets an optax transform that is not element-wise communicate between shards, so that its result is correct.

    Reductions over a split dimension end in an all-reduce; loops and factorizations run on gathered arrays, each on one
    device; any other operation without a rule for shards runs on gathered arrays on every device. Without splits, and
    outside `shard_optimizer` and `on_shards`, it returns the transform unchanged. Wrap only the part of a chain that
    needs it.

    >>> clip = across_shards(optax.adaptive_grad_clip(0.1))
    >>> tx = optax.chain(clip, optax.adam(1e-3))
    """
    inner = with_extra_args(tx)

    def init(params: PyTree) -> PyTree:
        return _marked(inner.init)(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        return _marked(lambda *trees: inner.update(*trees, **extra))(updates, state, params)

    return optax.GradientTransformationExtraArgs(init, update)


def with_extra_args(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The same transform, whose `update` takes extra arguments.

    Raises:
      TypeError: this is no transform, but the function that makes it.
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        name = getattr(tx, "__name__", repr(tx))
        call = f": call it first, {name}(...)" if callable(tx) else ""
        raise TypeError(f"expected an optax transform, with init and update, got {name}{call}")
    if isinstance(tx, optax.MultiSteps):
        return optax.GradientTransformationExtraArgs(tx.init, tx.update)  # its gradient_transformation() drops them
    return optax.with_extra_args_support(tx)


def _marked(fn: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any) -> Any:
        return fn(*args)

    def run(*args: Any) -> Any:
        if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
            return fn(*args)  # no shards; arrays of a mesh with explicit axes would need that mesh under jit
        return jax.jit(marked)(*args)

    marked.__name__ = ACROSS_SHARDS
    return run


def run_on_shards(
    fn: Callable[..., PyTree],
    axis: Axis,
    inputs: Sequence[tuple[PyTree, Layout]],
    outputs: Callable[[PyTree], Sequence[LeafLayout]],
) -> PyTree:
    """`fn(*trees)` of whole trees, computed from shards.

    Per device: shards in, for each `(tree, layout)` of `inputs`; shards out. `outputs` maps the shapes of the whole
    result to the layouts of its leaves. Call inside pmap.

    Raises:
      NotElementwiseError: an operation outside `across_shards` needs other devices, or draws random numbers.
      ValueError: an input is not a shard of its layout.
    """
    trees = []
    values = list[Value]()
    for tree, layout in inputs:
        shards = [Value(x, _split(leaf)) for x, leaf in zip(layout.shards_of(tree), layout.leaves, strict=True)]
        trees.append(layout.treedef.unflatten(map(whole_shape, shards)))
        values += shards
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*trees)
    splits = [_split(leaf) for leaf in outputs(shapes)]
    results = zip(Interpreter(axis, RULES).run(closed, values), splits, strict=True)
    place = Interpreter(axis, RULES, may_communicate=True).place
    # A result that `fn` computes from no input, such as the flag of a first step, is not an array before a jit
    # boundary.
    arrays = [jnp.asarray(place(x, split, None).x) for x, split in results]
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def _split(leaf: LeafLayout) -> Split | None:
    if not leaf.splits:
        return None
    return leaf.splits[0]
