"""Makes the model, the optimizer and the programs of a checked configuration, for training and `mode=plan`."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zero.base.errors import UserError
from zero.config.schema import Config, Zero
from zero.corpus.text.tokenizers import load_tokenizer
from zero.hosts.host_memory import share_of_host
from zero.hosts.speeds import SPEEDS, Speed
from zero.hosts.torus import collective_seconds, places_of
from zero.hosts.xla_options import overlaps_exchanges
from zero.models.attention.blockwise import blockwise_from
from zero.models.attention.dense import query_block
from zero.models.attention.kernel import chosen_kernel
from zero.models.attention_keys import missing_in_kernel
from zero.models.config import STACK, GPTConfig
from zero.models.parametrization import multipliers_of
from zero.models.stack import KINDS, OFFLOADED
from zero.partition.collectives.axis import Axis
from zero.partition.global_arrays import pmap_devices
from zero.partition.layout import Layout
from zero.training.activations import DENSE_SHARE, PRODUCTS_SHARE, Rates, kinds_on_host, with_fitting_storage
from zero.training.batch import UNDIVIDED, Separators
from zero.training.fused_update import span_of
from zero.training.objectives.objective import Objective
from zero.training.optimizers.optimizer import make_optimizer
from zero.training.parts import StepOptions
from zero.training.programs import Programs, make_programs
from zero.training.schedules import LearningRate
from zero.training.sharded_gpt import ShardedGPT
from zero.training.state_storage import LayersOnHost, OnDevices
from zero.training.step import state_layout
from zero.training.tuning import make_tuning

log = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")


class Job(NamedTuple):
    """A model on an axis of devices, its optimizer, the programs made of them, and the layout of the whole state.

    The objective is what the programs minimize; `held` counts the bytes of state and frozen parameters per device;
    `storage` knows where the state lies between steps; `placements` are those of tensor groups between which
    `zero.phases=auto` has chosen (`placement_seconds`).
    """

    model: ShardedGPT
    tx: optax.GradientTransformation
    programs: Programs
    layout: Layout
    objective: Objective
    held: int
    storage: OnDevices
    placements: dict[str, float]


def make_model(config: Config, size: GPTConfig, devices: Sequence[Any] | None = None) -> ShardedGPT:
    """The model of a checked configuration on these devices, by default all."""
    zero = config.zero
    platform = (devices or jax.devices())[0].platform
    device_kind = (devices or jax.devices())[0].device_kind
    has_activations = "activations" in OFFLOADED[zero.offload]
    stores_all = platform == "cpu" and not zero.fused_update and not has_activations
    remat = "none" if stores_all else "full"
    isolates = config.data.isolate_documents
    separators = Separators(*load_tokenizer(config.data.tokenizer).special.separators) if isolates else UNDIVIDED
    compute_dtype = if_auto(zero.compute_dtype, "float32" if platform == "cpu" else "bfloat16")
    axis = make_axis(zero, devices)
    if axis.replicas == 1 and axis.copies_dtype is not None:  # as after the loss of a slice
        log.warning("zero.replica_wire_dtype=%s: without effect, as there is one copy of the state", axis.copies_dtype)
    tuning = make_tuning(dataclasses.asdict(config.tuning))
    wire_dtype = compute_dtype if axis.exchanges and zero.stage >= 2 else "float32"
    model = ShardedGPT(
        size,
        axis,
        zero.stage,
        compute_dtype,
        wire_dtype=if_auto(zero.wire_dtype, wire_dtype),
        reduce_dtype=zero.reduce_dtype,
        gradient_dtype=zero.gradient_dtype,
        remat=if_auto(zero.remat, remat),
        offload=KINDS if has_activations else (),
        blockwise_from=blockwise_from(config.model.attention, platform),
        query_block=query_block(config.model.attention, platform),
        master_dtype=zero.master_dtype,
        separators=separators,
        gather_dtype=zero.gather_dtype if zero.gather_dtype == "int8" else None,
        kernel=chosen_kernel(
            config.model.attention, platform, device_kind, positions=config.data.max_context, dtype=compute_dtype
        ),
        tuning=tuning,
        product_dtype=zero.product_dtype,
        gathers_rounded=zero.gather_dtype == "products",
        last_target=bool(config.data.last_target),
    )
    data = config.data
    missing = missing_in_kernel(model.kernel, size, model.cut, data.max_context, has_segments=data.isolate_documents)
    if missing is not None and config.model.attention == "kernel":
        log.warning("model.attention=kernel lacks %s: attention is computed as with model.attention=auto", missing)
    if missing is not None:  # so that nothing counts on it, as `zero.remat=auto` does
        model = dataclasses.replace(model, kernel=None)
    for leaf in (*model.base.layout_by_parts.leaves, *model.layout_by_parts.leaves):
        if leaf.is_cut and leaf.path[0] == STACK and leaf.splits[0].padding:
            raise UserError(
                f"zero.tensor_shards={zero.tensor_shards}: {leaf.splits[0].size}, the size of {leaf.name} along which "
                f"it is cut, does not divide over {leaf.splits[0].shards} devices"
            )
    return model


def if_auto(value: T, automatic: U) -> T | U:
    """The value of a key, and where it is auto what that means here.

    >>> if_auto("int8", "bfloat16"), if_auto("auto", "bfloat16")
    ('int8', 'bfloat16')
    """
    return automatic if value == "auto" else value


def make_axis(zero: Zero, devices: Sequence[Any] | None = None) -> Axis:
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
        raise UserError(f"zero.phases=torus: expected auto or flat with {slices} slices, which form no torus")
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


def _tensor_lines(zero: Zero, devices: Sequence[Any]) -> Axis:
    if not hasattr(devices[0], "coords"):
        raise UserError("zero.phases=torus: expected auto or flat, as these devices are no TPU slice")
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


def make_job(config: Config, size: GPTConfig, devices: Sequence[Any] | None = None, rows: int | None = None) -> Job:
    """Binds a checked configuration to these devices, by default all. Nothing is compiled yet.

    `rows` are those per step and device, or group of devices that take the same rows; None: as training.batch_size.
    """
    training = config.training
    optimizer = config.optimizer
    hyperparameters = config.optimizer.hyperparameters()
    objective = config.objective.make()
    options = StepOptions(
        learning_rate(config),
        seed=config.seed,
        micro_batches=training.gradient_accumulation_steps,
        max_gradient_norm=training.max_gradient_norm,
        max_gradient_value=training.max_gradient_value,
        skip_bad_steps=training.skips_bad_steps,
        skip_spikes=training.skip_spikes,
        fused_update=config.zero.fused_update,
        streams_state="optimizer" in OFFLOADED[config.zero.offload],
        ema_decay=training.ema,
        objective=objective,
        parts=steps_per_row(config, size),
    )
    model = make_model(config, size, devices)
    device = (devices or jax.devices())[0]
    speed = SPEEDS.get(device.device_kind) if device.platform == "tpu" else None
    if rows is None and speed is not None:  # else nothing depends on them, and jobs of other rows are the same
        global_rows = objective.example.texts * training.batch_size * jax.process_count()
        rows = global_rows * model.axis.row_group // model.axis.size
    placements: dict[str, float] = {}
    has_groups = model.axis.tensor > 1 and model.axis.replicas == 1
    if config.zero.phases == "auto" and has_groups and speed is not None and rows is not None:
        devices = pmap_devices() if devices is None else devices
        shape = rows // options.micro_batches, options.micro_batches, config.data.max_context
        placements = placement_seconds(model, devices, *shape)
    if placements:
        phases = min(placements, key=placements.__getitem__)
        shown = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in placements.items())
        log.info("zero.phases=auto: %s, by the time of the links per step: %s", phases, shown)
        placed = dataclasses.replace(config.zero, phases=phases)
        model = make_model(dataclasses.replace(config, zero=placed), size, devices)
    tx = make_optimizer(
        optimizer.name,
        training.weight_decay / (training.peak_learning_rate if optimizer.decay == "independent" else 1),
        state_dtype=optimizer.state_dtype,
        multipliers=multipliers_of(size),
        vocab_size=size.vocab_size,
        **hyperparameters,
    )
    layout = state_layout(model, tx, options)
    storage = OnDevices(layout, model.axis)
    if options.streams_state:
        storage = LayersOnHost(layout, model.axis, span_of(model, options))
    held = storage.device_bytes + (0 if model.tuning is None else model.frozen_layout.bytes_per_device())
    chooses_remat = config.zero.remat == "auto" and model.stage == 3 and not options.fused_update
    if chooses_remat and speed is not None and rows is not None:
        may_use_host = bool(model.offload)
        model = with_fitting_storage(
            model,
            rows // options.micro_batches,
            config.data.max_context,
            held=held,
            capacity=speed.capacity,
            rates=rates_of(model, speed),
            host_capacity=share_of_host(device.device_kind),
        )
        where = f", on the host: {', '.join(kinds_on_host(model)) or 'nothing'}" if may_use_host else ""
        log.info("zero.remat=auto: %s%s", model.remat, where)
    return Job(model, tx, make_programs(model, tx, options, devices), layout, objective, held, storage, placements)


def steps_per_row(config: Config, size: GPTConfig) -> int:
    """Training steps that share a batch of rows, each with the next part of every row."""
    return 1 if size.update_tokens is None else int(config.data.max_context) // size.update_tokens


def learning_rate(config: Config) -> LearningRate:
    """The learning rate of a checked configuration, as a function of the step."""
    training = config.training
    schedule = config.schedule
    after_warmup = training.total_steps - training.warmup_steps
    return LearningRate(
        training.peak_learning_rate,
        training.end_learning_rate,
        training.warmup_steps,
        training.total_steps,
        schedule.name,
        schedule.decay_steps or min(max(1, training.total_steps // 10), after_warmup),
        schedule.decay_end,
    )
