"""The metadata of a checkpoint: JSON with the caller's entries, the shapes of the leaves, and a checksum of all."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zero.base.errors import UserError
from zero.base.versions import version_of
from zero.checkpoints.damage import DamagedCheckpoint, read_errors
from zero.checkpoints.retention import Saved
from zero.files import storage
from zero.files.parsing import reading
from zero.partition.layout import Layout

PACKAGES = ("zero-pmap", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
FORMAT = 3  # of checkpoints; the numbers below it were never released
META_CHECKSUM = "meta_checksum"


def complete_metadata(
    meta: Mapping[str, Any], layout: Layout, dtypes: Mapping[str, str], validation_loss: float | None
) -> dict[str, Any]:
    """The caller's entries with those that every checkpoint has.

    Args:
      dtypes: of the stored arrays, by the name of the leaf.
    """
    return with_checksum(
        {
            **meta,
            "shapes": {leaf.name: list(leaf.shape) for leaf in layout.leaves},
            "dtypes": {**dtypes},
            "versions": {name: version_of(name) for name in PACKAGES},
            "format": FORMAT,
            "validation_loss": validation_loss,
        }
    )


def with_checksum(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata with the checksum of its other entries."""
    return {**meta, META_CHECKSUM: meta_checksum(meta)}


def meta_checksum(meta: Mapping[str, Any]) -> int:
    """CRC-32 of all but itself, as sorted JSON."""
    kept = {key: value for key, value in json.loads(json.dumps(meta)).items() if key != META_CHECKSUM}
    return zlib.crc32(json.dumps(kept, sort_keys=True).encode())


def checkpoint_name(directory: Path | str, step: int) -> str:
    """How messages name a checkpoint."""
    return f"checkpoint {directory}, step {step}"


def metadata_file(directory: Path | str, step: int) -> str:
    return storage.join(directory, f"{step}/meta/metadata")


def read_metadata(directory: Path | str, step: int) -> dict[str, Any]:
    """The metadata of a checkpoint.

    Raises:
      DamagedCheckpoint: it is missing or cannot be decoded.
      UserError: it is of another format, or storage fails for the moment.
    """
    file = metadata_file(directory, step)
    name = checkpoint_name(directory, step)
    with read_errors(name, [file]):
        text = storage.read_bytes(file)
    with reading(f"{name}: file {file} cannot be read", kind=DamagedCheckpoint):
        meta = json.loads(text)
        check_metadata(meta)
    if meta["format"] != FORMAT:
        raise UserError(
            f"{name} is of format {meta['format']}, but this version of zero reads format {FORMAT}; it "
            f"was written by {meta['versions']}"
        )
    return dict(meta)


def check_metadata(meta: Any) -> None:
    """Raises ValueError if `meta` is not as it was written."""
    if not isinstance(meta, dict):
        raise ValueError("not a JSON object")
    if meta.get(META_CHECKSUM) != meta_checksum(meta):
        raise ValueError(f"its content does not match its checksum, {META_CHECKSUM}")


def retained(meta: Mapping[str, Any]) -> Saved:
    """The entries that retention depends on."""
    loss = meta.get("validation_loss")
    saved_at = meta.get("saved_at")
    if loss is not None and not math.isfinite(loss):
        loss = None
    return Saved(loss, saved_at)


def check_leaves(name: str, meta: Mapping[str, Any], layout: Layout, prefix: str) -> None:
    """Checks that a checkpoint holds the leaves of this layout, of floats that can be cast or of the same dtype.

    Args:
      prefix: of the names of the layout's leaves in the checkpoint.

    Raises:
      UserError: a leaf is missing, left over, of another logical shape, or of a dtype that no cast converts.
    """
    saved = {leaf: tuple(shape) for leaf, shape in meta["shapes"].items() if leaf.startswith(prefix)}
    expected = {prefix + leaf.name: leaf.shape for leaf in layout.leaves}
    for leaf_name in dict.fromkeys([*expected, *saved]):
        if saved.get(leaf_name) != expected.get(leaf_name):
            raise UserError(
                f"{name}, leaf {leaf_name}: "
                f"holds {saved.get(leaf_name, 'nothing')}, this run expects {expected.get(leaf_name, 'nothing')}"
            )
    for leaf in layout.leaves:
        dtype = jax.numpy.dtype(meta["dtypes"].get(prefix + leaf.name, leaf.dtype))
        are_floats = jax.numpy.issubdtype(dtype, np.floating) and jax.numpy.issubdtype(leaf.dtype, np.floating)
        if dtype != leaf.dtype and not are_floats:
            raise UserError(
                f"{name}, leaf {prefix + leaf.name}: holds {dtype.name}, this run expects {leaf.dtype.name}"
            )
