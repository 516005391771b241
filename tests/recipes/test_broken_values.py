"""Each value that docs/sources/recipes.yaml has of a run is broken in its recipe, and the comparison names it."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from benchmarks.recipe_sources import Row, disagreements, load_runs, resolved, values_of
from zero.base.errors import UserError
from zero.commands.cli import compose

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


def spread() -> dict[str, list[Row]]:
    """A few rows of each recipe, so that each key of the table is among them once."""
    rows: dict[str, list[Row]] = {recipe: [] for recipe in RUNS}
    by_key: dict[str, dict[str, Row]] = {}
    for recipe, run in RUNS.items():
        for row in run.rows:
            by_key.setdefault(row.key, {})[recipe] = row
    for of_recipes in sorted(by_key.values(), key=len):  # the rarest keys first, which few recipes have
        recipe = min(of_recipes, key=lambda name: len(rows[name]))
        rows[recipe].append(of_recipes[recipe])
    return rows


def unseen(recipe: str, rows: Iterable[Row]) -> list[str]:
    """The keys of rows that the comparison does not name, once all of them have another value in the recipe.

    Raises:
      UserError: these values together are no right configuration.
    """
    overrides = dict.fromkeys(override_of(row, values_of(recipe)) for row in rows)
    broken = resolved(*compose([f"+recipe={recipe}", "mode=plan", *overrides]))
    lines = disagreements(RUNS[recipe], broken)
    return [row.key for row in rows if not any(line.startswith(f"{row.key} is ") for line in lines)]


def refused_of(recipe: str, rows: Iterable[Row]) -> list[str]:
    """The keys of rows whose other value alone is refused; all others are named by the comparison."""
    assert disagreements(RUNS[recipe], values_of(recipe)) == []
    refused = []
    for row in rows:
        try:
            assert unseen(recipe, [row]) == []
        except UserError:
            refused.append(row.key)
    return refused


@pytest.mark.parametrize(
    ("recipe", "rows"),
    [pytest.param(*case, marks=pytest.mark.wide if n % 3 else ()) for n, case in enumerate(spread().items())],
)
def test_a_value_of_each_key_that_is_broken_is_seen(recipe: str, rows: list[Row]) -> None:
    """A few values of a recipe at once, or one after the other where they are refused together."""
    try:
        assert rows and unseen(recipe, rows) == []
    except UserError:
        assert len(refused_of(recipe, rows)) < len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RUNS)
def test_each_value_that_is_broken_is_seen(recipe: str) -> None:
    """All values of a recipe, one after the other; few are refused."""
    rows = RUNS[recipe].rows
    assert len(refused_of(recipe, rows)) <= len(rows) / 4
