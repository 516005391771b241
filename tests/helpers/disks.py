"""Disks without room: `small_disk` makes one, and `fill` takes all of its room that is left.

The fixture `small_disk` of tests/conftest.py uses it.
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


def fill(disk: Path) -> Path:
    """A file that takes all room that is left."""
    status = os.statvfs(disk)
    path = disk / "filler"
    path.write_bytes(bytes(status.f_bavail * status.f_bsize))
    return path
