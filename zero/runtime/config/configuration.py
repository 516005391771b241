"""The configuration: every key declared once, checked once, at the door (hydra, omegaconf).

Below `main_zero.py` and the training loop nobody sees it: functions take plain values.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import MissingConfigException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from zero.models.gpt import REMAT, GPTConfig
from zero.runtime import storage
from zero.runtime.errors import UserError

DTYPES = ("float32", "bfloat16")
MODES = ("train", "evaluate", "sample", "plan")


@dataclass
class Training:
    max_epochs: int | None = MISSING
    batch_size: int = MISSING
    peak_learning_rate: float = MISSING
    end_learning_rate: float = MISSING
    warmup_steps: int = MISSING
    total_steps: int = MISSING
    weight_decay: float = MISSING
    gradient_accumulation_steps: int = MISSING
    evaluation_frequency: int = MISSING
    maximum_evaluation_steps: int = MISSING
    staged_warmup_steps: int = MISSING
    warmup_train_context: int = MISSING
    max_gradient_norm: float | None = MISSING
    skip_bad_steps: bool = MISSING
    skip_spikes: float | None = MISSING
    max_skipped_in_a_row: int = MISSING
    log_frequency: int = MISSING
    sample_tokens: int = MISSING
    ema: float | None = MISSING
    harness_frequency: int | None = MISSING


@dataclass
class Model:
    size: str = MISSING
    warm_start: bool = MISSING
    model_path: str | None = MISSING
    ema: bool = MISSING


@dataclass
class Data:
    corpus: str | None = MISSING
    tokenizer: str = MISSING
    max_context: Any = MISSING
    train_samples: int | None = MISSING
    checkpoint_directory: str = MISSING
    bucket_path: str | None = MISSING
    index_path_train: Any = MISSING
    index_path_validation: Any = MISSING
    window: int = MISSING
    max_skipped_rows: int = MISSING
    cache_directory: str | None = MISSING
    cache_bytes: int = MISSING
    wandb_project: str | None = MISSING
    tensorboard: bool = MISSING
    resume_step: int | None = MISSING
    keep_checkpoints: int = MISSING
    checkpoint_minutes: float | None = MISSING


@dataclass
class Zero:
    stage: int = MISSING
    compute_dtype: str = MISSING
    wire_dtype: str = MISSING
    reduce_dtype: str = MISSING
    gradient_dtype: str = MISSING
    remat: str = MISSING
    fused_update: bool = MISSING
    replicate: bool | None = MISSING


@dataclass
class Evaluate:
    validation: bool = MISSING
    harness: list[str] = field(default_factory=list)
    context: int | None = MISSING
    stride: int | None = MISSING


@dataclass
class Sample:
    prompt: Any = MISSING
    prompt_file: str | None = MISSING
    copies: int = MISSING
    tokens: int = MISSING
    seed: int = MISSING
    temperature: float = MISSING
    top_k: int | None = MISSING
    top_p: float | None = MISSING
    typical_p: float | None = MISSING
    repetition_penalty: float = MISSING


@dataclass
class Grid:
    stage: list[int] = MISSING
    micro_batch: list[int] = MISSING
    accumulation: list[int] = MISSING
    remat: list[str] = MISSING
    context: list[int] | None = MISSING


@dataclass
class Plan:
    topology: str = MISSING
    micro_batch: int = MISSING
    search: bool = MISSING
    largest: bool | None = MISSING
    grid: Grid = field(default_factory=Grid)
    processes: int | None = MISSING


@dataclass
class Profile:
    steps: list[int] | None = MISSING
    peak_flops: float | None = MISSING


@dataclass
class Distributed:
    cpu_devices: int = MISSING
    coordinator_address: str | None = MISSING
    num_processes: int | None = MISSING
    process_id: int | None = MISSING
    compilation_cache: str | None = MISSING


@dataclass
class Config:
    """All of `conf/config.yaml`; its comments say what each key means."""

    mode: str = MISSING
    resume: str | None = MISSING
    seed: int = MISSING
    training: Training = field(default_factory=Training)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    zero: Zero = field(default_factory=Zero)
    evaluate: Evaluate = field(default_factory=Evaluate)
    sample: Sample = field(default_factory=Sample)
    profile: Profile = field(default_factory=Profile)
    distributed: Distributed = field(default_factory=Distributed)
    plan: Plan = field(default_factory=Plan)


# What a resume may not change: the model, the seed and the order of the data.
FIXED_KEYS = (
    "seed",
    "model.size",
    "training.ema",
    "data.max_context",
    "data.tokenizer",
    "data.train_samples",
    "data.index_path_train",
    "data.window",
)

ConfigStore.instance().store(name="schema", node=Config)


def check(config: DictConfig, sizes: dict[str, GPTConfig]) -> Config:
    """The configuration as plain typed values, if it can be run at all.

    Raises:
      UserError: a key has a value that cannot be right, alone or beside another; the line names it.
    """
    try:  # once more: what was added with +key=value or came out of a saved file was not compared with the schema
        config = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.to_container(config))  # type: ignore[assignment]
        checked: Config = OmegaConf.to_object(config)  # type: ignore[assignment]  # what a structured config becomes
    except OmegaConfBaseException as error:
        raise UserError(f"configuration: {describe(error)}") from error
    training, data, zero = checked.training, checked.data, checked.zero
    evaluate, sample = checked.evaluate, checked.sample

    def require(holds: bool, key: str, expected: str) -> None:
        if not holds:
            raise UserError(f"{key}={OmegaConf.select(config, key)}: expected {expected}")

    require(checked.mode in MODES, "mode", f"one of {', '.join(MODES)}")
    is_training = checked.mode == "train"
    require(
        data.resume_step is None or checked.resume is not None or not is_training,
        "data.resume_step",
        "--resume beside it",
    )
    require(checked.model.size in sizes, "model.size", f"one of {', '.join(sizes)} (conf/model_config.yaml)")
    for key in ("batch_size", "total_steps", "gradient_accumulation_steps", "evaluation_frequency", "log_frequency"):
        require(getattr(training, key) >= 1, f"training.{key}", "at least 1")
    for key in ("maximum_evaluation_steps", "max_skipped_in_a_row"):
        require(getattr(training, key) >= 1, f"training.{key}", "at least 1")
    for key in ("peak_learning_rate", "end_learning_rate", "weight_decay", "staged_warmup_steps", "sample_tokens"):
        require(0 <= getattr(training, key) < math.inf, f"training.{key}", "zero or more")
    require(0 <= checked.seed < 2**32, "seed", "0 to 4294967295")
    require(training.max_epochs is None or training.max_epochs >= 1, "training.max_epochs", "at least 1, or null")
    require(
        training.max_gradient_norm is None or training.max_gradient_norm > 0,
        "training.max_gradient_norm",
        "more than 0, or null for no clipping",
    )
    require(
        training.skip_spikes is None or 0 < training.skip_spikes < math.inf,
        "training.skip_spikes",
        "more than 0, or null for none",
    )
    require(
        training.ema is None or 0 < training.ema < 1, "training.ema", "more than 0 and less than 1, or null for none"
    )
    require(
        0 <= training.warmup_steps < training.total_steps,
        "training.warmup_steps",
        f"fewer than training.total_steps={training.total_steps}",
    )
    block_size = sizes[checked.model.size].block_size
    if not sizes[checked.model.size].alibi_attn:
        require(
            training.sample_tokens < block_size,
            "training.sample_tokens",
            f"at most {block_size - 1}, the learned positions of model.size={checked.model.size} less one",
        )
    data.max_context = block_size if data.max_context is None else data.max_context
    require(
        isinstance(data.max_context, int) and 2 <= data.max_context <= block_size,
        "data.max_context",
        f"2 to block_size={block_size} of model.size={checked.model.size}, or null for that",
    )
    require(data.keep_checkpoints >= 1, "data.keep_checkpoints", "at least 1")
    require(
        data.checkpoint_minutes is None or 0 < data.checkpoint_minutes < math.inf,
        "data.checkpoint_minutes",
        "more than 0, or null",
    )
    require(_is_paths(data.index_path_validation), "data.index_path_validation", "the path of an index file, or a list")
    is_mixture = not _is_paths(data.index_path_train)
    require(
        not is_mixture or _is_mixture(data.index_path_train),
        "data.index_path_train",
        "the path of an index file, a list of them, or [{index: path, weight: 0.7}, ...] of files of different names",
    )
    require(
        not is_mixture or data.train_samples is None,
        "data.train_samples",
        "null, as data.index_path_train is a mixture",
    )
    require(data.window >= 1, "data.window", "at least 1")
    require(data.max_skipped_rows >= 0, "data.max_skipped_rows", "zero or more")
    require(data.cache_bytes >= 1, "data.cache_bytes", "at least 1")
    require(data.train_samples is None or data.train_samples >= 1, "data.train_samples", "at least 1, or null")
    if training.staged_warmup_steps:
        require(
            training.warmup_train_context >= 2 and data.max_context % training.warmup_train_context == 0,
            "training.warmup_train_context",
            f"a divisor of data.max_context={data.max_context}",
        )
    require(zero.stage in (0, 1, 2, 3), "zero.stage", "0, 1, 2 or 3")
    for key in ("wire_dtype", "reduce_dtype", "gradient_dtype"):
        require(getattr(zero, key) in DTYPES, f"zero.{key}", f"one of {', '.join(DTYPES)}")
    require(zero.compute_dtype in ("auto", *DTYPES), "zero.compute_dtype", f"one of auto, {', '.join(DTYPES)}")
    require(zero.remat in ("auto", *REMAT), "zero.remat", f"one of auto, {', '.join(REMAT)}")
    if zero.fused_update:
        beside = "as zero.fused_update=true, which never holds the whole gradient"
        require(zero.stage == 3, "zero.stage", f"3, {beside}")
        require(zero.remat in ("auto", "full"), "zero.remat", f"auto or full, {beside}")
        require(training.max_gradient_norm is None, "training.max_gradient_norm", f"null, {beside}")
        require(not training.skip_bad_steps, "training.skip_bad_steps", f"false, {beside}")
        require(training.skip_spikes is None, "training.skip_spikes", f"null, {beside}")
        require(training.gradient_accumulation_steps == 1, "training.gradient_accumulation_steps", f"1, {beside}")
    require(
        training.harness_frequency is None or (training.harness_frequency >= 1 and bool(evaluate.harness)),
        "training.harness_frequency",
        "at least 1 with tasks in evaluate.harness, or null",
    )
    profile = checked.profile
    require(
        profile.steps is None or (len(profile.steps) == 2 and 1 <= profile.steps[0] <= profile.steps[1]),
        "profile.steps",
        "the first and the last step, as [20,25], or null",
    )
    require(
        profile.peak_flops is None or 0 < profile.peak_flops < math.inf, "profile.peak_flops", "more than 0, or null"
    )
    _check_plan(checked.plan, block_size, require)
    _check_distributed(checked.distributed, require)
    if checked.mode == "evaluate":
        require(
            evaluate.validation or bool(evaluate.harness), "evaluate.validation", "true, or evaluate.harness beside it"
        )
    require(evaluate.context is None or evaluate.context >= 2, "evaluate.context", "at least 2, or null")
    longest = evaluate.context or data.max_context
    require(
        evaluate.stride is None or 1 <= evaluate.stride < longest, "evaluate.stride", f"1 to {longest - 1}, or null"
    )
    for key in ("copies", "tokens"):
        require(getattr(sample, key) >= 1, f"sample.{key}", "at least 1")
    require(0 <= sample.seed < 2**32, "sample.seed", "0 to 4294967295")
    require(0 <= sample.temperature < math.inf, "sample.temperature", "zero (the likeliest token) or more")
    require(sample.top_k is None or sample.top_k >= 1, "sample.top_k", "at least 1, or null")
    for key in ("top_p", "typical_p"):
        require(getattr(sample, key) is None or 0 < getattr(sample, key) <= 1, f"sample.{key}", "0 to 1, or null")
    require(0 < sample.repetition_penalty < math.inf, "sample.repetition_penalty", "more than 0; 1 is none")
    require(
        not is_training or not checked.model.warm_start or bool(checked.model.model_path),
        "model.model_path",
        "a run, a directory of checkpoints or a Hugging Face folder, as model.warm_start=true",
    )
    return checked


def _is_paths(value: Any) -> bool:
    paths = value if isinstance(value, list) else [value]
    return bool(paths) and all(isinstance(path, str) and path for path in paths)


def _is_mixture(value: Any) -> bool:
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        return False
    is_whole = all(
        entry.keys() == {"index", "weight"}
        and isinstance(entry["index"], str)
        and isinstance(entry["weight"], int | float)
        and 0 < entry["weight"] < math.inf
        for entry in value
    )
    # The metrics name a corpus by the stem of its index file.
    return is_whole and len({Path(entry["index"]).stem for entry in value}) == len(value)


def index_files(value: Any, bucket_path: str | None) -> str | list[str] | dict[str, float]:
    """What `data.index_path_train` or `..._validation` says, for a Loader: index files, or their weights.

    Relative paths lie in the bucket, if there is one.
    """
    if isinstance(value, str):
        return storage.join(storage.bucket(bucket_path), value) if bucket_path else value
    if all(isinstance(entry, str) for entry in value):
        return [str(index_files(entry, bucket_path)) for entry in value]
    return {str(index_files(entry["index"], bucket_path)): entry["weight"] for entry in value}


def _check_plan(plan: Plan, block_size: int, require: Callable[[bool, str, str], None]) -> None:
    require(plan.micro_batch >= 1, "plan.micro_batch", "at least 1")
    require(plan.processes is None or plan.processes >= 1, "plan.processes", "at least 1, or null")
    grid = plan.grid
    expected = {"stage": "0 to 3", "micro_batch": "1 or more", "accumulation": "1 or more", "remat": ", ".join(REMAT)}
    right = {
        "stage": all(0 <= stage <= 3 for stage in grid.stage),
        "micro_batch": all(rows >= 1 for rows in grid.micro_batch),
        "accumulation": all(steps >= 1 for steps in grid.accumulation),
        "remat": all(policy in REMAT for policy in grid.remat),
    }
    for key, holds in right.items():
        require(holds and bool(getattr(grid, key)), f"plan.grid.{key}", f"a list, each of {expected[key]}")
    contexts = grid.context or [block_size]
    require(all(2 <= n <= block_size for n in contexts), "plan.grid.context", f"a list, each of 2 to {block_size}")


def _check_distributed(distributed: Distributed, require: Callable[[bool, str, str], None]) -> None:
    require(distributed.cpu_devices >= 1, "distributed.cpu_devices", "at least 1")
    address, number, count = distributed.coordinator_address, distributed.process_id, distributed.num_processes
    if address is None:
        for key in ("num_processes", "process_id"):
            require(getattr(distributed, key) is None, f"distributed.{key}", "null, as there is no coordinator_address")
        return
    is_address = re.fullmatch(r".+:\d+", address) is not None
    require(is_address, "distributed.coordinator_address", "host:port of the first process")
    require(count is not None and count >= 1, "distributed.num_processes", "how many processes there are")
    require(
        number is not None and 0 <= number < (count or 0),
        "distributed.process_id",
        f"0 to {(count or 1) - 1}, one each",
    )


def describe(error: Exception) -> str:
    """One line for what Hydra or OmegaConf found wrong: the key, why, and which keys there are."""
    parts = str(error).splitlines()[:2]
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        before = parts[0] if cause is not error else cause.full_key
        parts = [str(part) for part in (before, str(cause).splitlines()[0]) if part]
        if isinstance(cause, ConfigKeyError | ConfigAttributeError) and dataclasses.is_dataclass(cause.object_type):
            parts.append("expected one of " + ", ".join(f.name for f in dataclasses.fields(cause.object_type)))
    if isinstance(error, MissingConfigException) and error.options:
        parts = [parts[0].rstrip(": "), "expected one of " + ", ".join(sorted(error.options))]
    return ": ".join(part.rstrip(".") for part in parts)


def load_sizes(path: Path) -> dict[str, GPTConfig]:
    """The model sizes of `conf/model_config.yaml`.

    Raises:
      UserError: the file or a key of a size is missing, unknown, of another type, or impossible.
    """
    if not path.is_file():
        raise UserError(f"{path}: not found; expected the model sizes")
    schema = OmegaConf.structured(GPTConfig)
    OmegaConf.set_readonly(schema, False)  # it is frozen, and what is merged into it is not
    sizes = {}
    for size, entry in OmegaConf.load(path).items():
        try:
            checked = OmegaConf.to_container(OmegaConf.merge(schema, entry or {}), throw_on_missing=True)
            sizes[str(size)] = GPTConfig(**checked)  # type: ignore[arg-type]  # the mapping that was merged
        except OmegaConfBaseException as error:
            raise UserError(f"{path}: size {size!r}: {describe(error)}") from error
        except ValueError as error:
            raise UserError(f"{path}: size {size!r}: {error}") from error
    return sizes


def merge_resumed(saved: DictConfig, config: DictConfig, overrides: list[str]) -> DictConfig:
    """The saved configuration with the overrides that were given now.

    Raises:
      UserError: an override would change the model, the seed or the order of the data.
    """
    try:
        merged = OmegaConf.merge(config, saved)
        merged.model.ema = False  # chosen for that start, not for this one
        merged.data.resume_step = None  # asked of that start, not of this one
        for key in ("coordinator_address", "num_processes", "process_id"):  # of those machines
            merged.distributed[key] = config.distributed[key]
        for key in [override.lstrip("+~").split("=", 1)[0] for override in overrides]:
            OmegaConf.update(merged, key, OmegaConf.select(config, key))
    except OmegaConfBaseException as error:
        raise UserError(f"configuration of the run to resume: {describe(error)}") from error
    for key in FIXED_KEYS:
        before, now = OmegaConf.select(saved, key), OmegaConf.select(merged, key)
        if now != before:
            raise UserError(f"{key}={now}: a resume keeps {key}={before} of the run")
    merged.resume = config.resume
    assert isinstance(merged, DictConfig)
    return merged
