"""Estimates the memory and the time that activations take, and chooses which are stored, and in which memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import jax.numpy as jnp

from zero.models.attention.tpu_kernels import TPU_KERNELS
from zero.models.config import STACK, GPTConfig
from zero.models.mixers import MIXERS, numbers_per_layer, weights_per_layer
from zero.models.part import ATTENTION as ATTENTION_MIXER
from zero.models.stack import ATTENTION_OUTPUT, EXPERTS, KINDS, LAYER_INPUT, MLP_GATE, MLP_IN, PROJECTIONS
from zero.training.sharded_gpt import ShardedGPT


def activation_bytes(model: ShardedGPT, rows: int, context: int) -> int:
    """Bytes per device of the activations of one micro-batch of `rows` sequences, as an estimate.

    Offloaded values are on the device while they are in transit. An entry of the stack is a layer, or a period of
    layers with different parameters.

    A layer holds 34 bytes per position and channel at two bytes a number, and 5 per pair of positions and head where
    attention is dense; between layers the policy `remat` stores all of that, only inputs, or also other values. Beside
    it there is one layer or, in float32, the logits of the chunks of an iteration over the vocabulary, with gradients.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198,
    equation 2.
    """
    return _stored_on_device(model, rows, context) + forward_bytes(model, rows, context)


def forward_bytes(model: ShardedGPT, rows: int, context: int) -> int:
    """The part of `activation_bytes` that is not stored: one entry of the stack, or the logits."""
    return max(_entry_bytes(model, rows, context), _logits_bytes(model, rows, context))


def _entry_bytes(model: ShardedGPT, rows: int, context: int) -> int:
    """Bytes per device of the entry of the stack that runs, and of projections that XLA for TPU recomputes early.

    The layers of an iteration recompute from their stored inputs, in any order, so their projections exist together.
    """
    one = model.config.period * _layer_bytes(model, rows, context)
    ahead = _layers_at_once(model) - 1
    if not ahead:
        return one
    width = jnp.dtype(model.compute_dtype).itemsize * rows * context // model.axis.context
    return one + ahead * width * numbers_per_position(model, [PROJECTIONS, ATTENTION_OUTPUT]) // _parts(model)


def _layers_at_once(model: ShardedGPT) -> int:
    """Layers in an iteration of the loop whose windows differ; with kernels for TPU, with which it was measured."""
    return len(model.config.window_pattern) if model.kernel in TPU_KERNELS else 1


def _logits_bytes(model: ShardedGPT, rows: int, context: int) -> int:
    """Bytes per device of the logits of a chunk of the vocabulary and their gradient; a second chunk reuses most."""
    size = model.config
    chunk = 4 * rows * context // model.axis.context * size.vocab_size // size.vocab_chunks // _parts(model)
    return chunk * (3 + model.chunks_at_once) // 2


def _stored_on_device(model: ShardedGPT, rows: int, context: int) -> int:
    """Bytes per device of stored activations in its own memory, with those in transit to or from the host.

    In transit are those of the iteration that computes, but for one layer, whose own bytes they are, and of the next.
    Without kernels for TPU, which have not been measured, none is left out.
    """
    on_host = host_bytes(model, rows, context)
    in_transit = 2 * _layers_at_once(model) - (model.kernel in TPU_KERNELS)
    return stored_bytes(model, rows, context) - on_host + in_transit * on_host // _entries(model.config)


def _entries(model_config: GPTConfig) -> int:
    """Entries of the stacks of layers, each of which stores its input."""
    return model_config.first_dense + model_config.scanned_layers + model_config.layer_count - model_config.N


def kinds_on_host(model: ShardedGPT) -> tuple[str, ...]:
    """The kinds of activations that are stored in host memory."""
    return tuple(kind for kind in model.stored_kinds if kind in model.offload)


def host_bytes(model: ShardedGPT, rows: int, context: int) -> int:
    """The part of `stored_bytes` in host memory."""
    on_host = kinds_on_host(model)
    if model.remat == "nested":
        return stored_bytes(model, rows, context) // 2 if on_host else 0  # inputs of spans, not those within one
    if model.remat == "dots":  # `with_fitting_storage` does not choose it, and else all that is stored moves
        if not on_host:
            return 0
        return stored_bytes(model, rows, context)
    return _bytes_of_kinds(model, rows, context, on_host)


def stored_bytes(model: ShardedGPT, rows: int, context: int) -> int:
    """Bytes per device that the layers of a micro-batch store for the backward pass, in either memory."""
    size = model.config
    channels = _bytes_of_kinds(model, rows, context, [LAYER_INPUT]) // _entries(size)
    kept = {
        "none": _bytes_of_all(model, rows, context),
        "dots": size.layer_count * 9 * channels,  # inputs, and the results of products with weights
        "nested": 2 * math.isqrt(size.N) * channels,
    }
    return kept.get(model.remat, _bytes_of_kinds(model, rows, context, model.stored_kinds))


def _bytes_of_kinds(model: ShardedGPT, rows: int, context: int, kinds: Sequence[str]) -> int:
    """Bytes per device of these kinds in all layers."""
    size = model.config
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    positions = rows * context // model.axis.context
    inputs = positions * size.embedding_dim * itemsize if LAYER_INPUT in kinds else 0
    others = positions * itemsize * numbers_per_position(model, kinds) // _parts(model)
    return _entries(size) * inputs + size.layer_count * others


def _bytes_of_all(model: ShardedGPT, rows: int, context: int) -> int:
    """Bytes per device of all that the layers compute, and of their weights, each gathered once.

    A gated MLP keeps three numbers for each of its width; `_forward_bytes_of_layer` counts eight for each channel.
    """
    size = model.config
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    of_gates = max(0, 3 * math.ceil(size.hidden_width) - 8 * size.embedding_dim) if size.gated else 0
    gates = rows * context // model.axis.context * itemsize * of_gates // _parts(model)
    weights = _layer_parameters(model) * itemsize
    return size.layer_count * (_forward_bytes_of_layer(model, rows, context) + gates + weights)


def _parts(model: ShardedGPT) -> int:
    """The devices that share the computation of a position; tensor parallelism cuts what is within a layer."""
    return model.axis.row_group // model.axis.context


def _layer_bytes(model: ShardedGPT, rows: int, context: int) -> int:
    """Bytes per device of one layer in the backward pass.

    They are those of the forward pass or, of a wide gated MLP, four arrays of its width (its gate, the values that
    multiply it, and the gradients of both) and seven of the layer's (benchmarks/measured/beside-maxtext.md).
    """
    size = model.config
    forward = _forward_bytes_of_layer(model, rows, context)
    if not size.gated or size.experts is not None:
        return forward
    numbers = 4 * math.ceil(size.hidden_width) + 7 * size.embedding_dim
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    return max(forward, rows * context // model.axis.context * itemsize * numbers // _parts(model))


def _forward_bytes_of_layer(model: ShardedGPT, rows: int, context: int) -> int:
    """Bytes per device of all that one layer computes in the forward pass."""
    axis = model.axis
    size = model.config
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    channels = rows * context // axis.context * size.embedding_dim * itemsize
    is_dense = model.kernel is None and (model.blockwise_from is None or context < model.blockwise_from)
    scores = 5 * size.num_head * rows * context**2 // axis.context * itemsize // 2 if is_dense else 0
    numbers = 17 * channels + rows * context // axis.context * itemsize * _further_numbers(size)
    return (numbers + scores) // _parts(model)


def _further_numbers(model_config: GPTConfig) -> int:
    """Numbers per position that a layer computes in addition to the formula's: for wider heads, states and experts."""
    heads = max(MIXERS[mixer].transient_floats(model_config) for mixer in model_config.mixers)
    if model_config.experts is None:
        return heads
    of_choice = 2 * model_config.embedding_dim + (3 if model_config.gated else 2) * model_config.mlp_width
    return heads + math.ceil(model_config.places_per_position * of_choice)


def numbers_per_position(model: ShardedGPT, kinds: Sequence[str]) -> int:
    """Numbers per layer and position of these kinds, besides the layer's input."""
    size = model.config
    width = math.ceil(size.hidden_width)
    count = {**numbers_per_layer(size), MLP_IN: width, MLP_GATE: width if size.gated else 0, EXPERTS: 0}
    if size.experts is not None:
        # What experts read and return, and the place of each choice, an int32. Devices of a tensor group repeat them.
        of_layer = (size.places_per_position + size.experts_per_token) * size.embedding_dim + 2 * size.experts_per_token
        count[EXPERTS] = _parts(model) * math.ceil(of_layer * size.expert_layers / size.layer_count)
    return sum(count[kind] for kind in count if kind in kinds)


_LONG = 4096  # positions; a kernel's attention takes longer to compute again than to store from here on


def ladder(model: ShardedGPT, context: int) -> tuple[str, ...]:
    """Policies ordered by memory; each saves time (docs/decisions/attention.md)."""
    size = model.config
    if size.alone is not None:
        return ("full",)
    if model.kernel == "cudnn":
        # Without a loop an H200 took its first step after 31 s in place of 17; with products in float8 it took none
        # in 100 s (docs/reference/performance.md).
        unrolled = ("none",) if model.product_dtype in ("auto", "bfloat16") else ()
        return ("full", "attention", "mlp_in", "mlp", "mlp+attention", "mlp+projections", *unrolled)
    of_mlp = ("mlp_in", "mlp") if size.experts is None else ("mlp_in", "mlp", "experts")
    with_attention = tuple(f"{policy}+attention" for policy in of_mlp)
    if any(MIXERS[mixer].is_stored_first for mixer in size.mixers):
        return ("full", "attention", *with_attention)
    if model.kernel is not None and context >= _LONG:
        # On the host attention would wait behind an MLP's products, so these are stored without it there.
        without_attention = of_mlp if model.offload else ()
        return ("full", "attention", *without_attention, *with_attention)
    if model.kernel is None:
        return ("full", *of_mlp, with_attention[-1])
    return ("full", *of_mlp)


def _layer_parameters(model: ShardedGPT) -> int:
    """The numbers of a gathered layer."""
    return sum(math.prod(leaf.gathered_shape) for leaf in model.base.layout_by_parts.at(STACK).leaves)


class Rates(NamedTuple):
    """A device's practical rates, per second.

    Attributes:
      products: operations of products with weights.
      mixers: operations of each mixer of `zero.models.mixers.MIXERS` between positions.
      network: bytes that it sends to other devices.
      link: bytes copied to its host. Copies from the host are as fast, and run at the same time.
    """

    products: float
    mixers: Mapping[str, float]
    network: float
    link: float


PRODUCTS_SHARE = 0.85  # of the peak, that XLA for TPU reaches in the products of a layer (docs/decisions/offload.md)
_PRODUCTS_AHEAD = 2  # that XLA runs between the start of a load and the end of a layer (docs/decisions/offload.md)


def seconds_by_kind(model: ShardedGPT, rows: int, context: int, rates: Rates) -> dict[str, float]:
    """Seconds in which a device computes each kind of activation of one layer, for one micro-batch.

    Args:
      model, rows, context: as for `with_fitting_storage`.
      rates: of a device.
    """
    size = model.config
    shares = model.axis.context * _parts(model)
    of_parameter = 2 * rows * context / shares / rates.products
    of_mlp = of_parameter * size.embedding_dim * size.hidden_width
    of_mixers = [MIXERS[mixer].flops(size, context) / rates.mixers[mixer] for mixer in size.mixers]
    return {
        ATTENTION_OUTPUT: rows / shares * sum(of_mixers) / len(of_mixers),
        PROJECTIONS: of_parameter * weights_per_layer(size),
        MLP_IN: of_mlp,
        MLP_GATE: of_mlp if size.gated else 0.0,
        EXPERTS: _seconds_of_experts(model, rows, context, rates),
    }


def _seconds_of_experts(model: ShardedGPT, rows: int, context: int, rates: Rates) -> float:
    """Seconds of the last product of the experts of a layer, and of both exchanges of tokens in an expert group."""
    size = model.config
    if size.experts is None:
        return 0.0
    channels = rows * context / model.axis.context * size.places_per_position * size.embedding_dim
    others = 1 - 1 / model.axis.expert
    exchanges = 2 * channels * jnp.dtype(model.compute_dtype).itemsize * others / rates.network
    product = 2 * channels * size.mlp_width / _parts(model) / rates.products
    return (exchanges + product) * size.expert_layers / size.layer_count


def storage_seconds(model: ShardedGPT, rows: int, context: int, rates: Rates) -> float:
    """Seconds per micro-batch to compute again what the model does not store, and to wait for copies to and from hosts.

    XLA starts loads for a layer two products before the end of the layer before, those of the MLP's products earlier.
    The products of an MLP are the largest (docs/decisions/offload.md).

    Args:
      model, rows, context, rates: as for `seconds_by_kind`.
    """
    by_kind = seconds_by_kind(model, rows, context, rates)
    stored = model.stored_kinds
    recomputed = 0.0
    if model.remat != "none":
        recomputed = sum(seconds for kind, seconds in by_kind.items() if kind not in stored)
    moved = host_bytes(model, rows, context)
    loaded_late = moved - _bytes_of_kinds(model, rows, context, _mlp_kinds_on_host(model))
    load = loaded_late / model.config.layer_count / rates.link
    waits = max(0.0, load - _PRODUCTS_AHEAD * by_kind[MLP_IN])
    waits += _seconds_until_stored(model, rows, context, rates, by_kind)
    return model.config.layer_count * (recomputed + waits)


def _seconds_until_stored(
    model: ShardedGPT, rows: int, context: int, rates: Rates, by_kind: Mapping[str, float]
) -> float:
    """Seconds for which a layer of the forward pass waits until what the layer before stores is in the host's memory.

    XLA sends it from the beginning of the next layer on, the products of the MLP first, and the next attention and the
    next MLP take the place of those before (docs/decisions/offload.md).
    """
    per_second = model.config.layer_count * rates.link
    of_all = host_bytes(model, rows, context) / per_second
    waits = [0.0, of_all - _forward_seconds(model, by_kind)]
    of_mlp = _mlp_kinds_on_host(model)
    if of_mlp:
        waits.append(of_all - by_kind[PROJECTIONS] - by_kind[ATTENTION_OUTPUT] - by_kind[MLP_GATE])
    if of_mlp and ATTENTION_OUTPUT in kinds_on_host(model):
        first = _bytes_of_kinds(model, rows, context, [*of_mlp, ATTENTION_OUTPUT]) / per_second
        waits.append(first - by_kind[PROJECTIONS])
    return max(waits)


def _mlp_kinds_on_host(model: ShardedGPT) -> list[str]:
    """The products that begin an MLP, as far as they are stored in the host's memory."""
    return [kind for kind in kinds_on_host(model) if kind in (MLP_IN, MLP_GATE)]


def _forward_seconds(model: ShardedGPT, by_kind: Mapping[str, float]) -> float:
    """Seconds of the forward pass of a layer, from those of each kind of its activations."""
    forward = sum(by_kind.values())
    if model.config.experts is None:
        forward += by_kind[MLP_IN]  # the product that ends an MLP is as large
    return forward


def _candidates(model: ShardedGPT, context: int) -> Iterator[ShardedGPT]:
    """The model with each policy of `ladder`, those that store more first, and its kinds in each memory."""
    for remat in reversed(ladder(model, context)):
        storing = dataclasses.replace(model, remat=remat)
        movable = kinds_on_host(storing)
        for count in range(len(movable) + 1):
            for offload in combinations(movable, count):
                yield dataclasses.replace(storing, offload=offload)


class Memory(NamedTuple):
    """Bytes that limit what a device stores.

    Attributes:
      state_bytes: of a device between steps.
      capacity: of a device.
      host: of the host's memory, for each of its devices.
    """

    state_bytes: int
    capacity: float
    host: float = math.inf


class Choice(NamedTuple):
    """A storage policy that `zero.remat=auto` compares with others.

    Attributes:
      model: with the policy, and the kinds that it stores in host memory.
      bytes: of a device at the peak of a step, as an estimate.
      host_bytes: of the host's memory, for each of its devices.
      seconds: of `storage_seconds`.
      fits: both memories.
    """

    model: ShardedGPT
    bytes: int
    host_bytes: int
    seconds: float
    fits: bool


def storage_choices(model: ShardedGPT, rows: int, context: int, memory: Memory, rates: Rates) -> list[Choice]:
    """The policies of `ladder`, with each kind on the device or, if it is one of `model.offload`, in host memory.

    Policies that store more come first. Arguments as for `with_fitting_storage`.
    """
    return [_choice(candidate, rows, context, memory, rates) for candidate in _candidates(model, context)]


def _gathered_layers(model: ShardedGPT) -> int:
    """The layers whose weights, or gradients of that size, a device holds at the peak of the backward pass.

    Three were counted before it was measured; with the kernels for TPU it is two, and one if the layer has experts,
    whose activations are larger (benchmarks/measured/beside-maxtext.md).
    """
    if model.kernel not in TPU_KERNELS:
        return 3
    if model.config.experts is None:
        return 2
    return 1


def _choice(model: ShardedGPT, rows: int, context: int, memory: Memory, rates: Rates) -> Choice:
    # Held beside the logits too: with several micro-batches it is the sum of those before.
    gradients = sum(math.prod(leaf.shard_shape) for leaf in model.layout.leaves)
    gradients *= jnp.dtype(model.gradient_dtype).itemsize
    weights = _gathered_layers(model) * _layer_parameters(model) * jnp.dtype(model.compute_dtype).itemsize
    transient = max(weights + _entry_bytes(model, rows, context), _logits_bytes(model, rows, context))
    needed = memory.state_bytes + gradients + _stored_on_device(model, rows, context) + transient
    on_host = host_bytes(model, rows, context)
    fits = needed <= (1 - spare(model)) * memory.capacity and on_host <= memory.host
    return Choice(model, needed, on_host, storage_seconds(model, rows, context, rates), fits)


def spare(model: ShardedGPT) -> float:
    """The part of a device's memory that a policy has to leave by the estimate.

    The estimate is at most 3 % below the compiler's peak if an iteration is one layer of attention and a dense MLP, a
    kernel computes the scores, and a device has its rows for itself (benchmarks/measured/beside-maxtext.md). Otherwise,
    and on GPUs, it may be further below. Of a TPU's memory 1 to 3 % are never available, and where a step leaves none
    of the rest XLA hides less communication.
    """
    size = model.config
    is_one_layer = size.experts is None and {*size.mixers} == {ATTENTION_MIXER} and len({*size.windows}) == 1
    is_alone = model.axis.row_group == 1
    is_known = is_one_layer and is_alone and model.kernel in TPU_KERNELS
    return 0.065 if is_known else 0.1


def with_fitting_storage(model: ShardedGPT, rows: int, context: int, memory: Memory, rates: Rates) -> ShardedGPT:
    """The model with the storage policy that fits and takes the fewest seconds; "full" if none fits.

    Of equal `storage_choices` it is the one with the fewest bytes on the host, then that which stores most. If two
    chunks of the vocabulary at once fit as well, an iteration has two (benchmarks/measured/vocabulary-chunks.md).

    Args:
      model: sharded at stage 3.
      rows: sequences per device and micro-batch.
      context: tokens per sequence.
      memory: what it may take, of a device and its host.
      rates: of a device.
    """
    fitting = [choice for choice in storage_choices(model, rows, context, memory, rates) if choice.fits]
    chosen = dataclasses.replace(model, remat="full")
    if fitting:
        chosen = min(fitting, key=lambda choice: (choice.seconds, choice.host_bytes)).model
    in_pairs = dataclasses.replace(chosen, chunks_at_once=2)
    fits_in_pairs = _choice(in_pairs, rows, context, memory, rates).fits
    return in_pairs if model.config.vocab_chunks > 1 and fits_in_pairs else chosen


def saving_on_host(
    model: ShardedGPT, rows: int, context: int, memory: Memory, rates: Rates
) -> tuple[ShardedGPT, float]:
    """What `zero.offload=activations` would store of a model that stores nothing on the host, and what it would save.

    Args:
      model, rows, context, memory, rates: as for `with_fitting_storage`.

    Returns:
      The model with activations on the host, and the share of a micro-batch's predicted seconds that it would save.
    """
    on_host = with_fitting_storage(dataclasses.replace(model, offload=KINDS), rows, context, memory, rates)
    before = storage_seconds(model, rows, context, rates)
    after = storage_seconds(on_host, rows, context, rates)
    forward = _forward_seconds(model, seconds_by_kind(model, rows, context, rates))
    without_storage = 3 * model.config.layer_count * forward  # a backward pass takes twice as long
    return on_host, (before - after) / (without_storage + before)
