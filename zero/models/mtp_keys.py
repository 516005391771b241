"""The key of the further layer, which parts that count layers read as well (`zero.models.mtp`)."""

from __future__ import annotations

from dataclasses import dataclass

from zero.base.keys import key
from zero.models.part import Sizes


@dataclass(frozen=True)
class MtpKeys(Sizes):
    """The key of the further layer."""

    predictor: bool = key(
        False,
        None,
        "a further layer, like the last one, that predicts the token after the next one; objective=multi_token trains "
        "it, sampling leaves it out",
    )

    @property
    def layer_count(self) -> int:
        """Layers, with the further one."""
        return self.N + self.predictor
