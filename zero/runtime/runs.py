"""Where runs lie: finding the one to resume, and what stands in its directory (hydra, omegaconf)."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from zero.runtime import UserError, storage

CONFIG_FILE = "config.yaml"
LAYOUT_FILE = "layout.txt"
SAMPLES_FILE = "samples.txt"
DEFAULT_CONFIG = Path(__file__).parents[2] / "conf" / "config.yaml"
DEFAULT_ROOT = Path("runs")


def save_config(run_directory: Path, config: Any) -> None:
    """Writes the configuration, a dataclass or a dictionary, where `saved_config` finds it."""
    OmegaConf.save(OmegaConf.create(config), run_directory / CONFIG_FILE)


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


def default_config() -> DictConfig:
    """What a run has that is told nothing."""
    config = OmegaConf.load(DEFAULT_CONFIG)
    assert isinstance(config, DictConfig)
    del config["defaults"], config["hydra"]
    return config


def flat_config(config: Any) -> dict[str, str]:
    """`section.key` to what a command line would say."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, DictConfig):
            flat |= {f"{key}.{name}": one for name, one in flat_config(value).items()}
        else:
            flat[str(key)] = "null" if value is None else str(value)
    return flat


def checkpoint_directory(run_directory: Path, bucket_path: str | None, directory: str) -> Path | str:
    """An absolute path or address, or else `gs://bucket_path/directory`, or else inside the run directory."""
    place = storage.join(storage.bucket(bucket_path) if bucket_path else run_directory, directory)
    return place if storage.is_remote(place) else Path(place)


@contextmanager
def locked(run_directory: Path) -> Iterator[None]:
    """Keeps other processes out of a run: two that were started in one second, or two that resume the same one.

    Raises:
      UserError: one is in it. However a process ends, its lock ends with it.
    """
    directory = os.open(run_directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{run_directory}: another process trains here; name another hydra.run.dir") from None
        yield
    finally:
        os.close(directory)


def saved_steps(run_directory: Path) -> list[int]:
    """The steps whose checkpoints stand, here or in a bucket, oldest first.

    A directory is renamed into place whole; in a bucket, where nothing can be renamed, a file says that it is.
    """
    data = saved_config(run_directory).data
    directory = checkpoint_directory(run_directory, data.bucket_path, data.checkpoint_directory)
    if isinstance(directory, Path):
        return sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit() and path.is_dir())
    files = storage.list_files(directory)
    whole = (re.fullmatch(r"(\d+)/commit_success\.txt", url.removeprefix(f"{directory}/")) for url in files)
    return sorted(int(found[1]) for found in whole if found)


def newest_run(root: Path) -> Path | None:
    """The run under `root` that was started or resumed last, of those that have a checkpoint."""
    runs = [layout.parent for layout in root.rglob(LAYOUT_FILE)]  # W&B keeps files called config.yaml as well
    runs = [run for run in runs if saved_steps(run)]
    return max(runs, key=lambda run: (run / CONFIG_FILE).stat().st_mtime_ns, default=None)


def trained_run(place: str | None) -> Path:
    """The run at `place`, or the newest, to be used and not continued.

    Raises:
      UserError: there is none.
    """
    run = newest_run(DEFAULT_ROOT) if place is None else Path(place)
    if run is None:
        raise UserError(f"no run with a checkpoint stands in {DEFAULT_ROOT}; name one in model.model_path")
    return run


def resume_overrides(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with `--resume` and `--resume=auto` turned into overrides that Hydra understands.

    The run is the one in `hydra.run.dir`, or the newest; it goes on in its own directory, except from a step that is
    not its newest (`data.resume_step`): this forks into the directory that a new run would get.

    Raises:
      UserError: `--resume`, and no checkpoint stands; or an argument that looks like a flag for resuming and is none.
    """
    flags = [argument for argument in arguments if argument.startswith("--resume")]
    rest = [argument for argument in arguments if argument not in flags]
    if not flags:
        return rest
    if flags[-1] not in ("--resume", "--resume=auto"):
        raise UserError(f"{flags[-1]}: expected --resume or --resume=auto")
    given = _values(rest)
    if "hydra.run.dir" in given:
        place = Path(str(given["hydra.run.dir"]))
        run = place if (place / CONFIG_FILE).is_file() and saved_steps(place) else None
    else:
        place = DEFAULT_ROOT
        run = newest_run(place)
    if run is None:
        if flags[-1] == "--resume=auto":
            return rest
        raise UserError(f"--resume: no checkpoint stands in {place}; start without it, or name a run in hydra.run.dir")
    run_path = QuotedString(os.path.abspath(run), Quote.single).with_quotes()
    rest = [argument for argument in rest if not argument.startswith("hydra.run.dir=")]
    step = given.get("data.resume_step")
    is_fork = step is not None and step != saved_steps(run)[-1]
    return [*rest, f"resume={run_path}", *([] if is_fork else [f"hydra.run.dir={run_path}"])]


def _values(arguments: Sequence[str]) -> dict[str, Any]:
    """The values of overrides, quotes and all, as Hydra will read them."""
    plain = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    return {override.key_or_group: override.value() for override in OverridesParser.create().parse_overrides(plain)}
