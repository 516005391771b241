"""Runs a stack of layers one after the other. A policy says what of them is kept for the backward pass.

A layer is a function of its own part of the stacks, what enters it, and its number, to what leaves it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Layer = Callable[[Any, Any, jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """Keeps everything, and compiles each layer by itself.

    Without any checkpoint, which would copy and round what it keeps; and without a loop, which would copy what it keeps
    into stacks and out of them again.
    """


@dataclasses.dataclass(frozen=True)
class Scanned:
    """A loop that keeps the input of each layer and computes the rest again.

    Attributes:
      saveable: which results of operations are kept as well, as `jax.checkpoint` takes it; None: none.
    """

    saveable: Callable[..., bool] | None = None


@dataclasses.dataclass(frozen=True)
class Nested:
    """A loop over groups of `size` layers that keeps only the input of each group.

    Of L layers in groups of sqrt(L) it needs 2 sqrt(L) layer inputs instead of L, and runs one more forward pass.
    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174, section 4.
    """

    size: int


Policy = Unrolled | Scanned | Nested

# From the number of layers to what of each is kept, by name.
REMAT: Mapping[str, Callable[[int], Policy]] = MappingProxyType(
    {
        "full": lambda layers: Scanned(),
        "nested": lambda layers: Nested(span_size(layers)),
        "dots": lambda layers: Scanned(jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
        "none": lambda layers: Unrolled(),
    }
)


def span_size(layers: int) -> int:
    """Layers of a group such that the inputs kept, one per group and those of one group, are fewest.

    >>> span_size(136), span_size(36), span_size(7)
    (8, 6, 1)
    """
    return min((size for size in range(1, layers + 1) if layers % size == 0), key=lambda size: layers // size + size)


def run_layers(pattern: Sequence[Layer], stacks: Any, x: Any, policy: Policy) -> Any:
    """What leaves the last layer: layer i is `pattern[i % len(pattern)]`, with entry i of the stacks.

    Args:
      pattern: a period of the pattern of layers, which divides their number; for `Nested` a single layer.
      stacks: a tree of `(layers, ...)`.
      x: what enters the first layer.
      policy: what is kept for the backward pass.

    >>> weights = jnp.arange(6.0)
    >>> def loss(weights, policy):
    ...     return run_layers([lambda w, x, number: jnp.sin(w * x)], weights, jnp.float32(1), policy)
    >>> gradients = [jax.grad(loss)(weights, policy) for policy in (Unrolled(), Scanned(), Nested(3))]
    >>> bool(jnp.allclose(gradients[0], gradients[1]) and jnp.allclose(gradients[0], gradients[2]))
    True
    """
    count, period = jax.tree.leaves(stacks)[0].shape[0], len(pattern)
    xs = stacks, jnp.arange(count)
    if isinstance(policy, Nested):
        (layer,) = pattern
        one = jax.checkpoint(lambda x, xs: (layer(xs[0], x, xs[1]), None), prevent_cse=False)
        span = jax.checkpoint(lambda x, layers: lax.scan(one, x, layers), prevent_cse=False)
        return lax.scan(span, x, _in_spans(xs, policy.size))[0]

    if isinstance(policy, Scanned):
        pattern = [jax.checkpoint(layer, prevent_cse=False, policy=policy.saveable) for layer in pattern]

    def one_period(x: Any, xs: Any) -> tuple[Any, None]:
        for place, layer in enumerate(pattern):
            own, number = xs if period == 1 else jax.tree.map(lambda x, place=place: x[place], xs)
            x = layer(own, x, number)
        return x, None

    if period > 1:  # else XLA for TPU would copy the shards of all layers
        xs = _in_spans(xs, period)
    unroll = count // period if isinstance(policy, Unrolled) else 1
    return lax.scan(one_period, x, xs, unroll=unroll)[0]


def run_forward(layer: Layer, stacks: Any, x: Any, size: int) -> tuple[Any, Any]:
    """What leaves the last layer, and what enters each group of `size` layers, for a caller's own backward pass."""
    spans = jnp.arange(jax.tree.leaves(stacks)[0].shape[0]).reshape(-1, size)
    return lax.scan(lambda x, numbers: (_through(layer, stacks, x, numbers)[0], x), x, spans)


def inputs_of(layer: Layer, stacks: Any, x: Any, numbers: jax.Array) -> Any:
    """What enters each of a group's layers, from what enters the first."""
    if len(numbers) == 1:
        return jax.tree.map(lambda x: x[None], x)
    last, inputs = _through(layer, stacks, x, numbers[:-1])
    return jax.tree.map(lambda inputs, last: jnp.concatenate([inputs, last[None]]), inputs, last)


def _through(layer: Layer, stacks: Any, x: Any, numbers: jax.Array) -> tuple[Any, Any]:
    """What leaves a few layers, and what enters each of them. A slice of the stacks would be a copy."""

    def one(x: Any, number: jax.Array) -> tuple[Any, Any]:
        own = jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, number, keepdims=False), stacks)
        return layer(own, x, number), x

    return lax.scan(one, x, numbers)


def _in_spans(tree: Any, size: int) -> Any:
    """Leaves of `(layers, ...)` as `(groups, size, ...)`."""
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), tree)
