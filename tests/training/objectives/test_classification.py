"""Classification on shards: losses, gradient norms and metrics of steps are those of a formula on one device."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.config.composing import compose
from tests.helpers.preferences import DEVICES, PAIRS, READ, SIZE, check_steps, pairs, programs_on, scores_of_texts
from tests.training.small_gpt import first_params
from zero.base.errors import UserError
from zero.commands.modes import check
from zero.job.sizes import load_sizes
from zero.training.objectives.classification import Classification

CLASSES = 3
SCORED = replace(SIZE, score_outputs=CLASSES)
TEXTS = (2 * READ[:, None] + np.arange(2)).ravel()  # those that were read
LABELS = np.random.default_rng(3).integers(0, CLASSES, 2 * PAIRS).astype(np.int32)


def formula(params: Any, _: jax.Array, rows: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
    scores, labels = scores_of_texts(SCORED, params, rows)[TEXTS], LABELS[TEXTS]
    losses = jax.nn.logsumexp(scores, axis=1) - scores[jnp.arange(len(labels)), labels]
    return losses.mean(), {"accuracy": (scores.argmax(1) == labels).mean()}


@pytest.mark.parametrize(("devices", "stage", "options"), DEVICES)
def test_steps_equal_the_formula(devices: int, stage: int, options: dict[str, Any]) -> None:
    objective = Classification(num_labels=CLASSES).objective()
    check_steps(objective, formula, devices, stage, {"size": SCORED, **options}, lambda step: {"label": LABELS})


def test_evaluations_report_the_confusion() -> None:
    """The shares of texts by their label and the label with the highest score; a text of one token counts."""
    objective = Classification(num_labels=CLASSES).objective()
    one = programs_on(objective, 1, 0, size=SCORED)
    rows = pairs(0)
    rows[0] = [5] + [-1] * (rows.shape[1] - 1)
    params = one.place(first_params(SCORED), one.model)
    _, terms, sums = one.programs.evaluate(params, one.rows(rows), {"label": one.rows(LABELS)})
    assert terms == len(TEXTS)
    chosen = np.asarray(scores_of_texts(SCORED, first_params(SCORED), rows).argmax(1))[TEXTS]
    expected = np.zeros((CLASSES, CLASSES))
    np.add.at(expected, (LABELS[TEXTS], chosen), 1)
    found = [[sums[f"confusion/{label}/{other}"] for other in range(CLASSES)] for label in range(CLASSES)]
    np.testing.assert_array_equal(found, expected)
    assert sums["accuracy"] == expected.trace()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("objective.num_labels=3",), r"num_labels=3: expected 2, the score_outputs of model.size=test"),
        (("objective.label_names=[yes]",), r"label_names=\['yes'\]: expected objective.num_labels=2 different names"),
        (("objective.label_names=[no,no]",), r"expected objective.num_labels=2 different names"),
    ],
)
def test_classes_that_contradict_each_other_are_refused(keys: tuple[str, ...], message: str) -> None:
    common = ("objective=classification", "model.size=test", "model.override.score_outputs=2", "data.corpus=null")
    with pytest.raises(UserError, match=message):
        check(compose(*common, *keys), load_sizes())


@pytest.mark.quick
def test_a_reward_has_one_output() -> None:
    keys = ("objective=reward", "model.size=test", "model.override.score_outputs=2", "data.corpus=null")
    with pytest.raises(UserError, match="has score_outputs=2, a reward has 1"):
        check(compose(*keys), load_sizes())
