"""Where state and activations are stored: on devices or in host memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import optax

from zero.config.constraints import one_of, shown
from zero.config.keys import Mistakes, key
from zero.hosts.speeds import SPEEDS, Speed, usable_bytes
from zero.models.collections import collections_of
from zero.models.config import GPTConfig
from zero.models.mixers import MIXERS
from zero.models.part import ATTENTION
from zero.models.stack import EXPERTS, OFFLOADED, REMAT, STORED, span_size
from zero.partition.layout import Layout
from zero.training.activations import (
    PRODUCTS_SHARE,
    Memory,
    Rates,
    kinds_on_host,
    with_fitting_storage,
)
from zero.training.fused_update import span_of
from zero.training.parts import StepOptions
from zero.training.sharded_gpt import ShardedGPT
from zero.training.state_storage import LayersOnHost, OnDevices
from zero.training.step import state_layout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keys:
    """What a step stores, and where: keys of section `zero`."""

    remat: str = key(
        "auto",
        one_of("auto", *REMAT),
        "What the forward pass stores so that the backward pass does not recompute it. auto: on CPU everything "
        "(none); on GPU at stage 3, with cuDNN's attention, what fits and takes the fewest predicted seconds, up to "
        "none;",
        "on TPU at stage 3, the first that fits of mlp+attention (without a kernel), mlp, mlp_in and full, logged at "
        "the start;",
        "for rows of 4,096 or more positions, the first that fits of mlp+attention, mlp_in+attention, attention and "
        "full; with experts and the mixer delta, that of these and experts which takes the fewest predicted seconds.",
        "With all, if memory is left, an iteration over the vocabulary has two chunks.",
        "none: everything; at stage 3 each layer is gathered once and kept for the backward pass.",
        "dots: the products with weights, and the output of attention.",
        "mlp: the input products of an MLP or of each expert; mlp_in: the same without the gate's; experts: mlp, and "
        "what experts read and return, so that tokens are not exchanged again.",
        "projections: queries, keys, values and the output of attention; attention: only the output of its scores "
        "and values, and the states of the mixer delta.",
        "mlp+attention, mlp_in+attention, mlp+projections, mlp_in+projections, experts+attention, "
        "experts+projections: both.",
        "full: only the inputs of layers, which all of the above store too.",
        "nested: only the inputs of spans of layers, at the cost of one more forward pass.",
    )
    offload: str = key(
        "none",
        one_of(*OFFLOADED),
        "What is kept in the host's memory: none, nothing.",
        "activations: everything that remat stores, between the forward and the backward pass, so that a device holds "
        "only about two layers of it; results are bit for bit the same.",
        "With remat=auto, on TPU at stage 3 without fused_update, each kind of activation is kept on the device, "
        "moved to the host or recomputed, by predicted seconds; logged at the start.",
        "optimizer: the optimizer state of layers, between their updates, so that a device holds only three spans of "
        "layers of it; requires zero.fused_update. both: activations and optimizer.",
    )
    fused_update: bool = key(
        False,
        None,
        "At stage 3, update each layer inside the backward pass: needs the least memory, cannot accumulate gradients, "
        "and clips and skips layer by layer.",
    )

    def memory_mistakes(self, size: GPTConfig, of_model: str) -> Mistakes:
        """Contradictions between these keys, and with a model."""
        offloaded = OFFLOADED[self.offload]
        if self.remat in STORED and size.layer == "gated_units":
            yield "zero.remat", f"dots, full or none, as {of_model} has gated units"
        if EXPERTS in self.remat.split("+") and size.experts is None:
            yield "zero.remat", f"{self.remat.replace('experts', 'mlp')}, as {of_model} has no experts"
        if self.remat == "nested" and span_size(size.scanned_layers) == 1:
            yield "zero.remat", f"full, as the {size.scanned_layers} layers of {of_model} make no equal spans"
        if self.remat == "none" and "activations" in offloaded:
            why = f"zero.offload={self.offload} finds no names in what none stores"
            yield "zero.remat", f"full or another value, as {why}"
        if "optimizer" in offloaded and not self.fused_update:
            why = f"zero.offload={self.offload} moves the state of a span of layers at a time"
            yield "zero.fused_update", f"true, as {why}"
        if not self.fused_update:
            return
        for collection in collections_of(size).values():
            why = f"{of_model} has {collection.words}, which an update of single layers cannot move"
            yield "zero.fused_update", f"false, as {why}"
        with_fused = ["auto", "full", "nested"]
        if self.remat not in with_fused:
            possible = " or ".join(map(shown, with_fused))
            yield "zero.remat", f"{possible}, as zero.fused_update=true never holds the whole gradient"


class StoredState(NamedTuple):
    """Where the state of a job is stored.

    Attributes:
      layout: the layout of the whole state.
      storage: knows where the state is between steps.
      held: bytes of state and frozen parameters per device.
    """

    layout: Layout
    storage: OnDevices
    held: int


def store_state(model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions) -> StoredState:
    """Where the state of a model and its optimizer is stored between steps."""
    layout = state_layout(model, tx, options)
    storage = OnDevices(layout, model.axis)
    if options.streams_state:
        storage = LayersOnHost(layout, model.axis, span_of(model, options))
    frozen = 0 if model.tuning is None else model.frozen_layout.bytes_per_device()
    return StoredState(layout, storage, storage.device_bytes + frozen)


def with_automatic_remat(model: ShardedGPT, held: int, device: Any, rows: int, context: int) -> ShardedGPT:
    """The model with automatic rematerialization and offload resolved, from the free memory and predicted seconds.

    Args:
      held: bytes of state and frozen parameters per device.
      device: one of the TPUs or GPUs of the model.
      rows: sequences per device and micro-batch.
      context: tokens of a sequence.
    """
    speed = SPEEDS[device.device_kind]
    may_use_host = bool(model.offload)
    model = with_fitting_storage(model, rows, context, memory_for(device, held), rates_of(model, speed))
    where = f", on the host: {', '.join(kinds_on_host(model)) or 'nothing'}" if may_use_host else ""
    pairs = ", two chunks of the vocabulary at once" if model.chunks_at_once == 2 else ""
    log.info("zero.remat=auto: %s%s%s", model.remat, where, pairs)
    return model


def memory_for(device: Any, held: int) -> Memory:
    """What a device that holds so many bytes between steps, and its host, may store."""
    return Memory(held, usable_bytes(device), SPEEDS[device.device_kind].host_share)


def rates_of(model: ShardedGPT, speed: Speed) -> Rates:
    """Operations and bytes per second of a device kind, from which `zero.remat=auto` predicts seconds."""
    shares = {name: kind.share for name, kind in MIXERS.items()}
    if model.kernel is not None:
        shares[ATTENTION] = speed.attention(model.config.head_width)
    products = speed.products(model.product_dtype.removesuffix("_all"))
    return Rates(
        products=PRODUCTS_SHARE * products,
        mixers={name: share * speed.flops for name, share in shares.items()},
        network=speed.network,
        link=speed.host / speed.devices,
    )
