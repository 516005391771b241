"""Worker processes of this package: they end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from pathlib import Path


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
