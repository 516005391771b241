"""Columns: the values that objectives read besides a row's tokens and the members of its shard, by source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from zero.base.errors import UserError
from zero.job.job import Job
from zero.run.column import Column, ColumnInputs
from zero.run.reference import reference_column
from zero.run.restore import TrainingPosition
from zero.run.teacher import teacher_column

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
        before = position.columns.setdefault(source, column.identity)
        if before != column.identity:
            raise UserError(f"the values of the {source} have changed since the run began: bring the former ones back")
    return columns


def stored_columns(columns: Mapping[str, Column]) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of all columns that are stored, by index file and by name."""
    by_index: dict[str, dict[str, np.ndarray]] = {}
    for column in columns.values():
        for index, arrays in column.stored.items():
            by_index.setdefault(index, {}).update(arrays)
    return by_index
