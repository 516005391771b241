"""The sections of conf/config.yaml: each key with its type and its check, each section with its rules between keys.

Values and explanations are in conf/config.yaml alone. Below the training loop functions take plain values, and nothing
sees these classes (hydra, omegaconf).
"""
# ruff: noqa: RUF009  the functions of constraints.py return dataclass fields

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from zero.models.attention.choice import CHOICES as ATTENTION
from zero.models.config import GPTConfig
from zero.models.gpt import REMAT
from zero.runtime.config.constraints import (
    at_least,
    checked,
    fraction,
    fraction_below_one,
    is_mixture,
    is_paths,
    is_stages,
    list_of,
    one_of,
    positive,
    random_seed,
    shown,
    zero_or_more,
)
from zero.training.optimizer import ELEMENTWISE, MULTIPLIABLE, NAMES, QUANTISABLE, hyperparameters
from zero.training.schedules import SCHEDULES
from zero.training.sharded_gpt import group_size

DTYPES = ("float32", "bfloat16")
STATE_DTYPES = (*DTYPES, "int8")
Mistakes = Iterator[tuple[str, str]]  # key, and what was expected
_PATHS = "the path of an index file, or a list of them"
_STAGES = "[[steps, tokens per sequence], ...]"
_MIXTURE = "[{index: path, weight: 0.7}, ...] of files of different names"


@dataclass
class Training:
    max_epochs: int | None = at_least(1)
    batch_size: int = at_least(1)
    peak_learning_rate: float = zero_or_more()
    end_learning_rate: float = zero_or_more()
    warmup_steps: int = zero_or_more()
    total_steps: int = at_least(1)
    weight_decay: float = zero_or_more()
    gradient_accumulation_steps: int = at_least(1)
    evaluation_frequency: int = at_least(1)
    maximum_evaluation_steps: int = at_least(1)
    staged_warmup_steps: int = zero_or_more()
    warmup_train_context: int = MISSING
    context_stages: Any = checked(
        lambda value: value in (None, "linear") or is_stages(value), f"linear, {_STAGES}, or null"
    )
    max_gradient_norm: float | None = checked(lambda value: value > 0, "more than 0")
    skip_bad_steps: bool = MISSING
    skip_spikes: float | None = positive()
    max_skipped_in_a_row: int = at_least(1)
    log_frequency: int = at_least(1)
    sample_tokens: int = zero_or_more()
    ema: float | None = checked(lambda value: 0 < value < 1, "more than 0, less than 1")
    harness_frequency: int | None = at_least(1)
    loss_on: str = one_of("all", "completion")

    def mistakes(self, config: Config, size: GPTConfig) -> Mistakes:
        if self.warmup_steps >= self.total_steps:
            yield "training.warmup_steps", f"fewer than training.total_steps={self.total_steps}"
        longest = config.data.max_context
        key = "context_stages" if isinstance(self.context_stages, list) else "warmup_train_context"
        if longest <= size.block_size and any(length < 2 or longest % length for _, length in self.stages()):
            yield f"training.{key}", f"a divisor of data.max_context={longest}, at least 2"
        if size.has_learned_positions and self.sample_tokens >= size.block_size:
            learned = f"the learned positions of model.size={config.model.size} less one"
            yield "training.sample_tokens", f"at most {size.block_size - 1}, {learned}"
        if self.harness_frequency is not None and not config.evaluate.harness:
            yield "training.harness_frequency", "null, or tasks in evaluate.harness as well"

    def stages(self) -> tuple[tuple[int, int], ...]:
        """Steps and tokens per sequence of each stage of the warmup; linear growth counts as one."""
        if isinstance(self.context_stages, list):
            return tuple((steps, length) for steps, length in self.context_stages)
        return ((self.staged_warmup_steps, self.warmup_train_context),) if self.staged_warmup_steps else ()


@dataclass
class Model:
    size: str = MISSING
    warm_start: bool = MISSING
    model_path: str | None = MISSING
    ema: bool = MISSING
    attention: str = one_of(*ATTENTION)

    def mistakes(self, config: Config, size: GPTConfig) -> Mistakes:
        if config.mode == "train" and self.warm_start and not self.model_path:
            places = "a run, a directory of checkpoints or a Hugging Face folder"
            yield "model.model_path", f"{places}, as model.warm_start=true"


@dataclass
class Data:
    corpus: str | None = MISSING
    tokenizer: str = MISSING
    max_context: Any = checked(  # an integer, once it is checked
        lambda value: value is None or (isinstance(value, int) and value >= 2), "at least 2, or null"
    )
    isolate_documents: bool = MISSING
    train_samples: int | None = at_least(1)
    checkpoint_directory: str = MISSING
    bucket_path: str | None = MISSING
    index_path_train: Any = checked(lambda value: is_paths(value) or is_mixture(value), f"{_PATHS}, or {_MIXTURE}")
    index_path_validation: Any = checked(lambda value: is_paths(value), _PATHS)
    shuffle_shards: int = at_least(1)
    max_skipped_rows: int = zero_or_more()
    cache_directory: str | None = MISSING
    cache_bytes: int = at_least(1)
    wandb_project: str | None = MISSING
    tensorboard: bool = MISSING
    resume_step: int | None = MISSING
    keep_checkpoints: int = at_least(1)
    checkpoint_minutes: float | None = positive()

    def mistakes(self, config: Config, size: GPTConfig) -> Mistakes:
        if self.max_context > size.block_size:
            yield (
                "data.max_context",
                f"2 to {size.block_size}, the block_size of model.size={config.model.size}, or null",
            )
        if not is_paths(self.index_path_train) and self.train_samples is not None:
            yield "data.train_samples", "null, as data.index_path_train is a mixture"
        if self.resume_step is not None and config.resume is None and config.mode == "train":
            yield "data.resume_step", "null without --resume"


@dataclass
class Optimizer:
    name: str = one_of(*NAMES)
    state_dtype: str = one_of(*STATE_DTYPES)
    b1: float | None = fraction_below_one()
    b2: float | None = fraction_below_one()
    eps: float | None = positive()
    nesterov: bool | None = MISSING
    decay_rate: float | None = positive()
    factored_from: int | None = at_least(2)
    max_update_rms: float | None = positive()
    newton_schulz_steps: int | None = at_least(1)
    update_rms: float | None = positive()
    adam_b1: float | None = fraction_below_one()
    adam_b2: float | None = fraction_below_one()

    def hyperparameters(self) -> dict[str, Any]:
        """Those that are not null."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {key: value for key, value in values.items() if key not in ("name", "state_dtype") and value is not None}

    def mistakes(self, config: Config, size: GPTConfig) -> Mistakes:
        for key in sorted(self.hyperparameters().keys() - hyperparameters(self.name).keys()):
            yield f"optimizer.{key}", f"null, as optimizer.name={self.name} does not have it"
        if self.name not in QUANTISABLE and self.state_dtype != "float32":
            yield "optimizer.state_dtype", f"float32, as optimizer.name={self.name}"
        if self.name not in MULTIPLIABLE and size.parametrization == "mup":
            yield "optimizer.name", f"{' or '.join(MULTIPLIABLE)}, as model.size={config.model.size} is in mup"
        if self.name not in ELEMENTWISE and config.zero.fused_update:
            yield "optimizer.name", f"{', '.join(ELEMENTWISE)}, as zero.fused_update=true updates one layer at a time"


@dataclass
class Schedule:
    name: str = one_of(*SCHEDULES)
    decay_steps: int | None = at_least(1)

    def mistakes(self, config: Config, size: GPTConfig) -> Mistakes:
        left = config.training.total_steps - config.training.warmup_steps
        if self.name != "wsd" and self.decay_steps is not None:
            yield "schedule.decay_steps", f"null, as schedule.name={self.name}"
        elif self.decay_steps is not None and self.decay_steps > left:
            yield "schedule.decay_steps", f"at most {left}, the steps after the warmup"


@dataclass
class Zero:
    stage: int = one_of(0, 1, 2, 3)
    compute_dtype: str = one_of("auto", *DTYPES)
    wire_dtype: str = one_of(*DTYPES, "int8")
    gather_dtype: str = one_of("auto", "int8")
    reduce_dtype: str = one_of(*DTYPES)
    gradient_dtype: str = one_of(*DTYPES)
    master_dtype: str = one_of(*DTYPES)
    remat: str = one_of("auto", *REMAT)
    fused_update: bool = MISSING
    replicas: int = at_least(1)
    tensor_shards: int = at_least(1)
    context_shards: int = at_least(1)
    phases: str = one_of("auto", "flat", "torus")
    overlap_gathers: bool = MISSING
    replicate: bool | None = MISSING

    def mistakes(self, config: Config, size: GPTConfig) -> Mistakes:
        if self.remat == "nested" and group_size(size.N) == 1:
            yield "zero.remat", f"full, as the {size.N} layers of model.size={config.model.size} make no equal groups"
        for key in ("replicas", "tensor_shards"):
            if self.phases == "torus" and getattr(self, key) > 1:
                yield "zero.phases", f"auto or flat, as zero.{key}={getattr(self, key)}"
        for key, other in (("wire_dtype", "float32 or bfloat16"), ("gather_dtype", "auto")):
            if self.stage == 0 and getattr(self, key) == "int8":
                yield f"zero.{key}", f"{other}, as zero.stage=0 sums whole gradients and gathers nothing"
        yield from self._uncut(config, size)
        if not self.fused_update:
            return
        needed: dict[str, tuple[Any, list[Any]]] = {
            "zero.stage": (self.stage, [3]),
            "zero.remat": (self.remat, ["auto", "full", "nested"]),
            "training.skip_spikes": (config.training.skip_spikes, [None]),
            "training.gradient_accumulation_steps": (config.training.gradient_accumulation_steps, [1]),
        }
        for key, (value, choices) in needed.items():
            if value not in choices:
                possible = " or ".join(map(shown, choices))
                yield key, f"{possible}, as zero.fused_update=true never holds the whole gradient"
        if self.master_dtype == "bfloat16" and self.gradient_dtype != "bfloat16":
            yield "zero.gradient_dtype", "bfloat16, the dtype of zero.master_dtype, as zero.fused_update=true"

    def _uncut(self, config: Config, size: GPTConfig) -> Mistakes:
        """What tensor groups and context groups cannot cut into equal parts."""
        of_model = f"of model.size={config.model.size}"
        cut = {
            f"num_head={size.num_head} {of_model}": size.num_head,
            f"kv_heads={size.key_heads} {of_model}": size.key_heads,
            f"mlp_dim={size.mlp_width} {of_model}": size.mlp_width,
        }
        if config.mode in ("train", "plan"):
            cut[f"data.max_context={config.data.max_context}"] = config.data.max_context
            cut |= {f"a stage of {length} tokens": length for _, length in config.training.stages()}
        for what, count in cut.items():
            if count % self.tensor_shards:
                yield "zero.tensor_shards", f"a divisor of {what}"
        if self.context_shards == 1 or config.mode not in ("train", "plan"):
            return
        if self.tensor_shards > 1:
            yield "zero.context_shards", f"1, as zero.tensor_shards={self.tensor_shards}"
        if config.model.attention == "dense":
            yield "model.attention", f"auto or blockwise, as zero.context_shards={self.context_shards}"
        for length in (config.data.max_context, *(length for _, length in config.training.stages())):
            if length % (2 * self.context_shards):
                yield "zero.context_shards", f"a divisor of half of the {length} tokens of a sequence"


@dataclass
class Evaluate:
    validation: bool = MISSING
    harness: list[str] = MISSING
    context: int | None = at_least(2)
    stride: int | None = at_least(1)

    def mistakes(self, config: Config, size: GPTConfig) -> Mistakes:
        if config.mode == "evaluate" and not (self.validation or self.harness):
            yield "evaluate.validation", "true, or tasks in evaluate.harness"
        context = self.context or config.data.max_context
        if self.stride is not None and self.stride >= context:
            yield "evaluate.stride", f"1 to {context - 1}, or null"


@dataclass
class Sample:
    prompt: Any = MISSING
    prompt_file: str | None = MISSING
    chat: bool = MISSING
    copies: int = at_least(1)
    tokens: int = at_least(1)
    seed: int = random_seed()
    temperature: float = zero_or_more()
    top_k: int | None = at_least(1)
    top_p: float | None = fraction()
    typical_p: float | None = fraction()
    repetition_penalty: float = positive()


@dataclass
class Profile:
    steps: list[int] | None = checked(
        lambda steps: len(steps) == 2 and 1 <= steps[0] <= steps[1], "the first and the last step, such as [20,25]"
    )
    peak_flops: float | None = positive()


@dataclass
class Grid:
    stage: list[int] = list_of(one_of(0, 1, 2, 3))
    micro_batch: list[int] = list_of(at_least(1))
    accumulation: list[int] = list_of(at_least(1))
    remat: list[str] = list_of(one_of(*REMAT))
    master_dtype: list[str] | None = list_of(one_of(*DTYPES))
    state_dtype: list[str] | None = list_of(one_of(*STATE_DTYPES))
    context: list[int] | None = list_of(at_least(2))
    tensor: list[int] | None = list_of(at_least(1))
    context_shards: list[int] | None = list_of(at_least(1))
    replicas: list[int] | None = list_of(at_least(1))
    phases: list[str] | None = list_of(one_of("auto", "flat", "torus"))
    overlap_gathers: list[bool] | None = MISSING


@dataclass
class Plan:
    topology: str = MISSING
    micro_batch: int = at_least(1)
    search: str = one_of("none", "fastest", "largest")
    grid: Grid = field(default_factory=Grid)
    dollars_per_hour: float | None = positive()
    mfu: float = fraction()
    processes: int | None = at_least(1)

    def mistakes(self, config: Config, size: GPTConfig) -> Mistakes:
        if self.search != "largest" and max(self.grid.context or [0]) > size.block_size:
            limit = f"the block_size of model.size={config.model.size}"
            yield "plan.grid.context", f"a list, each element 2 to {size.block_size}, {limit}, or null"


@dataclass
class Distributed:
    cpu_devices: int = at_least(1)
    coordinator_address: str | None = checked(
        lambda value: re.fullmatch(r".+:\d+", value) is not None, "host:port of the first process"
    )
    num_processes: int | None = at_least(1)
    process_id: int | None = zero_or_more()
    compilation_cache: str | None = MISSING

    def mistakes(self, config: Config, size: GPTConfig) -> Mistakes:
        number, count = self.process_id, self.num_processes
        if self.coordinator_address is None:
            for key, value in (("num_processes", count), ("process_id", number)):
                if value is not None:
                    yield f"distributed.{key}", "null, as there is no distributed.coordinator_address"
        elif count is None:
            yield "distributed.num_processes", "the number of processes, as there is a distributed.coordinator_address"
        elif number is None or number >= count:
            yield "distributed.process_id", f"0 to {count - 1}, another one for each process"


@dataclass
class Config:
    """All of `conf/config.yaml`; its comments say what each key means."""

    mode: str = one_of("train", "evaluate", "sample", "plan")
    resume: str | None = MISSING
    seed: int = random_seed()
    training: Training = field(default_factory=Training)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    zero: Zero = field(default_factory=Zero)
    evaluate: Evaluate = field(default_factory=Evaluate)
    sample: Sample = field(default_factory=Sample)
    profile: Profile = field(default_factory=Profile)
    distributed: Distributed = field(default_factory=Distributed)
    plan: Plan = field(default_factory=Plan)

    def mistakes(self, size: GPTConfig) -> Mistakes:
        """What does not fit together, by the rules of each section. Each key by itself is checked by its field."""
        for section in vars(self).values():
            if hasattr(section, "mistakes"):
                yield from section.mistakes(self, size)


ConfigStore.instance().store(name="schema", node=Config)
