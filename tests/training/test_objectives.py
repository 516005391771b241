"""The table of objectives, and that nothing asks for one of them by its name."""

import ast
import dataclasses

import jax
import jax.numpy as jnp
import pytest

from docs.print_reference import all_metrics
from tests.helpers.rooms import SOURCES, nodes
from zero.corpus.format.example import PAIR
from zero.report.curves import panels_of_objectives
from zero.run.columns import COLUMNS
from zero.training.objectives.objective import LIKELIHOOD, REFERENCE
from zero.training.objectives.table import with_defaults

pytestmark = pytest.mark.quick

OBJECTIVES = with_defaults()


def compared_names(source: str) -> list[str]:
    """The names of objectives that a source compares something with."""
    compared = [node for node in nodes(source) if isinstance(node, ast.Compare)]
    operands = [operand for node in compared for operand in (node.left, *node.comparators)]
    return [str(one.value) for one in operands if isinstance(one, ast.Constant) and one.value in OBJECTIVES]


def test_no_source_asks_for_a_name() -> None:
    """What depends on the objective asks for `example`, `reads` and `metrics`, so that a new one needs no edit."""
    assert compared_names("if config.objective.name != 'likelihood': pass") == ["likelihood"]
    sources = {module: path for module, path in SOURCES.items() if module != "zero.config.saved_config"}
    found = {module: compared_names(path.read_text()) for module, path in sources.items()}
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_entry(name: str) -> None:
    """What it reads is made by someone, its metrics are explained and drawn, and its keys are those of the table."""
    objective = OBJECTIVES[name]
    for entry in objective.reads:
        assert entry.source in COLUMNS or entry.name in objective.example.members
    explained = {metric for of_page in all_metrics() for metric in of_page.names}
    drawn = {metric for panel in panels_of_objectives() for metric in panel.metrics}
    of_steps = {metric.name for metric in objective.metrics_of_steps}
    assert of_steps <= explained & drawn
    assert {f"validation/{name}" for name in of_steps} <= drawn
    assert {f"validation/{name}" for name in {*objective.names} - of_steps} <= explained


def test_shapes_of_entries() -> None:
    """`Batch.extra` as `mode=plan` compiles it: of each row, each example and each position."""
    entries = (REFERENCE, *(REFERENCE._replace(name=of, of=of, shape=(5,)) for of in ("example", "position")))
    pairs = dataclasses.replace(LIKELIHOOD, reads=entries, example=PAIR)
    shapes = {name: struct.shape for name, struct in pairs.extra(6, 8).items()}
    assert shapes == {"reference": (6,), "example": (3, 5), "position": (6, 8, 5)}
    assert LIKELIHOOD.extra(6, 8) == {}
    assert jax.tree.map(jnp.shape, pairs.zeros()) == {}
