"""The table of objectives, by the values of `training.objective`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from zero.training.dpo import dpo
from zero.training.objective import LIKELIHOOD, Objective

# From the keys of the section `training` to the objective.
OBJECTIVES: Mapping[str, Callable[[Mapping[str, Any]], Objective]] = MappingProxyType(
    {"likelihood": lambda keys: LIKELIHOOD, "dpo": lambda keys: dpo(keys["dpo_beta"])}
)


def make_objective(keys: Mapping[str, Any]) -> Objective:
    """The objective that the keys of the section `training` describe."""
    return OBJECTIVES[keys["objective"]](keys)
