"""examples/rows/train.py, a pmap program that reads `zero.corpus.Rows`, as users run it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

from tests.helpers.corpora import make

EXAMPLE = Path(__file__).parents[2] / "examples" / "rows" / "train.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    specification = importlib.util.spec_from_file_location("rows_example", EXAMPLE)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.wide
def test_it_continues_exactly_on_fewer_devices(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stopped, and continued on four of eight devices: the losses of a run that never stopped, to rounding."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(30):
        (text / f"{number:02}.txt").write_text(f"line {number} of some text, again and again. " * 60)
    index = make(text, tmp_path, row_tokens=example.CONTEXT + 1, rows_per_shard=64).train_index
    whole = example.train(index, 12, tmp_path / "whole.npz")
    first = example.train(index, 7, tmp_path / "parts.npz")
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    second = example.train(index, 12, tmp_path / "parts.npz")
    np.testing.assert_allclose(first + second, whole, rtol=1e-5)
    assert (len(first), len(second)) == (7, 5) and whole[-1] < whole[0] - 0.4
    assert example.train(index, 12, tmp_path / "parts.npz") == []
    assert "flax" not in vars(example) and example.__name__ not in sys.modules
