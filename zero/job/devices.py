"""Where devices stand: the pmap axis of all devices, its groups, and which placement of groups is the faster one."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from zero.base.errors import UserError
from zero.hosts.speeds import SPEEDS
from zero.hosts.torus import collective_seconds, places_of
from zero.hosts.xla_options import overlaps_exchanges
from zero.job.sharding import Sharding
from zero.models.config import STACK
from zero.partition.collectives.axis import Axis
from zero.partition.global_arrays import pmap_devices
from zero.training.sharded_gpt import ShardedGPT

log = logging.getLogger(__name__)


def make_axis(zero: Sharding, devices: Sequence[Any] | None = None) -> Axis:
    """The pmap axis of a checked configuration: copies of the state, groups of devices, the phases of collectives.

    Raises:
      UserError: the devices do not make groups of equal size.
    """
    devices = pmap_devices() if devices is None else devices
    slices = slices_of(devices)
    replicas = zero.replicas or slices
    is_tpu = devices[0].platform == "tpu"
    exchanges = is_tpu and zero.overlap_gathers and exchanges_gradients(devices)
    copies_dtype = None if zero.replica_wire_dtype == "auto" else zero.replica_wire_dtype
    has_torus = is_tpu and slices == 1 and not zero.overlap_gathers
    has_torus = has_torus and replicas == zero.tensor_shards == zero.expert_shards == 1
    _check_divisor(f"zero.replicas={replicas}", replicas, devices)
    _check_divisor(f"zero.context_shards={zero.context_shards}", zero.context_shards, devices)
    times = f" times zero.replicas={replicas}" if replicas > 1 else ""
    _check_divisor(f"zero.tensor_shards={zero.tensor_shards}{times}", replicas * zero.tensor_shards, devices)
    _check_divisor(f"zero.expert_shards={zero.expert_shards}{times}", replicas * zero.expert_shards, devices)
    if zero.expert_shards > 1:
        axis = Axis.with_expert_groups("zero", len(devices), zero.expert_shards, replicas)
        return dataclasses.replace(axis, exchanges=exchanges, copies_dtype=copies_dtype)
    if zero.phases == "torus" and slices > 1:
        raise UserError(f"zero.phases=torus: expected auto or flat, because {slices} slices do not form a torus")
    if zero.phases == "torus" and zero.tensor_shards > 1:
        axis = _tensor_lines(zero, devices)
        exchanges = is_tpu and zero.overlap_gathers and _gathers_in_rings(axis, devices)
    elif zero.phases == "torus" or (zero.phases == "auto" and has_torus):
        axis = Axis.from_devices("zero", devices)
    elif zero.tensor_shards == 1 and zero.phases == "auto" and replicas < slices and slices % replicas == 0:
        axis = Axis.across_slices("zero", len(devices), slices, replicas)
    elif zero.tensor_shards == 1:
        axis = Axis("zero", (replicas, len(devices) // replicas))
    else:
        if not zero.stage:
            replicas = len(devices) // zero.tensor_shards  # one per tensor group
        axis = Axis.with_tensor_groups("zero", len(devices), zero.tensor_shards, replicas)
    return dataclasses.replace(axis, context=zero.context_shards, exchanges=exchanges, copies_dtype=copies_dtype)


class Placement(NamedTuple):
    """An axis, and the seconds per step of links for each placement among which it was chosen."""

    axis: Axis
    seconds: dict[str, float]


def faster_placement(
    model: ShardedGPT, zero: Sharding, devices: Sequence[Any] | None, rows: int, micro_batches: int, context: int
) -> Placement | None:
    """The placement of tensor groups on one TPU slice whose links need the least time; None without a choice.

    The arguments are those of `placement_seconds`.
    """
    if model.axis.tensor == 1 or model.axis.replicas > 1:
        return None
    seconds = placement_seconds(model, pmap_devices() if devices is None else devices, rows, micro_batches, context)
    if not seconds:
        return None
    phases = min(seconds, key=seconds.__getitem__)
    shown = ", ".join(f"{name} {of_links:.3f} s" for name, of_links in seconds.items())
    log.info("zero.phases=auto chose %s by the time per step on the links: %s", phases, shown)
    return Placement(make_axis(dataclasses.replace(zero, phases=phases), devices), seconds)


def _check_divisor(setting: str, groups: int, devices: Sequence[Any]) -> None:
    """Raises UserError where the devices do not form so many groups of equal size."""
    if len(devices) % groups:
        raise UserError(f"{setting}: expected a divisor of {len(devices)}, the number of devices")


def slices_of(devices: Sequence[Any]) -> int:
    """How many slices of TPUs these devices form, by the numbers that jax gives them; 1 for all other devices.

    Machines with CPUs or GPUs have such numbers too.

    Raises:
      UserError: the slices have different sizes, or their devices lie among each other in the order of pmap.
    """
    if devices[0].platform != "tpu":
        return 1
    numbers = [getattr(device, "slice_index", 0) for device in devices]
    sizes = {number: numbers.count(number) for number in numbers}
    if len({*sizes.values()}) > 1:
        shown = ", ".join(f"{size} devices of slice {number}" for number, size in sizes.items())
        raise UserError(f"expected slices of equal size, got {shown}")
    if numbers != sorted(numbers):
        raise UserError(f"expected the devices of a slice next to each other, got slices {numbers}")
    return len(sizes)


def _tensor_lines(zero: Sharding, devices: Sequence[Any]) -> Axis:
    if not hasattr(devices[0], "coords"):
        raise UserError("zero.phases=torus: expected auto or flat, because these devices are not a TPU slice")
    try:
        return Axis.with_tensor_lines("zero", devices, zero.tensor_shards)
    except ValueError as error:
        raise UserError(f"zero.tensor_shards={zero.tensor_shards} with zero.phases=torus: {error}") from error


def _gathers_in_rings(axis: Axis, devices: Sequence[Any]) -> bool:
    """Whether the devices that gather a part of a layer lie along one dimension of the slice.

    Then they scatter gradients by an all-to-all, which XLA runs beside matrix products. Over two dimensions it takes
    longer than the reduce-scatter that XLA does not hide (docs/decisions/groups.md).
    """
    speed = SPEEDS.get(devices[0].device_kind)
    if speed is None or speed.offloads:
        return False
    first = (axis.groups(axis.shards // axis.tensor) or [list(range(axis.size))])[0]
    places = np.asarray([(*devices[i].coords, devices[i].core_on_chip) for i in first])
    return int((places != places[0]).any(axis=0).sum()) <= 1


def placement_seconds(
    model: ShardedGPT, devices: Sequence[Any], rows: int, micro_batches: int, context: int
) -> dict[str, float]:
    """Seconds per step in which links carry what tensor groups exchange and what is gathered, by `zero.phases`.

    "flat" has groups of neighbors, "torus" groups along lines: there, gathers have the other dimensions to themselves,
    and exchanges one. Nothing is hidden, and each placement has the links to itself.

    Args:
      model: with tensor groups.
      devices: of one TPU slice.
      rows: sequences per group and micro-batch.
      micro_batches: per step.
      context: tokens per sequence.

    Returns:
      One number for each placement that the slice has.
    """
    speed = SPEEDS[devices[0].device_kind]
    places = places_of(devices)
    tensor = model.axis.tensor
    placements = {"flat": Axis.with_tensor_groups(model.axis.name, len(devices), tensor)}
    try:
        placements["torus"] = Axis.with_tensor_lines(model.axis.name, devices, tensor)
    except ValueError:
        return {}
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    layer = itemsize * sum(math.prod(leaf.gathered_shape) for leaf in model.base.layout_by_parts.at(STACK).leaves)
    activations = itemsize * rows * context * model.config.embedding_dim
    passes = 3 * micro_batches if model.stage == 3 else 2  # of each layer: gathers, forward and backward, and a scatter
    sums = 6 * micro_batches  # of each layer: after attention and after the MLP; forward, recomputed, backward

    def seconds(axis: Axis) -> float:
        gathering = axis.groups(axis.shards // tensor) or [list(range(axis.size))]
        others = len(gathering[0])
        gather = collective_seconds("all-gather", layer * (others - 1) / others, gathering[0], places, speed)
        sent = 2 * activations * (tensor - 1) / tensor
        exchange = collective_seconds("all-reduce", sent, axis.row_groups()[0], places, speed)
        return model.config.N * (passes * gather + sums * exchange)

    return {phases: seconds(axis) for phases, axis in placements.items()}


def exchanges_gradients(devices: Sequence[Any]) -> bool:
    """Whether devices of a TPU slice scatter gradients by an all-to-all (docs/decisions/collectives.md).

    XLA runs it beside matrix products, as SparseCores do a reduce-scatter, but not over the chips of a square such as
    4x4: there the compiler makes an all-reduce of it, which nothing hides. An all-to-all must take at most twice as
    long as the all-reduce that XLA makes of a scatter elsewhere: the links in the middle of the longest dimension carry
    half of all bytes of an all-to-all, while those of all dimensions share an all-reduce, and the cores of a chip what
    it sends. A slice of more than 16 chips of a v5e runs no all-to-all beside computation.
    """
    speed = SPEEDS.get(devices[0].device_kind)
    if speed is None:
        return False
    chips = len(devices) // slices_of(devices) // speed.devices
    if not overlaps_exchanges(devices[0].device_kind, chips):
        return False
    places = [device.coords for device in devices]
    sizes = [1 + max(dim) for dim in zip(*places, strict=True)]
    spanned = [size for size in sizes if size > 1]
    is_square = len(spanned) == 2 and len({*spanned}) == 1 and spanned[0] >= 4
    if speed.offloads and not is_square:
        return False
    return not spanned or speed.devices * max(spanned) / 4 <= 2 * 2 / len(spanned)
