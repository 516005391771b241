"""What all optimizers have in the configuration, and the keys that several of them have."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from zero.config.constraints import DTYPES, fraction_below_one, one_of, positive
from zero.config.keys import key

STATE_DTYPES = (*DTYPES, "int8")


@dataclass
class Optimizer:
    """What all optimizers have; an optimizer may have the keys below as well."""

    name: str
    state_dtype: ClassVar[str] = "float32"
    decay: ClassVar[str] = "rate"

    def hyperparameters(self) -> dict[str, Any]:
        """The arguments of the optimizer that are not null."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value for name, value in values.items() if name not in ("name", "state_dtype") and value is not None
        }


def state_dtype(moments: str) -> Any:
    return key("float32", one_of(*STATE_DTYPES), f"{moments} of matrices and embeddings: float32, bfloat16 or int8.")


def decay() -> Any:
    return key(
        "rate",
        one_of("rate", "coupled", "independent", "constant"),
        "Factor of weight decay: rate, the learning rate; coupled, that of the array, in muP; independent, the rate "
        "over its peak; constant, 1 at every step.",
    )


def b1(default: float | None, sentence: str = "Decay of the mean of gradients.") -> Any:
    return key(default, fraction_below_one(), sentence)


def b2(default: float) -> Any:
    return key(default, fraction_below_one(), "Decay of the mean of their squares.")


def eps(default: float, sentence: str = "Added to the root of the mean square.") -> Any:
    return key(default, positive(), sentence)
