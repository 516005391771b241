"""Examines a state before it is saved."""

from __future__ import annotations

import math

from zero.base.errors import Unavailable, UserError
from zero.run.run import Run


def checked_sums(run: Run, validation_loss: float | None = None) -> dict[str, int]:
    """Checksums of the state by leaf.

    Raises:
      UserError: the state or its validation loss is not finite.
      Unavailable: the state differs between copies.
    """
    step = run.position.step
    try:
        sums, not_finite = run.job.storage.examine(run.state)
    except ValueError as error:
        raise Unavailable(
            f"step {step}: {error}; a device, its memory or a link is faulty, or hosts run different programs. This "
            "state is not saved; --resume continues from the previous checkpoint"
        ) from error
    problem = first_few(not_finite, most=3)
    if not problem and validation_loss is not None and not math.isfinite(validation_loss):
        problem = f"validation/loss={validation_loss}"
    if problem:
        raise UserError(
            f"step {step}: {problem} not finite; this state is not saved. Lower training.peak_learning_rate and "
            "--resume from an earlier checkpoint (data.resume_step), or start again"
        )
    return sums


def first_few(names: list[str], most: int) -> str:
    """The first names of a list.

    >>> first_few(["a", "b", "c"], most=3), first_few(["a", "b", "c"], most=2), first_few([], most=2)
    ('a, b, c', 'a, b, ...', '')
    """
    if len(names) > most:
        return ", ".join([*names[:most], "..."])
    return ", ".join(names)
