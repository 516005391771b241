"""The key of the further layer, which parts that count layers read as well (`zero.models.predictor`)."""

from __future__ import annotations

from dataclasses import dataclass

from zero.models.part import Sizes, key


@dataclass(frozen=True)
class Depth(Sizes):
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
