"""Every recipe is the run that it names: docs/sources/recipes.yaml has the values of its source."""

import jax
import numpy as np
import pytest

from benchmarks import recipe_sources as sources
from benchmarks.recipe_sources import PAGE, RECIPES, disagreements, load_runs, values_of
from zero.commands.cli import compose
from zero.exchange.warm_start import repeated_layers
from zero.job.sizes import load_sizes
from zero.models.axes import EMBED, HEADS, Axes, Role
from zero.models.parametrization import kernel_init

RUNS = load_runs()
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml") if path.stem != "common")


def test_every_recipe_names_a_run() -> None:
    assert NAMES == sorted(RUNS)


@pytest.mark.parametrize("recipe", NAMES)
def test_recipe_is_the_run_that_it_names(recipe: str) -> None:
    """Each value is that of the source, or stands under `differs` with its reason; no key is set without a row."""
    run = RUNS[recipe]
    assert disagreements(run, values_of(recipe)) == []
    assert sources.without_a_row(recipe, run) == set()
    assert (RECIPES / f"{recipe}.yaml").read_text().startswith(sources.head_of(recipe, run))


@pytest.mark.parametrize("recipe", NAMES)
def test_another_value_is_seen(recipe: str) -> None:
    """Whatever value of a recipe changes, one line names it; a difference that has gone is seen as well."""
    run, own = RUNS[recipe], values_of(recipe)
    for row in run.rows:
        assert row.key in own
        (line,) = disagreements(run, own | {row.key: "another"})
        assert line.startswith(f"{row.key} is another")
    for key in run.differs:
        (theirs,) = (row.value for row in run.rows if row.key == key)
        (line,) = disagreements(run, own | {key: theirs})
        assert line.startswith(f"{key} is {theirs}")


def test_keys_without_a_row_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = sources.keys_set_by("gpt-neo-125m")
    assert {"model.init", "model.z_loss", "model.attention_scale", "training.peak_learning_rate"} <= keys
    monkeypatch.setattr(sources, "keys_set_by", lambda recipe: {*keys, "training.ema", "zero.stage"})
    assert sources.without_a_row("gpt-neo-125m", RUNS["gpt-neo-125m"]) == {"training.ema"}


def test_page_is_printed_from_the_table() -> None:
    page = PAGE.read_text()
    assert sources.START in page and sources.END in page
    assert page == sources.with_part(page, sources.page_part())


def test_scores_without_a_divisor_begin_with_deviation_1() -> None:
    """`attention_scale: none` leaves the scale to the initial queries, which no init of constant width gives them."""
    sizes = load_sizes()
    unscaled = {name: sizes[name].init for name in sizes if sizes[name].attention_scale == "none"}
    assert len(unscaled) >= 14 and set(unscaled.values()) <= {"gpt_neo", "lingvo"}, unscaled


@pytest.mark.parametrize("recipe", [name for name in NAMES if name.startswith("gpt-neo")])
def test_first_scores_of_gpt_neo(recipe: str) -> None:
    """Scores of the first layer have deviation 1 at the recipe's width and head, and not that of GPT-2's weights."""
    _, size = compose([f"+recipe={recipe}"])
    width = size.embedding_dim
    rng = np.random.default_rng(0)
    h_TD = rng.normal(size=(128, width)).astype(np.float32)  # the output of a norm
    shape = (width, size.head_width)  # of one head
    keys = jax.random.split(jax.random.key(0))
    query = kernel_init(size, "query", Axes((EMBED, HEADS), Role.QUERY))(keys[0], shape)
    key = kernel_init(size, "key", Axes((EMBED, HEADS)))(keys[1], shape)
    scores = (h_TD @ np.asarray(query)) @ (h_TD @ np.asarray(key)).T
    assert np.std(scores) == pytest.approx(1.0, rel=0.1)


def test_growth_of_the_760m() -> None:
    """Layers are repeated as `create_mapping` of extend_params.py does (ZeRO-transformer at 7dcf6f4)."""
    twice = {0, 3, 6, 9, 12, 15}
    expected = [layer for layer in range(18) for _ in range(1 + (layer in twice))]
    assert list(repeated_layers(18, 24, "the 580M")) == expected
