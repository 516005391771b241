"""Checkpoints of earlier formats: maps their paths to those of the current format.

A change of the state's structure is an entry of `_LEAVES`, one of a key's meaning an entry of `_SIZES`; readers see
only the current ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zero.errors import UserError

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


def _mean_balance(size: dict[str, Any]) -> dict[str, Any]:
    """Until format 2 the load-balancing loss was a sum over layers, of shares of choices."""
    if not size.get("balance_loss"):
        return size
    layers = size["N"] // size.get("experts_every", 1)
    return {**size, "balance_loss": size["balance_loss"] * layers / size.get("experts_per_token", 1)}


# For each format, how the size of the model reads in the next one.
_SIZES: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (lambda size: size, _mean_balance)
FORMAT = len(_SIZES) + 1  # of checkpoints that are written now; those without a number are of format 1
_BY_PATH = ("shapes", "dtypes", "checksums")  # the entries of `meta` whose keys are paths


def migrate(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a checkpoint with the current paths.

    Raises:
      UserError: a later version wrote it.

    >>> migrate({"shapes": {"ema/norm/scale": [3], "params/norm/scale": [3]}})["shapes"]
    {'averages/ema/norm/scale': [3], 'params/norm/scale': [3]}
    >>> size = {"N": 6, "experts_every": 2, "experts_per_token": 2, "balance_loss": 0.02}
    >>> migrate({"size": size, "format": 2})["size"]["balance_loss"]
    0.03
    """
    first = meta.get("format", 1) - 1
    if first >= FORMAT:
        raise UserError(f"a checkpoint of format {first + 1}, this version reads formats 1 to {FORMAT}: update zero")
    moves = _LEAVES[first:]
    changed = {name: {_moved(path, moves): x for path, x in meta[name].items()} for name in _BY_PATH if name in meta}
    if isinstance(size := meta.get("size"), dict):
        for change in _SIZES[first:]:
            size = change(size)
        changed["size"] = size
    return {**meta, **changed}


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
