"""Stages 2 and 3 of a model of each framework are the unsharded model, in a fraction of the bytes."""

import importlib
from pathlib import Path

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("quick_compilation")
FOLDER = Path(__file__).parents[1] / "examples" / "fully_shard"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*_model.py")))
def test_stages_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    training = importlib.import_module("training")
    # In float64 no mistake can pass for rounding.
    with jax.enable_x64(True):
        params, layers = importlib.import_module(name).build()
        params = jax.tree.map(lambda x: x.astype(np.float64), params)
        expected, whole = training.train(params, layers, 0)
        assert expected[-1] < expected[0]
        for stage in (2, 3):
            losses, held = training.train(params, layers, stage)
            np.testing.assert_allclose(losses, expected, rtol=1e-12)
            assert held < 0.2 * whole
