"""`batch=ramp`: batches that grow by equal amounts are stages, and what does not divide is named."""

from pathlib import Path

import pytest

from tests.config.composing import compose
from tests.helpers import cli
from zero.base.errors import UserError
from zero.commands.modes import check
from zero.job.sizes import load_sizes
from zero.run.batches import Ramp


@pytest.mark.quick
@pytest.mark.parametrize(("first", "steps", "size"), [(2, 8, 8), (1, 7, 8), (3, 100, 12), (8, 5, 8)])
def test_stages(first: int, steps: int, size: int) -> None:
    """Each size between the first and the last is as long as the others but for one step, and all take the steps."""
    stages = Ramp(first=first, steps=steps).stages_to(size)
    assert [rows for _, rows in stages] == list(range(first, size, first))
    lengths = [count for count, _ in stages]
    assert sum(lengths) == steps * bool(stages) and all(1 <= count - min(lengths) + 1 <= 2 for count in lengths)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("batch.first=3",), "batch.first=3: expected a divisor of training.batch_size=8"),
        (("batch.first=8",), "batch.first=8: expected less than training.batch_size=8, to which batches grow"),
        (("training.total_steps=1000",), "batch.steps=1000: expected fewer than training.total_steps=1000"),
        (("batch.steps=6",), "batch.steps=6: expected at least 7, the stages from batch.first to"),
    ],
)
def test_mistakes_are_named(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(compose("batch=ramp", "training.batch_size=8", *overrides), load_sizes())


@pytest.fixture(scope="module")
def workplace(workplace: Path) -> Path:
    """With a run of batches of 16, 32, and then 48 rows, whose programs test_stages.py has too."""
    ramp = ("batch=ramp", "batch.first=16", "batch.steps=8", "training.batch_size=48")
    cli.Lasting(workplace).train("whole", *cli.later_values(*cli.TINY, *ramp))
    return workplace


@pytest.mark.wide  # they are those of stages
def test_lines_count_rows(workplace: Path) -> None:
    rows = [*[16] * 4, *[32] * 4, *[48] * 4]
    seen = [line["tokens_seen"] for line in cli.metrics(workplace / "whole")]
    assert seen == [sum(rows[:step]) * cli.CONTEXT for step in range(1, 13)]


@pytest.mark.wide  # the stages are those of a checkpoint, which test_stages.py resumes
def test_resumed_within_the_ramp(lasting: cli.Lasting) -> None:
    """A run that continues in a stage is the same, bit for bit."""
    assert cli.metrics(lasting.fork("whole", 6)) == cli.metrics(lasting.workplace / "whole")
