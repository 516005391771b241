"""Where runs lie: finding the one to resume, and what stands in its directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from zero.runtime import UserError

CONFIG_FILE = "config.yaml"
DEFAULT_ROOT = Path("runs")


def saved_config(run_directory: Path) -> DictConfig:
    """The configuration that a run was last started with.

    Raises:
      UserError: the directory holds none.
    """
    path = run_directory / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{run_directory}: not a run directory, {CONFIG_FILE} is missing")
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    return config


def checkpoint_directory(run_directory: Path, bucket_path: str | None, directory: str) -> Path | str:
    """`gs://bucket_path/directory`, or a local directory, which if relative lies inside the run directory."""
    if bucket_path:
        return f"gs://{bucket_path.removeprefix('gs://').strip('/')}/{directory.strip('/')}"
    return run_directory / directory


def saved_steps(run_directory: Path) -> list[int]:
    """The steps whose checkpoints stand in a local run, oldest first; a directory is renamed into place whole."""
    config = saved_config(run_directory)
    directory = checkpoint_directory(run_directory, None, config.data.checkpoint_directory)
    return sorted(int(path.name) for path in Path(directory).glob("*") if path.name.isdigit())


def newest_run(root: Path) -> Path | None:
    """The run under `root` with the newest checkpoint, if any has one."""
    runs = [config.parent for config in root.rglob(CONFIG_FILE) if config.parent.name != ".hydra"]
    runs = [run for run in runs if saved_steps(run)]
    return max(runs, key=lambda run: (run / CONFIG_FILE).stat().st_mtime, default=None)


def resume_overrides(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with `--resume` and `--resume=auto` turned into overrides that Hydra understands.

    The run is the one in `hydra.run.dir`, or the newest; it goes on in its own directory, except from a step that is
    not its newest (`data.resume_step`), which forks into a new directory.

    Raises:
      UserError: `--resume`, and no checkpoint stands; or an argument that looks like a flag for resuming and is none.
    """
    flags = [argument for argument in arguments if argument.startswith("--resume")]
    rest = [argument for argument in arguments if argument not in flags]
    if not flags:
        return rest
    if flags[-1] not in ("--resume", "--resume=auto"):
        raise UserError(f"{flags[-1]}: expected --resume or --resume=auto")
    given = dict(argument.split("=", 1) for argument in rest if "=" in argument)
    if "hydra.run.dir" in given:
        place = Path(given["hydra.run.dir"])
        run = place if (place / CONFIG_FILE).is_file() and saved_steps(place) else None
    else:
        place = DEFAULT_ROOT
        run = newest_run(place)
    if run is None:
        if flags[-1] == "--resume=auto":
            return rest
        raise UserError(
            f"--resume: no checkpoint stands in {place}; start without it, or name a run in hydra.run.dir"
        )
    overrides = [*rest, f"resume='{run}'"]
    step = given.get("data.resume_step", "null")
    is_fork = step != "null" and int(step) != saved_steps(run)[-1]
    if not is_fork and "hydra.run.dir" not in given:
        overrides.append(f"hydra.run.dir='{run}'")
    return overrides
