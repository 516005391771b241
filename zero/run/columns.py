"""Columns: the values that objectives read besides a row's tokens and the members of its shard, by source."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

from zero.base.errors import UserError
from zero.corpus.format.row_blocks import RowValues
from zero.job.job import Job
from zero.run.column import Column, ColumnInputs
from zero.run.reference import reference_column
from zero.run.restore import TrainingPosition
from zero.run.teacher import teacher_column

log = logging.getLogger(__name__)

# Makes a column from its inputs, the run's job and its position; all hosts call it.
COLUMNS: Mapping[str, Callable[[ColumnInputs, Job, TrainingPosition], Column]] = MappingProxyType(
    {"reference": reference_column, "teacher": teacher_column}
)


def open_columns(inputs: ColumnInputs, job: Job, position: TrainingPosition) -> dict[str, Column]:
    """The columns that the objective reads, by source.

    Raises:
      UserError: a column cannot be made, or its values differ from those at the first start of the run.
    """
    sources = dict.fromkeys(entry.source for entry in job.objective.reads if entry.source)
    columns = {source: COLUMNS[source](inputs, job, position) for source in sources}
    for source, column in columns.items():
        before = position.columns.setdefault(source, column.identity)  # an earlier version adds those for validation
        if not set(column.identity.split()) <= set(before.split()):
            files = ", ".join(inputs.training)
            raise UserError(
                f"{files}: the values of the {source} have changed since the run began: restore the former ones"
            )
        _compare_sets(source, column.sets_identity, position)
    return columns


def _compare_sets(source: str, now: str, position: TrainingPosition) -> None:
    """Warns if the values for validation have changed; a run that is not evaluated has none."""
    key = f"{source} of validation sets"
    if now and position.columns.setdefault(key, now) != now:
        log.warning(
            "the values of the %s for validation have changed since step %d: validation losses before and after it "
            "cannot be compared",
            source,
            position.step,
        )
        position.columns[key] = now


def stored_columns(columns: Mapping[str, Column]) -> dict[str, dict[str, RowValues]]:
    """The arrays of all columns that are stored, by index file and by name."""
    by_index: dict[str, dict[str, RowValues]] = {}
    for column in columns.values():
        for index, arrays in column.stored.items():
            by_index.setdefault(index, {}).update(arrays)
    return by_index
