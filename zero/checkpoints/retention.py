"""Which checkpoints orbax deletes after a save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Saved(NamedTuple):
    """The facts about a checkpoint that retention uses: its validation loss, if finite, and its time in seconds."""

    loss: float | None
    time: float | None


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: orbax's preservation policy, whose own `BestN` reads only losses in its own files.

    Attributes:
      newest: how many of the newest are kept, besides the one with the lowest validation loss.
      every: checkpoints whose step is a multiple of this are kept as well; None: no such rule.
      hours: the first checkpoint is kept as well, and each that was saved this many hours after the last one kept by
        this rule, or before it by a clock that was wrong; None: no such rule.
      saved: returns the facts about each existing checkpoint, by step.
    """

    newest: int
    every: int | None = None
    hours: float | None = None
    saved: Callable[[], dict[int, Saved]] = dict

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]  # in the order of saving
        known = self.saved()
        losses = {step: saved.loss for step, saved in known.items() if saved.loss is not None and step in steps}
        kept = set(steps[-self.newest :])
        if losses:
            kept.add(best_of(losses))
        if self.every is not None:
            kept |= {step for step in steps if step % self.every == 0}
        if self.hours is not None:
            kept |= self._apart(steps, {step: saved.time for step, saved in known.items() if saved.time is not None})
        return [step in kept for step in steps]

    def _apart(self, steps: Sequence[int], times: dict[int, float]) -> set[int]:
        """The first step, and each that was saved `hours` after the one kept before it.

        So is a step that was saved earlier than the one before it: a clock was wrong, and how far apart the two are is
        unknown.
        """
        kept: list[int] = []
        for step in (step for step in steps if step in times):
            if not kept or not 0 <= times[step] - times[kept[-1]] < 3600 * (self.hours or 0):
                kept.append(step)
        return set(kept)


def best_of(losses: Mapping[int, float]) -> int:
    """The step with the lowest loss, the last of several.

    >>> best_of({5: 0.4, 10: 0.3, 15: 0.3, 20: 0.5})
    15
    """
    return min(losses, key=lambda step: (losses[step], -step))
