"""Stages 2 and 3 of a model of each framework are the unsharded model, in a fraction of the bytes."""

import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "fully_shard"


def marks(name: str) -> Any:
    """partition/test_fully_shard.py has the moves, which are the same for all libraries."""
    return {"nnx_model": (), "haiku_model": pytest.mark.slow}.get(name, pytest.mark.wide)


@pytest.mark.parametrize(
    "name",  # that of Haiku is a pure function as that of Equinox is
    [pytest.param(path.stem, marks=marks(path.stem)) for path in sorted(FOLDER.glob("*_model.py"))],
)
def test_stages_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    training = importlib.import_module("training")
    # In float64 no mistake can pass for rounding.
    with jax.enable_x64(True):
        params, layers = importlib.import_module(name).build()
        params = jax.tree.map(lambda x: x.astype(np.float64), params)
        expected, whole = training.train(params, layers, 0)
        assert expected[-1] < expected[0]
        for stage in (2, 3) if name == "linen_model" else (3,):  # the moves are the same for all libraries
            losses, held = training.train(params, layers, stage)
            np.testing.assert_allclose(losses, expected, rtol=1e-12)
            assert held < 0.2 * whole


@pytest.mark.wide
def test_a_run_resumes_at_another_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    training, path = importlib.import_module("training"), tmp_path / "saved.npz"
    params, layers = importlib.import_module("linen_model").build()
    expected, _ = training.train(params, layers, 3, steps=5)
    losses, _ = training.train(params, layers, 3, steps=2, checkpoint=path)
    for stage, steps in ((2, 4), (0, 5)):
        losses += training.train(params, layers, stage, steps, checkpoint=path, resume=True)[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
