"""Sweeps (`--multirun`): a repeated sweep continues each job in its own directory (hydra)."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import DictConfig, OmegaConf

from zero.base.errors import UserError
from zero.base.keys import shown
from zero.config.files import literal
from zero.config.saved_config import flat_config, preset_keys
from zero.files import storage
from zero.record.metrics_file import lines_that_count
from zero.record.run_files import (
    CONFIG_FILE,
    METRICS_FILE,
    DamagedRun,
    checkpoint_directory,
    is_outside,
    rebuild,
    saved_config,
    saved_steps,
)
from zero.run.config import GROUPS
from zero.run.find_run import parsed_overrides

SWEEP_FILE = "sweep.csv"
_LAST = ("step", "train/loss", "validation/loss")  # columns: the last value of each

PLACE = ("bucket_path", "checkpoint_directory")  # keys of data
log = logging.getLogger(__name__)


def swept_keys(arguments: Iterable[str], task_overrides: Sequence[str]) -> set[str]:
    """The keys that differ between the jobs of a sweep with these arguments, including keys of swept presets."""
    swept = {override.key_or_group for override in parsed_overrides(arguments) if override.is_sweep_override()}
    job_overrides = [override for override in task_overrides if override.lstrip("+").split("=", 1)[0] in swept]
    return swept | set(preset_keys(job_overrides, GROUPS))


def check_places(config: DictConfig, run_directory: Path, keys: set[str]) -> None:
    """Raises UserError if all jobs of a sweep over `keys` would share one checkpoint directory."""
    checkpoint_path = checkpoint_directory(run_directory, config.data.bucket_path, config.data.checkpoint_directory)
    varies = [name for name in PLACE if f"data.{name}" in keys or OmegaConf.is_interpolation(config.data, name)]
    if keys and is_outside(run_directory, checkpoint_path) and not varies:
        raise UserError(
            f"data.checkpoint_directory={config.data.checkpoint_directory}: expected a directory for each job of this "
            f"sweep, not {checkpoint_path} for all; for instance "
            f"'data.checkpoint_directory={config.data.checkpoint_directory}/${{hydra:job.num}}'"
        )


def continue_job(config: DictConfig, run_directory: Path, keys: set[str], check: Callable[[DictConfig], Any]) -> None:
    """Sets `resume` of a job whose own directory has checkpoints, replacing the run that the sweep forks from.

    A lost directory is rebuilt from the mirror beside checkpoints outside it. The job's values of `keys` must match
    those of the run in the directory.

    Args:
      check: returns the checked configuration of a job.

    Raises:
      UserError: the directory holds the run of another job or of another sweep.
    """
    checkpoint_path = checkpoint_directory(run_directory, config.data.bucket_path, config.data.checkpoint_directory)
    if not (run_directory / CONFIG_FILE).is_file():
        with TemporaryDirectory() as copy:  # no file of another job may get into the directory
            if rebuild(Path(copy), checkpoint_path):
                _check_job(check(config), saved_config(Path(copy)), keys, str(checkpoint_path))
                rebuild(run_directory, checkpoint_path)
    if (run_directory / CONFIG_FILE).is_file() and saved_steps(run_directory):
        _check_job(check(config), saved_config(run_directory), keys, str(run_directory))
        config.resume = literal(str(run_directory))
        config.data.resume_step = None


def write_table(sweep: Path, keys: Iterable[str]) -> None:
    """Writes `sweep.csv`: for each started job its values of `keys`, its last step and its last losses.

    If the table cannot be written, or a job cannot be read, warns and lets the sweep go on.
    """
    rows = []
    for run in sorted(sweep.iterdir(), key=lambda run: (len(run.name), run.name)):
        if (run / CONFIG_FILE).is_file() and (run / METRICS_FILE).is_file():
            try:
                rows.append(_row(run, sorted(keys)))
            except DamagedRun as error:
                log.warning("%s has no row for this job: %s", sweep / SWEEP_FILE, error)
    table = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(table, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    storage.remove_unfinished(sweep, SWEEP_FILE)
    try:
        storage.write(sweep / SWEEP_FILE, table.getvalue().encode())
    except OSError as error:
        log.warning("%s; the table of the sweep lacks the newest job until the next one ends", error)


def _row(run: Path, keys: Sequence[str]) -> dict[str, Any]:
    """The line of a job in the table."""
    config = flat_config(saved_config(run))
    values = {key: config.get(key, "") for key in keys}
    last_values: dict[str, Any] = {}
    for line in lines_that_count(run / METRICS_FILE):
        last_values = {name: line[name] for name in _LAST if name in line} | last_values
        if len(last_values) == len(_LAST):
            break
    last_values = dict.fromkeys(_LAST, "") | last_values
    return {"job": run.name, **values, **last_values}


def _check_job(checked: Any, saved: DictConfig, keys: set[str], checkpoint_path: str) -> None:
    config = OmegaConf.create(literal(asdict(checked)))  # as a run saves it
    pairs = {key: (OmegaConf.select(config, key), OmegaConf.select(saved, key)) for key in sorted(keys)}
    changed = [
        f"{key}={shown(now)}: expected {shown(before)}, the value of the run in {checkpoint_path}; repeat the sweep "
        "with the same values, or set another hydra.sweep.dir"
        for key, (now, before) in pairs.items()
        if now != before
    ]
    if changed:
        raise UserError("\n".join(changed))
