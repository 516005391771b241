"""Constraints on the values of configuration keys, and how values are shown in messages."""

from __future__ import annotations

from typing import Any

import numpy as np

from zero.config.keys import Check

# Programs compute in float32: values that round to 0, 1 or infinity there would divide by zero.
SMALLEST = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)
ONE = 1 - 2.0**-25

DTYPES = ("float32", "bfloat16")
INT32 = 2**31 - 1  # the largest number of a step, a row of a batch or a token on a device
INT64 = 2**63 - 1


def at_least(minimum: int, maximum: int = INT32) -> Check:
    return Check(lambda value: minimum <= value <= maximum, f"at least {minimum}, at most {maximum}")


def zero_or_more() -> Check:
    return Check(lambda value: 0 <= value <= LARGEST, "zero or more, finite in float32")


def positive() -> Check:
    return Check(lambda value: SMALLEST <= value <= LARGEST, "more than 0, as a float32 (1.2e-38 to 3.4e38)")


def fraction() -> Check:
    return Check(lambda value: 0 < value <= 1, "more than 0, at most 1")


def fraction_below_one() -> Check:
    return Check(lambda value: 0 <= value < ONE, "at least 0, less than 1 in float32")


def not_empty() -> Check:
    return Check(lambda value: bool(value.strip()), "a non-empty string")


def random_seed() -> Check:
    return Check(lambda value: 0 <= value < 2**32, "0 to 4294967295")


def one_of(*choices: Any) -> Check:
    return Check(lambda value: value in choices, f"one of {', '.join(map(str, choices))}")


def list_of(check: Check) -> Check:
    """A list with at least one element, each of which satisfies `check`."""
    return Check(
        lambda values: bool(values) and all(map(check.holds, values)), f"a list, each element {check.expected}"
    )


def map_of(check: Check, *names: str) -> Check:
    """A mapping from some of these names to values that are numbers and satisfy `check`."""

    def holds(values: dict[Any, Any]) -> bool:
        numbers = [value for value in values.values() if type(value) in (int, float)]
        return len(numbers) == len(values) and all(map(check.holds, numbers)) and set(values) <= set(names)

    return Check(holds, f"{{NAME: number, ...}} of {', '.join(names)}, each {check.expected}")


def whole_number(check: Check) -> Check:
    """An integer that satisfies `check`."""
    return Check(lambda value: type(value) is int and check.holds(value), f"a whole number, {check.expected}")


def shown(value: Any) -> str:
    """A value as the command line takes it.

    >>> shown(None), shown(True), shown(0.5), shown([1, 2])
    ('null', 'true', '0.5', '[1, 2]')
    """
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_stages(value: Any) -> bool:
    """Whether a value is a list of pairs of whole numbers above 0, steps and a size."""
    return isinstance(value, list) and all(
        isinstance(stage, list) and len(stage) == 2 and all(type(x) is int and 1 <= x <= INT32 for x in stage)
        for stage in value
    )
