"""Finds the run to resume or to use: the newest, or the one that the arguments name (hydra)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString

from zero.config.saved_config import default_config
from zero.errors import UserError
from zero.files import storage
from zero.run_directory import (
    CONFIG_FILE,
    LAYOUT_FILE,
    WAIT_SECONDS,
    DamagedRun,
    checkpoint_directory,
    fetch_config,
    rebuild,
    saved_checkpoint_directory,
    saved_steps,
)

log = logging.getLogger(__name__)

DEFAULT_ROOT = Path("runs")
SWEEPS = DEFAULT_ROOT / "multirun"


def newest_run(root: Path, place: Path | str | None = None) -> Path | None:
    """The run under `root` that was started or resumed last and has a checkpoint (in `place`, where that is given).

    Runs are examined newest first, up to the first valid one. A run that is damaged, or whose bucket is gone, is
    skipped with a warning.

    Raises:
      UserError: a bucket denies access or does not answer: its run may be the newest.
    """
    runs = [layout.parent for layout in root.rglob(LAYOUT_FILE)]  # W&B keeps files called config.yaml as well
    for run in sorted(runs, key=_last_started, reverse=True):
        try:
            if place in (None, saved_checkpoint_directory(run)) and saved_steps(run):
                return run
        except (DamagedRun, storage.NoSuchBucket) as error:
            log.warning("skipped: %s", error)
    return None


def _last_started(run: Path) -> int:
    config = run / CONFIG_FILE
    return config.stat().st_mtime_ns if config.exists() else 0


def trained_run(place: str | None, wait: bool = False) -> Path:
    """A run directory, for evaluation and sampling: `place`, that of the checkpoints at this URL, or the newest run.

    With `wait` it returns once a run has started there.

    Raises:
      UserError: there is no run with a checkpoint.
    """
    if place is None:
        run = newest_run(DEFAULT_ROOT)
        if run is None:
            raise UserError(f"{DEFAULT_ROOT} has no run with a checkpoint; name one in model.model_path")
        return run
    while True:
        run = _copied(place.rstrip("/")) if "://" in place else Path(place)
        if run is not None and (not wait or (run / CONFIG_FILE).is_file()):
            return run
        if not wait:
            missing = f"{place.rstrip('/')}-run/{CONFIG_FILE}"
            raise UserError(f"model.model_path={place}: no run has its checkpoints here, {missing} is missing")
        log.info("%s: waiting for a run to start here", place)
        time.sleep(WAIT_SECONDS)


def _copied(place: str) -> Path | None:
    """A directory with the configuration of the run whose checkpoints are at this URL; None if there is none.

    It is not the directory in which `--resume` would continue the run, which may train on this machine.
    """
    run = DEFAULT_ROOT / "evaluated" / place.partition("://")[2]
    return run if fetch_config(run, place) else None


def resume_overrides(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with `--resume` and `--resume=auto` turned into overrides that Hydra understands.

    They resume the run in `hydra.run.dir` if that is given, else the newest run. With `data.bucket_path` it is the run
    whose checkpoints lie in that bucket, and its directory is rebuilt from there if this machine does not have it. A
    `data.resume_step` that is not the newest starts a new run directory.

    Jobs of a sweep (`--multirun`) find their own checkpoints (sweeps.py) in `hydra.sweep.dir` or else in the newest
    sweep; they fork from a run that is named by `hydra.run.dir`, or from the newest with `data.resume_step`.

    Raises:
      UserError: `--resume` without a checkpoint; `--resume=auto` from a fixed step; or an argument that only looks like
        `--resume`.
    """
    flags = [argument for argument in arguments if argument.startswith("--resume")]
    rest = [argument for argument in arguments if argument not in flags]
    if not flags:
        return rest
    if flags[-1] not in ("--resume", "--resume=auto"):
        raise UserError(f"{flags[-1]}: expected --resume or --resume=auto")
    given = {override.key_or_group: override.value() for override in parsed_overrides(rest)}
    if flags[-1] == "--resume=auto" and "data.resume_step" in given:
        raise UserError(
            "data.resume_step: expected --resume, once; a launcher that repeats --resume=auto would go back "
            "to that step at every start"
        )
    is_sweep = any(argument == "-m" or ("--multirun".startswith(argument) and len(argument) > 2) for argument in rest)
    resumes_sweep = is_sweep and not given.keys() & {"hydra.run.dir", "data.resume_step"}
    run, place = _newest_sweep(given) if resumes_sweep else _run_to_resume(given)
    if run is None:
        if flags[-1] == "--resume=auto":
            return rest
        raise UserError(f"--resume: {place} has no checkpoint; start without it, or name a run in hydra.run.dir")
    run_path = QuotedString(os.path.abspath(run), Quote.single).with_quotes()
    if resumes_sweep:
        return [
            *(argument for argument in rest if not argument.startswith("hydra.sweep.dir=")),
            f"hydra.sweep.dir={run_path}",
        ]
    rest = [argument for argument in rest if not argument.startswith("hydra.run.dir=")]
    step = given.get("data.resume_step")
    is_fork = step is not None and step != saved_steps(run)[-1]
    return [*rest, f"resume={run_path}", *([] if is_fork or is_sweep else [f"hydra.run.dir={run_path}"])]


def _newest_sweep(given: dict[str, Any]) -> tuple[Path | None, Path]:
    """The directory of the sweep that was started last and has a checkpoint, and the place that was searched."""
    named = given.get("hydra.sweep.dir")
    root = SWEEPS if named is None else Path(str(named))
    run = newest_run(root)
    if run is None or named is not None:
        return (None if run is None else root), root
    return root.joinpath(*run.relative_to(root).parts[:1]), root


def _run_to_resume(given: dict[str, Any]) -> tuple[Path | None, Path | str]:
    """The run, and the place that was searched for it or its checkpoints."""
    place = _shared_place(given)
    named = given.get("hydra.run.dir")
    run = newest_run(DEFAULT_ROOT, place) if named is None else Path(str(named))
    is_known = run is not None and (run / CONFIG_FILE).is_file()
    if run is None and place is not None:
        run = DEFAULT_ROOT / str(place).removeprefix("gs://").strip("/")
    looked_in = place or run or DEFAULT_ROOT
    if run is None:
        return None, looked_in
    own = saved_checkpoint_directory(run) if is_known else place
    if own is not None and place in (None, own):  # another host or machine may have taken the run further
        is_known = rebuild(run, own) or is_known
    return (run if is_known and saved_steps(run) else None), looked_in


def _shared_place(given: dict[str, Any]) -> Path | str | None:
    """The directory of checkpoints by the arguments, if it is outside any run directory."""
    data = default_config().data
    bucket_path = given.get("data.bucket_path", data.bucket_path)
    directory = str(given.get("data.checkpoint_directory", data.checkpoint_directory))
    place = checkpoint_directory(Path(), bucket_path, directory)
    return place if not isinstance(place, Path) or place.is_absolute() else None


def parsed_overrides(arguments: Iterable[str]) -> list[Override]:
    """The overrides among the arguments, parsed by Hydra."""
    plain = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    return OverridesParser.create().parse_overrides(plain)
