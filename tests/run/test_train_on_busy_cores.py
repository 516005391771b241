"""Runs beside processes that keep every core busy: status 0, and what the quiet runs wrote, bit for bit.

Virtual CPU devices used to abort there (docs/decisions/virtual-devices.md).
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers import cli
from zero.record.metrics_file import read_resumes

pytestmark = pytest.mark.slow  # the spinning processes take most of it


@pytest.fixture(scope="module")
def quiet(forks: cli.Forks, request: pytest.FixtureRequest) -> dict[int, Any]:
    """What the runs of each stage of this session write while nothing else runs; also compiles their programs."""
    names = {item.name for item in request.session.items}
    stages = [stage for stage in range(4) if any(f"[{stage}]" in name for name in names)]
    return {stage: run_all(forks, f"quiet{stage}", stage) for stage in stages}


@pytest.fixture(scope="module")
def spinning(quiet: dict[int, Any]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A process per core, and one more, that only spin; started after the quiet runs."""
    with cli.spinning(1 + (os.cpu_count() or 1), seconds=900) as processes:
        yield processes


def run_all(forks: cli.Forks, name: str, stage: int) -> dict[str, Any]:
    """Trains and resumes from the middle; what was written, but for clocks."""
    directory, run = forks.workplace / name, f"hydra.run.dir={name}"
    for arguments in ((*cli.TINY, f"zero.stage={stage}", run), ("--resume=auto", run)):
        forks.check(*arguments)
        if arguments[0] == cli.TINY[0]:
            shutil.rmtree(directory / "checkpoints" / "12")  # as if the machine had been lost before
    lines = cli.metrics(directory)
    assert read_resumes(directory / "metrics.jsonl") == [6]
    assert [line["step"] for line in lines if "validation/loss" in line] == [6, 12]
    return {"metrics": lines}


def use(forks: cli.Forks, trained: str, name: str) -> dict[str, Any]:
    """Evaluates and samples with sharded weights; what was found."""
    given = (f"model.model_path={trained}",)
    directory, prompts = forks.workplace / name, ("sample.prompt=[shard,gather]", "sample.tokens=40")
    for mode, options in (("evaluate", ()), ("sample", prompts)):
        done = forks.check(f"mode={mode}", f"{mode}.replicate=false", *given, *options, f"hydra.run.dir={name}/{mode}")
    evaluation = json.loads((directory / "evaluate" / "evaluation.json").read_text())
    return {"bits_per_byte": evaluation["bits_per_byte"], "text": done.stdout}


@pytest.mark.parametrize("stage", range(4))
def test_training_on_busy_cores(
    forks: cli.Forks, quiet: dict[int, Any], spinning: list[subprocess.Popen[bytes]], stage: int
) -> None:
    """Runs beside spinning processes write the same as the quiet ones."""
    assert run_all(forks, f"busy{stage}", stage) == quiet[stage]
    assert [process.poll() for process in spinning] == [None] * len(spinning)  # none had ended early


@pytest.mark.parametrize("stage", range(4))
def test_inference_on_busy_cores(forks: cli.Forks, stage: int) -> None:
    """Evaluation and sampling beside spinning processes give the same as without."""
    run_all(forks, f"trained{stage}", stage)
    alone = use(forks, f"trained{stage}", f"alone{stage}")
    with cli.spinning(1 + (os.cpu_count() or 1), seconds=900):
        assert use(forks, f"trained{stage}", f"beside{stage}") == alone
