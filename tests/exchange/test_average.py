"""The mean of several checkpoints is a run directory of its own."""

import shutil
from pathlib import Path
from unittest.mock import patch

import jax
import numpy as np
import pytest

from tests.exchange.random_weights import ALIBI, assert_same, model_of, params, save, whole
from zero.base.errors import UserError
from zero.checkpoints.damage import MissingCheckpoint
from zero.checkpoints.manager import Checkpoints
from zero.exchange.average import average
from zero.exchange.export import export
from zero.exchange.warm_start import warm_start


def test_average_is_the_mean(tmp_path: Path) -> None:
    """The average is the mean of the steps, in a run of its own."""
    meta = {"data": {"tokenizer": "bytes", "bucket_path": "elsewhere", "checkpoint_directory": "there"}}
    save(tmp_path / "run", ALIBI, 2, 5, 6, meta=meta)
    assert average(str(tmp_path / "run"), tmp_path / "two", [6, 2]) == [2, 6]
    assert average(str(tmp_path / "run"), tmp_path / "all") == [2, 5, 6]
    model = model_of(ALIBI)
    with Checkpoints(tmp_path / "two" / "checkpoints", None) as averaged:
        assert averaged.meta(6)["checksums"].keys() == averaged.meta(6)["shapes"].keys()
    for name, seeds in (("two", (2, 6)), ("all", (2, 5, 6))):
        got = whole(warm_start(str(tmp_path / name), model), model)
        expected = jax.tree.map(lambda *xs: np.mean(xs, axis=0, dtype=np.float64), *(params(ALIBI, s) for s in seeds))
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)
    export(str(tmp_path / "two"), tmp_path / "hf")


def test_average_that_fails_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path / "run", ALIBI, 2)
    with pytest.raises(UserError, match="no step 7; there are 2"):
        average(str(tmp_path / "run"), tmp_path / "mean", [2, 7])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "mean").mkdir()
    with pytest.raises(UserError, match="mean already exists and is never overwritten"):
        average(str(tmp_path / "run"), tmp_path / "mean")


def test_checkpoints_of_the_last_part(tmp_path: Path) -> None:
    """Two of the last part are its ends; a doctest has the choice of more."""
    save(tmp_path / "run", ALIBI, *range(1, 4))
    assert average(str(tmp_path / "run"), tmp_path / "mean", last=0.6, count=2) == [2, 3]
    with pytest.raises(UserError, match=r"the last 20% hold 1 checkpoints, 3; expected at least --count 4"):
        average(str(tmp_path / "run"), tmp_path / "none", last=0.2, count=4)


def test_average_beside_a_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that the run deletes while others are read is left out with a line, unless it was named."""
    place = tmp_path / "run"
    save(place, ALIBI, 2, 5, 6)
    expected = average(str(place), tmp_path / "expected", [5, 6])

    def deleting(self: Checkpoints, step: int, name: str) -> np.ndarray:
        if step == 5:
            shutil.rmtree(place / "2", ignore_errors=True)
        return read(self, step, name)

    read = Checkpoints.read
    with patch.object(Checkpoints, "read", deleting):
        assert average(str(place), tmp_path / "mean") == [5, 6] == expected
        assert f"{place}, step 2 was deleted while it was being read" in caplog.text
        with pytest.raises(MissingCheckpoint, match="no step 2; there are 5, 6"):
            average(str(place), tmp_path / "named", [2, 6])
    model = model_of(ALIBI)
    means = [whole(warm_start(str(tmp_path / name), model), model) for name in ("mean", "expected")]
    assert_same(*means)
