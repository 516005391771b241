"""The placement of devices: the pmap axis over all devices, its groups, and the faster placement of groups."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from zero.base.errors import UserError
from zero.base.keys import Mistakes, at_least, key, one_of
from zero.costs.topology import slices_of
from zero.hosts.speeds import SPEEDS, Speed
from zero.hosts.torus import collective_seconds, places_of
from zero.hosts.xla_options import overlaps_exchanges
from zero.models.config import STACK, GPTConfig
from zero.models.mixers import MIXERS
from zero.partition.collectives.axis import Axis
from zero.partition.global_arrays import pmap_devices
from zero.training.flops import model_flops
from zero.training.sharded_gpt import ShardedGPT

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupKeys:
    """How weights are split over devices and groups, in section `zero`: the keys that inference reads."""

    stage: int = key(
        3,
        one_of(0, 1, 2, 3),
        "ZeRO's stage; weights and optimizer state are sharded at 1 to 3. From most to least memory:",
        "0: everything is replicated, plain data parallelism.",
        "1: parameters are gathered at the start of a step, gradients reduce-scattered at its end.",
        "2: gradients are reduce-scattered layer by layer.",
        "3: parameters are gathered layer by layer as well.",
        in_scores=True,
    )
    tensor_shards: int = key(
        1,
        at_least(1),
        "Tensor parallelism: neighboring devices compute the same sequences, each with its share of the heads, the "
        "MLP and the vocabulary.",
        in_scores=True,
    )
    expert_shards: int = key(
        1,
        at_least(1),
        "Expert parallelism: neighboring devices divide the experts of a layer and exchange tokens; needs a model "
        "with experts and expert_capacity.",
        in_scores=True,
    )
    phases: str = key(
        "auto",
        one_of("auto", "flat", "torus"),
        "How parameters are gathered and gradients scattered. flat: one collective over all devices.",
        "torus: one collective along each dimension of a TPU slice. With tensor_shards, each group lies along one "
        "dimension, and parameters are gathered along the other.",
        "auto: flat, which the TPU compiler predicts to be faster. If a copy of the state spans several slices: one "
        "collective within each slice and one between slices. Without overlap_gathers: torus where possible, which "
        "sends the fewest bytes. With tensor_shards: the placement whose links need less time.",
        in_scores=True,
    )
    overlap_gathers: bool = key(
        True,
        None,
        "On TPU and GPU, overlap sending parameters and gradients with matrix products; false: send before and after "
        "them, which needs slightly less memory.",
    )

    def group_mistakes(self, model_config: GPTConfig, model_label: str, lengths: Iterable[tuple[str, int]]) -> Mistakes:
        """Groups that cannot be formed, or cannot divide a model and sequences of these lengths."""
        if self.phases == "torus" and self.expert_shards > 1:
            yield "zero.phases", f"auto or flat, as zero.expert_shards={self.expert_shards}"
        yield from self._uncut(model_config, model_label, lengths)
        yield from self._undivided(model_config, model_label)

    def _uncut(self, model_config: GPTConfig, model_label: str, lengths: Iterable[tuple[str, int]]) -> Mistakes:
        """The sizes that tensor groups cannot cut into equal parts."""
        counts: dict[str, int | None] = {}
        for name in dict.fromkeys(model_config.mixer_pattern):
            counts |= MIXERS[name].heads(model_config)
        if model_config.alone is None:
            counts |= {
                "mlp_dim": model_config.mlp_width,
                "dense_dim": model_config.dense_dim,
                "shared_dim": model_config.shared_dim,
            }
        cut = [(f"{name}={count} of {model_label}", count) for name, count in counts.items() if count is not None]
        for description, count in (*cut, *lengths):
            if count % self.tensor_shards:
                yield "zero.tensor_shards", f"a divisor of {description}"

    def _undivided(self, model_config: GPTConfig, model_label: str) -> Mistakes:
        """The keys that conflict with expert groups."""
        if self.expert_shards == 1:
            return
        if model_config.experts is None:
            yield "zero.expert_shards", f"1, as {model_label} has no experts"
        elif model_config.experts % self.expert_shards:
            yield "zero.expert_shards", f"a divisor of experts={model_config.experts} of {model_label}"
        elif model_config.expert_capacity is None:
            why = "as devices exchange a fixed number of tokens"
            yield "zero.expert_shards", f"1, or a number as expert_capacity of {model_label}, {why}"
        if self.tensor_shards > 1:
            yield "zero.tensor_shards", f"1, as zero.expert_shards={self.expert_shards}"


@dataclass(frozen=True)
class DeviceKeys(GroupKeys):
    """The same with the keys that training reads: copies of the state, and groups that share sequences."""

    replicas: int | None = key(
        None,
        at_least(1),
        "Copies of the whole state, each sharded over a group of neighboring devices: parameters are gathered inside "
        "a group, and gradients are summed over all devices.",
        "null: one copy per TPU slice, so that only sums of gradients leave a slice.",
        in_scores=True,
    )
    replica_wire_dtype: str = key(
        "auto",
        one_of("auto", "bfloat16", "int8"),
        "Dtype in which gradients are sent between copies of the state, once per update: auto, the dtype in which "
        "they are summed; bfloat16; or, if the network between slices is slow, int8 in blocks of 256 with a scale.",
    )
    context_shards: int = key(
        1,
        at_least(1),
        "Context parallelism: neighboring devices share sequences, and each holds 1/context_shards of the positions "
        "and their activations.",
        in_scores=True,
    )

    @property
    def in_groups(self) -> bool:
        """Whether devices share sequences or experts."""
        return max(self.tensor_shards, self.context_shards, self.expert_shards) > 1

    def copy_mistakes(self) -> Mistakes:
        """Contradictions between copies of the state and other keys."""
        if self.phases == "torus" and (self.replicas or 1) > 1:
            yield "zero.phases", f"auto or flat, as zero.replicas={self.replicas}"
        if self.replica_wire_dtype == "auto":
            return
        if self.stage == 0:
            yield "zero.replica_wire_dtype", "auto, as zero.stage=0 sums whole gradients over all devices"
        if self.replicas == 1:
            yield "zero.replica_wire_dtype", "auto, as zero.replicas=1 is one copy of the state"

    def context_mistakes(self, model_config: GPTConfig, model_label: str, lengths: Iterable[int]) -> Mistakes:
        """Models and sequence lengths that context groups cannot divide."""
        if self.context_shards == 1:
            return
        if model_config.alone is not None:
            yield "zero.context_shards", f"1, as {model_label} has {model_config.alone.noun} (docs/decisions/vq.md)"
        if self.tensor_shards > 1:
            yield "zero.context_shards", f"1, as zero.tensor_shards={self.tensor_shards}"
        if model_config.experts is not None:
            yield "zero.context_shards", f"1, as tokens are routed row by row in {model_label}"
        for name in sorted({*model_config.mixers}):
            heads = MIXERS[name].heads(model_config) if MIXERS[name].swaps_heads else {}
            for key_of_heads, count in heads.items():
                if count % self.context_shards:
                    yield "zero.context_shards", f"a divisor of {key_of_heads}={count} of {model_label}"
        for length in lengths:
            if length % (2 * self.context_shards):
                yield "zero.context_shards", f"a divisor of half of the {length} tokens of a sequence"


def make_axis(zero: DeviceKeys, devices: Sequence[Any] | None = None) -> Axis:
    """The pmap axis of a checked configuration: copies of the state, groups of devices, the phases of collectives.

    Raises:
      UserError: the devices do not form groups of equal size.
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
    if zero.phases == "torus" and slices > 1:
        raise UserError(f"zero.phases=torus: expected auto or flat, because {slices} slices do not form a torus")
    if zero.phases == "torus" and zero.tensor_shards > 1:
        axis = _tensor_lines(zero, devices)
        exchanges = axis.exchanges
    elif zero.expert_shards > 1:
        axis = Axis.with_expert_groups("zero", len(devices), zero.expert_shards, replicas)
    elif zero.tensor_shards > 1:
        if not zero.stage:
            replicas = len(devices) // zero.tensor_shards  # one per tensor group
        axis = Axis.with_tensor_groups("zero", len(devices), zero.tensor_shards, replicas)
    elif zero.phases == "torus" or (zero.phases == "auto" and has_torus):
        axis = Axis.from_devices("zero", devices)
    elif zero.phases == "auto" and replicas < slices and slices % replicas == 0:
        axis = Axis.across_slices("zero", len(devices), slices, replicas)
    else:
        axis = Axis("zero", (replicas, len(devices) // replicas))
    speed = SPEEDS.get(devices[0].device_kind)
    small_first = zero.overlap_gathers and speed is not None and speed.offloads
    return dataclasses.replace(
        axis,
        context=zero.context_shards,
        exchanges=exchanges,
        small_first=small_first,
        copies_dtype=copies_dtype,
    )


def _tensor_lines(zero: GroupKeys, devices: Sequence[Any]) -> Axis:
    """Tensor groups along one dimension of a slice.

    If the devices that gather a part of a layer lie along one dimension too, they scatter gradients by an all-to-all,
    which XLA overlaps with matrix products. Over two dimensions it takes longer than the reduce-scatter that XLA cannot
    hide (docs/decisions/groups.md).
    """
    if not hasattr(devices[0], "coords"):
        raise UserError("zero.phases=torus: expected auto or flat, because these devices are not a TPU slice")
    try:
        axis = Axis.with_tensor_lines("zero", devices, zero.tensor_shards)
    except ValueError as error:
        raise UserError(f"zero.tensor_shards={zero.tensor_shards} with zero.phases=torus: {error}") from error
    gathering = axis.groups(axis.shards // axis.tensor) or [list(range(axis.size))]
    places = np.asarray([(*devices[i].coords, devices[i].core_on_chip) for i in gathering[0]])
    is_one_line = int((places != places[0]).any(axis=0).sum()) <= 1
    speed = SPEEDS.get(devices[0].device_kind)
    has_free_links = speed is not None and not speed.offloads  # else SparseCores run the reduce-scatter
    return dataclasses.replace(axis, exchanges=zero.overlap_gathers and has_free_links and is_one_line)


class Placement(NamedTuple):
    """An axis, and the link seconds per step of each placement that it was chosen from."""

    axis: Axis
    seconds: dict[str, float]


def faster_placement(
    model: ShardedGPT, zero: DeviceKeys, devices: Sequence[Any] | None, rows: int, micro_batches: int, context: int
) -> Placement | None:
    """The placement of tensor groups on one TPU slice with the least time on links; None if there is no choice.

    "flat" has groups of neighbors, "torus" groups along lines, so that exchanges have one dimension and gathers the
    others to themselves. The arguments are the same as for `link_seconds`.
    """
    if model.axis.tensor == 1 or model.axis.replicas > 1:
        return None
    devices = pmap_devices() if devices is None else devices
    axes = {"flat": make_axis(dataclasses.replace(zero, phases="flat"), devices)}
    try:
        axes["torus"] = make_axis(dataclasses.replace(zero, phases="torus"), devices)
    except UserError:  # no dimension of the slice divides into such lines
        return None
    seconds = {name: link_seconds(model, axis, devices, rows, micro_batches, context) for name, axis in axes.items()}
    phases = min(seconds, key=seconds.__getitem__)
    shown = ", ".join(f"{name} {link_time:.3f} s" for name, link_time in seconds.items())
    log.info("zero.phases=auto chose %s by the time per step on the links: %s", phases, shown)
    return Placement(axes[phases], seconds)


def _check_divisor(setting: str, groups: int, devices: Sequence[Any]) -> None:
    """Raises UserError if the devices do not form this many groups of equal size."""
    if len(devices) % groups:
        raise UserError(f"{setting}: expected a divisor of {len(devices)}, the number of devices")


def link_seconds(
    model: ShardedGPT, axis: Axis, devices: Sequence[Any], rows: int, micro_batches: int, context: int
) -> float:
    """Seconds per step in which links carry the exchanges of tensor groups and the gathers.

    No overlap is assumed.

    Args:
      model: with tensor groups.
      axis: the placement of the groups.
      devices: of one TPU slice.
      rows: sequences per group and micro-batch.
      micro_batches: per step.
      context: tokens per sequence.
    """
    speed = SPEEDS[devices[0].device_kind]
    places = places_of(devices)
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    layer = _layer_bytes(model)
    activations = itemsize * rows * context * model.config.embedding_dim
    passes = 3 * micro_batches if model.stage == 3 else 2  # per layer: gathers, forward and backward, and a scatter
    sums = 6 * micro_batches  # per layer: after attention and after the MLP; forward, recomputed, backward
    gathering = axis.groups(axis.shards // axis.tensor) or [list(range(axis.size))]
    others = len(gathering[0])
    gather = collective_seconds("all-gather", layer * (others - 1) / others, gathering[0], places, speed)
    sent = 2 * activations * (axis.tensor - 1) / axis.tensor
    exchange = collective_seconds("all-reduce", sent, axis.row_groups()[0], places, speed)
    return model.config.N * (passes * gather + sums * exchange)


def exchanges_gradients(devices: Sequence[Any]) -> bool:
    """Whether devices of a TPU slice scatter gradients by an all-to-all (docs/decisions/collectives.md).

    XLA overlaps it with matrix products, as SparseCores do with a reduce-scatter, but not over a square of chips such
    as 4x4: there the compiler turns it into an all-reduce, which nothing hides. An all-to-all must take at most twice
    as long as the all-reduce into which XLA turns a scatter elsewhere: the links in the middle of the longest dimension
    carry half of all bytes of an all-to-all, whereas an all-reduce is shared by the links of all dimensions, and its
    traffic by the cores of a chip. `scattering_axis` has further cases, which depend on the model.
    """
    speed = SPEEDS.get(devices[0].device_kind)
    if speed is None or not _exchange_runs_beside_products(devices, speed):
        return False
    spanned = _spanned(devices)
    return not spanned or speed.devices * max(spanned) / 4 <= 2 * 2 / len(spanned)


def scattering_axis(
    model: ShardedGPT, zero: DeviceKeys, devices: Sequence[Any] | None, rows: int, context: int
) -> Axis | None:
    """Another axis, on which a TPU slice scatters gradients beside products; None to keep that of the model.

    SparseCores take a scatter over a line of chips, but none over a square: there it is one over each dimension of the
    torus, and the scatters of a layer have an order. Without SparseCores the gradients of dense models are exchanged if
    that is hidden (docs/decisions/collectives.md). The arguments are the same as for `hides_exchange`.
    """
    axis = model.axis
    devices = pmap_devices() if devices is None else devices
    is_alone = axis.shards == axis.size and axis.row_group == 1 and slices_of(devices) == 1
    is_free = zero.overlap_gathers and zero.phases == "auto" and not axis.exchanges
    if model.stage < 2 or not is_free or not is_alone:
        return None
    if SPEEDS[devices[0].device_kind].offloads:
        if not _is_square(devices):
            return None
        lines = make_axis(dataclasses.replace(zero, phases="torus"), devices)
        return dataclasses.replace(lines, orders_scatters=True)
    if model.config.experts is None and hides_exchange(model, devices, rows, context):
        return dataclasses.replace(axis, exchanges=True)
    return None


def hides_exchange(model: ShardedGPT, devices: Sequence[Any], rows: int, context: int) -> bool:
    """Whether an all-to-all of a layer's gradient runs beside the layer's backward pass from beginning to end.

    The backward pass, at the peak of the device, must take at least as long as that and a gather of the weights.

    Args:
      model: on one TPU slice, without groups.
      devices: of the slice.
      rows: sequences per device and micro-batch.
      context: tokens per sequence.
    """
    speed = SPEEDS[devices[0].device_kind]
    axis = model.axis
    if not _exchange_runs_beside_products(devices, speed):
        return False
    places = places_of(devices)
    group = range(axis.size)
    sent = _layer_bytes(model) * (axis.size - 1) / axis.size
    on_links = sum(collective_seconds(kind, sent, group, places, speed) for kind in ("all-to-all", "all-gather"))
    backward = 2 / 3 * model_flops(model.config, rows, context) / model.config.layer_count
    return on_links <= backward / speed.flops


def _exchange_runs_beside_products(devices: Sequence[Any], speed: Speed) -> bool:
    """A v5e slice of more than 16 chips overlaps no all-to-all, and SparseCores run the reduce-scatters of others."""
    if not overlaps_exchanges(devices[0].device_kind, chips_of_slice(devices)):
        return False
    return _is_square(devices) or not speed.offloads


def chips_of_slice(devices: Sequence[Any]) -> int:
    """The chips of each of their TPU slices; of a kind without constants of its speed, one per device."""
    kind = devices[0].device_kind
    devices_of_chip = SPEEDS[kind].devices if kind in SPEEDS else 1
    return len(devices) // slices_of(devices) // devices_of_chip


def _is_square(devices: Sequence[Any]) -> bool:
    """Whether the chips form a square of 4x4 or more."""
    spanned = _spanned(devices)
    return len(spanned) == 2 and len({*spanned}) == 1 and spanned[0] >= 4


def _spanned(devices: Sequence[Any]) -> list[int]:
    """The chips in each dimension of the torus that has more than one."""
    sizes = [1 + max(dim) for dim in zip(*(device.coords for device in devices), strict=True)]
    return [size for size in sizes if size > 1]


def _layer_bytes(model: ShardedGPT) -> int:
    """Bytes of the gathered weights of a layer, in the dtype of computation."""
    leaves = model.base.layout_by_parts.at(STACK).leaves
    return jnp.dtype(model.compute_dtype).itemsize * sum(math.prod(leaf.gathered_shape) for leaf in leaves)
