"""Where state and activations are stored: on devices or in host memory."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import optax

from zero.base.keys import Mistakes, key, one_of, shown
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
    saving_on_host,
    with_fitting_storage,
)
from zero.training.fused_update import span_of
from zero.training.parts import StepOptions
from zero.training.sharded_gpt import ShardedGPT
from zero.training.state_storage import LayersOnHost, OnDevices
from zero.training.step import state_layout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RematKeys:
    """What a step stores, and where: keys of section `zero`."""

    remat: str = key(
        "auto",
        one_of("auto", *REMAT),
        "What the backward pass recomputes; the forward pass stores everything else. Values, by what is stored:",
        "none: everything; nothing is recomputed. At stage 3 each layer is gathered once and kept for the backward "
        "pass.",
        "dots: the products with weights, and the output of attention.",
        "mlp: the input products of an MLP or of each expert; mlp_in: the same without the gate's; experts: as mlp, "
        "and what experts read and return, so that tokens are not exchanged again.",
        "projections: queries, keys, values and the output of attention; attention: only the output of its scores "
        "and values, and the states of the mixer delta.",
        "mlp+attention, mlp_in+attention, mlp+projections, mlp_in+projections, experts+attention, "
        "experts+projections: both.",
        "full: only the inputs of layers, which all of the above store too.",
        "nested: only the inputs of spans of layers, at the cost of one more forward pass.",
        "auto: none on CPU. At stage 3 on TPU, and on GPU with cuDNN's attention: of the values that fit, the one with "
        "the fewest predicted seconds, which is logged at the start. Otherwise full.",
        "On TPU, auto tries full, mlp_in and mlp, with experts also experts. Without an attention kernel it tries the "
        "last of these with +attention too. With the mixer delta, or with an attention kernel and rows of 4,096 or "
        "more positions, it tries full, attention, and the others with +attention. If memory is left, auto computes "
        "the loss for two chunks of the vocabulary at a time.",
    )
    offload: str = key(
        "none",
        one_of(*OFFLOADED),
        "What is moved to the host's memory while the device does not need it; results are bit for bit the same. none: "
        "nothing.",
        "activations: everything that remat stores, between the forward and the backward pass. A device then holds "
        "the activations of only about two layers.",
        "With remat=auto on TPU, at stage 3 without fused_update, each kind of activation stays on the device, moves "
        "to the host or is recomputed, whichever takes the fewest predicted seconds; the choice is logged at the "
        "start. If none is set there, the log says when activations would save 2 % of a step.",
        "optimizer: the optimizer state of layers, between their updates. A device then holds the state of only three "
        "spans of layers; requires zero.fused_update. both: activations and optimizer.",
    )
    fused_update: bool = key(
        False,
        None,
        "At stage 3, update each layer inside the backward pass: needs the least memory, cannot accumulate gradients, "
        "and clips and skips layer by layer.",
    )

    def memory_mistakes(self, model_config: GPTConfig, model_label: str) -> Mistakes:
        """Contradictions between these keys, and with a model."""
        offloaded = OFFLOADED[self.offload]
        if self.remat in STORED and model_config.alone is not None:
            yield "zero.remat", f"dots, full or none, as {model_label} has {model_config.alone.noun}"
        if EXPERTS in self.remat.split("+") and model_config.experts is None:
            yield "zero.remat", f"{self.remat.replace('experts', 'mlp')}, as {model_label} has no experts"
        if self.remat == "nested" and span_size(model_config.scanned_layers) == 1:
            yield (
                "zero.remat",
                f"full, as the {model_config.scanned_layers} layers of {model_label} make no equal spans",
            )
        if self.remat == "none" and "activations" in offloaded:
            why = f"zero.offload={self.offload} finds no names in what none stores"
            yield "zero.remat", f"full or another value, as {why}"
        if "optimizer" in offloaded and not self.fused_update:
            why = f"zero.offload={self.offload} moves the state of a span of layers at a time"
            yield "zero.fused_update", f"true, as {why}"
        if not self.fused_update:
            return
        for collection in collections_of(model_config).values():
            why = f"{model_label} has {collection.words}, which an update of single layers cannot move"
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
      state_bytes: bytes of state and frozen parameters per device.
    """

    layout: Layout
    storage: OnDevices
    state_bytes: int


def store_state(model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions) -> StoredState:
    """Where the state of a model and its optimizer is stored between steps."""
    span = None
    if options.streams_state:
        span = span_of(model, options)
    layout = state_layout(model, tx, options)
    storage = OnDevices(layout, model.axis)
    if span is not None:
        storage = LayersOnHost(layout, model.axis, span)
    frozen = 0 if model.tuning is None else model.frozen_layout.bytes_per_device()
    return StoredState(layout, storage, storage.device_bytes + frozen)


def with_automatic_remat(model: ShardedGPT, state_bytes: int, device: Any, rows: int, context: int) -> ShardedGPT:
    """The model with automatic rematerialization and offload resolved, from the free memory and predicted seconds.

    Args:
      state_bytes: bytes of state and frozen parameters per device.
      device: one of the TPUs or GPUs of the model.
      rows: sequences per device and micro-batch.
      context: tokens of a sequence.
    """
    speed = SPEEDS[device.device_kind]
    may_use_host = bool(model.offload)
    rates = rates_of(model, speed)
    memory = Memory(state_bytes, usable_bytes(device), most_on_host(speed))
    model = with_fitting_storage(model, rows, context, memory, rates)
    where = f", on the host: {', '.join(kinds_on_host(model)) or 'nothing'}" if may_use_host else ""
    pairs = ", two chunks of the vocabulary at once" if model.chunks_at_once == 2 else ""
    log.info("zero.remat=auto: %s%s%s", model.remat, where, pairs)
    if device.platform == "tpu" and not may_use_host:
        on_host, share = saving_on_host(model, rows, context, memory, rates)
        if share > _WORTH:
            log.info(
                "zero.offload=activations: would store %s, on the host %s, and is predicted to save %.0f %% of a step",
                on_host.remat,
                ", ".join(kinds_on_host(on_host)),
                100 * share,
            )
    return model


_WORTH = 0.02  # of a step


# Bytes of a device's program in the memory of its host, beyond which the compiler for TPU refuses it: "Exceeded host
# capacity" (libtpu 0.0.42.1, for a v6e, whose hosts have more).
MOST_ON_HOST = 128 * 2**30


def most_on_host(speed: Speed) -> float:
    """Bytes of the memory of a host that a device may take: its part, and of a TPU's no more than `MOST_ON_HOST`."""
    if math.isinf(speed.host_share):  # a GPU
        return speed.host_share
    return min(speed.host_share, MOST_ON_HOST)


def rates_of(model: ShardedGPT, speed: Speed) -> Rates:
    """Operations and bytes per second of a device kind, from which `zero.remat=auto` predicts seconds."""
    shares = {name: kind.peak_fraction for name, kind in MIXERS.items()}
    if model.kernel is not None:
        shares[ATTENTION] = speed.attention(model.config.head_width)
    products = speed.products(model.product_dtype.removesuffix("_all"))
    return Rates(
        products=PRODUCTS_SHARE * products,
        mixers={name: share * speed.flops for name, share in shares.items()},
        network=speed.network,
        link=speed.host / speed.devices,
    )
