"""The rules by which orbax deletes checkpoints after a save."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zero.base.keys import LARGEST, SMALLEST, Check, at_least, key


class Saved(NamedTuple):
    """The facts about a checkpoint that retention uses: its validation loss, if finite, and its time in seconds."""

    loss: float | None
    time: float | None


def hours_of(value: Any) -> float | None:
    """The hours of a text such as 2h; None of anything else.

    >>> hours_of("2h"), hours_of("0.5h"), hours_of("2"), hours_of("0h"), hours_of("2d"), hours_of(2)
    (2.0, 0.5, None, None, None, None)
    """
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]*\.?[0-9]+(e[+-]?[0-9]+)?h", value):
        return None
    hours = float(value.removesuffix("h"))
    return hours if SMALLEST <= hours <= LARGEST else None


def steps_or_hours() -> Check:
    """A number of steps, hours such as 2h, or null."""
    steps = at_least(1)

    def holds(value: Any) -> bool:
        return value is None or hours_of(value) is not None or (type(value) is int and steps.holds(value))

    return Check(holds, f"a number of steps, {steps.expected}, or hours such as 2h or 0.5h, or null")


@dataclass(frozen=True)
class RetentionKeys:
    """Which checkpoints are kept: keys of section `data`."""

    keep_checkpoints: int = key(
        3,
        at_least(1),
        "How many of the newest checkpoints to keep; the best one by validation/loss is always kept as well.",
    )
    keep_every: Any = key(
        None,
        steps_or_hours(),
        "1000: also keep checkpoints whose step is a multiple of 1000; null: off.",
        "2h: also keep the first checkpoint, and each that was saved at least 2 hours after the last one kept this "
        "way.",
    )

    def retention(self) -> Retention:
        """The rules of these keys."""
        hours = hours_of(self.keep_every)
        if hours is None:
            return Retention(self.keep_checkpoints, every=self.keep_every)
        return Retention(self.keep_checkpoints, hours=hours)


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: orbax's preservation policy, because its `BestN` only reads losses in its own files.

    Attributes:
      newest: how many of the newest to keep, besides the one with the lowest validation loss.
      every: also keep checkpoints whose step is a multiple of this; None: off.
      hours: also keep the first checkpoint, and each one saved at least this many hours after the last one kept by this
        rule, or before it because a clock was wrong; None: off.
      saved: returns the facts about each existing checkpoint, by step.
    """

    newest: int
    every: int | None = None
    hours: float | None = None
    saved: Callable[[], dict[int, Saved]] = dict

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]  # in the order of saving
        known = self.saved()
        existing = set(steps)
        losses = {step: saved.loss for step, saved in known.items() if saved.loss is not None and step in existing}
        kept = set(steps[-self.newest :])
        if losses:
            kept.add(best_of(losses))
        if self.every is not None:
            kept |= {step for step in steps if step % self.every == 0}
        if self.hours is not None:
            kept |= self._apart(steps, {step: saved.time for step, saved in known.items() if saved.time is not None})
        return [step in kept for step in steps]

    def _apart(self, steps: Sequence[int], times: dict[int, float]) -> set[int]:
        """The first step, and each step saved `hours` after the previously kept one.

        A step that was saved earlier than its predecessor is kept too: a clock was wrong, so their distance is unknown.
        """
        kept: list[int] = []
        for step in (step for step in steps if step in times):
            if not kept or not 0 <= times[step] - times[kept[-1]] < 3600 * (self.hours or 0):
                kept.append(step)
        return set(kept)


def best_of(losses: Mapping[int, float]) -> int:
    """The step with the lowest loss; of equal ones the last.

    >>> best_of({5: 0.4, 10: 0.3, 15: 0.3, 20: 0.5})
    15
    """
    return min(losses, key=lambda step: (losses[step], -step))
