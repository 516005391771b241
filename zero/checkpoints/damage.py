"""Distinguishes damaged checkpoints from temporary failures of storage, and sets damaged ones aside."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax

from zero.base.errors import Unavailable, UserError, causes, full_disk
from zero.files import storage
from zero.hosts.watchdog import LOST_HOST

# Error codes of tensorstore that say nothing about the stored bytes.
OUTAGE_CODES = {"ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"}
OUTAGE_CODES |= {"UNAUTHENTICATED", "UNAVAILABLE", "UNKNOWN"}
TENSORSTORE_ERROR = re.compile(r"(?:(?P<code>[A-Z_]+): )?Error (?:opening|reading|decoding) ")
NO_GENERATION = "Malformed StorageGeneration"  # tensorstore's, if an object on gs:// has none
LEAF_IN_ERROR = re.compile(r'(?:Error reading|Metadata at) "([^"]+)/[^"/]+"')


class DamagedCheckpoint(UserError):
    """Stored data of a checkpoint is truncated, missing, or cannot be decoded."""


class MissingCheckpoint(DamagedCheckpoint):
    """There is no checkpoint of this step: it was never saved, or retention has deleted it."""


@contextmanager
def read_errors(checkpoint: str, json_files: Sequence[str]) -> Iterator[None]:
    """Turns read errors into one line each; errors that are neither damage nor an outage are raised unchanged.

    The line begins with `checkpoint`, and names the first of `json_files` that does not parse.

    Raises:
      DamagedCheckpoint: the stored data is truncated, missing, or cannot be decoded.
      UserError: permission, network, disk or memory failed.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        for cause in causes(error):
            if isinstance(cause, json.JSONDecodeError | UnicodeDecodeError):
                file = next((file for file in json_files if not _is_valid_json(file)), json_files[0])
                raise DamagedCheckpoint(
                    f"{checkpoint}: file {file} cannot be read: not valid JSON, {without_brackets(cause)}"
                ) from error
            if isinstance(cause, FileNotFoundError):
                raise DamagedCheckpoint(f"{checkpoint}: a file cannot be read: {without_brackets(cause)}") from error
            if _is_outage(cause):
                raise Unavailable(f"{checkpoint} cannot be read now: {without_brackets(cause)}") from error
            if isinstance(cause, ValueError) and TENSORSTORE_ERROR.match(str(cause)):
                leaf = LEAF_IN_ERROR.search(str(cause))
                part = f"leaf {leaf[1]}" if leaf else "a file"
                raise DamagedCheckpoint(f"{checkpoint}: {part} cannot be read: {without_brackets(cause)}") from error
        raise


@contextmanager
def write_errors(directory: Path | str) -> Iterator[None]:
    """Turns write errors into UserErrors that name the directory.

    Orbax raises them from a background thread; a full disk is an OSError or, from tensorstore, a ValueError. An error
    of jax because another host is gone is raised unchanged: the watchdog names the host.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if LOST_HOST.search(str(error)) or not (isinstance(error, ValueError) or storage.is_outage(error)):
            raise
        if NO_GENERATION in str(error):
            raise UserError(
                f"{directory}: the checkpoint could not be written: the server sends no generation numbers "
                "(x-goog-generation), which orbax needs. Google Cloud Storage sends them, some emulators do not: set "
                "data.checkpoint_directory to a local absolute path"
            ) from error
        reason = full_disk(error) or without_brackets(error)
        raise Unavailable(
            f"{directory}: the checkpoint could not be written: {reason}. Earlier checkpoints are intact: --resume "
            "continues from the newest of them"
        ) from error


def move_aside(directory: Path | str, step: int) -> str:
    """Renames a checkpoint to STEP.damaged, or STEP.damaged-2 and so on; returns the new path."""
    source = storage.join(directory, str(step))
    target = f"{source}.damaged"
    number = 1
    while storage.list_files(target):
        number += 1
        target = f"{source}.damaged-{number}"
    with write_errors(directory):
        storage.move(source, target)
    return target


def without_brackets(error: BaseException) -> str:
    """The first line, without the specification and source lines that tensorstore adds in brackets."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].partition(" [")[0]


def _is_outage(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or storage.is_outage(error):
        return True
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    matched = TENSORSTORE_ERROR.match(str(error)) if isinstance(error, ValueError) else None
    return matched is not None and matched["code"] in OUTAGE_CODES


def _is_valid_json(file: str) -> bool:
    try:
        json.loads(storage.read_bytes(file))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return False
    return True
