"""A task for each part of a source."""

from __future__ import annotations

from collections.abc import Iterable

from zero.corpus.preparing.processes import Task
from zero.corpus.preparing.sources.source import Source


def part_tasks(source: Source, numbers: Iterable[int] | None = None) -> list[Task]:
    """Tasks whose argument is the number and the source of a part; of all parts, or of these."""
    chosen = range(source.parts) if numbers is None else numbers
    return [Task(f"part {number} ({source.part(number)})", (number, source.part(number))) for number in chosen]
