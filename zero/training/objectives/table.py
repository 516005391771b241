"""The table of objectives: the choices of the group `objective`, the default first."""

from __future__ import annotations

from zero.training.objectives.distillation import Distillation
from zero.training.objectives.dpo import Dpo
from zero.training.objectives.kto import Kto
from zero.training.objectives.multi_token import MultiToken
from zero.training.objectives.objective import Keys, Likelihood, Objective
from zero.training.objectives.orpo import Orpo
from zero.training.objectives.simpo import Simpo

OBJECTIVES: tuple[type[Keys], ...] = (Likelihood, Dpo, Orpo, Simpo, Kto, Distillation, MultiToken)


def with_defaults() -> dict[str, Objective]:
    """Each objective with the defaults of its keys, by its name."""
    return {keys.name: keys.make() for keys in (kind() for kind in OBJECTIVES)}
