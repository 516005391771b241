"""The mean of several checkpoints is a run directory of its own."""

from pathlib import Path

import jax
import numpy as np
import pytest

from tests.exchange.random_weights import ALIBI, model_of, params, save, whole
from zero.errors import UserError
from zero.exchange.average import average, last_steps
from zero.exchange.export import export
from zero.exchange.warm_start import warm_start


def test_average_is_the_mean(tmp_path: Path) -> None:
    """The average is the mean of the steps, in a run of its own."""
    meta = {"data": {"tokenizer": "bytes", "bucket_path": "elsewhere", "checkpoint_directory": "there"}}
    save(tmp_path / "run", ALIBI, 2, 5, 6, meta=meta)
    assert average(str(tmp_path / "run"), tmp_path / "two", [6, 2]) == [2, 6]
    assert average(str(tmp_path / "run"), tmp_path / "all") == [2, 5, 6]
    model = model_of(ALIBI)
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
    with pytest.raises(UserError, match="mean exists already; nothing is overwritten"):
        average(str(tmp_path / "run"), tmp_path / "mean")


def test_checkpoints_of_the_last_part(tmp_path: Path) -> None:
    """Four of the last part are evenly spaced, the newest among them."""
    save(tmp_path / "run", ALIBI, *range(1, 11))
    assert last_steps(str(tmp_path / "run"), 0.6, 4) == [5, 7, 8, 10]
    assert last_steps(str(tmp_path / "run"), 0.2, 2) == [9, 10]
    with pytest.raises(UserError, match=r"the last 20% hold 2 checkpoints, 9, 10; expected at least --count 4"):
        last_steps(str(tmp_path / "run"), 0.2, 4)
