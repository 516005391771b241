"""Keys that a start has no use for, by its mode or another key. Keys of another choice or mode do not exist in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from zero.config.constraints import shown
from zero.config.schema import GROUPS, Config, EvaluateConfig, PlanConfig, SampleConfig, default_section
from zero.corpus.reading.synthetic import SYNTHETIC

OF_FILES = ("index_path_train", "index_path_validation", "shuffle_shards", "max_skipped_rows", "cache_directory")
# Keys of the run that mode=evaluate and mode=sample read, whole sections by their names.
OF_WEIGHTS = {
    *("mode", "resume", "model", "distributed"),
    *("data.tokenizer", "data.max_context", "data.last_target", "data.isolate_documents", "data.resume_step"),
    *("zero.stage", "zero.compute_dtype", "zero.product_dtype", "zero.gather_dtype", "zero.master_dtype"),
    *("zero.tensor_shards", "zero.expert_shards", "zero.phases", "zero.overlap_gathers"),
}
OF_SCORES = {
    *("training.batch_size", "training.loss_on"),
    *("data.corpus", "data.index_path_validation", "data.bucket_path"),
}
OF_FOLLOWING = {"data.wandb_project", "data.tensorboard"}
# The key whose values each key of plan.grid lists.
OF_GRID = {
    "stage": "zero.stage",
    "micro_batch": "plan.micro_batch",
    "accumulation": "training.gradient_accumulation_steps",
    "remat": "zero.remat",
    "master_dtype": "zero.master_dtype",
    "state_dtype": "optimizer.state_dtype",
    "context": "data.max_context",
    "tensor": "zero.tensor_shards",
    "context_shards": "zero.context_shards",
    "expert": "zero.expert_shards",
    "replicas": "zero.replicas",
    "phases": "zero.phases",
    "overlap_gathers": "zero.overlap_gathers",
}
OF_SEARCHES = {"none": (), "fastest": tuple(OF_GRID), "largest": ("context", "master_dtype", "state_dtype")}
# The keys that each search replaces by values of its own.
REPLACED = {
    "none": {
        "zero.stage": "mode=plan compiles stages 0 to 3; plan.search=fastest with plan.grid.stage=[3] compiles one"
    },
    "fastest": {},
    "largest": {
        **dict.fromkeys(("model.size", "model.override"), "plan.search=largest makes its own models"),
        "data.max_context": "plan.search=largest plans for 1024 tokens, or for the most of plan.grid.context",
    },
}


def without_effect(config: Config) -> Iterator[tuple[str, str]]:
    """The keys that change nothing beside the other keys of a configuration, each with the reason; groups by name."""
    if isinstance(config, SampleConfig):
        yield from _unread(config, OF_WEIGHTS | {"sample"}, "mode=sample does not read it")
    elif isinstance(config, EvaluateConfig):
        read = OF_WEIGHTS | OF_SCORES | {"evaluate"}
        yield from _unread(config, read | OF_FOLLOWING, "mode=evaluate does not read it")
        if not config.evaluate.follow:
            for key in sorted(OF_FOLLOWING):
                yield key, "evaluate.follow=false"
    elif isinstance(config, PlanConfig):
        yield from _of_a_plan(config)
    else:
        yield from without_effect_in_training(config)


def with_read_keys(config: Config) -> Config:
    """The configuration of weights with defaults for what their mode does not read of the section zero.

    A run keeps these keys in its configuration, and `mode=evaluate` and `mode=sample` take no other value of them.
    """
    if not isinstance(config, EvaluateConfig | SampleConfig):
        return config
    defaults = default_section(type(config.zero))
    unread = {name: value for name, value in defaults.items() if f"zero.{name}" not in OF_WEIGHTS}
    return dataclasses.replace(config, zero=dataclasses.replace(config.zero, **unread))


def _unread(config: Config, read: set[str], reason: str) -> Iterator[tuple[str, str]]:
    """The keys and groups of a configuration that a mode does not read."""
    for name, section in vars(config).items():
        if name in read:
            continue
        if name in GROUPS or not dataclasses.is_dataclass(section):
            yield name, reason
        if dataclasses.is_dataclass(section):
            keys = (f"{name}.{field.name}" for field in dataclasses.fields(section))
            yield from ((key, reason) for key in keys if key not in read)


def _of_a_plan(config: PlanConfig) -> Iterator[tuple[str, str]]:
    """Other keys of training are part of the printed command, if not of the compiled step."""
    yield "data.resume_step", "mode=plan plans a fresh start"
    yield "training.batch_size", "plan.micro_batch takes its place"
    yield "profile.step_time", "mode=plan predicts it"
    if config.plan.tokens is not None:
        yield "training.total_steps", "plan.tokens takes its place"
    search = config.plan.search
    yield from REPLACED[search].items()
    for name, replaced in OF_GRID.items():
        if name not in OF_SEARCHES[search]:
            reading = " or ".join(f"plan.search={other}" for other, names in OF_SEARCHES.items() if name in names)
            yield f"plan.grid.{name}", f"plan.search={search}; {reading} reads it"
        elif getattr(config.plan.grid, name) is not None and replaced not in REPLACED[search]:
            yield replaced, f"plan.grid.{name} takes its place"
    yield from without_effect_in_training(config)


def without_effect_in_training(config: Config) -> Iterator[tuple[str, str]]:
    """As `without_effect`, of the keys of a training run."""
    data = config.data
    if not config.model.warm_start:
        yield "model.model_path", "model.warm_start=false"
    if not config.schedule.has_end:
        yield "training.end_learning_rate", f"schedule={config.schedule.name} has no end"
    yield from _of_sequence_lengths(config)
    if config.zero.emergency_steps is None:
        yield "zero.emergency_directory", "zero.emergency_steps=null"
    if data.corpus in SYNTHETIC:
        for name in OF_FILES:
            yield f"data.{name}", f"data.corpus={data.corpus} reads no files"


def _of_sequence_lengths(config: Config) -> Iterator[tuple[str, str]]:
    training = config.training
    if isinstance(training.context_stages, list):
        reason = f"training.context_stages={shown(training.context_stages)}"
        yield "training.warmup_train_context", reason
        if training.staged_warmup_steps:
            yield "training.staged_warmup_steps", reason
    elif training.staged_warmup_steps == 0:
        yield "training.warmup_train_context", "training.staged_warmup_steps=0"
        if training.context_stages is not None:
            yield "training.context_stages", "training.staged_warmup_steps=0"
