"""Processes that this package starts beside the first one."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import threading
from pathlib import Path


def environment_without_devices() -> dict[str, str]:
    """The environment of a Python program that is started beside a run and leaves the accelerators to it."""
    return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}


def end_with_parent(temporary: Path | None = None) -> None:
    """In a worker process: ends it when its parent ends, also when the parent is killed.

    Args:
      temporary: a directory that is removed then.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def end_with_input() -> None:
    """In a program that is started beside a run: ends it when its standard input, which the run holds open, ends."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1024):  # a read of `sys.stdin` would hold its lock when the program ends
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
