"""A run that an earlier version started is resumed as if that version had gone on."""

import dataclasses
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.config.composing import compose
from tests.helpers import cli
from zero.config.check import check
from zero.config.files import load_sizes
from zero.config.saved_config import merge_resumed
from zero.run.train import train
from zero.run_directory import saved_config, saved_steps
from zero.tracking.metrics_file import read_metrics, read_resumes

ARCHIVE = Path(__file__).with_name("run-0d770a5.tar.xz")


def test_run_of_an_earlier_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of an earlier version continues with the same losses.

    The archive is the directory of a run of 12 steps by commit 0d770a5, with only its checkpoint of step 6.

    Its model is the size `test` with an embedding_dim of 6, to keep it small; on 8 devices, with dropout and a moving
    average of the weights, on the corpus of tests/helpers/cli.py.
    """
    monkeypatch.chdir(cli.make_workplace(tmp_path / "workplace"))
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall("runs", filter="data")
    run = Path("runs/old")
    expected = read_metrics(run / "metrics.jsonl")
    resumed = merge_resumed(saved_config(run), compose(f"resume={run}"), [])
    sizes = load_sizes()
    assert train(check(resumed, sizes), dataclasses.replace(sizes["test"], embedding_dim=6), run) == 0
    got = read_metrics(run / "metrics.jsonl")
    assert read_resumes(run / "metrics.jsonl") == [6] and saved_steps(run) == [6, 12]
    assert [line["samples_checksum"] for line in got] == [line["samples_checksum"] for line in expected]
    for key in ("train/loss", "learning_rate", "gradient_norm"):
        np.testing.assert_allclose([line[key] for line in got], [line[key] for line in expected], rtol=1e-5)
    for key in ("validation/loss", "validation/ema_loss"):
        assert got[-1][key] == pytest.approx(expected[-1][key], rel=1e-5)
