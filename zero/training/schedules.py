"""Schedules of the learning rate and of the sequence length."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from zero.base.keys import Check, Mistakes, at_least, choice_name, is_stages, key, named, shown, zero_or_more


@dataclasses.dataclass(frozen=True)
class ScheduleKeys:
    """The keys of the learning rate, in section `training`."""

    peak_learning_rate: float = key(3.0e-3, zero_or_more(), "Learning rate at the end of the warmup.")
    end_learning_rate: float = key(
        3.0e-4,
        zero_or_more(),
        "Learning rate at total_steps, where cosine, linear and wsd schedules end.",
    )
    warmup_steps: int = key(20, at_least(0), "Steps over which the learning rate rises linearly from 0 to its peak.")
    total_steps: int = key(
        960,
        at_least(1),
        "Optimizer steps of the run; here 8 sequences x 256 tokens x 960 steps = 1,966,080 tokens.",
        in_steps=True,
    )

    def rate_mistakes(self) -> Mistakes:
        if self.warmup_steps >= self.total_steps:
            yield "training.warmup_steps", f"fewer than training.total_steps={self.total_steps}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The keys shared by all choices of the group `schedule`."""

    name: str
    decay_steps: ClassVar[int | None] = None
    decay_end: ClassVar[int | None] = None
    has_end: ClassVar[bool] = True  # training.end_learning_rate

    def mistakes(self, rate: ScheduleKeys) -> Mistakes:
        left = rate.total_steps - rate.warmup_steps
        if self.decay_steps is not None and self.decay_steps > left:
            yield "schedule.decay_steps", f"at most {left}, the steps after the warmup"
        if self.decay_end is not None and self.decay_end <= rate.warmup_steps:
            yield "schedule.decay_end", f"more than training.warmup_steps={rate.warmup_steps}"


@dataclasses.dataclass(frozen=True)
class _Ending(Schedule):
    decay_end: int | None = key(  # type: ignore[misc]
        None, at_least(1), "The step at which the rate reaches training.end_learning_rate; null: total_steps."
    )


@dataclasses.dataclass(frozen=True)
class Cosine(_Ending):
    """Half a cosine, to training.end_learning_rate at training.total_steps."""

    name: str = named("cosine")


@dataclasses.dataclass(frozen=True)
class Linear(_Ending):
    """A line, to training.end_learning_rate at training.total_steps."""

    name: str = named("linear")


@dataclasses.dataclass(frozen=True)
class RampedCosine(_Ending):
    """A cosine that falls from step 0 on, times the warmup, as in GPT-Neo."""

    name: str = named("ramped_cosine")


@dataclasses.dataclass(frozen=True)
class InverseSqrt(Schedule):
    """peak * sqrt(warmup_steps / step) (arXiv 1706.03762)."""

    name: str = named("inverse_sqrt")
    has_end: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """training.peak_learning_rate in every step after the warmup."""

    name: str = named("constant")
    has_end: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Wsd(Schedule):
    """Constant, with a linear end (arXiv 2404.06395)."""

    name: str = named("wsd")
    decay_steps: int | None = key(  # type: ignore[misc]
        None, at_least(1), "Steps of the linear decay at the end; null: a tenth of total_steps, at least 1."
    )


@dataclasses.dataclass(frozen=True)
class SqrtDecay(Schedule):
    """peak * sqrt(warmup_steps / max(step, warmup_steps)), without a warmup, as in Lingvo."""

    name: str = named("sqrt_decay")
    has_end: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """Linear warmup to `peak` over `warmup_steps`, then `schedule`.

    Called with the number of updates attempted before this one. The first rate is above 0; the last one is `end`, if
    the schedule has one.

    Attributes:
      peak, end: the largest rate (of ramped_cosine that without the ramp), and the rate at `decay_end`, or
        `total_steps`, unused by inverse_sqrt, sqrt_decay and constant.
      warmup_steps, total_steps: updates.
      schedule: cosine or linear from `peak` to `end`; inverse_sqrt, `peak` times the root of `warmup_steps / step`
        (arXiv 1706.03762, section 5.3); constant; or wsd, warmup-stable-decay: constant, then linear to `end` (arXiv
        2404.06395, section 4); or sqrt_decay, `peak` times the root of `warmup_steps / max(step, warmup_steps)`,
        without a ramp, as in Lingvo.
        ramped_cosine, a cosine from step 0 to `end`, times a ramp over the warmup, as in GPT-Neo.
      decay_steps: updates of the decay of wsd.
      decay_end: the step at which a cosine or linear schedule has reached `end`, where it stays; None: `total_steps`.

    >>> float(LearningRate(1.0, 0.1, warmup_steps=4, total_steps=10)(0))
    0.25
    """

    peak: float
    end: float
    warmup_steps: int
    total_steps: int
    schedule: str = "cosine"
    decay_steps: int = 0
    decay_end: int | None = None

    @property
    def last(self) -> int:
        """The step at which the schedule has reached `end`."""
        return self.total_steps if self.decay_end is None else self.decay_end

    def __call__(self, step: ArrayLike) -> jax.Array:
        return CURVES[self.schedule](self)(step + 1)


def _cosine(rate: LearningRate) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, rate.peak, rate.warmup_steps, rate.last, rate.end)


def _ramped_cosine(rate: LearningRate) -> optax.Schedule:
    """Source: `optimizers.py` of GPT-Neo."""
    cosine = optax.cosine_decay_schedule(rate.peak, rate.last, rate.end / rate.peak if rate.peak else 0.0)
    return lambda step: cosine(step) * jnp.minimum(step / max(rate.warmup_steps, 1), 1)


def _after_warmup(after: Callable[[LearningRate], optax.Schedule]) -> Callable[[LearningRate], optax.Schedule]:
    """A linear warmup, continued by `after`, whose step 0 is the last one of the warmup."""

    def schedule(rate: LearningRate) -> optax.Schedule:
        warmup = optax.linear_schedule(0.0, rate.peak, rate.warmup_steps)
        return optax.join_schedules([warmup, after(rate)], [rate.warmup_steps])

    return schedule


def _linear(rate: LearningRate) -> optax.Schedule:
    return optax.linear_schedule(rate.peak, rate.end, rate.last - rate.warmup_steps)


def _inverse_sqrt(rate: LearningRate) -> optax.Schedule:
    warmup = max(rate.warmup_steps, 1)
    return lambda step: rate.peak * jnp.sqrt(warmup / (step + warmup))


def _wsd(rate: LearningRate) -> optax.Schedule:
    left = rate.total_steps - rate.warmup_steps
    return optax.linear_schedule(rate.peak, rate.end, rate.decay_steps, left - rate.decay_steps)


def _sqrt_decay(rate: LearningRate) -> optax.Schedule:
    warmup = max(rate.warmup_steps, 1)
    return lambda step: rate.peak * jnp.sqrt(warmup / jnp.maximum(step, warmup))


WITH_DECAY_END = ("cosine", "ramped_cosine", "linear")  # take `decay_end`
_CURVES: Mapping[type[Schedule], Callable[[LearningRate], optax.Schedule]] = MappingProxyType(
    {
        Cosine: _cosine,
        RampedCosine: _ramped_cosine,
        Linear: _after_warmup(_linear),
        InverseSqrt: _after_warmup(_inverse_sqrt),
        Constant: _after_warmup(lambda rate: optax.constant_schedule(rate.peak)),
        Wsd: _after_warmup(_wsd),
        SqrtDecay: _sqrt_decay,
    }
)
SCHEDULES = tuple(_CURVES)  # the choices of the group `schedule`, the default first
CURVES = MappingProxyType({choice_name(kind): curve for kind, curve in _CURVES.items()})


def learning_rate(keys: ScheduleKeys, schedule: Schedule) -> LearningRate:
    """The learning rate of a configuration, as a function of the step."""
    after_warmup = keys.total_steps - keys.warmup_steps
    return LearningRate(
        keys.peak_learning_rate,
        keys.end_learning_rate,
        keys.warmup_steps,
        keys.total_steps,
        schedule.name,
        schedule.decay_steps or min(max(1, keys.total_steps // 10), after_warmup),
        schedule.decay_end,
    )


STAGES = "[[steps, tokens per sequence], ...]"


@dataclasses.dataclass(frozen=True)
class LengthKeys:
    """The keys of the length of sequences, in section `training`."""

    staged_warmup_steps: int = key(
        280,
        at_least(0),
        "Steps at the start with short sequences, with the number of tokens per step unchanged; 0: off.",
    )
    warmup_train_context: int = key(64, None, "Tokens per sequence during the staged_warmup_steps.")
    context_stages: Any = key(
        None,
        Check(lambda value: value in (None, "linear") or is_stages(value), f"linear, {STAGES}, or null"),
        "Sequence length by stage; null: warmup_train_context for staged_warmup_steps, then max_context.",
        "linear: grows from warmup_train_context to max_context over the staged_warmup_steps.",
        "[[200, 64], [80, 128]]: 200 steps of 64 tokens, then 80 of 128, then max_context, whatever "
        "staged_warmup_steps and warmup_train_context are.",
    )

    def stages(self) -> tuple[tuple[int, int], ...]:
        """Steps and tokens per sequence of each stage of the warmup; linear growth counts as one."""
        if isinstance(self.context_stages, list):
            return tuple((steps, length) for steps, length in self.context_stages)
        if not self.staged_warmup_steps:
            return ()
        return ((self.staged_warmup_steps, self.warmup_train_context),)

    def lengths(self, full: int, has_last_target: bool) -> SequenceLengths:
        """The tokens of a sequence at each step, up to `full`."""
        if self.context_stages == "linear":
            shortest = self.warmup_train_context
            steps = self.staged_warmup_steps
            return SequenceLengths.linear(full, shortest, steps, has_last_target=has_last_target)
        return SequenceLengths(full, self.stages(), has_last_target)

    def length_mistakes(self, max_context: int) -> Mistakes:
        key = "context_stages" if isinstance(self.context_stages, list) else "warmup_train_context"
        if any(length < 2 or max_context % length for _, length in self.stages()):
            yield f"training.{key}", f"a divisor of data.max_context={max_context}, at least 2"
        elif key == "context_stages" and {length for _, length in self.stages()} == {max_context}:
            yield "training.context_stages", f"a stage of less than data.max_context={max_context} tokens, or null"

    def without_effect(self) -> Mistakes:
        """Keys that others replace, each with the reason."""
        if isinstance(self.context_stages, list):
            reason = f"training.context_stages={shown(self.context_stages)}"
            yield "training.warmup_train_context", reason
            if self.staged_warmup_steps:
                yield "training.staged_warmup_steps", reason
        elif self.staged_warmup_steps == 0:
            yield "training.warmup_train_context", "training.staged_warmup_steps=0"
            if self.context_stages is not None:
                yield "training.context_stages", "training.staged_warmup_steps=0"


@dataclasses.dataclass(frozen=True)
class SequenceLengths:
    """Staged sequence-length warmup: short sequences first, at an unchanged number of tokens per step.

    Source: Li et al., The Stability-Efficiency Dilemma, arXiv 2108.06084.

    Attributes:
      full: tokens of a sequence after the last stage, `max_context`.
      stages: `(steps, tokens of a sequence)`, one stage after the other.
      has_last_target: rows have one token more than a sequence, the target of its last position, and so has each piece.

    Raises:
      ValueError: rows of `full` tokens cannot be cut into sequences of a stage.
    """

    full: int
    stages: tuple[tuple[int, int], ...] = ()
    has_last_target: bool = False

    def __post_init__(self) -> None:
        for _, context in self.stages:
            if context < 1 or self.full % context:
                raise ValueError(f"rows of {self.full} tokens cannot be cut into sequences of {context}")

    @classmethod
    def linear(cls, full: int, shortest: int, steps: int, *, has_last_target: bool = False) -> SequenceLengths:
        """Grows to `full` within `steps`: always the longest divisor of `full` on or below a line from `shortest`.

        >>> SequenceLengths.linear(1024, 128, 70).stages
        ((10, 128), (20, 256), (40, 512))
        """
        lengths = [length for length in range(shortest, full + 1) if full % length == 0]
        starts = [math.ceil(steps * (length - shortest) / max(full - shortest, 1)) for length in lengths]
        return cls(full, tuple(zip(np.diff(starts).tolist(), lengths[:-1], strict=True)), has_last_target)

    def at(self, step: int) -> int:
        """Tokens of a sequence at this step."""
        for steps, context in self.stages:
            if step < steps:
                return context
            step -= steps
        return self.full

    def cut(self, tokens: np.ndarray, step: int) -> np.ndarray:
        """Cuts rows `(B, full)` into `(B * full / context, context)`; the pieces of a row stay neighbors.

        >>> SequenceLengths(4, ((1, 2),), has_last_target=True).cut(np.arange(5)[None], 0).tolist()
        [[0, 1, 2], [2, 3, 4]]
        """
        context = self.at(step)
        if not self.has_last_target:
            return tokens.reshape(-1, context)
        columns = np.arange(0, self.full, context)[:, None] + np.arange(context + 1)[None]
        return tokens[:, columns].reshape(-1, context + 1)
