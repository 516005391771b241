"""Constraints on the values of configuration keys, as fields of the dataclasses in sections.py (omegaconf).

The type says whether a key may be null; null is not checked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from omegaconf import MISSING


class Check(NamedTuple):
    """What a value has to satisfy, and how a message says it."""

    holds: Callable[[Any], bool]
    expected: str


def checked(holds: Callable[[Any], bool], expected: str) -> Any:
    """A key whose value must satisfy `holds`. Its default is in conf/config.yaml, and nowhere else."""
    return dataclasses.field(default=MISSING, metadata={"check": Check(holds, expected)})


def at_least(minimum: int) -> Any:
    return checked(lambda value: value >= minimum, f"at least {minimum}")


def zero_or_more() -> Any:
    return checked(lambda value: 0 <= value < math.inf, "zero or more")


def positive() -> Any:
    return checked(lambda value: 0 < value < math.inf, "more than 0")


def fraction() -> Any:
    return checked(lambda value: 0 < value <= 1, "more than 0, at most 1")


def fraction_below_one() -> Any:
    return checked(lambda value: 0 <= value < 1, "at least 0, less than 1")


def random_seed() -> Any:
    return checked(lambda value: 0 <= value < 2**32, "0 to 4294967295")


def one_of(*choices: Any) -> Any:
    return checked(lambda value: value in choices, f"one of {', '.join(map(str, choices))}")


def list_of(key: Any) -> Any:
    """A list with at least one element, each of which satisfies the check of `key`."""
    holds, expected = key.metadata["check"]
    return checked(lambda values: bool(values) and all(map(holds, values)), f"a list, each element {expected}")
