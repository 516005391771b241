"""The data of a run: tokenizer, corpus, loaders, and the lengths of sequences."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from zero.base.errors import UserError
from zero.corpus.format.index_files import row_lengths
from zero.corpus.format.shards import RowFormat
from zero.corpus.reading import keys as reading
from zero.corpus.reading.batch_schedule import BatchSchedule
from zero.corpus.reading.cache import ShardCache
from zero.corpus.reading.loader import ONCE, Batching, Loader, RowOrder
from zero.corpus.reading.synthetic import AnyLoader, SyntheticLoader
from zero.corpus.text.tokenizers import Tokenizer
from zero.exchange import warm_start
from zero.hosts import agreement
from zero.job.devices import DeviceKeys
from zero.job.job import Job, Training
from zero.job.model import RowKeys
from zero.models.config import GPTConfig
from zero.run.column import Column, ColumnInputs
from zero.run.columns import stored_columns
from zero.run.position import Position
from zero.run.restore import TrainingPosition
from zero.training.host_rows import HostRows
from zero.training.schedules import LengthKeys, SequenceLengths

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """The data that a run trains on and validates on.

    Attributes:
      validation: a loader per set, keyed by name; "" is a set without a name.
      context: tokens per sequence at each step.
      columns: the values that the objective reads besides rows, by source.
    """

    tokenizer: Tokenizer
    training: AnyLoader
    validation: dict[str, Loader]
    context: SequenceLengths
    columns: dict[str, Column]


@dataclass(frozen=True)
class DataKeys(reading.Keys, RowKeys):
    """The keys of section `data` for finding and cutting rows."""


@dataclass(frozen=True)
class TrainingKeys(reading.EpochKeys, reading.ScoredKeys, LengthKeys):
    """The keys of section `training` for finding and cutting rows."""


AnyDataKeys = TypeVar("AnyDataKeys", bound=DataKeys)


class Prepare(Protocol):
    """Prepares the corpus of a source if index files are missing, and returns the index files to use instead.

    The command that starts a run passes it in, so that reading a corpus does not depend on preparing one.
    """

    def __call__(
        self, source: str, index_files: Iterable[str], tokenizer: Tokenizer, row_tokens: int, completions: bool
    ) -> dict[str, str]: ...


def open_data(
    job: Job,
    tokenizer: Tokenizer,
    schedule: BatchSchedule,
    columns: dict[str, Column],
    data: DataKeys,
    training: TrainingKeys,
    *,
    seed: int,
    evaluation_batches: int,
) -> Data:
    """The loaders of a run whose corpus exists; all hosts call it.

    Args:
      data: with automatic values resolved (`resolve_data`).
      seed: seeds the order of rows.
      evaluation_batches: the maximum over all validation sets.

    Raises:
      UserError: the data does not fit the configuration.
    """
    loader, sets = _loaders(job, schedule, stored_columns(columns), data, training, seed, evaluation_batches)
    lengths = training.lengths(data.max_context, bool(data.last_target))
    return Data(tokenizer, loader, sets, lengths, columns)


def column_inputs(data: DataKeys, weights: warm_start.Keys, scores: Mapping[str, Any], has_sets: bool) -> ColumnInputs:
    """The inputs of columns.

    Args:
      scores: the values of the keys on which scores depend.
      has_sets: whether the run evaluates on its validation sets.
    """
    indices = tuple(dict.fromkeys(data.index_files(with_sets=has_sets)))
    return ColumnInputs(indices, data.max_context, str(weights.model_path), weights.starts_from_average, scores)


def resolve_data(
    data: AnyDataKeys,
    tokenizer: Tokenizer,
    size: GPTConfig,
    of_model: str,
    *,
    has_rows: bool,
    loss_on: str = "all",
    prepare: Prepare | None = None,
) -> AnyDataKeys:
    """The section with automatic values resolved, for a corpus that exists or is prepared now.

    Args:
      has_rows: whether rows of running text determine if they contain the target of their last position.
      loss_on: the value of `training.loss_on`.
      prepare: prepares the corpus if its index files are missing; None if they exist.

    Raises:
      UserError: the model has fewer tokens than the tokenizer.
    """
    if tokenizer.vocab_size > size.vocab_size:
        raise UserError(
            f"{of_model}: its vocab_size {size.vocab_size} is smaller than the {tokenizer.vocab_size} tokens of "
            f"data.tokenizer={data.tokenizer}"
        )
    prepared = data if prepare is None else _prepared(data, tokenizer, loss_on == "completion", prepare)
    if prepared.last_target is not None:
        return prepared
    lengths = set[int]()
    if has_rows and not prepared.is_synthetic:
        paths = prepared.index_files(with_sets=prepared.has_validation_set)
        lengths = row_lengths(paths, skip_bad=prepared.max_skipped_rows > 0)
    context = prepared.max_context
    has_last_target = agreement.broadcast("data.last_target", str(lengths == {context + 1})) == "True"
    if size.has_learned_positions and lengths == {size.block_size} == {context}:
        log.warning(
            "rows of %d tokens train %d positions: the last of the %d learned positions of %s is never trained; rows "
            "of %d tokens train it (zero-prepare --row-tokens)",
            context,
            context - 1,
            size.block_size,
            of_model,
            context + 1,
        )
    return replace(prepared, last_target=has_last_target)


def _prepared(data: AnyDataKeys, tokenizer: Tokenizer, completions: bool, prepare: Prepare) -> AnyDataKeys:
    """Prepares the corpus if its index files are missing, so that the default job needs only this machine.

    Returns:
      The section, with other index files if the rows of the corpus are too short.
    """
    if data.corpus is None or data.is_synthetic:
        return data
    with agreement.host_0_first():  # hosts that share a disk find its corpus
        paths = data.index_files(with_sets=True)
        used = prepare(data.corpus, paths, tokenizer, data.max_context, completions)
    if not used:
        return data
    log.info("data.corpus=%s has shorter rows; using %s", data.corpus, ", ".join(used.values()))
    single = {"index_path_train": data.training_index(), "index_path_validation": data.validation_sets().get("")}
    of_corpus: dict[str, Any] = {name: used[path] for name, path in single.items() if isinstance(path, str)}
    return replace(data, **of_corpus)


def start_of(position: TrainingPosition, steps_per_batch: int, row_tokens: int) -> Position:
    """The position before the first step of a run, with the batch schedule that its first checkpoint fixed.

    Args:
      steps_per_batch: the steps that share the rows of a batch.
      row_tokens: the number of tokens per row, over all texts of it.
    """
    stages = tuple((steps, of_stage) for steps, of_stage in position.batch_stages)
    return Position(0, BatchSchedule(position.global_rows, stages, steps_per_batch), row_tokens)


def share_of_batch(start: Position, training: Training, zero: DeviceKeys) -> int:
    """This host's share of the rows of the global batch, which the first checkpoint of a run fixes.

    Warns if the share differs from `training.batch_size`.

    Raises:
      UserError: the global batch does not divide into the micro-batches of all devices.
    """
    schedule = start.schedule
    micro_batches = training.gradient_accumulation_steps
    hosts = jax.process_count()
    group = zero.tensor_shards * zero.context_shards
    groups = jax.device_count() // group
    unit = "devices" if group == 1 else f"groups of {group} devices"
    parts = groups * micro_batches
    for rows in schedule.sizes:
        if rows % parts or rows % hosts:
            raise UserError(
                f"training.batch_size: a global batch of {rows} sequences cannot be divided into {groups} {unit} x "
                f"training.gradient_accumulation_steps={micro_batches} = {parts} parts, and over {hosts} hosts"
            )
    share = schedule.rows // hosts
    if share != training.batch_size:
        log.warning(
            "training.batch_size=%d instead of %d on %d hosts: the global batch stays at %d sequences, as in the "
            "first checkpoint of the run",
            share,
            training.batch_size,
            hosts,
            schedule.rows,
        )
    return share


def _loaders(
    job: Job,
    schedule: BatchSchedule,
    columns: dict[str, dict[str, np.ndarray]],
    data: DataKeys,
    training: TrainingKeys,
    seed: int,
    evaluation_batches: int,
) -> tuple[AnyLoader, dict[str, Loader]]:
    """The loaders of the training set and of each validation set, with the stored columns of their index files.

    Raises:
      UserError: the data does not fit the configuration.
    """
    vocab_size = job.model.config.vocab_size
    host_rows = HostRows.here(job.model.axis)
    batching = Batching(schedule, host_rows.groups, host_rows.count)
    unstaged = replace(batching, global_rows=schedule.rows)
    if data.corpus is not None and data.is_synthetic:
        length = data.max_context + bool(data.last_target)
        return SyntheticLoader(data.corpus, batching, length, vocab_size, seed), {}
    cache = ShardCache(Path(data.cache_directory)) if data.cache_directory else None
    example = job.objective.example
    form = RowFormat(
        data.max_context + bool(data.last_target),
        vocab_size,
        data.crop,
        only_completions=example.is_whole or training.loss_on == "completion",
        example=example,
    )
    order = RowOrder(
        seed=seed,
        max_epochs=training.max_epochs,
        train_samples=data.train_samples,
        shuffle_shards=data.shuffle_shards,
    )
    of_training = Loader(
        data.training_index(),
        batching,
        form,
        order,
        skip_bad=data.max_skipped_rows > 0,
        cache=cache,
        columns=columns or None,
    )
    sets = data.validation_sets() if data.has_validation_set and evaluation_batches > 0 else {}
    if form.crop == "random":  # not at random, because evaluations are compared
        form = replace(form, crop="all")
    validation = {
        name: Loader(index, unstaged, form, ONCE, cache=cache, columns=columns or None) for name, index in sets.items()
    }
    if data.cache_directory and not any(loader.is_remote for loader in (of_training, *validation.values())):
        raise UserError(
            f"data.cache_directory={data.cache_directory}: it has no effect, because no shard is in a bucket"
        )
    if names := _uncovered(validation, evaluation_batches, schedule.rows):
        log.warning(
            "training.maximum_evaluation_steps=%d, counted over all sets in order, ends before %s: validation/loss "
            "and the choice of the best checkpoint leave these out",
            evaluation_batches,
            ", ".join(names),
        )
    return of_training, validation


def _uncovered(loaders: Mapping[str, Loader], batches: int, global_rows: int) -> list[str]:
    """The sets that are not reached by this number of batches, counted over all sets in order."""
    names = []
    left = batches * global_rows
    for name, loader in loaders.items():
        if left <= 0:
            names.append(name)
        left -= loader.rows
    return names


def last_step(total_steps: int, epochs: reading.EpochKeys, loader: AnyLoader, start: Position) -> int:
    """The last step of the schedule, or of the data if it ends earlier."""
    last = start.last_step(total_steps, loader.total_batches)
    if last < total_steps:
        log.warning(
            "training.max_epochs=%s ends the data at step %d, before training.total_steps=%d",
            epochs.max_epochs,
            last,
            total_steps,
        )
    return last
