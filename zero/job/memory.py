"""What is stored where: the state on devices or in the host's memory, and the activations of a step."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import optax

from zero.hosts.host_memory import share_of_host
from zero.hosts.speeds import SPEEDS, Speed
from zero.partition.layout import Layout
from zero.training.activations import DENSE_SHARE, PRODUCTS_SHARE, Rates, kinds_on_host, with_fitting_storage
from zero.training.fused_update import span_of
from zero.training.parts import StepOptions
from zero.training.sharded_gpt import ShardedGPT
from zero.training.state_storage import LayersOnHost, OnDevices
from zero.training.step import state_layout

log = logging.getLogger(__name__)


class StoredState(NamedTuple):
    """Where the state of a job lies.

    Attributes:
      layout: of the whole state.
      storage: knows where the state lies between steps.
      held: bytes of state and frozen parameters per device.
    """

    layout: Layout
    storage: OnDevices
    held: int


def store_state(model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions) -> StoredState:
    """Where the state of a model and its optimizer lies between steps."""
    layout = state_layout(model, tx, options)
    storage = OnDevices(layout, model.axis)
    if options.streams_state:
        storage = LayersOnHost(layout, model.axis, span_of(model, options))
    frozen = 0 if model.tuning is None else model.frozen_layout.bytes_per_device()
    return StoredState(layout, storage, storage.device_bytes + frozen)


def with_automatic_remat(model: ShardedGPT, held: int, device: Any, rows: int, context: int) -> ShardedGPT:
    """The model with what its forward pass stores, and where, by the memory that is left and by predicted seconds.

    Args:
      held: bytes of state and frozen parameters per device.
      device: one of the TPUs of the model.
      rows: sequences per device and micro-batch.
      context: tokens of a sequence.
    """
    speed = SPEEDS[device.device_kind]
    may_use_host = bool(model.offload)
    model = with_fitting_storage(
        model,
        rows,
        context,
        held=held,
        capacity=speed.capacity,
        rates=rates_of(model, speed),
        host_capacity=share_of_host(device.device_kind),
    )
    where = f", on the host: {', '.join(kinds_on_host(model)) or 'nothing'}" if may_use_host else ""
    log.info("zero.remat=auto: %s%s", model.remat, where)
    return model


def rates_of(model: ShardedGPT, speed: Speed) -> Rates:
    """Operations and bytes per second of a kind of device, from which `zero.remat=auto` predicts seconds.

    zero's own attention kernel lacks windows and caps, which splash attention has; some TPUs have one of the two only.
    """
    share = DENSE_SHARE
    if model.kernel is not None:
        is_plain = max(model.config.windows) == 0 and model.config.attention_cap is None
        share = (speed.fused or speed.splash) if is_plain else (speed.splash or speed.fused)
    products = speed.products(model.product_dtype.removesuffix("_all"))
    return Rates(PRODUCTS_SHARE * products, share * speed.flops, speed.host / speed.devices)
