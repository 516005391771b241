"""Checkpoints of earlier formats: maps their paths to those of the current format.

A change of the state's structure is one more entry of `_LEAVES`; readers see only the current paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero.runtime.errors import UserError

Moves = tuple[dict[str, str], ...]

# For each format, the paths of leaves and subtrees that moved, and their paths in the next format.
_LEAVES: Moves = (
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
FORMAT = len(_LEAVES) + 1  # of checkpoints that are written now; those without a number are of format 1
_BY_PATH = ("shapes", "dtypes", "checksums")  # the entries of `meta` whose keys are paths


def migrate(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a checkpoint with the current paths.

    Raises:
      UserError: a later version wrote it.

    >>> migrate({"shapes": {"ema/norm/scale": [3], "params/norm/scale": [3]}})["shapes"]
    {'averages/ema/norm/scale': [3], 'params/norm/scale': [3]}
    """
    first = meta.get("format", 1) - 1
    if first >= FORMAT:
        raise UserError(f"a checkpoint of format {first + 1}, this version reads formats 1 to {FORMAT}: update zero")
    moves, entries = _LEAVES[first:], [name for name in _BY_PATH if name in meta]
    return {**meta, **{name: {_moved(path, moves): x for path, x in meta[name].items()} for name in entries}}


def stored_path(meta: Mapping[str, Any], path: str) -> str:
    """The path of a leaf in the files of a checkpoint with this metadata, from its current path.

    >>> stored_path({}, "averages/ema/norm/scale"), stored_path({"format": FORMAT}, "clock")
    ('ema/norm/scale', 'clock')
    """
    moves = _LEAVES[meta.get("format", 1) - 1 :]
    return _moved(path, tuple({new: old for old, new in move.items()} for move in reversed(moves)))


def _moved(path: str, moves: Moves) -> str:
    for move in moves:
        for old, new in move.items():
            if path == old or path.startswith(f"{old}/"):
                path = new + path[len(old) :]
                break
    return path
