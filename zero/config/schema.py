"""The sections of conf/config.yaml: each key with its type and its check (hydra, omegaconf).

Values and explanations are only in conf/config.yaml, rules between keys in rules_between_keys.py. Functions that build
a model, a run or a plan take these classes; all others take plain values.
"""
# ruff: noqa: RUF009  the functions of constraints.py return dataclass fields

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from zero.config.constraints import (
    INT32,
    INT64,
    ONE,
    SMALLEST,
    at_least,
    boolean,
    checked,
    fraction,
    fraction_below_one,
    is_mixture,
    is_paths,
    is_prompts,
    is_sets,
    is_stages,
    list_of,
    not_empty,
    one_of,
    positive,
    project_name,
    random_seed,
    zero_or_more,
)
from zero.corpus.reading.crop import CROPS
from zero.corpus.reading.synthetic import SYNTHETIC
from zero.models.adapters import PRODUCTS
from zero.models.attention.blockwise import CHOICES as ATTENTION
from zero.models.stack import REMAT
from zero.training.block_codes import FORMS
from zero.training.objectives import OBJECTIVES
from zero.training.optimizer import DECAYED, NAMES
from zero.training.schedules import SCHEDULES

DTYPES = ("float32", "bfloat16")
STATE_DTYPES = (*DTYPES, "int8")
BASE_DTYPES = (*DTYPES, *FORMS)
_PATHS = "the path of an index file, or a list of them"
_SETS = "{name: one of these, ...} with letters, digits, and . - _ between them in names"
_STAGES = "[[steps, tokens per sequence], ...]"
_PROMPTS = "a text, quoted as '\"2024\"' if it looks like a number, or a list of texts"
_MIXTURE = (
    "[{index: path, weight: 0.7}, ...] of files of different names, with weights or [[0, weight], [step, weight], ...]"
)


def _is_validation(value: Any) -> bool:
    return value is None or is_paths(value) or is_sets(value)


@dataclass
class Training:
    max_epochs: int | None = at_least(1)
    batch_size: int = at_least(1)
    peak_learning_rate: float = zero_or_more()
    end_learning_rate: float = zero_or_more()
    warmup_steps: int = at_least(0)
    total_steps: int = at_least(1)
    weight_decay: float = zero_or_more()
    gradient_accumulation_steps: int = at_least(1)
    evaluation_frequency: int = at_least(1)
    maximum_evaluation_steps: int = at_least(0)
    staged_warmup_steps: int = at_least(0)
    warmup_train_context: int = MISSING
    context_stages: Any = checked(
        lambda value: value in (None, "linear") or is_stages(value), f"linear, {_STAGES}, or null"
    )
    max_gradient_norm: float | None = checked(lambda value: value >= SMALLEST, "more than 0 in float32")
    max_gradient_value: float | None = checked(lambda value: value >= SMALLEST, "more than 0 in float32")
    skip_bad_steps: Any = boolean()
    skip_spikes: float | None = positive()
    max_skipped_in_a_row: int = at_least(1)
    verify_every: int | None = at_least(1)
    statistics: int | None = at_least(1)
    log_frequency: int = at_least(1)
    sample_tokens: int = at_least(0)
    ema: float | None = checked(lambda value: 0 < value < ONE, "more than 0, less than 1 in float32")
    harness_frequency: int | None = at_least(1)
    loss_on: str = one_of("all", "completion")
    objective: str = one_of(*OBJECTIVES)
    dpo_beta: float = positive()

    def stages(self) -> tuple[tuple[int, int], ...]:
        """Steps and tokens per sequence of each stage of the warmup; linear growth counts as one."""
        if isinstance(self.context_stages, list):
            return tuple((steps, length) for steps, length in self.context_stages)
        return ((self.staged_warmup_steps, self.warmup_train_context),) if self.staged_warmup_steps else ()


@dataclass
class Model:
    size: str = MISSING
    warm_start: Any = boolean()
    model_path: str | None = not_empty()
    ema: Any = boolean()
    attention: str = one_of(*ATTENTION)
    sizes: str | None = not_empty()
    override: dict[str, Any] = field(default_factory=dict)


@dataclass
class Data:
    corpus: str | None = not_empty()
    tokenizer: str = not_empty()
    max_context: Any = checked(  # an integer, once it is checked
        lambda value: value is None or (isinstance(value, int) and 2 <= value <= INT32), "at least 2, or null"
    )
    crop: str = one_of(*CROPS)
    last_target: Any = boolean(optional=True)
    isolate_documents: Any = boolean()
    train_samples: int | None = at_least(1, INT64)
    checkpoint_directory: str = not_empty()
    bucket_path: str | None = not_empty()
    index_path_train: Any = checked(lambda value: is_paths(value) or is_mixture(value), f"{_PATHS}, or {_MIXTURE}")
    index_path_validation: Any = checked(_is_validation, f"{_PATHS}, {_SETS}, or null")
    shuffle_shards: int = at_least(1)
    max_skipped_rows: int = zero_or_more()
    cache_directory: str | None = not_empty()
    cache_bytes: int = at_least(1, INT64)
    wandb_project: str | None = project_name()
    tensorboard: Any = boolean()
    resume_step: int | None = MISSING
    keep_checkpoints: int = at_least(1)
    keep_every: int | None = at_least(1)
    keep_every_hours: float | None = positive()
    save_every: int | None = at_least(1)
    checkpoint_minutes: float | None = positive()


@dataclass
class Optimizer:
    name: str = one_of(*NAMES)
    state_dtype: str = one_of(*STATE_DTYPES)
    b1: float | None = fraction_below_one()
    b2: float | None = fraction_below_one()
    eps: float | None = positive()
    nesterov: Any = boolean(optional=True)
    decay_rate: float | None = positive()
    factored_from: int | None = at_least(2)
    max_update_rms: float | None = positive()
    min_scale: float | None = positive()
    scale_by_parameter: Any = boolean(optional=True)
    decay: str | None = one_of("rate", "coupled", "independent")
    decay_on: str | None = one_of(*DECAYED)
    bias_correction: Any = boolean(optional=True)
    scaled_eps: Any = boolean(optional=True)
    newton_schulz_steps: int | None = at_least(1)
    update_rms: float | None = positive()
    adam_b1: float | None = fraction_below_one()
    adam_b2: float | None = fraction_below_one()

    def hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters that are not null."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {key: value for key, value in values.items() if key not in ("name", "state_dtype") and value is not None}


@dataclass
class Tuning:
    method: str = one_of("all", "lora", "dora")
    rank: int = at_least(1)
    alpha: float = positive()
    dropout: float = fraction_below_one()
    targets: list[str] | None = list_of(one_of(*PRODUCTS))
    base_dtype: str = one_of(*BASE_DTYPES)
    adapter: str | None = not_empty()


@dataclass
class Schedule:
    name: str = one_of(*SCHEDULES)
    decay_steps: int | None = at_least(1)
    decay_end: int | None = at_least(1)


@dataclass
class Zero:
    stage: int = one_of(0, 1, 2, 3)
    compute_dtype: str = one_of("auto", *DTYPES)
    wire_dtype: str = one_of("auto", *DTYPES, "int8")
    gather_dtype: str = one_of("auto", "int8")
    reduce_dtype: str = one_of(*DTYPES)
    gradient_dtype: str = one_of(*DTYPES)
    master_dtype: str = one_of(*DTYPES)
    remat: str = one_of("auto", *REMAT)
    fused_update: Any = boolean()
    replicas: int = at_least(1)
    tensor_shards: int = at_least(1)
    context_shards: int = at_least(1)
    expert_shards: int = at_least(1)
    phases: str = one_of("auto", "flat", "torus")
    overlap_gathers: Any = boolean()
    replicate: Any = boolean(optional=True)
    emergency_steps: int | None = at_least(1)
    emergency_directory: str = not_empty()


@dataclass
class Evaluate:
    validation: Any = boolean()
    index: Any = checked(_is_validation, f"{_PATHS}, {_SETS}, or null")
    harness: list[str] = MISSING
    adapters: list[str] | None = list_of(not_empty())
    context: int | None = at_least(2)
    stride: int | None = at_least(1)
    carry: Any = boolean()
    follow: Any = boolean()


@dataclass
class Sample:
    prompt: Any = checked(lambda value: value is None or is_prompts(value), f"{_PROMPTS}, or null")
    prompt_file: str | None = MISSING
    chat: Any = boolean()
    copies: int = at_least(1)
    tokens: int = at_least(1)
    seed: int = random_seed()
    temperature: float = zero_or_more()
    top_k: int | None = at_least(1)
    top_p: float | None = fraction()
    typical_p: float | None = fraction()
    eta: float | None = fraction()
    log_probabilities: Any = boolean()
    interactive: Any = boolean()
    repetition_penalty: float = positive()


@dataclass
class Profile:
    steps: list[int] | None = checked(
        lambda steps: len(steps) == 2 and 1 <= steps[0] <= steps[1], "the first and the last step, such as [20,25]"
    )
    step_time: float | None = positive()
    peak_flops: float | None = positive()


@dataclass
class Grid:
    stage: list[int] = list_of(one_of(0, 1, 2, 3))
    micro_batch: list[int] = list_of(at_least(1))
    accumulation: list[int] = list_of(at_least(1))
    remat: list[str] = list_of(one_of("auto", *REMAT))
    master_dtype: list[str] | None = list_of(one_of(*DTYPES))
    state_dtype: list[str] | None = list_of(one_of(*STATE_DTYPES))
    context: list[int] | None = list_of(at_least(2))
    tensor: list[int] | None = list_of(at_least(1))
    context_shards: list[int] | None = list_of(at_least(1))
    expert: list[int] | None = list_of(at_least(1))
    replicas: list[int] | None = list_of(at_least(1))
    phases: list[str] | None = list_of(one_of("auto", "flat", "torus"))
    overlap_gathers: list[Any] | None = list_of(boolean())


@dataclass
class Plan:
    topology: str = MISSING
    micro_batch: int = at_least(1)
    search: str = one_of("none", "fastest", "largest")
    grid: Grid = field(default_factory=Grid)
    tokens: int | None = at_least(1)
    dollars_per_hour: float | None = positive()
    breakdown: Any = boolean()
    processes: int | None = at_least(1)


@dataclass
class Distributed:
    cpu_devices: int = at_least(1)
    coordinator_address: str | None = checked(
        lambda value: re.fullmatch(r".+:\d+", value) is not None, "host:port of the first process"
    )
    num_processes: int | None = at_least(1)
    process_id: int | None = at_least(0)
    compilation_cache: str | None = MISSING
    stall_minutes: float | None = positive()


@dataclass
class Config:
    """All of `conf/config.yaml`, whose comments explain each key."""

    mode: str = one_of("train", "evaluate", "sample", "plan")
    resume: str | None = MISSING
    seed: int = random_seed()
    training: Training = field(default_factory=Training)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    tuning: Tuning = field(default_factory=Tuning)
    schedule: Schedule = field(default_factory=Schedule)
    zero: Zero = field(default_factory=Zero)
    evaluate: Evaluate = field(default_factory=Evaluate)
    sample: Sample = field(default_factory=Sample)
    profile: Profile = field(default_factory=Profile)
    distributed: Distributed = field(default_factory=Distributed)
    plan: Plan = field(default_factory=Plan)

    @property
    def has_validation_set(self) -> bool:
        return self.data.index_path_validation is not None and self.data.corpus not in SYNTHETIC


def declared() -> DictConfig:
    """The sections with their types; `model.override` takes any key, as it is checked with the model's entry."""
    node = OmegaConf.structured(Config)
    OmegaConf.set_struct(node.model.override, False)
    assert isinstance(node, DictConfig)
    return node


ConfigStore.instance().store(name="schema", node=declared())
