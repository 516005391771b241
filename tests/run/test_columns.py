"""A run identifies a column by the rows that it trains on, and compares its values when it reads them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.loaders import open_loader
from tests.helpers.shards import write_corpus
from zero.base.errors import UserError
from zero.corpus.format import row_blocks
from zero.corpus.format.index_files import read_index
from zero.corpus.format.top_tokens import write_top_tokens
from zero.corpus.reading.contents import contents_of
from zero.run.column import ColumnInputs
from zero.run.columns import open_columns, stored_columns
from zero.run.restore import TrainingPosition
from zero.training.objectives.distillation import Distillation

pytestmark = pytest.mark.quick
CONTEXT = 4
JOB: Any = SimpleNamespace(
    objective=Distillation(top_tokens=2).objective(), model=SimpleNamespace(config=SimpleNamespace(vocab_size=300))
)


def store(index: Path, rows: int, value: float) -> None:
    """A teacher whose values tell the rows apart."""
    contents = list(contents_of(read_index(str(index))))
    tokens = np.arange(rows)[:, None, None] + np.zeros((rows, CONTEXT, 3))
    write_top_tokens(str(index), tokens.shape, 300, contents, [(tokens, np.full(tokens.shape, value))])


def inputs(training: Path, *sets: Path) -> ColumnInputs:
    return ColumnInputs((str(training),), tuple(map(str, sets)), CONTEXT, "", False, {})


def test_identity_is_of_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resume without validation is the same run; other values for validation are a warning, for training an error."""
    train, validation = (write_corpus(tmp_path / name, [6]) for name in ("train", "validation"))
    store(train, 6, -2)
    store(validation, 6, -3)
    position = TrainingPosition(8)
    open_columns(inputs(train, validation), JOB, position)
    recorded = dict(position.columns)
    open_columns(inputs(train), JOB, position)
    assert position.columns == recorded and not caplog.messages
    of_earlier_version = TrainingPosition(8, columns={"teacher": " ".join(recorded.values())})
    open_columns(inputs(train), JOB, of_earlier_version)
    store(validation, 6, -4)
    open_columns(inputs(train, validation), JOB, position)
    (warning,) = caplog.messages
    assert warning.startswith("the values of the teacher for validation have changed since step 0")
    store(train, 6, -4)
    with pytest.raises(UserError, match=f"^{train}: the values of the teacher have changed since the run began"):
        open_columns(inputs(train), JOB, position)


def test_values_are_compared_when_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several index files each row has its own values; the run that comes to a damaged block ends with its rows."""
    monkeypatch.setattr(row_blocks, "_BLOCK_BYTES", 2 * 4 * CONTEXT * 3)
    indices = [write_corpus(tmp_path / name, [6]) for name in ("one", "two")]
    for index, value in zip(indices, (-2, -3), strict=True):
        store(index, 6, value)
    columns = open_columns(ColumnInputs(tuple(map(str, indices)), (), CONTEXT, "", False, {}), JOB, TrainingPosition(8))
    options: dict[str, Any] = {"global_rows": 3, "context": CONTEXT, "vocab_size": 300, "max_epochs": 1}
    options |= {"shuffle": False, "columns": stored_columns(columns)}
    batches = list(open_loader([str(index) for index in indices], **options).batches())
    numbers = np.concatenate([batch.extra["teacher/tokens"] for batch in batches])[:, 0, 0]
    values = np.concatenate([batch.extra["teacher/log_probabilities"] for batch in batches])[:, 0, 0]
    assert numbers.tolist() == [*range(6), *range(6)] and values.tolist() == 6 * [-2] + 6 * [-3]
    damaged = tmp_path / "two" / f"{indices[1].stem}.teacher-log_probabilities.npy"
    array = np.load(damaged)
    array[2:4] = -5
    np.save(damaged, array)
    columns = open_columns(ColumnInputs(tuple(map(str, indices)), (), CONTEXT, "", False, {}), JOB, TrainingPosition(8))
    with pytest.raises(UserError, match=rf"^{damaged}, rows 2 to 3: other values than were stored"):
        list(open_loader([str(index) for index in indices], **options | {"columns": stored_columns(columns)}).batches())
