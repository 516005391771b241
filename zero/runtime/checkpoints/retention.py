"""Which checkpoints orbax deletes after a save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Saved(NamedTuple):
    """What retention depends on: the validation loss, if it is finite, and the time of saving in seconds."""

    loss: float | None
    time: float | None


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: orbax's preservation policy, whose own `BestN` reads only losses in its own files.

    Attributes:
      newest: the number of the last checkpoints; the one with the lowest validation loss is kept as well.
      every: those whose step is a multiple of this; None: none.
      hours: the first one, and from then on the first one that was saved this many hours later; None: none.
      saved: of existing checkpoints, by step.
    """

    newest: int
    every: int | None = None
    hours: float | None = None
    saved: Callable[[], dict[int, Saved]] = dict

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]  # in the order of saving
        known = self.saved()
        losses = {step: saved.loss for step, saved in known.items() if saved.loss is not None}
        kept = set(steps[-self.newest :])
        kept |= {min((step for step in steps if step in losses), key=lambda step: (losses[step], -step), default=-1)}
        if self.every is not None:
            kept |= {step for step in steps if step % self.every == 0}
        if self.hours is not None:
            kept |= self._apart(steps, {step: saved.time for step, saved in known.items() if saved.time is not None})
        return [step in kept for step in steps]

    def _apart(self, steps: Sequence[int], times: dict[int, float]) -> set[int]:
        """The first step, and each whose time is `hours` after that of the one before in the set."""
        kept: list[int] = []
        for step in (step for step in steps if step in times):
            if not kept or times[step] - times[kept[-1]] >= 3600 * (self.hours or 0):
                kept.append(step)
        return set(kept)
