"""What a card of a page shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """A line of a card: `best validation loss | 1.3746 | at step 960`. The grade, good or bad, colors the value."""

    name: str
    value: str
    note: str = ""
    grade: str = ""
