"""The metrics of a line, each declared beside the code that adds it."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """Metrics that are explained together.

    Attributes:
      names: as in the lines; words in capitals, and ..., stand for any text.
      sentence: their meaning, with units.
    """

    names: tuple[str, ...]
    sentence: str
