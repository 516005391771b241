"""Keys that reinterpret the steps before a resume: each change of the next step is one line with both values."""

import dataclasses
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.config.composing import compose
from tests.helpers import cli
from zero.commands.modes import check
from zero.job.sizes import load_sizes
from zero.run.past import Past, warn_of_changes

BEFORE = (
    *("training.total_steps=100", "training.warmup_steps=10"),
    *("training.staged_warmup_steps=50", "training.warmup_train_context=16"),
)


def configured(*overrides: str) -> Any:
    return check(compose("model.size=test", *overrides), load_sizes())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("before", "now", "step", "lines"),
    [
        (
            (),
            ("training.total_steps=200",),
            100,
            ["training.total_steps from 100 to 200: the learning rate of step 101"],
        ),
        ((), ("training.total_steps=200",), 5, []),
        ((), ("training.warmup_steps=20",), 50, ["training.warmup_steps from 10 to 20: the learning rate of step 51"]),
        ((), ("schedule.decay_end=60",), 50, ["schedule.decay_end from null to 60: the learning rate of step 51"]),
        ((), ("schedule=linear",), 50, ["schedule.name from cosine to linear: the learning rate of step 51"]),
        (("schedule=wsd",), ("schedule=wsd", "training.total_steps=200"), 80, []),
        (("schedule=constant",), ("schedule=constant", "training.total_steps=200"), 100, []),
        (
            (),
            ("training.staged_warmup_steps=10",),
            20,
            ["training.staged_warmup_steps from 50 to 10: the sequence length of step 21 changes from 16 to "],
        ),
    ],
)
def test_changes(
    before: tuple[str, ...], now: tuple[str, ...], step: int, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    old, new = configured(*BEFORE, *before), configured(*BEFORE, *before, *now)
    past = Past(new.training, new.schedule, new.training, new.data.max_context)
    warn_of_changes(OmegaConf.create(dataclasses.asdict(old)), past, step)
    assert len(caplog.messages) == len(lines), caplog.messages
    for message, line in zip(caplog.messages, lines, strict=True):
        assert message.startswith(line) and " changes from " in message


@pytest.mark.quick
def test_a_run_from_before_schedules(caplog: pytest.LogCaptureFixture) -> None:
    """Its configuration lacks the section, as the merged one then has the defaults."""
    now = configured(*BEFORE)
    record = dataclasses.asdict(now)
    del record["schedule"]
    warn_of_changes(OmegaConf.create(record), Past(now.training, now.schedule, now.training, now.data.max_context), 50)
    assert not caplog.messages


def test_resume_of_a_finished_run(lasting: cli.Lasting) -> None:
    """More steps: one line with the rate that the run had ended with, and the one of its next step."""
    job = cli.later_values(*cli.TINY, "training.total_steps=4", "training.end_learning_rate=0.0001")
    run = lasting.train("finished", *job)
    again = ("--resume", "hydra.run.dir=finished")
    assert "learning rate" not in lasting.check(*again).stderr
    done = lasting.check(*again, "training.total_steps=8", "zero.remat=dots")
    assert "zero.remat was none up to step 4 and is dots from now on: results are equal to rounding" in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "the learning rate of step" in line]
    rate = next(line["learning_rate"] for line in cli.metrics(run) if line["step"] == 5)
    assert "training.total_steps from 4 to 8: the learning rate of step 5 changes from 0.0001 to" in line
    assert float(line.partition(" changes from 0.0001 to ")[2].partition(";")[0]) == pytest.approx(rate, rel=1e-3)
