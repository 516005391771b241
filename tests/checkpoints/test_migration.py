"""Checkpoints of commit 0d770a5, whose state had other paths, train on as that version did."""

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.small_gpt import Setup, advance, setup, tokens
from zero.checkpoints.manager import Checkpoints
from zero.checkpoints.migration import FORMAT, migrate
from zero.errors import UserError
from zero.exchange.average import average
from zero.exchange.checkpoint_weights import saved_step
from zero.models.config import GPTConfig
from zero.run.restore import restore

# After 4 steps of small_gpt on 2 devices, the third of which was skipped: AdamW with a moving average of the weights
# and running statistics of losses, and vector-quantised keys. The metadata has the losses of the next 4 steps.
OPTIONS: dict[str, dict[str, Any]] = {"ema": {"ema_decay": 0.6, "skip_spikes": 6.0}, "vq": {}}


def data(step: int) -> np.ndarray:
    rows = tokens(step)
    return np.where(rows < 0, rows, rows % 11)


def opened(name: str, directory: Path) -> Checkpoints:
    with tarfile.open(Path(__file__).with_name(f"checkpoint-0d770a5-{name}.tar.xz")) as archive:
        archive.extractall(directory / "checkpoints", filter="data")
    return Checkpoints(directory / "checkpoints", keep=None)


def trainer(meta: dict[str, Any], name: str, stage: int) -> Setup:
    return setup(8, stage, config=GPTConfig(**meta["size"]), **OPTIONS[name])


@pytest.mark.parametrize(("name", "stage"), [("ema", 3), ("vq", 3), pytest.param("ema", 1, marks=pytest.mark.slow)])
def test_earlier_format_trains_on(name: str, stage: int, tmp_path: Path) -> None:
    """A checkpoint of an earlier format is trained further."""
    with opened(name, tmp_path) as checkpoints:
        meta = checkpoints.meta(4)
        on = trainer(meta, name, stage)
        position, state = restore(checkpoints, None, on.model.config, on.layout, on.model.axis, is_own=False)
    assert (position.step, position.global_rows) == (4, 24)
    assert [int(x[0]) for x in (state.clock, *state.guard.counters.values())] == [4, 1, 0, 0]
    assert (np.asarray(state.guard.running) != 0).any()
    _, metrics = advance(on, state, range(4, 8), data)
    np.testing.assert_allclose([one["loss"] for one in metrics], meta["next_losses"], rtol=1e-5)
    np.testing.assert_allclose([one["gradient_norm"] for one in metrics], meta["next_gradient_norms"], rtol=1e-4)
    assert [one["skipped_steps"] for one in metrics] == [1] * 4


def test_later_format_is_refused() -> None:
    """A checkpoint of a later format is refused."""
    with pytest.raises(UserError, match=f"of format {FORMAT + 1}, this version reads formats 1 to {FORMAT}: update"):
        migrate({"format": FORMAT + 1, "shapes": {}})


def test_weights_of_an_earlier_format(tmp_path: Path) -> None:
    """Weights and their averages are read from an earlier format."""
    with opened("ema", tmp_path) as checkpoints:
        saved = saved_step(checkpoints, 4)
        on = trainer(saved.meta, "ema", 3)
        found = {}
        for ema in (False, True):
            shards = saved.restore(on.model, saved.subtree(ema))
            found[ema] = on.whole(shards, on.model.layout)["vocabulary/table"]
            name = ("averages/ema" if ema else "params") + "/vocabulary/table"
            np.testing.assert_array_equal(found[ema], checkpoints.read(4, name))
    assert 0 < np.abs(found[True] - found[False]).max() < 0.1


def test_codebook_of_an_earlier_format(tmp_path: Path) -> None:
    """An average of checkpoints of an earlier format keeps the codebook."""
    with opened("vq", tmp_path) as checkpoints:
        expected = checkpoints.read(4, "averages/codebook/blocks/unit_0/sums")
    assert average(str(tmp_path / "checkpoints"), tmp_path / "mean") == [4]
    with Checkpoints(tmp_path / "mean" / "checkpoints", keep=None) as averaged:
        np.testing.assert_array_equal(averaged.read(4, "averages/codebook/blocks/unit_0/sums"), expected)
