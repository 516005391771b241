"""Keys that a training run has no use for, as another key says. Keys of another choice or mode do not exist in it."""

from __future__ import annotations

from collections.abc import Iterator

from zero.config.constraints import shown
from zero.config.schema import Config
from zero.corpus.reading.synthetic import SYNTHETIC

OF_FILES = ("index_path_train", "index_path_validation", "shuffle_shards", "max_skipped_rows", "cache_directory")


def without_effect(config: Config) -> Iterator[tuple[str, str]]:
    """The keys of a training run that change nothing beside its other keys, each with the reason."""
    if config.mode != "train":
        return
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
