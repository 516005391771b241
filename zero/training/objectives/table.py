"""The table of objectives: the choices of the group `objective`, the default first."""

from __future__ import annotations

from zero.training.objectives.classification import Classification
from zero.training.objectives.distillation import Distillation
from zero.training.objectives.dpo import Dpo
from zero.training.objectives.kto import Kto
from zero.training.objectives.mtp import Mtp
from zero.training.objectives.objective import Likelihood, Objective, ObjectiveKeys
from zero.training.objectives.orpo import Orpo
from zero.training.objectives.reward import Reward
from zero.training.objectives.simpo import Simpo

OBJECTIVES: tuple[type[ObjectiveKeys], ...] = (
    Likelihood,
    Dpo,
    Orpo,
    Simpo,
    Kto,
    Distillation,
    Mtp,
    Reward,
    Classification,
)


def with_defaults() -> dict[str, Objective]:
    """Each objective with the defaults of its keys, by its name."""
    return {keys.name: keys.objective() for keys in (kind() for kind in OBJECTIVES)}
