"""The table of objectives, by the choices of the group `objective`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from zero.training.dpo import dpo
from zero.training.objective import LIKELIHOOD, Objective


def _dpo(keys: Mapping[str, Any]) -> Objective:
    return dpo(keys["beta"], keys.get("label_smoothing", 0.0), keys.get("smoothing", "conservative"))


# From the keys of a choice to the objective.
OBJECTIVES: Mapping[str, Callable[[Mapping[str, Any]], Objective]] = MappingProxyType(
    {"likelihood": lambda keys: LIKELIHOOD, "dpo": _dpo}
)


def make_objective(keys: Mapping[str, Any]) -> Objective:
    """The objective that the keys of the section `objective` describe."""
    return OBJECTIVES[keys["name"]](keys)
