"""`batch=stages`: batches that grow by step, their tokens and learning, killed and resumed."""

from pathlib import Path

import pytest

from tests.config.composing import compose
from tests.helpers import cli
from zero.base.errors import UserError
from zero.commands.modes import check
from zero.job.sizes import load_sizes

STAGED = (*cli.TINY, "batch=stages", "batch.stages=[[2,16],[6,32]]", "training.batch_size=48")
ROWS = [*[16] * 2, *[32] * 6, *[48] * 4]  # of each step: three programs


@pytest.fixture(scope="module")
def workplace(workplace: Path) -> Path:
    """With a run that has ended."""
    cli.Lasting(workplace).train("whole", *STAGED)
    return workplace


def test_lines_count_rows(lasting: cli.Lasting) -> None:
    """Tokens so far are those of the rows of each step, whatever their number."""
    lines = cli.metrics(lasting.workplace / "whole")
    seen = [sum(ROWS[:step]) * cli.CONTEXT for step in range(1, len(ROWS) + 1)]
    assert [line["tokens_seen"] for line in lines] == seen
    speeds = [line for line in cli.read_metrics(lasting.workplace / "whole" / "metrics.jsonl") if "step_time" in line]
    assert len(speeds) >= 8
    for line in speeds:
        tokens = ROWS[line["step"] - 1] * cli.CONTEXT
        assert line["tokens_per_second"] == pytest.approx(tokens / line["step_time"])
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]


def test_resumed_within_a_stage(lasting: cli.Lasting) -> None:
    """A run that continues within a stage is the same, bit for bit."""
    assert cli.metrics(lasting.fork("whole", 6)) == cli.metrics(lasting.workplace / "whole")


@pytest.mark.wide
@pytest.mark.parametrize("step", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_killed_and_resumed(forks: cli.Forks, step: int) -> None:
    """From a step within a stage the run continues as if nothing had been, with the same rows."""
    arguments = (*STAGED, f"hydra.run.dir=killed-{step}", f"training.evaluation_frequency={step}")
    whole = forks.train(f"whole-{step}", *STAGED, f"training.evaluation_frequency={step}")
    process = forks.start(*arguments)
    run = forks.workplace / f"killed-{step}"
    process.wait_for(run / "checkpoints" / str(step))
    process.kill()
    process.finish()
    forks.check("--resume", f"hydra.run.dir=killed-{step}")
    assert cli.metrics(run) == cli.metrics(whole)


@pytest.mark.wide
def test_first_stage_is_a_run_of_its_size(lasting: cli.Lasting) -> None:
    """The steps of the first stage are those of a run with such batches."""
    small = cli.metrics(lasting.train("small", *cli.TINY))
    staged = cli.metrics(lasting.workplace / "whole")
    assert [line["train/loss"] for line in staged[:2]] == [line["train/loss"] for line in small[:2]]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("[[9,4],[9,2]]", "expected batches that grow up to training.batch_size=8"),
        ("[[9,4],[9,16]]", "expected batches that grow up to training.batch_size=8"),
        ("[[9,8]]", "expected batches that grow up to training.batch_size=8"),
        ("[]", "expected batches that grow up to training.batch_size=8"),
        ("[[9,4],[991,4]]", "expected fewer steps than training.total_steps=1000"),
    ],
)
def test_stages_without_effect_are_refused(stages: str, message: str) -> None:
    keys = ("batch=stages", "training.batch_size=8", "training.total_steps=1000", f"batch.stages={stages}")
    with pytest.raises(UserError, match=message):
        check(compose(*keys), load_sizes())
    check(compose(*keys, "resume=runs/earlier"), load_sizes())  # a run that has begun so


def test_other_stages_are_refused(forks: cli.Forks) -> None:
    """A resume with other stages, or batches that do not divide, is refused by the name of the key."""
    done = forks.run("--resume", "hydra.run.dir=whole", "batch.stages=[[2,16]]", "training.total_steps=14")
    cli.check_refusal(done, "batch.stages")
    done = forks.run(*cli.TINY, "batch=stages", "batch.stages=[[2,12]]", "hydra.run.dir=odd")
    cli.check_refusal(done, "a global batch of 12 sequences cannot be divided into 8 devices")
