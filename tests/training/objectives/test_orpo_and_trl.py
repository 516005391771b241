"""ORPO beside TRL's trainer."""

from pathlib import Path

import pytest

from tests.helpers import trl_steps
from zero.training.objectives.orpo import Orpo

pytestmark = trl_steps.WARNS

BETA = 0.4


@pytest.mark.wide  # the formula is compared by default
def test_steps_equal_trl(trl_folder: Path, tmp_path: Path) -> None:
    """Loss and gradient norm of ten steps of ORPOTrainer.

    Its likelihood counts prompts, and is a mean over the tokens of a batch: it is that of the paper where a prompt is
    the beginning of text alone, and chosen answers are of equal length.
    """
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    examples = [{"prompt": "", "chosen": letter, "rejected": "2048"[:k]} for k, letter in enumerate("xyz", 1)]
    trainer, expected = trl_steps.train(ORPOTrainer, ORPOConfig, trl_folder, examples, tmp_path, beta=BETA)
    texts = trl_steps.labelled_texts(trainer)
    found = trl_steps.steps_of_zero(trl_folder, Orpo(beta=BETA).objective(), texts, 3, 0)
    trl_steps.assert_same(found, expected)


@pytest.mark.wide
def test_odds_equal_trl(trl_folder: Path, tmp_path: Path) -> None:
    """Of answers of unequal lengths behind prompts: the first loss is that of the paper, of the odds that TRL logs."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    trainer, _ = trl_steps.train(ORPOTrainer, ORPOConfig, trl_folder, trl_steps.PAIRS, tmp_path, beta=BETA)
    logged = trainer.state.log_history[0]
    texts = trl_steps.labelled_texts(trainer)
    lengths = [(row < -1).sum() for row in texts]
    assert len({*lengths}) > 2
    found = trl_steps.steps_of_zero(trl_folder, Orpo(beta=BETA).objective(), texts, 2, 3)
    expected = -logged["logps/chosen"] - BETA * logged["log_odds_ratio"]
    assert found.losses[0] == pytest.approx(expected, rel=1e-4)
