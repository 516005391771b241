"""The table of objectives: the choices of the group `objective`, the default first."""

from __future__ import annotations

from zero.training.dpo import Dpo
from zero.training.objective import Keys, Likelihood

OBJECTIVES: tuple[type[Keys], ...] = (Likelihood, Dpo)
