"""Rotary frequencies for contexts longer than those of the original training.

Shapes are named by suffix: R pairs of rotated dimensions
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np


class Scaling(NamedTuple):
    """A kind of `rotary_scaling`.

    Attributes:
      scaled: `(frequencies_R, base, *numbers)` to scaled frequencies and the factor of cosines and sines; where there
        is a switch the number of positions comes before the numbers.
      form: the numbers, in words.
      fits: whether there are such numbers, all of them more than 0.
      switch: which of the numbers is that of positions beyond which the length of a row changes frequencies.
    """

    scaled: Callable[..., tuple[np.ndarray, float]]
    form: str
    fits: Callable[[tuple[float, ...]], bool]
    switch: int | None = None


def _linear(frequencies_R: np.ndarray, base: float, factor: float) -> tuple[np.ndarray, float]:
    """Positions are divided by the factor (arXiv 2306.15595, section 2.3)."""
    return frequencies_R / factor, 1.0


def _llama3(
    frequencies_R: np.ndarray, base: float, factor: float, low: float, high: float, original: float
) -> tuple[np.ndarray, float]:
    """As in Llama 3.1 (arXiv 2407.21783, section 3.4.1).

    Wavelengths beyond `original / low` are stretched by the factor, those below `original / high` are kept, and those
    between are interpolated.
    """
    turns_R = original * frequencies_R / (2 * math.pi)  # in the context of the original training
    kept_R = np.clip((turns_R - low) / (high - low), 0, 1)
    return frequencies_R * (kept_R + (1 - kept_R) / factor), 1.0


def _yarn(
    frequencies_R: np.ndarray,
    base: float,
    factor: float,
    original: float,
    fast: float,
    slow: float,
    length: float,
    *,
    is_rounded: bool = True,
) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071, sections 3.2 and 3.3), with the ends of its ramp rounded outwards, as in its own code.

    Pairs that turn more than `fast` times in the original context are kept, those that turn less than `slow` times are
    stretched by the factor.
    """
    pairs = len(frequencies_R)

    def pair_of(turns: float) -> float:
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(base)

    ends = pair_of(fast), pair_of(slow)
    ends = (math.floor(ends[0]), math.ceil(ends[1])) if is_rounded else ends
    first = max(ends[0], 0)
    last = min(ends[1], 2 * pairs - 1)
    stretched_R = np.clip((np.arange(pairs) - first) / max(last - first, 0.001), 0, 1)
    return frequencies_R * (1 - stretched_R + stretched_R / factor), length


def _dynamic(
    frequencies_R: np.ndarray, base: float, positions: int, factor: float, original: float
) -> tuple[np.ndarray, float]:
    """The base grows with the positions beyond the original context, as transformers has it (NTK-aware, dynamic)."""
    rotated = 2 * len(frequencies_R)
    growth = (factor * max(positions, original) / original - (factor - 1)) ** (rotated / (rotated - 2))
    return frequencies_R * growth ** -(np.arange(0, rotated, 2) / rotated), 1.0


def _longrope(
    frequencies_R: np.ndarray, base: float, positions: int, original: float, length: float, *divisors: float
) -> tuple[np.ndarray, float]:
    """LongRoPE (arXiv 2402.13753, section 3.2): divisors for rows of up to the original context, then for longer."""
    pairs = len(frequencies_R)
    chosen_R = divisors[pairs:] if positions > original else divisors[:pairs]
    return frequencies_R / np.asarray(chosen_R), length


_YARN_FORM = "factor, original context, fast turns, slow turns, factor of cosines and sines"


def _fits_yarn(numbers: tuple[float, ...]) -> bool:
    return len(numbers) == 5 and numbers[3] <= numbers[2]


UNNAMED = "llama3"  # a scaling without a name
SCALINGS = {
    UNNAMED: Scaling(
        _llama3,
        "factor, low and high frequency factor, original context",
        lambda numbers: len(numbers) == 4 and numbers[1] < numbers[2],
    ),
    "linear": Scaling(_linear, "factor", lambda numbers: len(numbers) == 1),
    "yarn": Scaling(_yarn, _YARN_FORM, _fits_yarn),
    "yarn_unrounded": Scaling(partial(_yarn, is_rounded=False), _YARN_FORM, _fits_yarn),
    "dynamic": Scaling(_dynamic, "factor, original context", lambda numbers: len(numbers) == 2, switch=1),
    "longrope": Scaling(
        _longrope,
        "original context, factor of cosines and sines, ...",
        lambda numbers: len(numbers) >= 4 and len(numbers) % 2 == 0,
        switch=0,
    ),
}


def is_scaling(kind: str, numbers: tuple[object, ...]) -> bool:
    """Whether there is such a scaling.

    >>> is_scaling("linear", (4.0,)), is_scaling("linear", ()), is_scaling("cubic", (4.0,))
    (True, False, False)
    """
    positive = [x for x in numbers if isinstance(x, int | float) and x > 0]
    return kind in SCALINGS and len(positive) == len(numbers) and SCALINGS[kind].fits(tuple(positive))


def forms() -> str:
    """The forms of a scaling, for a message."""
    names = ["" if kind == UNNAMED else f"{kind}, " for kind in SCALINGS]
    named = [f"[{name}{scaling.form}]" for name, scaling in zip(names, SCALINGS.values(), strict=True)]
    return f"{', '.join(named[:-1])} or {named[-1]}"
