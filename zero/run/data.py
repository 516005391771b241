"""The data of a run: tokenizer, corpus, loaders, and the lengths of sequences."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax

from zero.base.errors import UserError
from zero.corpus.format.index_files import row_lengths
from zero.corpus.format.row_blocks import RowValues
from zero.corpus.format.shards import RowFormat
from zero.corpus.reading import keys as reading
from zero.corpus.reading.batch_schedule import BatchSchedule
from zero.corpus.reading.cache import ShardCache
from zero.corpus.reading.keys import RowSelectionKeys
from zero.corpus.reading.loader import ONCE, Batching, Loader, RowOrder
from zero.corpus.reading.synthetic import AnyLoader, SyntheticLoader
from zero.corpus.text.tokenizers import Tokenizer
from zero.exchange.warm_start import WarmStartKeys
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
class DataKeys(RowSelectionKeys, RowKeys):
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
        self,
        source: str,
        index_files: Iterable[str],
        tokenizer: Tokenizer,
        row_tokens: int,
        completions: bool,
        on_progress: Callable[[], None],
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


def column_inputs(data: DataKeys, weights: WarmStartKeys, scores: Mapping[str, Any], has_sets: bool) -> ColumnInputs:
    """The inputs of columns.

    Args:
      scores: the values of the keys on which scores depend.
      has_sets: whether the run evaluates on its validation sets.
    """
    training = data.index_files(with_sets=False)
    sets = data.index_files(with_sets=has_sets)[len(training) :]
    return ColumnInputs(
        tuple(training), tuple(sets), data.max_context, str(weights.model_path), weights.starts_from_average, scores
    )


def resolve_data(
    data: AnyDataKeys,
    tokenizer: Tokenizer,
    model_config: GPTConfig,
    model_label: str,
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
    if tokenizer.vocab_size > model_config.vocab_size:
        raise UserError(
            f"{model_label}: its vocab_size {model_config.vocab_size} is smaller than the {tokenizer.vocab_size} "
            f"tokens of data.tokenizer={data.tokenizer}"
        )
    prepared = data if prepare is None else _prepared(data, tokenizer, loss_on == "completion", prepare)
    if prepared.last_target is not None:
        return prepared
    lengths = set[int]()
    if has_rows and not prepared.is_synthetic:
        paths = prepared.index_files(with_sets=prepared.has_validation_set)
        skip_bad = prepared.max_skipped_rows > 0
        lengths = set(agreement.on_host_0("tokens of a row", lambda: sorted(row_lengths(paths, skip_bad=skip_bad))))
    context = prepared.max_context
    has_last_target = lengths == {context + 1}
    if model_config.has_learned_positions and lengths == {model_config.block_size} == {context}:
        log.warning(
            "rows of %d tokens train %d positions: the last of the %d learned positions of %s is never trained; rows "
            "of %d tokens train it (zero-prepare --row-tokens)",
            context,
            context - 1,
            model_config.block_size,
            model_label,
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
        used = prepare(data.corpus, paths, tokenizer, data.max_context, completions, agreement.advance)
    if not used:
        return data
    log.info("data.corpus=%s has shorter rows; using %s", data.corpus, ", ".join(used.values()))
    single = {"index_path_train": data.training_index(), "index_path_validation": data.validation_sets().get("")}
    corpus_indices: dict[str, Any] = {name: used[path] for name, path in single.items() if isinstance(path, str)}
    return replace(data, **corpus_indices)


def start_of(position: TrainingPosition, steps_per_batch: int, row_tokens: int) -> Position:
    """The position before the first step of a run, with the batch schedule that its first checkpoint fixed.

    Args:
      steps_per_batch: the steps that share the rows of a batch.
      row_tokens: the number of tokens per row, over all texts of it.
    """
    stages = tuple((steps, batch_size) for steps, batch_size in position.batch_stages)
    return Position(0, BatchSchedule(position.global_rows, stages, steps_per_batch), row_tokens)


def check_batch(schedule: BatchSchedule, training: Training, zero: DeviceKeys) -> None:
    """Raises UserError if a global batch does not divide into the micro-batches of all devices; it names a way out."""
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
                f"training.gradient_accumulation_steps={micro_batches} = {parts} parts, and over {hosts} hosts; "
                + _way_out(math.gcd(*schedule.sizes), groups, unit, micro_batches, hosts)
            )


def _way_out(rows: int, groups: int, unit: str, micro_batches: int, hosts: int) -> str:
    """What would divide so many rows: other micro-batches on these devices, or other devices.

    >>> _way_out(12, 2, "devices", 4, 1), _way_out(12, 8, "devices", 2, 1)
    ('here training.gradient_accumulation_steps=1, 2, 3, 6 would do', '1, 2, 3, 6 devices would do, on hosts \
that divide 12')
    >>> _way_out(12, 8, "devices", 8, 1)
    '1, 2, 3, 4, 6, 12 devices would do with training.gradient_accumulation_steps=1, on hosts that divide 12'
    """
    if rows % groups == 0 and rows % hosts == 0:
        return f"here training.gradient_accumulation_steps={_divisors(rows // groups)} would do"
    if rows % micro_batches:
        with_one = f"{_divisors(rows)} {unit} would do with training.gradient_accumulation_steps=1"
        return f"{with_one}, on hosts that divide {rows}"
    return f"{_divisors(rows // micro_batches)} {unit} would do, on hosts that divide {rows}"


def _divisors(number: int) -> str:
    """The divisors of a number, at most the ten largest of them."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return ", ".join(map(str, divisors[-10:]))


def share_of_batch(start: Position, training: Training, zero: DeviceKeys) -> int:
    """This host's share of the rows of the global batch, which the first checkpoint of a run fixes.

    Warns if the share differs from `training.batch_size`. Raises as `check_batch`.
    """
    schedule = start.schedule
    check_batch(schedule, training, zero)
    hosts = jax.process_count()
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
    columns: dict[str, dict[str, RowValues]],
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
    training_loader = Loader(
        data.training_index(),
        batching,
        form,
        order,
        skip_bad=data.max_skipped_rows > 0,
        cache=cache,
        columns=columns or None,
        on_one_host=agreement.on_host_0,
    )
    sets = data.validation_sets() if data.has_validation_set and evaluation_batches > 0 else {}
    if form.crop == "random":  # not at random, because evaluations are compared
        form = replace(form, crop="all")
    validation = {
        name: Loader(index, unstaged, form, ONCE, cache=cache, columns=columns or None, on_one_host=agreement.on_host_0)
        for name, index in sets.items()
    }
    if data.cache_directory and not any(loader.is_remote for loader in (training_loader, *validation.values())):
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
    return training_loader, validation


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
