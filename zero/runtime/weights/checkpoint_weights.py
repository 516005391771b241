"""Reads weights from checkpoints of a run, and writes directories that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zero.models.config import GPTConfig
from zero.partition.global_arrays import from_global
from zero.partition.layout import Layout, PyTree
from zero.runtime.checkpoints.damage import DamagedCheckpoint
from zero.runtime.checkpoints.manager import Checkpoints
from zero.runtime.errors import UserError
from zero.runtime.run_directory import CONFIG_FILE, saved_checkpoint_directory
from zero.runtime.weights.hf_config import UNSEEN
from zero.training.ema import EMA
from zero.training.sharded_gpt import ShardedGPT

# As `UNSEEN`, of checkpoints: what a Hugging Face folder is compared by in other ways.
UNSEEN_IN_CHECKPOINTS = ("alibi_attn", "norm_place", "expert_capacity", "expert_priority", "distance_base")


def open_checkpoints(place: str) -> Checkpoints:
    """The checkpoints of a run directory, or those in this directory itself, local or gs://, to be read only."""
    is_run = (Path(place) / CONFIG_FILE).is_file()
    return Checkpoints(saved_checkpoint_directory(Path(place)) if is_run else place, keep=None)


def choose_steps(checkpoints: Checkpoints, steps: Sequence[int] | None) -> list[int]:
    """These steps in ascending order, or all where they are None.

    Raises:
      UserError: there is no such step, or none at all.
    """
    existing = checkpoints.steps()
    if not existing:
        raise UserError(
            f"{checkpoints.directory}: no weights; expected a run directory, a directory of checkpoints, or a Hugging "
            "Face folder"
        )
    missing = sorted(set(steps or []) - set(existing))
    if missing:
        raise UserError(f"{checkpoints.directory}: no step {missing[0]}; there are {', '.join(map(str, existing))}")
    return sorted(set(steps)) if steps else existing


def check_unseen(origin: str, saved: Mapping[str, Any], expected: GPTConfig, also: Sequence[str] = ()) -> None:
    """Compares attributes that no leaf shows, `UNSEEN` and `also`, of the saved size with the expected ones.

    Raises:
      UserError: one differs; `origin` begins the message.
    """
    for key in (*also, *UNSEEN):
        if saved[key] != getattr(expected, key):
            raise UserError(f"{origin}: {key} is {saved[key]}, this run expects {getattr(expected, key)}")


def trained_size(origin: str, meta: Mapping[str, Any]) -> GPTConfig:
    """The size of the model that a checkpoint is of, from its metadata.

    Raises:
      DamagedCheckpoint: they hold none; `origin` begins the message.
    """
    try:
        return GPTConfig(**meta["size"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{origin}: its metadata hold no size of a model: {error!r}") from error


def weights_subtree(origin: str, meta: Mapping[str, Any], ema: bool) -> str:
    """The subtree of a checkpointed state to read: the parameters or, with `ema`, their moving average.

    Raises:
      UserError: the run kept no average; `origin` begins the message.
    """
    name = f"averages/{EMA}" if ema else "params"
    if not any(leaf.startswith(f"{name}/") for leaf in meta["shapes"]):
        raise UserError(f"{origin}: holds no moving average of the weights; training.ema keeps one from the first step")
    return name


def restore_weights(checkpoints: Checkpoints, step: int, model: ShardedGPT, within: str) -> PyTree:
    """Shards for a pmap of the parameters `within` a checkpointed state, with the model's collections.

    Raises as `Checkpoints.restore`.
    """

    def shards(layout: Layout, within: str) -> PyTree:
        whole = checkpoints.restore(step, layout, model.axis, within=within)
        return from_global(whole, layout, model.axis, donate=True)

    collections = {name: shards(layout, f"averages/{name}") for name, layout in model.collection_layouts.items()}
    return {**shards(model.layout, within), **collections}


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """An empty directory to fill, renamed to `path` when the block succeeds and deleted when it fails.

    Raises:
      UserError: `path` exists.
    """
    if os.path.lexists(path):
        raise UserError(f"{path} exists already; nothing is overwritten, name another")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    unfinished.mkdir()
    try:
        yield unfinished
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished)
        raise
