"""The configuration of a training run on one page: each section inherits its owners' keys and checks them together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from omegaconf import DictConfig

from zero.base.keys import Mistakes, all_keys, choice, section, shown
from zero.checkpoints.emergency import EmergencyKeys
from zero.config import saved_config
from zero.config.check import flat
from zero.config.modes import Modes
from zero.exchange.warm_start import WarmStartKeys
from zero.files import storage
from zero.hosts.startup import DistributedKeys
from zero.job import job
from zero.job.model import RowKeys
from zero.job.sharding import Sharding
from zero.job.sizes import load_sizes
from zero.models.branch import Branch
from zero.models.branches import branches_of
from zero.models.config import GPTConfig
from zero.models.stack import OFFLOADED
from zero.run import data
from zero.run.batches import BATCHES, BatchKeys
from zero.run.directory import DirectoryKeys
from zero.run.features.export import Export
from zero.run.features.harness import Harness
from zero.run.features.profile import Profile
from zero.run.features.sample import Sample
from zero.run.features.save import Save
from zero.run.features.statistics import Statistics
from zero.run.features.track import Track
from zero.run.features.validate import Validate
from zero.run.features.verify import Verify
from zero.run.step_programs import StepProgramKeys
from zero.tracking.tracker import TrackerKeys
from zero.training.objectives.objective import REFERENCE, Objective
from zero.training.objectives.table import with_defaults
from zero.training.optimizers.optimizer import ELEMENTWISE, MULTIPLIABLE
from zero.training.tuning import Adapted
from zero.training.updates_by_part import PART_KEY, parts_of_row


def _needed(why: str, *rules: tuple[str, object, object]) -> Mistakes:
    """The keys whose values are not the ones that a setting needs: `(name, value, needed value)` of each.

    >>> list(_needed("as rows are whole texts", ("data.crop", "random", "first"), ("data.last_target", None, None)))
    [('data.crop', 'first, as rows are whole texts')]
    """
    for name, value, needed in rules:
        if value != needed:
            yield name, f"{shown(needed)}, {why}"


@dataclass(frozen=True)
class TrainingSection(
    data.TrainingKeys,
    job.Training,
    Validate.Keys,
    Track.Keys,
    Sample.Keys,
):
    """Section `training`."""

    def mistakes_beside(self, data: RowKeys, model_config: GPTConfig) -> Mistakes:
        yield from self.rate_mistakes()
        yield from self.skip_mistakes()
        if data.max_context <= model_config.block_size:
            yield from self.length_mistakes(data.max_context)


@dataclass(frozen=True)
class ModelSection(job.Model, WarmStartKeys):
    """Section `model`."""


@dataclass(frozen=True)
class DataSection(
    data.DataKeys,
    DirectoryKeys,
    Save.Keys,
    TrackerKeys,
):
    """Section `data`."""

    def mistakes_beside(self, run: TrainConfig, model_config: GPTConfig, model_label: str) -> Mistakes:
        yield from self.row_mistakes(model_config, model_label)
        yield from self.order_mistakes()
        if self.is_synthetic:
            yield from _needed(
                f"because data.corpus={self.corpus} has no end, no documents and no completions",
                ("training.max_epochs", run.training.max_epochs, None),
                ("data.train_samples", self.train_samples, None),
                ("data.crop", self.crop, "first"),
                ("data.isolate_documents", self.isolate_documents, False),
                ("training.loss_on", run.training.loss_on, "all"),
            )
        if not run.trains:
            return
        place = storage.join(storage.bucket(self.bucket_path) if self.bucket_path else "", self.checkpoint_directory)
        if "://" in place and storage.scheme(place) != "gs":
            why = f"orbax cannot save to {place} (docs/decisions/stores.md)"
            yield "data.checkpoint_directory", f"an absolute path or a gs:// URL, as {why}"
        if self.resume_step is not None and run.resume is None:
            yield "data.resume_step", "null without --resume"


@dataclass(frozen=True)
class ZeroSection(Sharding, EmergencyKeys):
    """Section `zero`."""

    def mistakes_beside(self, run: TrainConfig, model_config: GPTConfig, model_label: str) -> Mistakes:
        context = run.data.max_context
        stages = [(f"a stage of {length} tokens", length) for _, length in run.training.stages()]
        yield from Sharding.mistakes(
            self, model_config, model_label, [(f"data.max_context={context}", context), *stages]
        )
        if self.context_shards > 1 and run.model.attention == "dense":
            yield "model.attention", f"auto or blockwise, as zero.context_shards={self.context_shards}"
        if "optimizer" in OFFLOADED[self.offload] and self.emergency_steps is not None:
            why = f"zero.offload={self.offload} needs the host's memory that emergency checkpoints would use"
            yield "zero.emergency_steps", f"null, as {why}"
        if self.fused_update:
            yield from _needed(
                "as zero.fused_update=true never holds the whole gradient",
                ("training.skip_spikes", run.training.skip_spikes, None),
                ("training.gradient_accumulation_steps", run.training.gradient_accumulation_steps, 1),
            )


@dataclass(frozen=True)
class ProfileSection(Profile.Keys, StepProgramKeys):
    """Section `profile`."""


@dataclass(frozen=True)
class TrainConfig(job.JobConfig):
    """Trains a model, or continues a run."""

    training: TrainingSection = section(TrainingSection)
    batch: BatchKeys = choice(BATCHES, "How many sequences the batch of each step has.", fixed=True)
    model: ModelSection = section(ModelSection)
    data: DataSection = section(DataSection)
    zero: ZeroSection = section(ZeroSection)
    profile: ProfileSection = section(ProfileSection)
    distributed: DistributedKeys = section(DistributedKeys)
    statistics: Statistics.Keys = section(Statistics.Keys)
    verify: Verify.Keys = section(Verify.Keys)
    harness: Harness.Keys = section(Harness.Keys)
    export: Export.Keys = section(Export.Keys)

    @property
    def trains(self) -> bool:
        """Whether this configuration trains, rather than only plans."""
        return True

    def fitted(self, model_config: GPTConfig) -> Self:
        if self.data.max_context is not None:
            return self
        return dataclasses.replace(self, data=dataclasses.replace(self.data, max_context=model_config.block_size))

    def mistakes(self, model_config: GPTConfig) -> Mistakes:
        """The contradictions between keys, section by section."""
        model_label = str(self.model)
        yield from self.training.mistakes_beside(self.data, model_config)
        yield from self.training.sample_mistakes(model_config, model_label)
        yield from self.batch.mistakes(self.training.batch_size)
        if self.trains and self.resume is None:
            yield from self.batch.start_mistakes(self.training.batch_size, self.training.total_steps)
            yield from self.objective.start_mistakes()
        yield from self._updates_by_part(model_config)
        yield from self._objective_mistakes(model_config, model_label)
        if self.trains:
            yield from self.model.mistakes()
        yield from self.data.mistakes_beside(self, model_config, model_label)
        yield from self.optimizer.mistakes(model_config, model_label, self.training.peak_learning_rate)
        yield from self._optimizer_mistakes(model_config, model_label)
        yield from self._tuning_mistakes(model_config, model_label)
        yield from self.schedule.mistakes(self.training)
        yield from self.zero.mistakes_beside(self, model_config, model_label)
        yield from self.distributed.mistakes()

    def without_effect(self) -> Mistakes:
        yield from self.model.without_effect()
        if not self.schedule.has_end:
            yield "training.end_learning_rate", f"schedule={self.schedule.name} has no end"
        yield from self.training.without_effect()
        if self.zero.emergency_steps is None:
            yield "zero.emergency_directory", "zero.emergency_steps=null"
        yield from self.data.without_effect()
        yield from self._after_the_last_step()

    def _after_the_last_step(self) -> Mistakes:
        """Keys that name a step after the last one; those of other features also act at the last step."""
        traced = self.profile.steps
        first_steps = {
            "statistics.every": self.statistics.every,
            "verify.every": self.verify.every,
            "zero.emergency_steps": self.zero.emergency_steps,
            "data.keep_every": self.data.keep_every,
            "profile.steps": None if traced is None else traced[0],
        }
        for name, first in first_steps.items():
            if isinstance(first, int) and first > self.training.total_steps:
                yield name, f"training.total_steps={self.training.total_steps} ends the run before"

    def _updates_by_part(self, model_config: GPTConfig) -> Mistakes:
        """Actions that a model with steps on parts of rows postpones to the end of a row, or does not support."""
        setting = f"{PART_KEY}={getattr(model_config, PART_KEY)} of {self.model}"
        try:
            steps = parts_of_row(model_config, self.data.max_context)
        except ValueError:
            yield "data.max_context", f"a multiple of {setting}"
            return
        if steps is None:
            return
        training = self.training
        if training.stages() or training.context_stages is not None:
            yield "training.staged_warmup_steps", f"0, with training.context_stages=null, as {setting}"
        if self.statistics.every is not None:
            yield "statistics.every", f"null, as {setting} and it repeats steps on whole rows"
        if self.zero.remat == "nested":
            yield "zero.remat", f"auto, full, dots or none, as {setting}"
        if self.zero.fused_update:
            yield "zero.fused_update", f"false, as {setting}"
        objective = self.objective.objective()
        if objective.example.is_whole:
            yield "objective", f"likelihood, or another on running text, as {setting}"
        elif objective.reads:
            yield "objective", f"one that reads nothing beside tokens, as {setting}"
        if any(count % steps for count, _ in self.batch.stages_to(training.batch_size)):
            yield "batch", f"constant, or stages of a multiple of {steps} steps, a row's with {setting}"
        values = flat(vars(self))
        for name in (key.name for key in all_keys(type(self)) if key.in_steps):
            if values[name] is not None and values[name] % steps:
                yield name, f"a multiple of {steps}, the steps per row with {setting}"

    def _objective_mistakes(self, model_config: GPTConfig, model_label: str) -> Mistakes:
        """An objective needs its inputs; an objective on whole examples has no loss per token and cannot cut rows."""
        training = self.training
        rows = self.data
        objective = self.objective.objective()
        example = objective.example
        setting = f"objective={self.objective.name}"
        yield from self._branch_mistakes(objective, branches_of(model_config), model_label)
        yield from self.objective.mistakes(model_config, model_label)
        if self.trains and objective.has_reference and not self.model.warm_start:
            yield "model.warm_start", f"true, as the reference of {setting} is the model at model.model_path"
        stored = [entry.name for entry in objective.reads if entry.source]
        if isinstance(self.tuning, Adapted) and objective.has_reference:
            stored.remove(REFERENCE.name)  # computed for each batch
        if stored and rows.max_skipped_rows:
            yield "data.max_skipped_rows", f"0, as {setting} reads {stored[0]} of rows by their number"
        if not example.is_whole:
            yield from self._stored_mistakes(stored, setting)
            return
        lacks = {
            "experts": model_config.experts is not None,
            "a codebook": model_config.has_codebook,
            "z_loss": model_config.z_loss != 0,
        }
        for feature in (name for name, has_it in lacks.items() if has_it):
            yield (
                "objective",
                f"likelihood, or another on running text, as {model_label} has {feature}, a loss per token",
            )
        if rows.last_target:
            yield "data.last_target", f"false or null, as rows are whole examples with {setting}"
        if training.context_stages is not None:
            yield "training.context_stages", f"null, as {setting} compares whole texts"
        elif training.stages():
            yield "training.staged_warmup_steps", f"0, as {setting} compares whole texts"
        if self.trains and rows.corpus is not None:
            yield "data.corpus", f"null, as zero-prepare {example.option} makes the corpus of {setting}"
        yield from _needed(
            f"as a row is one text with {setting}",
            ("data.crop", rows.crop, "first"),
            ("data.isolate_documents", rows.isolate_documents, False),
        )

    def _branch_mistakes(self, objective: Objective, branches: Sequence[Branch], model_label: str) -> Mistakes:
        """An objective and the branches of a model need each other."""
        for branch in objective.branches:
            if branch not in branches:
                why = f"{model_label} has no {branch.noun} (model.override.{branch.key}={branch.example})"
                yield "objective", f"another one, as {why}"
        if not self.trains:
            return
        for branch in branches:
            if branch not in objective.branches:
                trained_by = " or ".join(name for name, other in with_defaults().items() if branch in other.branches)
                yield "objective", f"{trained_by}, as {model_label} has a {branch.noun}, which nothing else trains"
            if self.zero.fused_update:
                yield "zero.fused_update", f"false, as {model_label} has a {branch.noun}"

    def _stored_mistakes(self, stored: Sequence[str], setting: str) -> Mistakes:
        """Rules for stored values, which are looked up by row number."""
        if not stored:
            return
        if self.data.is_synthetic:
            yield "data.corpus", f"null or a corpus on a disk, as {setting} reads {stored[0]} of its rows"
        if self.data.crop != "first":
            yield "data.crop", f"first, as {setting} reads {stored[0]} of whole rows"

    def _optimizer_mistakes(self, model_config: GPTConfig, model_label: str) -> Mistakes:
        name = self.optimizer.name
        if name not in MULTIPLIABLE and model_config.parametrization != "standard":
            yield "optimizer", f"{' or '.join(MULTIPLIABLE)}, as {model_label} is in mup"
        if name not in ELEMENTWISE and self.zero.fused_update:
            yield "optimizer", f"{', '.join(ELEMENTWISE)}, as zero.fused_update=true updates one layer at a time"

    def _tuning_mistakes(self, model_config: GPTConfig, model_label: str) -> Mistakes:
        if not isinstance(self.tuning, Adapted):
            return
        setting = f"tuning={self.tuning.name}"
        if self.trains and not self.model.warm_start:
            yield "model.warm_start", f"true, as {setting} adapts the weights of model.model_path"
        if self.zero.fused_update:
            yield "zero.fused_update", f"false, as {setting} has only small gradients"
        if self.zero.product_dtype != "auto":
            yield "zero.product_dtype", f"auto, as {setting} multiplies with frozen weights"
        yield from self.tuning.mistakes(model_config, model_label, self.zero.tensor_shards, self.zero.context_shards)


TRAINING = Modes({"train": TrainConfig})
GROUPS = TRAINING.groups


def default_config(**choices: str) -> DictConfig:
    """The default configuration of a training run, as the run saves it: checked and typed.

    Args:
      choices: the choice of a group, such as optimizer="lion".
    """
    config = saved_config.defaults(TRAINING, choices)
    config.data.max_context = load_sizes()[config.model.size].block_size  # as `check` makes it
    return config
