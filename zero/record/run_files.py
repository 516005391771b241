"""A run directory: the files in it, and its mirror next to checkpoints that are elsewhere (omegaconf).

If checkpoints are outside the run directory, in a bucket or on a shared disk, the other files that a resume needs
are copied next to them, to CHECKPOINTS-run/, or to run/ within a bucket that is all for checkpoints. A machine that has
lost the run directory rebuilds it from there.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from omegaconf import DictConfig, OmegaConf

from zero.base.errors import UserError
from zero.base.keys import key, not_empty
from zero.config.files import literal, read_yaml
from zero.files import storage
from zero.files.parsing import reading

WAIT_SECONDS = 10  # between two looks for a run to start, or for its next checkpoint
CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
LAYOUT_FILE = "layout.txt"
SAMPLES_FILE = "samples.txt"
WANDB_ID_FILE = "wandb_run_id"
COMMAND_FILE = "command.json"  # the keys that the command lines of its starts have set
LINEAGE_FILE = "emergency_lineage"  # the lineages of emergency checkpoints that a resume may use, a line each
MIRRORED = (CONFIG_FILE, LAYOUT_FILE, METRICS_FILE, SAMPLES_FILE, WANDB_ID_FILE, COMMAND_FILE, LINEAGE_FILE)
GROWING = (METRICS_FILE, SAMPLES_FILE)
RECORDS = "records"  # the folder of all other files that grow, each of one feature; mirrored as well


_PURPOSES = {
    CONFIG_FILE: "the configuration, which a resume needs",
    METRICS_FILE: "the metrics",
    LAYOUT_FILE: "the layout of the state and its memory",
    SAMPLES_FILE: "the samples",
    WANDB_ID_FILE: "the id of the run in W&B",
    LINEAGE_FILE: "the name of the emergency checkpoints",
}


@dataclass(frozen=True)
class CheckpointDirectoryKeys:
    """Where checkpoints are, in section `data`."""

    checkpoint_directory: str = key(
        "checkpoints",
        not_empty(),
        "Where checkpoints are saved. A relative path is inside the run directory, or inside the bucket if there is "
        "one.",
        per_host=True,
    )


class DamagedRun(UserError):
    """A run directory whose configuration is missing or cannot be read."""


def describe_full_disk(error: OSError) -> str:
    """A line that names the file that could not be written, what it is for, and what is safe.

    >>> describe_full_disk(OSError(28, "No space left on device", "runs/new/config.yaml"))
    'runs/new/config.yaml (the configuration, which a resume needs): No space left on device. Earlier checkpoints \
are intact: free some space and repeat the command with --resume=auto'
    """
    path = str(error.filename or "the run directory")
    purpose = _PURPOSES.get(Path(path).name, "a file of the run")
    return (
        f"{path} ({purpose}): {error.strerror}. Earlier checkpoints are intact: free some space and repeat the command "
        "with --resume=auto"
    )


def save_config(run_directory: Path, config: Any) -> None:
    """Writes the configuration, a DictConfig or nested dictionaries, where `saved_config` finds it."""
    storage.write(
        run_directory / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(literal(config)), resolve=True).encode()
    )


def saved_config(run_directory: Path) -> DictConfig:
    """The configuration that a run was last started with.

    Raises:
      DamagedRun: the directory has none, or a damaged one.
    """
    path = run_directory / CONFIG_FILE
    if not path.is_file():
        raise DamagedRun(f"{run_directory}: not a run directory, {CONFIG_FILE} is missing")
    message = f"{path} is damaged: expected the configuration of a run"
    config = read_yaml(path, message, DamagedRun)
    with reading(message, kind=DamagedRun):
        data = config["data"]
        for name in ("data", "model", "optimizer"):
            if not isinstance(config.get(name, {}), dict):
                raise TypeError(f"{name} is not a section")
        if not (isinstance(data["bucket_path"], str | None) and isinstance(data["checkpoint_directory"], str)):
            raise TypeError("data.bucket_path or data.checkpoint_directory is not a path")
        return OmegaConf.create(literal(config))


def checkpoint_directory(run_directory: Path, bucket_path: str | None, directory: str) -> Path | str:
    """An absolute path or URL as it is, else `gs://bucket_path/directory`, else inside the run directory."""
    checkpoints = storage.join(storage.bucket(bucket_path) if bucket_path else run_directory, directory)
    if storage.is_remote(checkpoints):
        return checkpoints
    return Path(checkpoints)


def saved_steps(run_directory: Path) -> list[int]:
    """The steps of a run's complete checkpoints, oldest first."""
    return committed_steps(saved_checkpoint_directory(run_directory))


def committed_steps(directory: Path | str) -> list[int]:
    """The steps of the complete checkpoints in a directory, on disk or in a bucket, oldest first.

    On disk a complete checkpoint is renamed into place; in a bucket, where nothing can be renamed, a file marks it.
    """
    if isinstance(directory, Path):
        return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal() and path.is_dir())
    files = storage.list_files(directory)
    matches = (re.fullmatch(r"(\d+)/commit_success\.txt", url.removeprefix(f"{directory}/")) for url in files)
    return sorted(int(match[1]) for match in matches if match)


def split_step(source: str) -> tuple[str, int | None]:
    """The place of weights, and the step that its name ends with as in RUN@STEP; None for the newest.

    A directory whose own name ends so is a place, and what a model of the hub ends with is its revision.

    >>> split_step("runs/mine@480"), split_step("gs://bucket/checkpoints"), split_step("hf:name@7")
    (('runs/mine', 480), ('gs://bucket/checkpoints', None), ('hf:name@7', None))
    """
    run, mark, step = source.rpartition("@")
    if not mark or not step.isdecimal() or source.startswith("hf:") or os.path.exists(source):
        return source, None
    return run, int(step)


def is_outside(run_directory: Path, checkpoints: Path | str) -> bool:
    """Whether checkpoints are outside the run directory."""
    return not isinstance(checkpoints, Path) or not checkpoints.absolute().is_relative_to(run_directory.absolute())


def shared_file(run_directory: Path, checkpoints: Path | str, name: str) -> str:
    """The path of a file of a run that every machine sees: beside its checkpoints if they are outside the directory."""
    if is_outside(run_directory, checkpoints):
        return mirror_path(checkpoints, name)
    return str(run_directory / name)


def fetch_config(run_directory: Path, checkpoints: str) -> bool:
    """Copies the configuration of the run that mirrors itself beside these checkpoints; False if none does."""
    mirrored = mirror_path(checkpoints, CONFIG_FILE)
    if not storage.exists(mirrored):
        return False
    storage.write(run_directory / CONFIG_FILE, storage.read_bytes(mirrored))
    return True


def mirror(run_directory: Path, checkpoints: Path | str) -> None:
    """Copies the files that a resume needs next to the checkpoints, if these are outside the directory.

    A file that the directory does not have is removed there: an earlier attempt has left it.
    """
    if is_outside(run_directory, checkpoints):
        records = [f"{RECORDS}/{path.name}" for path in sorted((run_directory / RECORDS).glob("*"))]
        for name in [*MIRRORED, *records]:
            if (run_directory / name).exists():
                with (run_directory / name).open("rb") as file:
                    storage.write_blocks(mirror_path(checkpoints, name), storage.blocks_of(file))
            else:
                storage.remove(mirror_path(checkpoints, name))
        for name in {*_mirrored_records(checkpoints)} - {*records}:
            storage.remove(mirror_path(checkpoints, name))


def sync_growing(run_directory: Path) -> None:
    """Has the disk hold all lines that files of a run have so far; otherwise it may lose those of the last seconds.

    Raises:
      OSError: the disk refuses.
    """
    for path in [*(run_directory / name for name in GROWING), *(run_directory / RECORDS).glob("*")]:
        if path.exists():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _mirrored_records(checkpoints: Path | str) -> list[str]:
    """The files of `RECORDS` beside the checkpoints."""
    files = storage.list_files(mirror_path(checkpoints, RECORDS))
    return [f"{RECORDS}/{file.rpartition('/')[2]}" for file in files]


def growing_file(run_directory: Path, name: str) -> Path:
    """The path of a file that grows: below `RECORDS`, unless its name is known to readers of run directories."""
    return run_directory / (name if name in GROWING else f"{RECORDS}/{name}")


def remove_unfinished(run_directory: Path, checkpoints: Path | str) -> None:
    """Removes what killed processes have left of files that they were writing: in both directories and the mirror."""
    for directory in (run_directory, checkpoints, storage.parent(mirror_path(checkpoints, CONFIG_FILE))):
        storage.remove_unfinished(directory)


def rebuild(run_directory: Path, checkpoints: Path | str) -> bool:
    """Restores a run directory from its mirror, if there is one; files that continue the mirrored ones stay."""
    if not is_outside(run_directory, checkpoints) or not storage.exists(mirror_path(checkpoints, CONFIG_FILE)):
        return False
    run_directory.mkdir(parents=True, exist_ok=True)
    for name in [*MIRRORED, *_mirrored_records(checkpoints)]:
        if storage.exists(mirror_path(checkpoints, name)):
            here = run_directory / name
            here.parent.mkdir(exist_ok=True)
            is_growing = name in GROWING or name.startswith(f"{RECORDS}/")
            with storage.open_reader(mirror_path(checkpoints, name)) as kept:
                if not (is_growing and here.exists() and _begins_with(here, kept)):
                    kept.seek(0)
                    storage.write_blocks(here, storage.blocks_of(kept))
    return True


def _begins_with(path: Path, start: BinaryIO) -> bool:
    """Whether a file begins with all the bytes of another."""
    with path.open("rb") as file:
        return all(file.read(len(block)) == block for block in storage.blocks_of(start))


def mirror_path(checkpoints: Path | str, name: str) -> str:
    """The copy of a file of a run beside its checkpoints.

    >>> mirror_path("gs://bucket/checkpoints", "config.yaml"), mirror_path("gs://bucket", "config.yaml")
    ('gs://bucket/checkpoints-run/config.yaml', 'gs://bucket/run/config.yaml')
    """
    if storage.is_root(checkpoints):  # nothing is beside a bucket
        return storage.join(checkpoints, f"run/{name}")
    return f"{checkpoints}-run/{name}"


def saved_checkpoint_directory(run_directory: Path) -> Path | str:
    """The directory of a run's checkpoints, by its saved configuration."""
    data = saved_config(run_directory).data
    return checkpoint_directory(run_directory, data.bucket_path, data.checkpoint_directory)
