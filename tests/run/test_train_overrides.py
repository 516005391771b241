"""Runs of models that the command line changes: resumed, refused with another model, and swept over widths.

They train on rows that are computed, and so without a file of data and without validation. test_resume.py resumes a
run with overrides by default, and test_train_synthetic.py has computed rows.
"""

import shutil
from pathlib import Path

import pytest

from tests.helpers import cli
from zero.record.metrics_file import read_resumes
from zero.record.run_files import saved_config

pytestmark = pytest.mark.wide
SIZES = """
mine:
  embedding_dim: 96
  vocab_size: 257
  num_head: null
  head_dim: 16
  block_size: 32
  dropout: 0.1
  N: 2
  alibi_attn: false
  positions: rotary
  rotary_base: 1000.0
"""
MINE = (
    *(key for key in cli.TINY if not key.startswith(("model.", "data.corpus", "data.index"))),
    "data.corpus=synthetic",
    *("model.size=mine.yaml:mine", "model.override.N=1", "model.override.embedding_dim=32"),
)


@pytest.fixture(scope="module")
def workplace(workplace: Path) -> Path:
    """With a file of sizes, and a run that has ended."""
    (workplace / "mine.yaml").write_text(SIZES)
    cli.Lasting(workplace).train("whole", *MINE)
    return workplace


def test_lost_steps_are_repeated(lasting: cli.Lasting) -> None:
    """A run that lost its last steps resumes with its overrides, bit for bit, and ends as one that did not."""
    shutil.copytree(lasting.workplace / "whole", lasting.workplace / "killed")
    shutil.rmtree(lasting.workplace / "killed/checkpoints/12")
    run = lasting.train("killed", "--resume")
    assert read_resumes(run / "metrics.jsonl") == [6]
    assert saved_config(run).model.override == {"N": 1, "embedding_dim": 32}
    assert cli.losses(run) == cli.losses(lasting.workplace / "whole")
    assert len(cli.losses(run)) == 12 and "validation/loss" not in cli.metrics(run)[-1]
    found = lasting.evaluate("whole/used", "model.model_path=whole", f"evaluate.index={cli.INDICES[1]}")
    assert found["loss"] > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["model.override.N=2"],
            "override={'N': 2, 'embedding_dim': 32}: expected {'N': 1, 'embedding_dim': 32}",
        ),
        (["model.size=mine"], "model.size=mine: expected mine.yaml:mine, the value of the run"),
        (["model.size=mine.yaml:other"], "model.size=mine.yaml:other: expected mine.yaml:mine, the value of the run"),
    ],
)
def test_another_model_is_refused(lasting: cli.Lasting, arguments: list[str], named: str) -> None:
    cli.check_refusal(lasting.run("--resume", "hydra.run.dir=whole", *arguments), named)


def test_moved_sizes(lasting: cli.Lasting) -> None:
    """A file of sizes may move: a resume and an evaluation name where it is, and the model is compared as before."""
    old, new = lasting.workplace / "mine.yaml", lasting.workplace / "elsewhere.yaml"
    shutil.copytree(lasting.workplace / "whole", lasting.workplace / "moved")
    shutil.rmtree(lasting.workplace / "moved/checkpoints/12")
    old.rename(new)
    try:
        cli.check_refusal(lasting.run("--resume", "hydra.run.dir=moved"), "model.size=mine.yaml:mine: mine.yaml not")
        run = lasting.train("moved", "--resume", "model.size=elsewhere.yaml:mine")
        assert cli.losses(run) == cli.losses(lasting.workplace / "whole")
        assert saved_config(run).model.size == "elsewhere.yaml:mine"
        used = "model.model_path=whole", "model.size=elsewhere.yaml:mine", f"evaluate.index={cli.INDICES[1]}"
        assert lasting.evaluate("whole/used_again", *used)["loss"] > 0
        new.write_text(SIZES.replace("1000.0", "2000.0"))
        done = lasting.run("--resume", "hydra.run.dir=whole", "training.total_steps=13", used[1])
        cli.check_refusal(done, "rotary_base is 1000.0, this run expects 2000.0")
    finally:
        new.unlink(missing_ok=True)
        old.write_text(SIZES)


def test_edited_sizes_are_refused(lasting: cli.Lasting) -> None:
    """A file of sizes whose entry computes something else since the start is refused by the key."""
    path = lasting.workplace / "mine.yaml"
    path.write_text(SIZES.replace("1000.0", "2000.0"))
    try:
        done = lasting.run("--resume", "hydra.run.dir=whole", "training.total_steps=13")
        cli.check_refusal(done, "rotary_base is 1000.0, this run expects 2000.0")
    finally:
        path.write_text(SIZES)


@pytest.mark.slow
def test_sweep_over_widths(forks: cli.Forks) -> None:
    """One key sweeps the width, with as many heads as it has room for."""
    once = ("training.evaluation_frequency=12", "hydra.sweep.dir=widths")
    forks.check("--multirun", *MINE[:-1], "model.override.embedding_dim=16,32", *once)
    for job, heads in (("0", 1), ("1", 2)):
        layout = (forks.workplace / "widths" / job / "layout.txt").read_text()
        assert f"{16 * heads}" in layout and len(cli.losses(forks.workplace / "widths" / job)) == 12
