"""ORPO on shards: the numbers of its formula on logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.preferences import DEVICES, check_steps, lengths, log_probabilities, of_pairs
from zero.training.objectives.orpo import Orpo, log_odds

BETA = 0.4


def formula(params: Any, _: jax.Array, rows: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Equations 2, 6 and 7 of arXiv 2403.07691: the likelihood of an answer is a mean over its tokens."""
    chosen, rejected = of_pairs(log_probabilities(params, rows) / lengths(rows).clip(1))
    odds = [jnp.exp(x) / (1 - jnp.exp(x)) for x in (chosen, rejected)]
    log_ratio = jnp.log(odds[0] / odds[1])
    metrics = {
        "rewards/chosen": BETA * chosen,
        "rewards/rejected": BETA * rejected,
        "rewards/accuracies": (chosen > rejected).astype(float),
        "rewards/margins": BETA * (chosen - rejected),
        "logps/chosen": chosen,
        "logps/rejected": rejected,
        "nll_loss": -chosen,
        "log_odds_chosen": log_ratio,
        "log_odds_ratio": jnp.log(jax.nn.sigmoid(log_ratio)),
    }
    losses = -chosen - BETA * jnp.log(jax.nn.sigmoid(log_ratio))
    return losses.mean(), {name: value.mean() for name, value in metrics.items()}


@pytest.mark.parametrize(("devices", "stage", "options"), DEVICES)
def test_steps_equal_the_formula(devices: int, stage: int, options: dict[str, Any]) -> None:
    check_steps(Orpo(beta=BETA).objective(), formula, devices, stage, options)


def test_log_odds_of_likely_texts() -> None:
    """Where a text is nearly certain, and where rounding makes it certain, log-odds and slopes are finite."""
    logps = np.asarray([-1e-6, -0.69, -0.71, -20.0])
    exact = logps - np.log(-np.expm1(logps))
    np.testing.assert_allclose(log_odds(jnp.asarray(logps)), exact, rtol=1e-3)
    assert np.isfinite(jax.grad(lambda x: log_odds(x).sum())(jnp.asarray([0.0, -1e-9, -100.0]))).all()
