"""The table of plans in docs/reference/from-other-code.md is printed from figures that know what they follow from."""

import doctest
from dataclasses import replace
from types import ModuleType

import pytest

from benchmarks import recipe_sources, recipes
from benchmarks.recipe_sources import PAGE, with_part
from benchmarks.recipes import START, Digests, Plan
from zero.commands.cli import compose
from zero.planning.config import Request


@pytest.mark.parametrize("module", [recipes, recipe_sources])
def test_examples(module: ModuleType) -> None:
    """Those of docstrings, which pytest collects of `zero` and `tests` only."""
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed


def test_page_is_printed_from_the_plans() -> None:
    page = PAGE.read_text()
    assert START in page
    assert page == with_part(page, recipes.page_part(recipes.load_plans()), START)


def test_rows() -> None:
    """Days are those of the recipe's steps; what does not fit has no time."""
    plan = Plan(Digests("a", "b", "c"), 3 * 2**30, 16 * 2**30, 2.0, 1234567.8, 0.345)
    assert recipes.table_row("zero-transformer-580m", plan) == (
        "| `zero-transformer-580m` | v3-32 | 3.00 | 2 | 1,234,568 | 34 % | 2.25 | 4 days on a v3-32 |\n"
    )
    vq = recipes.table_row("transformer-vq-enwik8", plan)  # four of 125,000 steps in a call
    assert vq.endswith("| 0.723 | - |\n")
    misfit = recipes.table_row("gpt-neo-13b", replace(plan, seconds=None, tokens_per_second=None, mfu=None))
    assert misfit == "| `gpt-neo-13b` | v3-256 | 3.00 | does not fit in 16.00 GiB |  |  |  | - |\n"


@pytest.mark.slow
def test_digests_of_programs() -> None:
    """Equal for equal programs; a key that changes the program, or the options of its compiler, changes them."""
    pytest.importorskip("libtpu")
    tiny = ["mode=plan", "plan.topology=v3-8", "model.size=test", "data.max_context=64", "training.sample_tokens=0"]

    def digests_with(override: str) -> Digests:
        config, size = compose([*tiny, override])
        return recipes.digests(Request(config, size, 1))

    first = digests_with("seed=0")
    assert digests_with("training.log_frequency=7") == first
    for override in ("model.override.activation=relu", "zero.overlap_gathers=false"):
        changed = digests_with(override)
        assert changed.programs != first.programs
        assert replace(changed, programs=first.programs) == first
