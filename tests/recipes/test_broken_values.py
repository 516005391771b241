"""Each value that docs/sources/recipes.yaml has of a run is broken in its recipe, and the comparison names it."""

from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.recipe_sources import Row, disagreements, load_runs, resolved
from zero.cli import compose
from zero.errors import UserError

RUNS = load_runs()
# Keys of the table that another key sets.
SET_BY = {
    "model.position_kind": "model.override.positions",
    "model.residual_drop_rate": "model.override.residual_dropout",
    "model.attention_drop_rate": "model.override.attention_dropout",
    "model.head_width": "model.override.head_dim",
    "model.mlp_width": "model.override.mlp_dim",
    "model.mlp_width_multiple": "model.override.mlp_dim",
    "schedule.last": "schedule.decay_end",
    "step.rows": "plan.topology",  # which says how many hosts there are
    "step.tokens": "plan.topology",
}
CHOICES = {
    "model.init": ("gpt2", "fan_in"),
    "optimizer.decay_on": ("matrices", "gpt_neo"),
    "schedule": ("sqrt_decay", "inverse_sqrt"),
}
# Another value for a choice, and for null.
OTHER = {
    "data.corpus": "synthetic:random",
    "step.rows": "v3-8",
    "step.tokens": "v3-8",
    "model.activation": "selu",
    "model.attention_cap": "30.0",
    "model.attention_scale": "0.5",
    "model.distance_limit": "window",
    "model.head_init": "fan_in",
    "model.layer": "transformer",
    "model.norm": "rms_offset",
    "model.norm_place": "after",
    "model.parametrization": "standard",
    "model.position_kind": "sinusoidal",
    "model.windows": "[0,128]",
    "model.zero_init": "[mlp_out]",
    "optimizer": "lion",
    "optimizer.b1": "0.5",
    "optimizer.decay": "independent",
    "training.max_gradient_norm": "2.0",
    "training.max_gradient_value": "2.0",
}


def override_of(row: Row, values: Mapping[str, Any]) -> str:
    """The override that gives the key of a row another value.

    >>> override_of(Row("model.N", 12, "n_layer", "a.json"), {})
    'model.override.N=24'
    >>> override_of(Row("model.init", "gpt2", "normal", "a.py"), {})
    'model.override.init=fan_in'
    """
    key = SET_BY.get(row.key, row.key.replace("model.", "model.override."))
    return f"{key}={other_value(row, values)}"


def other_value(row: Row, values: Mapping[str, Any]) -> str:
    if row.key in CHOICES:
        return next(choice for choice in CHOICES[row.key] if choice != row.value)
    if row.key in OTHER:
        return OTHER[row.key]
    if row.key.startswith("model.mlp_width"):
        return str(2 * values["model.mlp_width"])
    if isinstance(row.value, bool):
        return str(not row.value).lower()
    if isinstance(row.value, int):
        return str(row.value // 2 if row.key == "data.max_context" else 2 * row.value)
    return str(row.value / 2 or 0.25)


@pytest.mark.slow  # test_sources.py has the short form, in which values are broken after they are resolved
@pytest.mark.parametrize("recipe", RUNS)
def test_each_value_that_is_broken_is_seen(recipe: str) -> None:
    """A recipe with another value for the key of a row is refused, or the comparison names the key; few are refused."""
    run = RUNS[recipe]
    started = [f"+recipe={recipe}", "mode=plan"]
    values = resolved(*compose(started))
    assert disagreements(run, values) == []
    refused = []
    for row in run.rows:
        override = override_of(row, values)
        try:
            broken = resolved(*compose([*started, override]))
        except UserError as error:
            refused.append(f"{override}: {error}")
            continue
        assert any(line.startswith(f"{row.key} is ") for line in disagreements(run, broken)), override
    assert len(refused) <= len(run.rows) / 4, refused
