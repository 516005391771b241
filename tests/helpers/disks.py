"""Disks without room, and disks that fail; tests that use them are skipped without the right to mount one.

- `small_disk`: an empty one, which the fixture of this name in tests/conftest.py uses. `fill`: takes all its room.
- `failing_disk`: one that `FAIL` makes read-only, with open files, as the kernel does after an error of a device.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, kib: int = 128) -> Iterator[None]:
    """An empty disk at an empty directory; the test is skipped without the right to mount one."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount a disk: {done.stderr.decode()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def failing_disk(place: Path, image: Path) -> Iterator[None]:
    """A disk at an empty directory, with its contents in a file: opened again, it can be written to."""
    if not image.exists():
        with image.open("wb") as file:
            file.truncate(64 << 20)
        _tried("mkfs.ext4", "-q", str(image))
    _tried("mount", "-o", "loop", str(image), str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


FAIL = ("mount", "-o", "remount,abort")  # before the directory of a disk


def _tried(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True)
    except FileNotFoundError:
        pytest.skip(f"needs {command[0]}")
    if done.returncode:
        pytest.skip(f"needs the right to mount a disk: {done.stderr.decode()}")


def fill(disk: Path) -> Path:
    """A file that takes all room that is left."""
    status = os.statvfs(disk)
    path = disk / "filler"
    path.write_bytes(bytes(status.f_bavail * status.f_bsize))
    return path
