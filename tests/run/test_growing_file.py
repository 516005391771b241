"""A feature with its own clock and its own file, written as anybody would: one file and an entry of the table."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import cli
from zero.record.run_files import RECORDS

# The learning rates of all groups of weights, every two steps, after which the process may be killed.
FEATURE = """
import json, os, signal
import zero.run.feature_table as table
from zero.models.parametrization import multipliers_of
from zero.run.feature import Feature
from zero.run.growing_file import GrowingFile
from zero.training.schedules import learning_rate
import jax.tree

class Rates(Feature):
    name = "rates"
    makes_line = False

    def __init__(self, training, schedule, run):
        self._rate = learning_rate(training, schedule)
        factors = multipliers_of(run.job.model.config, run.job.model.axes)(run.job.model.layout.shapes())
        self._factors = sorted(set(jax.tree.leaves(factors)))
        self._file = GrowingFile(run, "rates.jsonl", lambda line: json.loads(line)["step"])

    def due(self, now):
        return now.step % 2 == 0

    def do(self, run, now, line):
        rates = [float(self._rate(now.step - 1)) * factor for factor in self._factors]
        self._file.append(now.step, json.dumps({{"step": now.step, "rates": rates}}).encode() + b"\\n")
        if now.step == {killed_at}:
            os.kill(os.getpid(), signal.SIGKILL)

row = {{Rates: lambda config, run: Rates(config.training, config.schedule, run)}}
table.FEATURES = {{**row, **table.FEATURES}}
"""
JOB = (
    *cli.TINY,
    "distributed.cpu_devices=2",
    "training.gradient_accumulation_steps=1",
    "training.log_frequency=3",
    "+model.override={parametrization: mup, mup_base_width: 16, tied: false}",
    "optimizer=adamw",
)


def entries(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / RECORDS / "rates.jsonl").read_text().splitlines()]


def steps_of(run: Path) -> list[int]:
    return [entry["step"] for entry in entries(run)]


@pytest.mark.wide
def test_a_feature_writes_its_own_file_at_its_own_steps(forks: cli.Forks) -> None:
    """It makes no line of metrics, and a killed run whose directory is lost ends with the same file."""
    place = f"data.checkpoint_directory={forks.workplace}/elsewhere/checkpoints"
    alone = forks.train("alone", *JOB)
    with cli.customized(FEATURE.format(killed_at=None)):
        undisturbed = forks.train("undisturbed", *JOB)
    again = (*JOB, place, "hydra.run.dir=killed", "--resume=auto")
    killed = forks.workplace / "killed"
    for killed_at, steps in [(10, [2, 4, 6, 8, 10]), (8, [2, 4, 6, 8])]:  # from step 6 on they are done again
        with cli.customized(FEATURE.format(killed_at=killed_at)):
            assert forks.run(*again).returncode == -signal.SIGKILL
        assert steps_of(killed) == steps
    shutil.rmtree(killed)
    with cli.customized(FEATURE.format(killed_at=None)):
        forks.check(*again)
    assert steps_of(undisturbed) == [2, 4, 6, 8, 10, 12]
    rates = entries(undisturbed)[-1]["rates"]
    assert len(set(rates)) == len(rates) > 1
    assert entries(killed) == entries(undisturbed)
    assert cli.metrics(killed) == cli.metrics(undisturbed) == cli.metrics(alone)
