"""starts.json: a run's record of its starts, so that neither changed clocks nor copied files decide which is newer.

Starts are numbered over all runs below one directory. Each notes the clock of its machine since it was booted, which
nobody sets, beside the time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from zero.files import storage
from zero.files.parsing import MALFORMED

STARTS_FILE = "starts.json"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Start(NamedTuple):
    """A start of a run.

    Attributes:
      step: that it continued from.
      boot: of its machine, by an id; empty if the system has none.
      uptime: seconds since then.
      time: seconds since 1970, by a clock that may be wrong.
    """

    step: int
    boot: str
    uptime: float
    time: float


def start_now(step: int) -> Start:
    boot = BOOT_ID.read_text().strip() if BOOT_ID.is_file() else ""
    uptime = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
    return Start(step, boot, uptime, time.time())


def number_of(run: Path) -> int:
    """The number of the last start of a run; 0 if it has noted none that can be read."""
    return _read(run)[0]


def last_start(run: Path, step: int) -> Start | None:
    """The start of a run that made this step, according to the record."""
    starts = [start for start in _read(run)[1] if start.step < step]
    if not starts:
        return None
    return starts[-1]


def note_start(run: Path, start: Start, others: Iterable[Path]) -> None:
    """Records a start of a run, after the starts of other runs; earlier starts from later steps are dropped."""
    number = 1 + max(map(number_of, [run, *others]))
    starts = [earlier for earlier in _read(run)[1] if earlier.step < start.step]
    noted = {"number": number, "starts": [earlier._asdict() for earlier in [*starts, start]]}
    storage.write(run / STARTS_FILE, json.dumps(noted, indent=1).encode())


def time_of(start: Start | None) -> float:
    """The time now, in seconds since 1970, by the clock that the start had.

    If the machine was rebooted or replaced, its clock may differ arbitrarily.
    """
    now = start_now(0)
    if start is None or not now.boot or start.boot != now.boot:
        return now.time
    return start.time + now.uptime - start.uptime


def _read(run: Path) -> tuple[int, list[Start]]:
    path = run / STARTS_FILE
    if not path.is_file():
        return 0, []
    try:
        noted = json.loads(path.read_bytes())
        return int(noted["number"]), [Start(**start) for start in noted["starts"]]
    except MALFORMED:
        return 0, []
