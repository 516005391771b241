"""Averages the weights of several checkpoints of one run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zero.base.errors import UserError
from zero.checkpoints.damage import MissingCheckpoint
from zero.checkpoints.manager import Checkpoints
from zero.exchange.checkpoint_weights import choose_steps, new_directory, open_checkpoints
from zero.models.collections import collections_of
from zero.models.config import GPTConfig
from zero.partition.checksums import array_checksum
from zero.partition.layout import make_layout
from zero.record import run_files

log = logging.getLogger(__name__)


def last_steps(existing: Sequence[int], last: float, count: int) -> list[int]:
    """`count` checkpoints of the last part of a run, evenly spaced and the newest among them.

    Args:
      existing: the steps of the checkpoints, oldest first.
      last: the part, a fraction of the newest step.

    Raises:
      UserError: there are fewer.

    >>> last_steps([*range(1, 11)], 0.6, 4), last_steps([*range(1, 11)], 0.2, 2)
    ([5, 7, 8, 10], [9, 10])
    """
    within = [step for step in existing if step > (1 - last) * existing[-1]]
    if len(within) < count:
        raise UserError(
            f"the last {last:.0%} hold {len(within)} checkpoints, {', '.join(map(str, within))}; "
            f"expected at least --count {count}. data.keep_every keeps more"
        )
    places = np.linspace(len(within) - 1, 0, count).round().astype(int)
    return sorted(within[i] for i in places)


def average(
    source: str,
    run_directory: Path,
    steps: Sequence[int] | None = None,
    *,
    last: float | None = None,
    count: int = 4,
) -> list[int]:
    """Writes a new run directory with one checkpoint of weights: the mean, in float32, of several of one run.

    Every mode reads it as any other, but it cannot be resumed. Averaged are these steps, or `count` of the last part
    of the run, or all. If the run still trains and deletes one of them meanwhile, the choice is repeated from the
    others. Returns the steps that were averaged; the new checkpoint has the number of the last one.

    Raises:
      UserError: a step does not exist, there are fewer than `count`, or the run directory exists.
    """
    if run_files.split_step(source)[1] is not None:
        raise UserError(f"{source}: expected a run without a step; --steps names several")
    with open_checkpoints(source) as checkpoints, new_directory(run_directory) as unfinished:
        existing = choose_steps(checkpoints, None)
        while True:
            chosen = existing if last is None else last_steps(existing, last, count)
            if steps is not None:
                chosen = choose_steps(checkpoints, steps)
            try:
                meta = checkpoints.meta(chosen[-1])
                means = _means(checkpoints, chosen, meta)
                break
            except MissingCheckpoint as error:
                kept = checkpoints.steps()
                existing = [step for step in existing if step in kept]
                if not existing:
                    raise
                log.warning("%s; averaging others", error)
        config = meta["config"]
        config["data"] |= {"bucket_path": None, "checkpoint_directory": "checkpoints"}
        run_files.save_config(unfinished, config)
        array_keys = ("shapes", "dtypes", "checksums")
        described = {key: value for key, value in meta.items() if key not in array_keys}
        with Checkpoints(unfinished / "checkpoints", keep=1) as averaged:
            sums = {name: array_checksum(mean) for name, mean in means.items()}
            described |= {"averaged": chosen, "checksums": sums}
            averaged.save(chosen[-1], means, make_layout(means, 1), described)
    return chosen


def _means(checkpoints: Checkpoints, steps: Sequence[int], meta: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The mean of each array of weights over these steps; raises MissingCheckpoint if one is deleted meanwhile."""

    def mean(name: str) -> np.ndarray:
        total = checkpoints.read(steps[0], name).astype(np.float32)
        for step in steps[1:]:
            total += checkpoints.read(step, name).astype(np.float32)
        return total / np.float32(len(steps))

    collections = [f"averages/{name}/" for name in collections_of(GPTConfig(**meta["size"]))]
    return {name: mean(name) for name in meta["shapes"] if name.startswith(("params/", *collections))}
