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
from jax.ad_checkpoint import checkpoint_name

from zero.models.elements import row_major

Layer = Callable[[Any, Any, jax.Array], Any]

# Kinds of activations, and names of their values, as `jax.ad_checkpoint.checkpoint_name` sets them.
LAYER_INPUT = "layer_input"  # or the input of a span of layers; named only if it goes to the host's memory
ATTENTION_OUTPUT = "attention"  # its output; of the delta rule also the states between chunks
# The sums of each query's scores, which are stored with the output and small. They stay on the device: a copy to the
# host would wait behind those of large values (docs/decisions/offload.md).
ATTENTION_SUMS = "attention_sums"
PROJECTIONS = "projections"  # queries, keys, values and the output projection
MLP_IN, MLP_GATE = "mlp_in", "mlp_gate"  # the products that begin an MLP, or each expert
EXPERTS = "experts"  # the places of tokens, what experts read, and what they return
DOTS = "dots"  # all products with parameters; no name, but a policy of its own
# Those that may lie in the host's memory.
KINDS = (LAYER_INPUT, ATTENTION_OUTPUT, PROJECTIONS, MLP_IN, MLP_GATE, EXPERTS, DOTS)


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """Stores everything, and compiles each layer separately.

    Without `jax.checkpoint`, which would copy and round the stored values, and without a loop, which would copy them
    into stacks and back.
    """

    @property
    def kinds(self) -> tuple[str, ...]:
        """Empty: the stored values have no names."""
        return ()


@dataclasses.dataclass(frozen=True)
class Scanned:
    """A loop that stores the input of each layer and recomputes the rest.

    Attributes:
      names: of further values to store, as `jax.ad_checkpoint.checkpoint_name` sets them.
      products: whether all products with parameters are stored as well.
      on_host: the `kinds` that lie in host memory until the backward pass needs them.
    """

    names: tuple[str, ...] = ()
    products: bool = False
    on_host: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """All that is stored."""
        return (LAYER_INPUT, *self.names, *([DOTS] if self.products else []))

    @property
    def saveable(self) -> Callable[..., Any] | None:
        """The policy of `jax.checkpoint`."""
        products = _PRODUCTS_ON_HOST if DOTS in self.on_host else _saveable.dots_with_no_batch_dims_saveable
        if self.on_host:
            on_device = [name for name in self.names if name not in self.on_host]
            return _either(_named_on_host(*self.on_host, on_device=on_device), products if self.products else None)
        if self.products:
            return _either(products, _saveable.save_only_these_names(*self.names))
        if not self.names:
            return None
        return _saveable.save_only_these_names(*self.names)


@dataclasses.dataclass(frozen=True)
class Nested:
    """A loop over spans of `size` layers that stores only the input of each span.

    L layers in spans of sqrt(L) need 2 sqrt(L) layer inputs instead of L, and one more forward pass.
    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174, section 4.

    Attributes:
      size: layers of a span.
      on_host: those of `kinds` that lie in host memory.
    """

    size: int
    on_host: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """All that is stored."""
        return (LAYER_INPUT,)


Policy = Unrolled | Scanned | Nested

_OF_ATTENTION = {
    "attention": (ATTENTION_OUTPUT, ATTENTION_SUMS),
    "projections": (ATTENTION_OUTPUT, ATTENTION_SUMS, PROJECTIONS),
}
_OF_MLP = {"mlp_in": (MLP_IN,), "mlp": (MLP_IN, MLP_GATE), "experts": (MLP_IN, MLP_GATE, EXPERTS)}


def _stored() -> dict[str, tuple[str, ...]]:
    """What the policy of each name stores besides the inputs of layers.

    >>> _stored()["mlp_in+attention"]
    ('mlp_in', 'attention', 'attention_sums')
    """
    stored = _OF_ATTENTION | _OF_MLP
    for mlp in _OF_MLP:
        for attention in _OF_ATTENTION:
            stored[f"{mlp}+{attention}"] = _OF_MLP[mlp] + _OF_ATTENTION[attention]
    return stored


STORED: Mapping[str, tuple[str, ...]] = MappingProxyType(_stored())
_saveable = jax.checkpoint_policies
_TO_HOST: Any = {"offload_src": "device", "offload_dst": "pinned_host"}
_PRODUCTS_ON_HOST = _saveable.offload_dot_with_no_batch_dims(**_TO_HOST)


def _named_on_host(*names: str, on_device: Sequence[str] = ()) -> Callable[..., Any]:
    return _saveable.save_and_offload_only_these_names(
        names_which_can_be_saved=on_device, names_which_can_be_offloaded=names, **_TO_HOST
    )


def _either(first: Callable[..., Any], second: Callable[..., Any] | None) -> Callable[..., Any]:
    """A policy that stores what either stores, where the first one does, and recomputes the rest.

    `jax.checkpoint_policies.save_from_both_policies` takes none that stores on the host.
    """
    if second is None:
        return first

    def policy(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
        by_first = first(primitive, *arguments, **parameters)
        recomputes = by_first is False or by_first is _RECOMPUTE
        if not recomputes:
            return by_first
        return second(primitive, *arguments, **parameters)

    return policy


# What the policies return for all that is not stored, for which jax has no public name.
_RECOMPUTE = _named_on_host()(None)


def _storing(*names: str) -> Callable[[int], Policy]:
    return lambda layers: Scanned(names)


# Policies by name, from the number of layers; "dots" stores all products with parameters.
REMAT: Mapping[str, Callable[[int], Policy]] = MappingProxyType(
    {
        "nested": lambda layers: Nested(span_size(layers)),
        "full": lambda layers: Scanned(),
        **{name: _storing(*names) for name, names in STORED.items()},
        "dots": lambda layers: Scanned(_OF_ATTENTION["attention"], products=True),
        "none": lambda layers: Unrolled(),
    }
)
# The kinds in host memory, by the value of `zero.offload`.
OFFLOADED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "none": (),
        "activations": ("activations",),
        "optimizer": ("optimizer",),
        "both": ("activations", "optimizer"),
    }
)


def policy_of(remat: str, layers: int, offload: Sequence[str] = ()) -> Policy:
    """The policy of `REMAT` with this name for this many layers; it stores the kinds of `offload` in host memory.

    Raises:
      ValueError: the policy stores values without names.

    >>> policy_of("mlp_in", 8, KINDS)
    Scanned(names=('mlp_in',), products=False, on_host=('layer_input', 'mlp_in'))
    >>> policy_of("nested", 8, [LAYER_INPUT])
    Nested(size=2, on_host=('layer_input',))
    """
    policy = REMAT[remat](layers)
    if not offload:
        return policy
    if isinstance(policy, Unrolled):
        raise ValueError(f"remat {remat} stores all that a layer computes, of which the host's memory takes no part")
    return dataclasses.replace(policy, on_host=tuple(kind for kind in policy.kinds if kind in offload))


def kinds_of(remat: str) -> tuple[str, ...]:
    """The kinds of activations that a policy of `REMAT` stores.

    >>> kinds_of("mlp"), kinds_of("none")
    (('layer_input', 'mlp_in', 'mlp_gate'), ())
    """
    return REMAT[remat](1).kinds


def span_size(layers: int) -> int:
    """The span that minimizes the stored inputs: one per span, and those of one span.

    >>> span_size(136), span_size(36), span_size(7)
    (8, 6, 1)
    """
    return min((size for size in range(1, layers + 1) if layers % size == 0), key=lambda size: layers // size + size)


def run_layers(pattern: Sequence[Layer], stacks: Any, x: Any, policy: Policy) -> Any:
    """The output of the last layer: layer i is `pattern[i % len(pattern)]`, with entry i of the stacks.

    One period of layers is an iteration of a loop. Layers that are left after the last whole period follow the loop.

    Args:
      pattern: one period of layers; a single layer for `Nested`.
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
    iterations, left = divmod(count, period)
    if isinstance(policy, Nested):
        (layer,) = pattern
        step = jax.checkpoint(lambda x, xs: (layer(xs[0], x, xs[1]), None), prevent_cse=False)

        def through_span(x: Any, layers: Any) -> Any:
            return lax.scan(step, name_input(x) if policy.on_host else x, layers)

        saveable = _named_on_host(LAYER_INPUT) if policy.on_host else None
        span = jax.checkpoint(through_span, prevent_cse=False, policy=saveable)
        return lax.scan(span, x, _in_spans(xs, policy.size))[0]

    looped = pattern
    after = pattern[:left]
    if isinstance(policy, Scanned):
        looped = [_rematerialized(layer, policy, in_loop=iterations > 1) for layer in looped]
        after = [_rematerialized(layer, policy, in_loop=False) for layer in after]

    def through(layers: Sequence[Layer], x: Any, xs: Any) -> Any:
        for place, layer in enumerate(layers):
            weights, number = xs if period == 1 else jax.tree.map(lambda x, place=place: x[place], xs)
            x = layer(weights, x, number)
        return x

    rest = ()
    if left:
        rest = jax.tree.map(lambda x: x[count - left :], xs)
        xs = jax.tree.map(lambda x: x[: count - left], xs)
    if period > 1:  # else XLA for TPU would copy the shards of all layers
        xs = _in_spans(xs, period)
    unroll = iterations if isinstance(policy, Unrolled) else 1
    x, _ = lax.scan(lambda x, xs: (through(looped, x, xs), None), x, xs, unroll=unroll)
    return through(after, x, rest)


def run_with_outputs(layer: Callable[..., Any], stacks: Any, x: Any, policy: Policy) -> tuple[Any, Any]:
    """As `run_layers` of one kind of layers, whose result is a pair: its output, and more, which comes out stacked.

    Not for `Nested`.
    """
    count = jax.tree.leaves(stacks)[0].shape[0]
    if isinstance(policy, Scanned):
        layer = _rematerialized(layer, policy)
    unroll = count if isinstance(policy, Unrolled) else 1
    return lax.scan(lambda x, xs: layer(xs[0], x, xs[1]), x, (stacks, jnp.arange(count)), unroll=unroll)


def _rematerialized(layer: Callable[..., Any], policy: Scanned, *, in_loop: bool = True) -> Callable[..., Any]:
    """The layer, storing only the values of the policy.

    Outside a loop XLA would notice that the backward pass repeats the forward pass, and store its values.
    """

    def with_named_input(weights: Any, x: Any, number: jax.Array) -> Any:
        return layer(weights, name_input(x), number)

    named = with_named_input if LAYER_INPUT in policy.on_host else layer
    return jax.checkpoint(named, prevent_cse=not in_loop, policy=policy.saveable)


def name_input(x: Any) -> Any:
    """The input of a layer, with the name by which it goes to the host's memory, and a fixed layout there.

    Otherwise XLA for TPU may choose one for the forward and another for the backward pass, and transpose the stack of
    all layers, for which it copies it to the device and back. Statistics of rows, of fewer dimensions, stay.
    """

    def name(x: jax.Array) -> jax.Array:
        if not is_on_host(x):
            return x
        return checkpoint_name(row_major(x), LAYER_INPUT)

    return jax.tree.map(name, x)


def is_on_host(x: jax.Array) -> bool:
    """Whether a part of a layer's input is one of `(rows, positions, channels)`, which goes to the host's memory."""
    return x.ndim >= 3


def run_forward(layer: Layer, stacks: Any, x: Any, size: int, *, on_host: bool = False) -> tuple[Any, Any]:
    """The output of the last layer, and the input of each span of `size` layers, for a caller's own backward pass.

    `on_host` has these inputs in host memory; `to_device` brings back what was there.
    """
    spans = jnp.arange(jax.tree.leaves(stacks)[0].shape[0]).reshape(-1, size)

    def through_span(x: Any, numbers: jax.Array) -> tuple[Any, Any]:
        kept = jax.tree.map(_to_host, x) if on_host else x
        return _through(layer, stacks, x, numbers)[0], kept

    return lax.scan(through_span, x, spans)


def _to_host(x: jax.Array) -> jax.Array:
    if not is_on_host(x):
        return x
    return jax.device_put(row_major(x), jax.memory.Space.Host)


def to_device(x: Any) -> Any:
    """What `run_forward` has put into the host's memory; parts that stayed on the device are returned as they are."""

    def bring(x: jax.Array) -> jax.Array:
        if not is_on_host(x):
            return x
        return row_major(jax.device_put(x, jax.memory.Space.Device))

    return jax.tree.map(bring, x)


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


def movable_kinds(remat: str) -> tuple[str, ...]:
    """Those of `kinds_of` that may lie in the host's memory.

    >>> kinds_of("attention"), movable_kinds("attention")
    (('layer_input', 'attention', 'attention_sums'), ('layer_input', 'attention'))
    """
    return tuple(kind for kind in kinds_of(remat) if kind in KINDS)
