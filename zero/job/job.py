"""Makes the model, the optimizer and the programs of a checked configuration, for training and `mode=plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import optax

from zero.base.keys import choice, key, random_seed, section
from zero.config.modes import Configuration
from zero.corpus.reading import keys as reading
from zero.hosts.speeds import SPEEDS, Speed
from zero.job.devices import faster_placement, make_axis, scattering_axis
from zero.job.memory import store_state, with_automatic_remat
from zero.job.model import AttentionKeys, RowKeys, make_model
from zero.job.sharding import Sharding
from zero.job.sizes import SizeKeys
from zero.models.config import GPTConfig
from zero.models.stack import OFFLOADED
from zero.partition.collectives.axis import Axis
from zero.partition.layout import Layout
from zero.training.ema import EmaKeys
from zero.training.guard import GuardKeys
from zero.training.objectives.objective import Objective, ObjectiveKeys
from zero.training.objectives.table import OBJECTIVES
from zero.training.optimizers import optimizer_keys
from zero.training.optimizers.optimizer import OPTIMIZERS, make_optimizer
from zero.training.optimizers.optimizer_keys import DecayKeys
from zero.training.parts import GradientKeys, StepOptions
from zero.training.programs import Programs, make_programs
from zero.training.schedules import SCHEDULES, Schedule, ScheduleKeys, learning_rate
from zero.training.sharded_gpt import ShardedGPT
from zero.training.state_storage import OnDevices
from zero.training.tuning import TUNINGS, TuningKeys
from zero.training.updates_by_part import parts_of_row


@dataclass(frozen=True)
class Training(
    ScheduleKeys,
    DecayKeys,
    GradientKeys,
    GuardKeys,
    EmaKeys,
    reading.ScoredKeys,
):
    """The keys of section `training` that a job reads."""


@dataclass(frozen=True)
class Model(SizeKeys, AttentionKeys):
    """The keys of section `model` that a job reads."""


@dataclass(frozen=True)
class JobConfig(Configuration):
    """The sections that a job is made from."""

    seed: int = key(0, random_seed(), "Seed of weight initialization, data order and dropout.", fixed=True)
    training: Training = section(Training)
    model: Model = section(Model)
    data: RowKeys = section(RowKeys)
    optimizer: optimizer_keys.Optimizer = choice(OPTIMIZERS, "The optimizer.", fixed=True)
    objective: ObjectiveKeys = choice(OBJECTIVES, "The loss.", fixed=True)
    tuning: TuningKeys = choice(TUNINGS, "Which parameters are trained (docs/how-to/fine-tuning.md).", fixed=True)
    schedule: Schedule = choice(SCHEDULES, "The learning rate after a linear warmup from 0.")
    zero: Sharding = section(Sharding)


class PlacedModel(NamedTuple):
    """A model on an axis of devices.

    Attributes:
      devices: the devices of the axis; None means all of jax's.
      rows: per step and device, or per group of devices that share rows; None if nothing depends on them.
      placements: seconds of the placements of tensor groups that `zero.phases=auto` chose from.
      steps_per_batch: the steps that share rows, each with the next part of them.
    """

    model: ShardedGPT
    devices: Sequence[Any] | None
    rows: int | None
    placements: dict[str, float]
    steps_per_batch: int

    @property
    def speed(self) -> Speed | None:
        """The speed of its TPUs or GPUs; None for CPUs and unknown kinds."""
        return SPEEDS.get(self.device.device_kind)

    def on_axis(self, axis: Axis) -> PlacedModel:
        """The same model on another axis of the same devices."""
        return self._replace(model=dataclasses.replace(self.model, axis=axis))

    def with_last_target(self, has_last_target: bool) -> PlacedModel:
        """The same model for rows with or without the target of their last position."""
        return self._replace(model=dataclasses.replace(self.model, last_target=has_last_target))

    @property
    def device(self) -> Any:
        return (self.devices or jax.devices())[0]


class Job(NamedTuple):
    """A model on an axis of devices, its optimizer, the programs made of them, and the layout of the whole state.

    The programs minimize `objective`; `state_bytes` counts the bytes of state and frozen parameters per device;
    `storage` knows where the state is between steps; `placements` are the placements of tensor groups that
    `zero.phases=auto` chose from (`link_seconds`); `steps_per_batch` counts the steps that share rows, each with the
    next part of them.
    """

    model: ShardedGPT
    tx: optax.GradientTransformation
    programs: Programs
    layout: Layout
    objective: Objective
    state_bytes: int
    storage: OnDevices
    placements: dict[str, float]
    steps_per_batch: int


def place_model(
    config: JobConfig, model_config: GPTConfig, devices: Sequence[Any] | None = None, rows: int | None = None
) -> PlacedModel:
    """The model of a checked configuration on these devices, by default all. Raises UserError if they cannot hold it.

    `rows` counts rows per step and device, or per group of devices that share rows; None takes training.batch_size.
    """
    model = make_model(
        model_config,
        make_axis(config.zero, devices),
        config.zero,
        config.model,
        config.data,
        config.tuning.tuning(),
        device=None if devices is None else devices[0],
    )
    placed = PlacedModel(model, devices, rows, {}, steps_per_row(config.data, model_config))
    if rows is None and placed.speed is not None:  # else nothing depends on them, so that jobs are equal
        global_rows = config.objective.objective().example.texts * config.training.batch_size * jax.process_count()
        placed = placed._replace(rows=global_rows * model.axis.row_group // model.axis.size)
    if placed.speed is None or placed.rows is None or placed.device.platform != "tpu":
        return placed
    micro_batches = config.training.gradient_accumulation_steps
    micro_rows = placed.rows // micro_batches
    context = config.data.max_context
    scattering = scattering_axis(model, config.zero, devices, micro_rows, context)
    if scattering is not None:
        return placed.on_axis(scattering)
    if config.zero.phases != "auto":
        return placed
    faster = faster_placement(model, config.zero, devices, micro_rows, micro_batches, context)
    if faster is None:
        return placed
    return placed.on_axis(faster.axis)._replace(placements=faster.seconds)


def make_job(config: JobConfig, placed: PlacedModel) -> Job:
    """A placed model with its optimizer, its programs and the storage of its state. Nothing is compiled yet."""
    model = placed.model
    objective = config.objective.objective()
    options = step_options(config, objective, placed.steps_per_batch)
    tx = trained_by(config.optimizer, config.training, model)
    stored = store_state(model, tx, options)
    knows_host = placed.device.platform == "tpu" or not model.offload  # how fast a GPU and its host copy is not known
    chooses_remat = config.zero.remat == "auto" and model.stage == 3 and not options.fused_update and knows_host
    if chooses_remat and placed.speed is not None and placed.rows is not None:
        rows = placed.rows // options.micro_batches
        model = with_automatic_remat(model, stored.state_bytes, placed.device, rows, config.data.max_context)
    programs = make_programs(model, tx, options, placed.devices)
    return Job(
        model,
        tx,
        programs,
        stored.layout,
        objective,
        stored.state_bytes,
        stored.storage,
        placed.placements,
        placed.steps_per_batch,
    )


def step_options(config: JobConfig, objective: Objective, updates_per_row: int) -> StepOptions:
    training = config.training
    return StepOptions(
        learning_rate(training, config.schedule),
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
        parts=updates_per_row,
    )


def trained_by(
    optimizer: optimizer_keys.Optimizer, training: Training, model: ShardedGPT
) -> optax.GradientTransformation:
    """The optimizer of a model."""
    return make_optimizer(
        optimizer.name,
        optimizer.weight_decay(training, training.peak_learning_rate),
        axes=model.axes,
        state_dtype=optimizer.state_dtype,
        multipliers=model.rate_multipliers,
        vocab_size=model.config.vocab_size,
        **optimizer.hyperparameters(),
    )


def steps_per_row(rows: RowKeys, model_config: GPTConfig) -> int:
    """Training steps that share a batch of rows, each with the next part of every row."""
    return parts_of_row(model_config, rows.max_context) or 1
