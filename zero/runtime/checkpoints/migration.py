"""Checkpoints of earlier formats: where their leaves are in the state of today.

A change of the state's structure is one more entry of `_MOVES`; every reader sees the paths of today only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# From each format to the next: the path of a leaf or of a subtree that moved, and where it is now.
_MOVES: tuple[dict[str, str], ...] = (
    {
        "step": "clock",
        "skipped": "guard/skipped_steps",
        "skipped_in_a_row": "guard/skipped_in_a_row",
        "skipped_spikes": "guard/skipped_spikes",
        "running": "guard/running",
        "ema": "averages/ema",
        "codebook": "averages/codebook",
    },
)
FORMAT = len(_MOVES) + 1  # of checkpoints that are written now; those without a number are of format 1
_BY_LEAF = ("shapes", "dtypes", "checksums")  # the entries of `meta` that have one value per leaf


def migrate(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a checkpoint with the paths of today.

    >>> migrate({"shapes": {"ema/norm/scale": [3], "params/norm/scale": [3]}})["shapes"]
    {'averages/ema/norm/scale': [3], 'params/norm/scale': [3]}
    """
    moves = _MOVES[meta.get("format", 1) - 1 :]
    return {
        key: {_moved(path, moves): x for path, x in value.items()} if key in _BY_LEAF else value
        for key, value in meta.items()
    }


def stored_path(meta: Mapping[str, Any], path: str) -> str:
    """Where the files of a checkpoint with this metadata have the leaf of a path of today.

    >>> stored_path({}, "averages/ema/norm/scale"), stored_path({"format": FORMAT}, "clock")
    ('ema/norm/scale', 'clock')
    """
    moves = _MOVES[meta.get("format", 1) - 1 :]
    return _moved(path, tuple({new: old for old, new in move.items()} for move in reversed(moves)))


def _moved(path: str, moves: tuple[dict[str, str], ...]) -> str:
    for move in moves:
        for old, new in move.items():
            if path == old or path.startswith(f"{old}/"):
                path = new + path[len(old) :]
                break
    return path
