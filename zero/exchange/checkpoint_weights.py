"""Reads weights from checkpoints of a run, and writes directories that appear whole or not at all."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from zero.base.errors import UserError
from zero.checkpoints.damage import DamagedCheckpoint, MissingCheckpoint
from zero.checkpoints.manager import Checkpoints
from zero.corpus.text.tokenizers import TokenizerIdentity
from zero.exchange.fresh_parts import held_parts
from zero.exchange.hf_config import UNSEEN
from zero.files import storage
from zero.hosts import agreement
from zero.models.config import GPTConfig
from zero.partition.checksums import checksum_of_local
from zero.partition.global_arrays import from_global
from zero.partition.layout import Layout, PyTree
from zero.record.run_files import CONFIG_FILE, saved_checkpoint_directory, split_step
from zero.training.ema import EMA
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import Tuning, saved_tuning

# Like `UNSEEN`, for checkpoints: attributes that are compared in other ways for a Hugging Face folder.
UNSEEN_IN_CHECKPOINTS = ("alibi_attn", "norm_place", "expert_capacity", "expert_priority", "distance_base")
T = TypeVar("T")
log = logging.getLogger(__name__)


def open_checkpoints(source: str) -> Checkpoints:
    """The checkpoints of a run directory, or those in this directory itself, local or gs://, to be read only."""
    is_run = (Path(source) / CONFIG_FILE).is_file()
    return Checkpoints(saved_checkpoint_directory(Path(source)) if is_run else source, keep=None)


def choose_steps(checkpoints: Checkpoints, steps: Sequence[int] | None) -> list[int]:
    """These steps in ascending order; None: all.

    Raises:
      MissingCheckpoint: there is no such step, or none at all.
    """
    existing = checkpoints.steps()
    if not existing:
        raise MissingCheckpoint(
            f"{checkpoints.directory}: no weights; expected a run directory, a directory of checkpoints, or a Hugging "
            "Face folder"
        )
    missing = sorted(set(steps or []) - set(existing))
    if missing:
        raise MissingCheckpoint(
            f"{checkpoints.directory}: no step {missing[0]}; there are {', '.join(map(str, existing))}"
        )
    if not steps:
        return existing
    return sorted(set(steps))


def check_unseen(origin: str, saved: Mapping[str, Any], expected: GPTConfig, also: Sequence[str] = ()) -> None:
    """Compares attributes that no leaf shows, `UNSEEN` and `also`, of the saved size with the expected ones.

    Raises:
      UserError: one differs; `origin` begins the message.
    """
    for key in (*also, *UNSEEN):
        if saved[key] != getattr(expected, key):
            raise UserError(f"{origin}: {key} is {saved[key]}, this run expects {getattr(expected, key)}")


class SavedStep(NamedTuple):
    """One checkpoint of a run, and what its metadata tell of its weights; errors begin with its origin."""

    checkpoints: Checkpoints
    step: int
    meta: dict[str, Any]

    @property
    def origin(self) -> str:
        """The directory and the step."""
        return f"{self.checkpoints.directory}, step {self.step}"

    def size(self) -> GPTConfig:
        """The size of the model. Raises DamagedCheckpoint if the metadata hold none."""
        try:
            return GPTConfig(**self.meta["size"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpoint(f"{self.origin}: its metadata has no model size: {error!r}") from error

    def check_size(self, expected: GPTConfig) -> None:
        """Raises UserError if an attribute that no leaf shows differs from the expected one."""
        check_unseen(self.origin, asdict(self.size()), expected, UNSEEN_IN_CHECKPOINTS)

    def tuning(self) -> Tuning | None:
        """What the run trained; None for all parameters."""
        return saved_tuning(self.meta["config"]["tuning"])

    def base(self) -> dict[str, Any]:
        """The base of its adapters: as it was `named`, the `source` with the step or commit, its `ema` and `checksum`.

        Raises DamagedCheckpoint if the metadata name none.
        """
        base = self.meta.get("base")
        if not isinstance(base, dict) or base.keys() != {"named", "place", "ema", "checksum"}:
            raise DamagedCheckpoint(f"{self.origin}: its metadata does not name the base of its adapters")
        return base

    def tokenizer(self) -> TokenizerIdentity:
        """The tokenizer of the run."""
        return TokenizerIdentity(self.meta.get("tokenizer"), self.meta.get("beside_tokenizer"))

    def subtree(self, ema: bool) -> str:
        """The part of the state to read: the parameters or, with `ema`, their moving average.

        Raises UserError if the run kept no average.
        """
        name = f"averages/{EMA}" if ema else "params"
        if not any(leaf.startswith(f"{name}/") for leaf in self.meta["shapes"]):
            raise UserError(
                f"{self.origin}: has no moving average of the weights; training.ema keeps one from the first step"
            )
        return name

    def restore(self, model: ShardedGPT, within: str, seed: int | None = None) -> PyTree:
        """Shards for a pmap of the parameters in this subtree, with the model's collections.

        With a seed, fresh parts that the run has not trained are new (`HeldParts`). Raises as `Checkpoints.restore`.
        """
        parts = held_parts(model, lambda leaf: f"{within}/{leaf.name}" in self.meta["shapes"], seed)

        def shards(collection: str, layout: Layout) -> PyTree:
            place = f"averages/{collection}" if collection else within
            whole = self.checkpoints.restore(self.step, layout, model.axis, within=place)
            self._compare(whole, layout, place)
            return from_global(whole, layout, model.axis, donate=True)

        read = {collection: shards(collection, layout) for collection, layout in parts.layouts.items()}
        return parts.completed(self.origin, read, model, seed)

    def _compare(self, whole: PyTree, layout: Layout, place: str) -> None:
        """Raises DamagedCheckpoint if a leaf differs from its checksum. Leaves that were cast are not compared."""
        saved = {}
        sums = []
        for leaf, x in zip(layout.leaves, layout.leaves_of(whole), strict=True):
            name = f"{place}/{leaf.name}"
            if name in self.meta.get("checksums", {}) and self.meta["dtypes"][name] == leaf.dtype.name:
                saved[name] = self.meta["checksums"][name]
                sums.append(checksum_of_local(x, leaf.shape))
        if not sums:
            return
        found = agreement.sum_over_hosts(*sums)
        if bad := [name for name, found_sum in zip(saved, found, strict=True) if found_sum != saved[name]]:
            raise DamagedCheckpoint(f"{self.origin}: {', '.join(bad)} differs from what was saved")


def saved_step(checkpoints: Checkpoints, step: int) -> SavedStep:
    """This checkpoint, with its metadata; raises as `Checkpoints.meta`."""
    return SavedStep(checkpoints, step, checkpoints.meta(step))


def read_step(checkpoints: Checkpoints, step: int | None, read: Callable[[SavedStep], T]) -> T:
    """What `read` returns for this step, or for the newest one if it is None.

    If the run that trains there deletes the newest one meanwhile, the next newest is read.

    Raises:
      MissingCheckpoint: there is no such step.
    """
    while True:
        chosen = choose_steps(checkpoints, None if step is None else [step])[-1]
        try:
            return read(saved_step(checkpoints, chosen))
        except MissingCheckpoint as error:
            if step is not None or checkpoints.steps()[-1] == chosen:
                raise
            log.warning("%s; reading the newest one instead", error)


def read_place(source: str, read: Callable[[SavedStep], T]) -> T:
    """What `read` returns for RUN@STEP, or for the newest step of RUN, a run or a directory of checkpoints."""
    run, step = split_step(source)
    with open_checkpoints(run) as checkpoints:
        return read_step(checkpoints, step, read)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """An empty directory to fill, renamed to `path` when the block succeeds and deleted when it fails.

    What a process that was killed within its block has left is deleted by the next one for the same path.

    Raises:
      UserError: `path` exists.
    """
    exists = UserError(f"{path} already exists and is never overwritten; choose another name")
    if os.path.lexists(path):
        raise exists
    path.parent.mkdir(parents=True, exist_ok=True)
    with storage.unfinished_directory(path) as unfinished:
        yield unfinished
        try:
            unfinished.rename(path)
        except OSError as error:
            if not os.path.lexists(path):
                raise
            raise exists from error  # another process has made it since
