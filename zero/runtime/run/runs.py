"""Where runs lie: finding the one to resume, and what stands in its directory (hydra, omegaconf).

Where checkpoints lie outside the run directory, in a bucket or on a disk that machines share, what else a resume needs
is kept beside them, in PLACE-run/, and a machine that has lost the run directory rebuilds it from there.
"""

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
from yaml import YAMLError

from zero.runtime import storage
from zero.runtime.errors import UserError
from zero.runtime.tracking.tracking import METRICS_FILE, WANDB_ID_FILE

CONFIG_FILE = "config.yaml"
LAYOUT_FILE = "layout.txt"
SAMPLES_FILE = "samples.txt"
MIRRORED = (CONFIG_FILE, LAYOUT_FILE, METRICS_FILE, SAMPLES_FILE, WANDB_ID_FILE)
GROWING = (METRICS_FILE, SAMPLES_FILE)
DEFAULT_CONFIG = Path(__file__).parents[3] / "conf" / "config.yaml"
DEFAULT_ROOT = Path("runs")


def save_config(run_directory: Path, config: Any) -> None:
    """Writes the configuration, a dataclass or a dictionary, where `saved_config` finds it."""
    storage.write(run_directory / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(config)).encode())


def saved_config(run_directory: Path) -> DictConfig:
    """The configuration that a run was last started with.

    Raises:
      UserError: the directory holds none, or a damaged one.
    """
    path = run_directory / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{run_directory}: not a run directory, {CONFIG_FILE} is missing")
    try:
        config = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    if not isinstance(config, DictConfig) or "data" not in config:
        raise UserError(f"{path} is damaged: expected the configuration of a run")
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
    directory = _place(run_directory)
    if isinstance(directory, Path):
        return sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit() and path.is_dir())
    files = storage.list_files(directory)
    whole = (re.fullmatch(r"(\d+)/commit_success\.txt", url.removeprefix(f"{directory}/")) for url in files)
    return sorted(int(found[1]) for found in whole if found)


def is_apart(run_directory: Path, place: Path | str) -> bool:
    """Whether checkpoints lie outside the run directory."""
    return not isinstance(place, Path) or not place.absolute().is_relative_to(run_directory.absolute())


def mirror(run_directory: Path, place: Path | str) -> None:
    """Copies what a resume needs of a run directory beside its checkpoints; without effect where they lie inside."""
    if is_apart(run_directory, place):
        for name in MIRRORED:
            if (run_directory / name).exists():
                storage.write(_mirrored(place, name), (run_directory / name).read_bytes())


def rebuild(run_directory: Path, place: Path | str) -> bool:
    """Brings a run directory up to what was mirrored, if anything was; what only adds to that is kept."""
    if not is_apart(run_directory, place) or not storage.exists(_mirrored(place, CONFIG_FILE)):
        return False
    run_directory.mkdir(parents=True, exist_ok=True)
    for name in MIRRORED:
        if storage.exists(_mirrored(place, name)):
            here, kept = run_directory / name, storage.read_bytes(_mirrored(place, name))
            if not (name in GROWING and here.exists() and here.read_bytes().startswith(kept)):
                storage.write(here, kept)
    return True


def _mirrored(place: Path | str, name: str) -> str:
    return f"{place}-run/{name}"  # in a bucket orbax takes a directory beside its steps for one that is half written


def newest_run(root: Path, place: Path | str | None = None) -> Path | None:
    """The run under `root` that was started or resumed last, of those that have a checkpoint (in `place`)."""
    runs = [layout.parent for layout in root.rglob(LAYOUT_FILE)]  # W&B keeps files called config.yaml as well
    runs = [run for run in runs if place in (None, _place(run)) and saved_steps(run)]
    return max(runs, key=lambda run: (run / CONFIG_FILE).stat().st_mtime_ns, default=None)


def _place(run_directory: Path) -> Path | str:
    data = saved_config(run_directory).data
    return checkpoint_directory(run_directory, data.bucket_path, data.checkpoint_directory)


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

    The run is the one in `hydra.run.dir`, or the newest; where the arguments say that checkpoints lie apart
    (`data.bucket_path`), it is the one that they belong to, rebuilt if this machine does not know it. It goes on in its
    own directory, except from a step that is not its newest (`data.resume_step`): this forks into the directory that a
    new run would get.

    Raises:
      UserError: `--resume`, and no checkpoint stands; `--resume=auto` from a fixed step; or an argument that looks like
        a flag for resuming and is none.
    """
    flags = [argument for argument in arguments if argument.startswith("--resume")]
    rest = [argument for argument in arguments if argument not in flags]
    if not flags:
        return rest
    if flags[-1] not in ("--resume", "--resume=auto"):
        raise UserError(f"{flags[-1]}: expected --resume or --resume=auto")
    given = _values(rest)
    if flags[-1] == "--resume=auto" and "data.resume_step" in given:
        raise UserError(
            "data.resume_step: expected --resume beside it, once; a launcher that repeats --resume=auto would go back "
            "to that step at every start"
        )
    run, place = _run_to_resume(given)
    if run is None:
        if flags[-1] == "--resume=auto":
            return rest
        raise UserError(f"--resume: no checkpoint stands in {place}; start without it, or name a run in hydra.run.dir")
    run_path = QuotedString(os.path.abspath(run), Quote.single).with_quotes()
    rest = [argument for argument in rest if not argument.startswith("hydra.run.dir=")]
    step = given.get("data.resume_step")
    is_fork = step is not None and step != saved_steps(run)[-1]
    return [*rest, f"resume={run_path}", *([] if is_fork else [f"hydra.run.dir={run_path}"])]


def _run_to_resume(given: dict[str, Any]) -> tuple[Path | None, Path | str]:
    """The run, and where it or its checkpoints were looked for."""
    place = _place_named(given)
    named = given.get("hydra.run.dir")
    run = newest_run(DEFAULT_ROOT, place) if named is None else Path(str(named))
    is_known = run is not None and (run / CONFIG_FILE).is_file()
    if run is None and place is not None:
        run = DEFAULT_ROOT / str(place).removeprefix("gs://").strip("/")
    looked_in = place or run or DEFAULT_ROOT
    if run is None:
        return None, looked_in
    own = _place(run) if is_known else place
    if own is not None and place in (None, own):  # another host or machine may have taken the run further
        is_known = rebuild(run, own) or is_known
    return (run if is_known and saved_steps(run) else None), looked_in


def _place_named(given: dict[str, Any]) -> Path | str | None:
    """Where the arguments say that checkpoints lie, if that is apart from any run directory."""
    data = default_config().data
    bucket_path = given.get("data.bucket_path", data.bucket_path)
    directory = str(given.get("data.checkpoint_directory", data.checkpoint_directory))
    place = checkpoint_directory(Path(), bucket_path, directory)
    return place if not isinstance(place, Path) or place.is_absolute() else None


def _values(arguments: Sequence[str]) -> dict[str, Any]:
    """The values of overrides, quotes and all, as Hydra will read them."""
    plain = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    return {override.key_or_group: override.value() for override in OverridesParser.create().parse_overrides(plain)}
