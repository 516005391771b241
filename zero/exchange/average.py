"""Averages the weights of several checkpoints of one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zero import run_directory as run_files
from zero.checkpoints.manager import Checkpoints
from zero.errors import UserError
from zero.exchange.checkpoint_weights import choose_steps, new_directory, open_checkpoints
from zero.models.collections import collections_of
from zero.models.config import GPTConfig
from zero.partition.layout import make_layout


def last_steps(place: str, last: float, count: int) -> list[int]:
    """`count` checkpoints of the last part of a run, evenly spaced and the newest among them.

    Args:
      place: a run directory, or a directory of checkpoints.
      last: the part, a fraction of the newest step.

    Raises:
      UserError: there are fewer.
    """
    with open_checkpoints(place) as checkpoints:
        existing = choose_steps(checkpoints, None)
    within = [step for step in existing if step > (1 - last) * existing[-1]]
    if len(within) < count:
        raise UserError(
            f"{place}: the last {last:.0%} hold {len(within)} checkpoints, {', '.join(map(str, within))}; "
            f"expected at least --count {count}. data.keep_every keeps more"
        )
    places = np.linspace(len(within) - 1, 0, count).round().astype(int)
    return sorted(within[i] for i in places)


def average(place: str, run_directory: Path, steps: Sequence[int] | None = None) -> list[int]:
    """Writes a new run directory with one checkpoint of weights: the mean, in float32, of several of one run.

    Every mode reads it as any other, but it cannot be resumed. Returns the steps that were averaged, by default all;
    the new checkpoint has the number of the last one.

    Raises:
      UserError: a step does not exist, or the run directory does.
    """
    with open_checkpoints(place) as checkpoints, new_directory(run_directory) as unfinished:
        chosen = choose_steps(checkpoints, steps)
        meta = checkpoints.meta(chosen[-1])

        def mean(name: str) -> np.ndarray:
            total = checkpoints.read(chosen[0], name).astype(np.float32)
            for step in chosen[1:]:
                total += checkpoints.read(step, name).astype(np.float32)
            return total / np.float32(len(chosen))

        collections = [f"averages/{name}/" for name in collections_of(GPTConfig(**meta["size"]))]
        means = {name: mean(name) for name in meta["shapes"] if name.startswith(("params/", *collections))}
        config = meta["config"]
        config["data"] |= {"bucket_path": None, "checkpoint_directory": "checkpoints"}
        run_files.save_config(unfinished, config)
        of_arrays = ("shapes", "dtypes", "checksums")
        kept = {key: value for key, value in meta.items() if key not in of_arrays}
        with Checkpoints(unfinished / "checkpoints", keep=1) as averaged:
            averaged.save(chosen[-1], means, make_layout(means, 1), kept | {"averaged": chosen})
    return chosen
