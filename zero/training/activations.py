"""Memory of a step for activations, as an estimate, and the policy of rematerialization that it leaves room for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp

from zero.models.config import STACK
from zero.models.stack import ATTENTION, LAYER_INPUT, MLP_GATE, MLP_IN, PROJECTIONS, kinds_of
from zero.training.sharded_gpt import ShardedGPT


def activation_bytes(model: ShardedGPT, rows: int, context: int) -> int:
    """Bytes per device of the activations of one micro-batch of `rows` sequences, as an estimate.

    Of what lies in the host's memory two layers are on the device: one that computes, and one on its way.

    A layer holds 34 bytes per position and channel at two bytes a number, and 5 per pair of positions and head where
    attention is dense; between layers the policy `remat` stores all of that, only inputs, or also other values. Beside
    it there is one layer or, in float32, the logits of a chunk of the vocabulary and their gradient.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198,
    equation 2.
    """
    axis = model.axis
    size = model.config
    positions = rows * context // axis.context
    logits = 2 * 4 * positions * size.vocab_size // size.vocab_chunks // _parts(model)
    stored = stored_bytes(model, rows, context)
    on_host = host_bytes(model, rows, context)
    on_device = stored - on_host + 2 * on_host // size.N
    return on_device + max(_layer_bytes(model, rows, context), logits)


def kinds_on_host(model: ShardedGPT) -> tuple[str, ...]:
    """The kinds of activations that are stored in the host's memory."""
    return tuple(kind for kind in kinds_of(model.remat) if kind in model.offload)


def host_bytes(model: ShardedGPT, rows: int, context: int) -> int:
    """Those of `stored_bytes` that lie in the host's memory."""
    on_host = kinds_on_host(model)
    if model.remat == "nested":
        return stored_bytes(model, rows, context) // 2 if on_host else 0  # inputs of spans, not those within one
    if model.remat == "dots":  # all that is stored moves, or nothing
        return stored_bytes(model, rows, context) if on_host else 0
    return _bytes_of_kinds(model, rows, context, on_host)


def stored_bytes(model: ShardedGPT, rows: int, context: int) -> int:
    """Bytes per device that the layers of a micro-batch store for the backward pass, wherever they lie."""
    size = model.config
    channels = _bytes_of_kinds(model, rows, context, [LAYER_INPUT]) // size.N
    kept = {
        "none": size.N * _layer_bytes(model, rows, context),
        "dots": size.N * 9 * channels,  # inputs, and the results of products with weights
        "nested": 2 * math.isqrt(size.N) * channels,
    }
    return kept.get(model.remat, _bytes_of_kinds(model, rows, context, kinds_of(model.remat)))


def _bytes_of_kinds(model: ShardedGPT, rows: int, context: int, kinds: Sequence[str]) -> int:
    """Bytes per device of these kinds in all layers."""
    size = model.config
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    positions = rows * context // model.axis.context
    inputs = positions * size.embedding_dim * itemsize if LAYER_INPUT in kinds else 0
    return size.N * (inputs + positions * itemsize * numbers_per_position(model, kinds) // _parts(model))


def _parts(model: ShardedGPT) -> int:
    """The devices that share the computation of a position; tensor parallelism cuts what is within a layer."""
    return model.axis.row_group // model.axis.context


def _layer_bytes(model: ShardedGPT, rows: int, context: int) -> int:
    """Bytes per device of all that one layer computes."""
    axis = model.axis
    size = model.config
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    channels = rows * context // axis.context * size.embedding_dim * itemsize
    is_dense = model.kernel is None and (model.blockwise_from is None or context < model.blockwise_from)
    scores = 5 * size.num_head * rows * context**2 // axis.context * itemsize // 2 if is_dense else 0
    return (17 * channels + scores) // _parts(model)


def numbers_per_position(model: ShardedGPT, kinds: Sequence[str]) -> int:
    """Numbers that these kinds have per layer and position, beside the layer's input."""
    size = model.config
    heads = size.num_head * size.head_width
    count = {
        ATTENTION: heads + 2 * size.num_head,  # with the log-sum-exp of each head in float32
        PROJECTIONS: heads + 2 * size.key_heads * size.head_width + size.embedding_dim,
        MLP_IN: size.mlp_width,
        MLP_GATE: size.mlp_width if size.gated else 0,
    }
    return sum(count[kind] for kind in count if kind in kinds)


_LONG = 4096  # positions; a kernel's attention takes longer to compute again than to store from here on


def ladder(model: ShardedGPT, context: int) -> tuple[str, ...]:
    """Policies by the memory that they need, each of which saves time (docs/decisions/attention.md)."""
    if model.config.layer != "transformer" or model.config.experts is not None:
        return ("full",)
    if model.kernel is None:
        return ("full", "mlp_in", "mlp", "mlp+attention")
    return ("full", "attention", "mlp_in+attention", "mlp+attention") if context >= _LONG else ("full", "mlp_in", "mlp")


def _layer_parameters(model: ShardedGPT) -> int:
    """The numbers of a gathered layer."""
    return sum(math.prod(leaf.gathered_shape) for leaf in model.base.layout_by_parts.at(STACK).leaves)


def forward_flops(model: ShardedGPT, rows: int, context: int) -> int:
    """Operations of a device in the forward pass of the layers: products with weights, and causal attention."""
    size = model.config
    positions = rows * context // model.axis.context
    attention = 2 * size.N * positions * context * size.num_head * size.head_width // model.axis.tensor
    return 2 * size.scanned_layers * positions * _layer_parameters(model) + attention


def fitting_remat(
    model: ShardedGPT,
    rows: int,
    context: int,
    held: int,
    capacity: float,
    link: float = 0.0,
    host_capacity: float = math.inf,
) -> str:
    """The policy of `ladder` that stores most and leaves a tenth of the memory free; "full" if none does.

    With activations in the host's memory no more is stored than it holds, and than can be sent there while the forward
    pass computes.

    Args:
      model: sharded at stage 3.
      rows: sequences per device and micro-batch.
      context: tokens per sequence.
      held: bytes per device between steps.
      capacity: bytes of memory of a device.
      link: operations of a device in the time that one byte takes to the host's memory.
      host_capacity: bytes of the host's memory for each of its devices.
    """
    trained = sum(math.prod(leaf.shard_shape) for leaf in model.layout.leaves)
    gradients = trained * jnp.dtype(model.gradient_dtype).itemsize
    forward = forward_flops(model, rows, context)
    # Three times a layer: one, its gradient, and one that is gathered.
    fixed = held + gradients + 3 * _layer_parameters(model) * jnp.dtype(model.compute_dtype).itemsize

    def fits(remat: str) -> bool:
        stores = dataclasses.replace(model, remat=remat)
        is_held = fixed + activation_bytes(stores, rows, context) <= 0.9 * capacity
        on_host = host_bytes(stores, rows, context)
        return is_held and on_host <= host_capacity and on_host * link <= forward

    fitting = [remat for remat in ladder(model, context) if fits(remat)]
    return fitting[-1] if fitting else "full"
