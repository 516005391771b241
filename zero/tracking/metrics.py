"""What a line of metrics holds: the names of metrics, each declared beside what adds it."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """Metrics that are explained together.

    Attributes:
      names: as in the lines; words in capitals, and ..., stand for any text.
      sentence: what they mean, with their units.
    """

    names: tuple[str, ...]
    sentence: str
