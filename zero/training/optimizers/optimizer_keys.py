"""The keys of all optimizers, and the keys that several of them share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from zero.base.keys import DTYPES, Mistakes, fraction_below_one, key, one_of, positive, zero_or_more
from zero.models.config import GPTConfig

STATE_DTYPES = (*DTYPES, "int8")


@dataclass(frozen=True)
class DecayKeys:
    """The keys of all optimizers in section `training`."""

    weight_decay: float = key(
        0.1,
        zero_or_more(),
        "Decoupled weight decay of matrices and embeddings, times the learning rate; sgd adds it to the gradient.",
    )


@dataclass(frozen=True)
class Optimizer:
    """What all optimizers have; an optimizer may have the keys below as well."""

    name: str
    state_dtype: ClassVar[str] = "float32"
    decay: ClassVar[str] = "rate"

    def weight_decay(self, keys: DecayKeys, peak: float) -> float:
        """The factor of weight decay; independent decay divides it by the peak learning rate."""
        return keys.weight_decay / (peak if self.decay == "independent" else 1)

    def mistakes(self, model_config: GPTConfig, model_label: str, peak: float) -> Mistakes:
        for name in ("decay", "scaled_eps"):
            if model_config.parametrization == "standard" and getattr(self, name, None) in ("coupled", True):
                yield f"optimizer.{name}", f"another value, as {model_label} is not in mup"
        if self.decay in ("independent", "constant") and peak == 0:
            yield "optimizer.decay", "rate, as training.peak_learning_rate=0"

    def hyperparameters(self) -> dict[str, Any]:
        """The arguments of the optimizer that are not null."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value for name, value in values.items() if name not in ("name", "state_dtype") and value is not None
        }


def state_dtype(moments: str, *, fixed: bool = True) -> Any:
    sentence = f"{moments} of matrices and embeddings: float32, bfloat16 or int8."
    return key("float32", one_of(*STATE_DTYPES), sentence, fixed=fixed)


def decay() -> Any:
    return key(
        "rate",
        one_of("rate", "coupled", "independent", "constant"),
        "The factor of weight decay. rate: the learning rate. coupled: in muP, the learning rate of the array. "
        "independent: the learning rate divided by its peak. constant: 1 at every step.",
        fixed=True,
    )


def b1(default: float | None, sentence: str = "Decay of the mean of gradients.") -> Any:
    return key(default, fraction_below_one(), sentence, fixed=True)


def b2(default: float) -> Any:
    return key(default, fraction_below_one(), "Decay of the mean of their squares.", fixed=True)


def eps(default: float, sentence: str = "Added to the root of the mean square.") -> Any:
    return key(default, positive(), sentence, fixed=True)
