"""Keys that a resume may change and that reinterpret the steps before it: each change is told with both values."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Protocol, TypeVar

from zero.base.keys import choice_name, shown
from zero.training.schedules import SCHEDULES, LengthKeys, Schedule, ScheduleKeys, learning_rate

log = logging.getLogger(__name__)


class _IsDataclass(Protocol):
    """What type checkers know every dataclass by."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


_Section = TypeVar("_Section", bound=_IsDataclass)


@dataclass(frozen=True)
class Past:
    """The keys by which a step before a resume decides what a later one does."""

    rate: ScheduleKeys
    schedule: Schedule
    lengths: LengthKeys
    max_context: int

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Past:
        """From the configuration that a run was last started with; keys that it lacks have their defaults."""
        training, schedule = record["training"], record.get("schedule", {})  # a section that early runs lack
        kind = {choice_name(kind): kind for kind in SCHEDULES}[schedule.get("name", choice_name(SCHEDULES[0]))]
        return cls(
            _from(ScheduleKeys, training),
            _from(kind, schedule),
            _from(LengthKeys, training),
            record["data"]["max_context"],
        )

    def changes(self, now: Past, step: int) -> Iterator[str]:
        """A line for each value of the next step that would be another one without the change."""
        old_rate, new_rate = (f"{past._rate(step):.4g}" for past in (self, now))
        if self._rate(step) != now._rate(step):
            keys = _differences("training", self.rate, now.rate) + _differences("schedule", self.schedule, now.schedule)
            yield _line(keys, step, "the learning rate", old_rate, new_rate)
        if self._tokens(step) != now._tokens(step):
            keys = _differences("training", self.lengths, now.lengths)
            yield _line(keys, step, "the sequence length", str(self._tokens(step)), str(now._tokens(step)))

    def _rate(self, step: int) -> float:
        return float(learning_rate(self.rate, self.schedule)(step))

    def _tokens(self, step: int) -> int:
        return self.lengths.lengths(self.max_context, has_last_target=False).at(step)


def _line(keys: list[str], step: int, what: str, before: str, now: str) -> str:
    return (
        f"{', '.join(keys)}: {what} of step {step + 1} changes from {before} to {now}; the resume is not the "
        "continuation that the run would have had"
    )


def _from(kind: type[_Section], section: Mapping[str, Any]) -> _Section:
    names = [field.name for field in fields(kind)]
    return kind(**{name: section[name] for name in names if name in section})


def _differences(section: str, before: Any, now: Any) -> list[str]:
    """The keys of the first that have another value in the second, which may have further ones."""
    return [
        f"{section}.{field.name} from {shown(getattr(before, field.name))} to {shown(getattr(now, field.name, None))}"
        for field in fields(before)
        if getattr(before, field.name) != getattr(now, field.name, None)
    ]


def warn_of_remat(before: str | None, now: str, step: int) -> None:
    """Logs that other activations are recomputed than up to a step, which another machine may choose (auto)."""
    if before is not None and before != now:
        log.warning(
            "zero.remat was %s up to step %d and is %s from now on: results are equal to rounding, not to the bit; "
            "zero.remat=%s keeps the bits",
            before,
            step,
            now,
            before,
        )


def warn_of_changes(record: Mapping[str, Any], now: Past, step: int) -> None:
    """Logs a line for each change since the last start of a run, whose configuration is `record`."""
    for line in Past.from_record(record).changes(now, step):
        log.warning("%s", line)
