"""The column of a teacher's tokens: what does not fit the run is named."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.config.composing import compose
from tests.helpers.shards import write_corpus
from zero.base.errors import UserError
from zero.commands.modes import check
from zero.corpus.format.index_files import read_index
from zero.corpus.format.top_tokens import write_top_tokens
from zero.corpus.reading.contents import contents_of
from zero.job.sizes import load_sizes
from zero.run.column import Column, ColumnInputs
from zero.run.restore import TrainingPosition
from zero.run.teacher import teacher_column
from zero.training.objectives.distillation import Distillation

pytestmark = pytest.mark.quick
CONTEXT = 4


def column_of(index: Path, count: int = 2, context: int = CONTEXT, vocab_size: int = 300) -> Column:
    job: Any = SimpleNamespace(
        objective=Distillation(top_tokens=count).objective(),
        model=SimpleNamespace(config=SimpleNamespace(vocab_size=vocab_size)),
    )
    inputs = ColumnInputs((str(index),), (), context, "", False, {})
    return teacher_column(inputs, job, TrainingPosition(8))


def store(index: Path, rows: int, count: int = 3) -> None:
    contents = list(contents_of(read_index(str(index))))
    tokens = np.full((rows, CONTEXT, count), 250)
    write_top_tokens(str(index), tokens.shape, 300, contents, [(tokens, -2 * np.ones(tokens.shape))])


def test_column(tmp_path: Path) -> None:
    """The first of the stored tokens, and a value that tells these files from others."""
    index = write_corpus(tmp_path, [6])
    store(index, 6)
    column = column_of(index)
    stored = column.stored[str(index)]
    assert {name: x.shape for name, x in stored.items()} == {
        "teacher/tokens": (6, CONTEXT, 2),
        "teacher/log_probabilities": (6, CONTEXT, 2),
    }
    before = column.identity
    store(index, 6, count=2)
    assert before and column_of(index).identity != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 4}, r"objective\.top_tokens=4: the teacher's tokens beside .* are 3 of each position"),
        ({"context": 8}, r"data\.max_context=8: the teacher's tokens beside .* are of 4 positions of each row"),
        ({"vocab_size": 250}, "hold token 250, outside the vocabulary of 250"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, options: dict[str, int], message: str) -> None:
    index = write_corpus(tmp_path, [6])
    store(index, 6)
    with pytest.raises(UserError, match=message):
        column_of(index, **options)


def test_other_shards_are_named(tmp_path: Path) -> None:
    index = write_corpus(tmp_path, [6])
    store(index, 6)
    write_corpus(tmp_path, [6, 2])
    with pytest.raises(UserError, match="are of other shards than it lists: write them again"):
        column_of(index)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("objective.weight=0.0", "more than 0: nothing else in the loss depends on the teacher"),
        ("data.crop=all", "first, as objective=distillation reads teacher/tokens of whole rows"),
        ("data.corpus=synthetic", "null or a corpus on a disk, as objective=distillation reads"),
        ("data.max_skipped_rows=2", "0, as objective=distillation reads teacher/tokens of rows by their number"),
    ],
)
def test_contradictions_are_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=f"{override}: expected {message}"):
        check(compose("objective=distillation", override), load_sizes())
