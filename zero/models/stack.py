"""Runs a stack of layers in sequence. A policy determines what is stored for the backward pass.

A layer is a function `(its entry of the stacks, its input, its number)` to its output.
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
    """Stores everything, and compiles each layer separately.

    Without `jax.checkpoint`, which would copy and round the stored values, and without a loop, which would copy them
    into stacks and back.
    """


@dataclasses.dataclass(frozen=True)
class Scanned:
    """A loop that stores the input of each layer and recomputes the rest.

    Attributes:
      saveable: policy of `jax.checkpoint` for further values to store; None: none.
    """

    saveable: Callable[..., bool] | None = None


@dataclasses.dataclass(frozen=True)
class Nested:
    """A loop over spans of `size` layers that stores only the input of each span.

    L layers in spans of sqrt(L) need 2 sqrt(L) layer inputs instead of L, and one more forward pass.
    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174, section 4.
    """

    size: int


Policy = Unrolled | Scanned | Nested

# Names of values of a layer, as `jax.ad_checkpoint.checkpoint_name` sets them: the output of attention; queries, keys,
# values and the output projection; the products that begin an MLP.
ATTENTION, PROJECTIONS, MLP_IN, MLP_GATE = "attention", "projections", "mlp_in", "mlp_gate"
_OF_ATTENTION = {"attention": (ATTENTION,), "projections": (ATTENTION, PROJECTIONS)}
_OF_MLP = {"mlp_in": (MLP_IN,), "mlp": (MLP_IN, MLP_GATE)}


def _stored() -> dict[str, tuple[str, ...]]:
    """What a policy of each name stores beside the inputs of layers.

    >>> _stored()["mlp_in+attention"]
    ('mlp_in', 'attention')
    """
    stored = _OF_ATTENTION | _OF_MLP
    for mlp in _OF_MLP:
        for attention in _OF_ATTENTION:
            stored[f"{mlp}+{attention}"] = _OF_MLP[mlp] + _OF_ATTENTION[attention]
    return stored


STORED: Mapping[str, tuple[str, ...]] = MappingProxyType(_stored())
_saveable = jax.checkpoint_policies


def _storing(*names: str) -> Callable[[int], Policy]:
    return lambda layers: Scanned(_saveable.save_only_these_names(*names))


# Policies by name, from the number of layers; "dots" stores all products with parameters.
REMAT: Mapping[str, Callable[[int], Policy]] = MappingProxyType(
    {
        "nested": lambda layers: Nested(span_size(layers)),
        "full": lambda layers: Scanned(),
        **{name: _storing(*names) for name, names in STORED.items()},
        "dots": lambda layers: Scanned(
            _saveable.save_from_both_policies(
                _saveable.dots_with_no_batch_dims_saveable, _saveable.save_only_these_names(ATTENTION)
            )
        ),
        "none": lambda layers: Unrolled(),
    }
)


def span_size(layers: int) -> int:
    """The span that minimises the stored inputs: one per span, and those of one span.

    >>> span_size(136), span_size(36), span_size(7)
    (8, 6, 1)
    """
    return min((size for size in range(1, layers + 1) if layers % size == 0), key=lambda size: layers // size + size)


def run_layers(pattern: Sequence[Layer], stacks: Any, x: Any, policy: Policy) -> Any:
    """The output of the last layer: layer i is `pattern[i % len(pattern)]`, with entry i of the stacks.

    Args:
      pattern: one period of layers, which divides their number; a single layer for `Nested`.
      stacks: a tree of `(layers, ...)`.
      x: the input of the first layer.
      policy: what is stored for the backward pass.

    >>> weights = jnp.arange(6.0)
    >>> def loss(weights, policy):
    ...     return run_layers([lambda w, x, number: jnp.sin(w * x)], weights, jnp.float32(1), policy)
    >>> gradients = [jax.grad(loss)(weights, policy) for policy in (Unrolled(), Scanned(), Nested(3))]
    >>> bool(jnp.allclose(gradients[0], gradients[1]) and jnp.allclose(gradients[0], gradients[2]))
    True
    """
    count = jax.tree.leaves(stacks)[0].shape[0]
    period = len(pattern)
    xs = stacks, jnp.arange(count)
    if isinstance(policy, Nested):
        (layer,) = pattern
        step = jax.checkpoint(lambda x, xs: (layer(xs[0], x, xs[1]), None), prevent_cse=False)
        span = jax.checkpoint(lambda x, layers: lax.scan(step, x, layers), prevent_cse=False)
        return lax.scan(span, x, _in_spans(xs, policy.size))[0]

    if isinstance(policy, Scanned):
        pattern = [jax.checkpoint(layer, prevent_cse=False, policy=policy.saveable) for layer in pattern]

    def one_period(x: Any, xs: Any) -> tuple[Any, None]:
        for place, layer in enumerate(pattern):
            weights, number = xs if period == 1 else jax.tree.map(lambda x, place=place: x[place], xs)
            x = layer(weights, x, number)
        return x, None

    if period > 1:  # else XLA for TPU would copy the shards of all layers
        xs = _in_spans(xs, period)
    unroll = count // period if isinstance(policy, Unrolled) else 1
    return lax.scan(one_period, x, xs, unroll=unroll)[0]


def run_with_outputs(layer: Callable[..., Any], stacks: Any, x: Any, policy: Policy) -> tuple[Any, Any]:
    """As `run_layers` of one kind of layers, whose result is a pair: its output, and more, which comes out stacked.

    Not for `Nested`.
    """
    count = jax.tree.leaves(stacks)[0].shape[0]
    if isinstance(policy, Scanned):
        layer = jax.checkpoint(layer, prevent_cse=False, policy=policy.saveable)
    unroll = count if isinstance(policy, Unrolled) else 1
    return lax.scan(lambda x, xs: layer(xs[0], x, xs[1]), x, (stacks, jnp.arange(count)), unroll=unroll)


def run_forward(layer: Layer, stacks: Any, x: Any, size: int) -> tuple[Any, Any]:
    """The output of the last layer, and the input of each span of `size` layers, for a caller's own backward pass."""
    spans = jnp.arange(jax.tree.leaves(stacks)[0].shape[0]).reshape(-1, size)
    return lax.scan(lambda x, numbers: (_through(layer, stacks, x, numbers)[0], x), x, spans)


def inputs_of(layer: Layer, stacks: Any, x: Any, numbers: jax.Array) -> Any:
    """The input of each layer of a span, from the input of the first."""
    if len(numbers) == 1:
        return jax.tree.map(lambda x: x[None], x)
    last, inputs = _through(layer, stacks, x, numbers[:-1])
    return jax.tree.map(lambda inputs, last: jnp.concatenate([inputs, last[None]]), inputs, last)


def _through(layer: Layer, stacks: Any, x: Any, numbers: jax.Array) -> tuple[Any, Any]:
    """The output of a span of layers, and the input of each. Indexes the stacks, because a slice would be a copy."""

    def through_layer(x: Any, number: jax.Array) -> tuple[Any, Any]:
        weights = jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, number, keepdims=False), stacks)
        return layer(weights, x, number), x

    return lax.scan(through_layer, x, numbers)


def _in_spans(tree: Any, size: int) -> Any:
    """Leaves of `(layers, ...)` as `(spans, size, ...)`."""
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), tree)
