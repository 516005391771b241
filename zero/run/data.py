"""The data of a run: tokenizer, corpus, loaders, and the lengths of sequences."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zero.base.errors import UserError
from zero.config.schema import Config
from zero.corpus.format.index_files import index_paths, named_sets, paths_of, row_tokens
from zero.corpus.format.shards import BadData, RowFormat
from zero.corpus.preparing.prepare_if_missing import prepare_if_missing
from zero.corpus.reading.batch_schedule import BatchSchedule
from zero.corpus.reading.cache import ShardCache
from zero.corpus.reading.loader import ONCE, Batching, Loader, RowOrder
from zero.corpus.reading.synthetic import SYNTHETIC, AnyLoader, SyntheticLoader
from zero.corpus.text.tokenizers import Tokenizer, load_tokenizer
from zero.hosts import agreement
from zero.job import Job, steps_per_row
from zero.models.config import GPTConfig
from zero.run.column import Column
from zero.run.columns import open_columns, stored_columns
from zero.run.position import Position
from zero.run.restore import TrainingPosition
from zero.training.host_rows import HostRows
from zero.training.schedules import SequenceLengths

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """What a run trains on and is evaluated on.

    Attributes:
      validation: a loader for each set by its name; a set without a name is "".
      context: the tokens per sequence at each step.
      columns: what the objective reads beside rows, by the source that makes it.
    """

    tokenizer: Tokenizer
    training: AnyLoader
    validation: dict[str, Loader]
    context: SequenceLengths
    columns: dict[str, Column]


def open_data(
    config: Config, job: Job, tokenizer: Tokenizer, position: TrainingPosition, schedule: BatchSchedule
) -> Data:
    """The loaders of a run whose corpus is prepared; all hosts call it.

    Raises:
      UserError: the data does not fit the configuration.
    """
    columns = open_columns(config, job, position)
    training, validation = _loaders(config, job, schedule, stored_columns(columns))
    return Data(tokenizer, training, validation, staged_context(config), columns)


def fitting_tokenizer(config: Config, size: GPTConfig) -> Tokenizer:
    """The tokenizer of the configuration; raises UserError where the model has fewer tokens than it."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > size.vocab_size:
        raise UserError(
            f"model.size={config.model.size}: its vocab_size {size.vocab_size} is smaller than the "
            f"{tokenizer.vocab_size} tokens of data.tokenizer={config.data.tokenizer}"
        )
    return tokenizer


def prepare_corpus(config: Config, tokenizer: Tokenizer) -> Config:
    """Prepares the corpus if its index files are missing: the default job needs nothing but this machine.

    Returns:
      The configuration with the index files of the corpus that fits.
    """
    data = config.data
    if data.corpus in SYNTHETIC:
        return config
    train = index_paths(data.index_path_train, data.bucket_path)
    sets = named_sets(data.index_path_validation, data.bucket_path)
    paths = list(itertools.chain.from_iterable(map(paths_of, (train, *sets.values()))))
    used: dict[str, str] = {}
    with agreement.host_0_first():  # hosts that share a disk find its corpus
        if data.corpus:
            used = prepare_if_missing(data.corpus, paths, tokenizer, data.max_context)
    if not used:
        return config
    log.info("data.corpus=%s has shorter rows: %s in place of it", data.corpus, ", ".join(used.values()))
    single = {"index_path_train": train, "index_path_validation": sets.get("")}
    new: dict[str, Any] = {key: used[path] for key, path in single.items() if isinstance(path, str)}
    return replace(config, data=replace(data, **new))


def with_last_target(config: Config, size: GPTConfig) -> Config:
    """The configuration in which `data.last_target` says whether rows hold the target of their last position."""
    data = config.data
    if data.last_target is not None:
        return config
    example = config.objective.make().example
    has_rows = data.corpus not in SYNTHETIC and not example.is_whole
    lengths = _row_tokens(config) if config.resume is None and has_rows else set()
    has_last_target = agreement.broadcast("data.last_target", str(lengths == {data.max_context + 1})) == "True"
    if size.has_learned_positions and lengths == {size.block_size} == {data.max_context}:
        log.warning(
            "rows of %d tokens train %d positions: the last of the %d learned positions of model.size=%s stays as it "
            "starts; rows of %d tokens train it (zero-prepare --row-tokens)",
            data.max_context,
            data.max_context - 1,
            size.block_size,
            config.model.size,
            data.max_context + 1,
        )
    return replace(config, data=replace(data, last_target=has_last_target))


def _row_tokens(config: Config) -> set[int]:
    """The tokens per row of all index files, by the first row of each; those that cannot be read are left out."""
    train = index_paths(config.data.index_path_train, config.data.bucket_path)
    sets = named_sets(config.data.index_path_validation, config.data.bucket_path) if config.has_validation_set else {}
    paths = list(itertools.chain.from_iterable(map(paths_of, (train, *sets.values()))))
    lengths = set()
    for path in paths:
        try:
            lengths.add(row_tokens(path))
        except BadData:
            if config.data.max_skipped_rows == 0:
                raise
    return lengths


def start_of(config: Config, size: GPTConfig, position: TrainingPosition) -> Position:
    """The position before the first step of a run, with the batches that its first checkpoint has fixed."""
    updates = steps_per_row(config, size)
    stages = tuple((steps, rows) for steps, rows in position.batch_stages)
    row_tokens = config.objective.make().example.texts * config.data.max_context
    return Position(0, BatchSchedule(position.global_rows, stages, updates), row_tokens)


def with_global_batch(config: Config, schedule: BatchSchedule) -> Config:
    """The configuration with this host's share of the global batch, which the first checkpoint of a run fixes.

    Raises:
      UserError: the global batch does not divide into the micro-batches of all devices.
    """
    training = config.training
    hosts = jax.process_count()
    group = config.zero.tensor_shards * config.zero.context_shards
    groups = jax.device_count() // group
    unit = "devices" if group == 1 else f"groups of {group} devices"
    parts = groups * training.gradient_accumulation_steps
    for rows in schedule.sizes:
        if rows % parts or rows % hosts:
            raise UserError(
                f"training.batch_size: a global batch of {rows} sequences does not divide into {groups} {unit} x "
                f"training.gradient_accumulation_steps={training.gradient_accumulation_steps} = {parts} parts, "
                f"and over {hosts} hosts"
            )
    share = schedule.rows // hosts
    if share == training.batch_size:
        return config
    log.warning(
        "training.batch_size=%d instead of %d on %d hosts: the global batch keeps the %d sequences of the first "
        "checkpoint of the run",
        share,
        training.batch_size,
        hosts,
        schedule.rows,
    )
    return replace(config, training=replace(training, batch_size=share))


def staged_context(config: Config) -> SequenceLengths:
    training = config.training
    full = config.data.max_context
    has_last_target = bool(config.data.last_target)
    if training.context_stages == "linear":
        shortest = training.warmup_train_context
        steps = training.staged_warmup_steps
        return SequenceLengths.linear(full, shortest, steps, has_last_target=has_last_target)
    return SequenceLengths(full, training.stages(), has_last_target)


def _loaders(
    config: Config, job: Job, schedule: BatchSchedule, columns: dict[str, dict[str, np.ndarray]]
) -> tuple[AnyLoader, dict[str, Loader]]:
    """The loaders of the training set and of each validation set; with the stored columns of their index files.

    Raises:
      UserError: the data does not fit the configuration.
    """
    data = config.data
    vocab_size = job.model.config.vocab_size
    host_rows = HostRows.here(job.model.axis)
    batching = Batching(schedule, host_rows.groups, host_rows.count)
    unstaged = replace(batching, global_rows=schedule.rows)
    if data.corpus is not None and data.corpus in SYNTHETIC:
        length = data.max_context + bool(data.last_target)
        return SyntheticLoader(data.corpus, batching, length, vocab_size, config.seed), {}
    cache = ShardCache(Path(data.cache_directory)) if data.cache_directory else None
    example = job.objective.example
    form = RowFormat(
        data.max_context + bool(data.last_target),
        vocab_size,
        data.crop,
        only_completions=example.is_whole or config.training.loss_on == "completion",
        example=example,
    )
    order = RowOrder(
        seed=config.seed,
        max_epochs=config.training.max_epochs,
        train_samples=data.train_samples,
        shuffle_shards=data.shuffle_shards,
    )
    training = Loader(
        index_paths(data.index_path_train, data.bucket_path),
        batching,
        form,
        order,
        skip_bad=data.max_skipped_rows > 0,
        cache=cache,
        columns=columns or None,
    )
    sets = {}
    if config.has_validation_set and config.training.maximum_evaluation_steps > 0:
        sets = named_sets(data.index_path_validation, data.bucket_path)
    if form.crop == "random":  # not at random: evaluations are compared
        form = replace(form, crop="all")
    validation = {
        name: Loader(index, unstaged, form, ONCE, cache=cache, columns=columns or None) for name, index in sets.items()
    }
    if data.cache_directory and not any(loader.is_remote for loader in (training, *validation.values())):
        raise UserError(f"data.cache_directory={data.cache_directory}: it has no effect, as no shard is in a bucket")
    if names := _uncovered(validation, config.training.maximum_evaluation_steps, schedule.rows):
        log.warning(
            "training.maximum_evaluation_steps=%d, counted over all sets one after the other, ends before %s: "
            "validation/loss is without them, and so is the choice of the best checkpoint",
            config.training.maximum_evaluation_steps,
            ", ".join(names),
        )
    return training, validation


def _uncovered(loaders: Mapping[str, Loader], batches: int, global_rows: int) -> list[str]:
    """The sets of which this number of batches of all sets, one after the other, holds nothing."""
    names = []
    left = batches * global_rows
    for name, loader in loaders.items():
        if left <= 0:
            names.append(name)
        left -= loader.rows
    return names


def last_step(config: Config, loader: AnyLoader, start: Position) -> int:
    """The last step of the schedule, or of the data if that ends earlier."""
    training = config.training
    last = start.last_step(training.total_steps, loader.total_batches)
    if last < training.total_steps:
        log.warning(
            "training.max_epochs=%s ends the data at step %d, before training.total_steps=%d",
            training.max_epochs,
            last,
            training.total_steps,
        )
    return last
