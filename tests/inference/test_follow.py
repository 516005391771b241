"""A follower beside a run that trains: its checkpoints come, and retention deletes them, at any moment."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.exchange.random_weights import ALIBI, model_of, save
from zero.checkpoints.damage import DamagedCheckpoint
from zero.checkpoints.manager import Checkpoints
from zero.commands.cli import compose
from zero.corpus.text.tokenizers import ByteTokenizer
from zero.inference import follow as module
from zero.inference.follow import follow, follower_tracker
from zero.inference.trained_model import TrainedModel
from zero.record.evaluations_file import read_evaluations
from zero.record.run_files import save_config


class Trainer:
    """A run of 10 steps that saves every 2 and keeps the newest, two steps while one is scored."""

    def __init__(self, run: Path) -> None:
        self.place = run / "checkpoints"
        self.step = 0
        save_config(run, {"data": {"bucket_path": None, "checkpoint_directory": "checkpoints"}})
        self.train()

    def train(self) -> None:
        if self.step < 10:
            self.step += 2
            save(self.place, ALIBI, self.step, last_step=10)
            shutil.rmtree(self.place / str(self.step - 2), ignore_errors=True)


def followed(run: Path, evaluate: Callable[[], object], loss: float = 2.0, **identity: Any) -> list[int]:
    """The steps that a follower scores until the run has ended."""
    config, _ = compose(["mode=evaluate", "evaluate.follow=true", f"model.model_path={run}", "data.wandb_project=null"])
    scorer: Any = SimpleNamespace(trained=TrainedModel(model_of(ALIBI), None, ByteTokenizer(), None))
    scored = []

    def result() -> dict[str, Any]:
        evaluate()
        scored.append(scorer.trained.step)
        return {"step": scorer.trained.step, "loss": loss}

    (run / "follower").mkdir(exist_ok=True)
    with patch.object(module, "WAIT_SECONDS", 0):
        tracker = partial(follower_tracker, run, run / "follower", config.data, {})
        follow(run, scorer, config.evaluate.ema, result, identity, tracker)
    return scored


def test_retention_takes_what_is_scored(tmp_path: Path) -> None:
    """The follower lives until the run has ended, and scores what is there when it looks."""
    trainer = Trainer(tmp_path)

    def evaluate() -> None:
        trainer.train()
        trainer.train()

    assert followed(tmp_path, evaluate) == [2, 6, 10]


def test_retention_takes_what_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that is deleted while it is read is left out with a line."""
    trainer = Trainer(tmp_path)
    read = Checkpoints._read_arrays

    def interrupted(self: Checkpoints, step: int, *arguments: Any) -> Any:
        trainer.train()
        return read(self, step, *arguments)

    with patch.object(Checkpoints, "_read_arrays", interrupted):
        assert followed(tmp_path, lambda: None) == [10]
    assert f"skipped: checkpoint {tmp_path}/checkpoints, step 4 was deleted while it was being read" in caplog.text


def test_damage_of_the_newest(tmp_path: Path) -> None:
    """A newest checkpoint that is damaged is still an error; nothing has been deleted."""
    trainer = Trainer(tmp_path)
    (trainer.place / "2" / "meta" / "metadata").write_text(json.dumps({}))
    with pytest.raises(DamagedCheckpoint, match="meta/metadata cannot be read"):
        followed(tmp_path, lambda: None)


def test_lines_hold_what_was_scored(tmp_path: Path) -> None:
    """What has a line is not scored again; under other keys, or with other weights of the step, it is."""
    trainer = Trainer(tmp_path)
    assert followed(tmp_path, trainer.train, keys={"evaluate.ema": False}) == [2, 4, 6, 8, 10]
    assert followed(tmp_path, trainer.train, keys={"evaluate.ema": False}) == []
    assert followed(tmp_path, trainer.train, 3.0, keys={"evaluate.ema": True}) == [10]
    assert read_evaluations(tmp_path) == [{"step": 10, "evaluation/loss": 3.0}]
    shutil.rmtree(trainer.place / "10")
    save(trainer.place, ALIBI, 10, last_step=10, checksums={"params": 1})
    assert followed(tmp_path, trainer.train, 4.0, keys={"evaluate.ema": True}) == [10]
    assert read_evaluations(tmp_path) == [{"step": 10, "evaluation/loss": 4.0}]
