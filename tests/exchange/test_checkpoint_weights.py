"""RUN@STEP names weights, and a run notes the step that it began with: its source may train on."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.exchange.random_weights import ALIBI, RUN, assert_same, contents, model_of, params, save, whole
from zero.base.errors import UserError
from zero.checkpoints.damage import DamagedCheckpoint
from zero.commands.cli import compose
from zero.exchange.average import average
from zero.exchange.export import export
from zero.exchange.warm_start import warm_start
from zero.partition.checksums import array_checksum
from zero.partition.layout import named_leaves
from zero.record.run_files import save_config
from zero.run.frozen_base import load_unchanged
from zero.run.restore import TrainingPosition

MODEL = model_of(ALIBI)
CONFIG = {"data": {**RUN["data"], "bucket_path": None, "checkpoint_directory": "checkpoints"}}


def make_run(run: Path, *steps: int) -> Path:
    save_config(run, CONFIG)
    save(run / "checkpoints", ALIBI, *steps)
    return run


def begun(run: Path | str, position: TrainingPosition) -> Any:
    """The weights that a run of adapters, or of pairs, has as its base or reference."""
    return whole(load_unchanged(str(run), False, MODEL, position), MODEL)


def test_base_that_trains_on(tmp_path: Path) -> None:
    """The step that a run began with is read, also after its base has made others, or was moved."""
    base = make_run(tmp_path / "base", 4)
    position = TrainingPosition(8)
    expected = begun(base, position)
    assert position.base is not None and position.base["place"] == f"{base}@4"
    save(base / "checkpoints", ALIBI, 8)
    assert_same(begun(base, position), expected)
    base.rename(tmp_path / "moved")
    assert_same(begun(tmp_path / "moved", position), expected)
    with pytest.raises(UserError, match=r"moved@8: the adapters were trained for other weights, those of .*moved@4"):
        begun(f"{tmp_path}/moved@8", position)
    shutil.rmtree(tmp_path / "moved" / "checkpoints" / "4")
    with pytest.raises(UserError, match=f"^model.model_path={tmp_path}/moved@4: .*: no step 4; there are 8"):
        begun(tmp_path / "moved", position)


def test_steps_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever weights are named; a directory whose own name ends so is no step."""
    monkeypatch.chdir(tmp_path)
    run = make_run(Path("run"), 4, 8)
    newest, older, listed = (whole(warm_start(f"run{end}", MODEL), MODEL) for end in ("@8", "@4", "/checkpoints@4"))
    assert_same(whole(warm_start("run", MODEL), MODEL), newest)
    assert_same(listed, older)
    assert any(map(np.any, jax.tree.leaves(jax.tree.map(np.subtract, newest, older))))
    assert export("run@4", Path("named")) == export("run", Path("chosen"), 4) == 4
    assert contents(Path("named")) == contents(Path("chosen"))
    for refused in (lambda: export("run@4", Path("both"), 8), lambda: average("run@4", Path("mean"))):
        with pytest.raises(UserError, match=r"^run@4: expected a run without a step"):
            refused()
    run.rename("run@4")
    assert_same(whole(warm_start("run@4", MODEL), MODEL), newest)


def test_changed_weights_are_not_read(tmp_path: Path) -> None:
    """A run's checkpoint has a checksum of each leaf, on any number of devices."""
    sums = {f"params/{name}": array_checksum(x) for name, x in named_leaves(params(ALIBI, 4))}
    save(tmp_path / "run", ALIBI, 4, checksums=sums)
    for model in (MODEL, model_of(ALIBI, devices=1, stage=0)):
        assert_same(whole(warm_start(str(tmp_path / "run"), model), model), params(ALIBI, 4))
    name = min(sums)
    save(tmp_path / "changed", ALIBI, 4, checksums=sums | {name: sums[name] ^ 1})
    with pytest.raises(DamagedCheckpoint, match=f"^{tmp_path}/changed, step 4: {name} differs from what was saved"):
        warm_start(str(tmp_path / "changed"), MODEL)


def test_modes_take_steps(tmp_path: Path) -> None:
    """`model.model_path=RUN@STEP` of a mode is that run and `data.resume_step`, of which one may be given."""
    run = make_run(tmp_path / "run", 4, 8)
    config, _ = compose(["mode=sample", f"model.model_path={run}@4"])
    assert (config.model.model_path, config.data.resume_step) == (str(run), 4)
    with pytest.raises(UserError, match=r"^data.resume_step=8: expected null, as model.model_path=.*@4"):
        compose(["mode=sample", f"model.model_path={run}@4", "data.resume_step=8"])
    with pytest.raises(UserError, match=r"@4: expected a run without a step, as evaluate.follow=true"):
        compose(["mode=evaluate", f"model.model_path={run}@4", "evaluate.follow=true"])
