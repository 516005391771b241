"""Whether a value of `data.index_path_train` is a weighted mixture of index files."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from zero.config.constraints import INT32, SMALLEST
from zero.corpus.reading.order import weight_stages


def _is_weight(value: Any, lowest: float = 0) -> bool:
    return type(value) in (int, float) and lowest <= value < math.inf


def _is_curve(value: Any) -> bool:
    """Whether a value is [[step, weight], ...] with rising steps from 0 on, and a weight above 0 among them."""
    if not isinstance(value, list) or not value:
        return False
    pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2]
    if len(pairs) < len(value) or not all(type(step) is int and _is_weight(weight) for step, weight in pairs):
        return False
    steps, weights = zip(*pairs, strict=True)
    return steps[0] == 0 and all(a < b <= INT32 for a, b in itertools.pairwise(steps)) and max(weights) > 0


def is_mixture(value: Any) -> bool:
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        return False
    is_whole = all(
        entry.keys() == {"index", "weight"}
        and isinstance(entry["index"], str)
        and (_is_weight(entry["weight"], lowest=SMALLEST) or _is_curve(entry["weight"]))
        for entry in value
    )
    if not is_whole or not all(sum(weights) > 0 for _, weights in weight_stages(entry["weight"] for entry in value)):
        return False
    # The metrics name a corpus by the stem of its index file.
    return len({Path(entry["index"]).stem for entry in value}) == len(value)
