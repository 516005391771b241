"""Files of one JSON object per line, read without the lines that are damaged."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from zero.files.parsing import MALFORMED

_BLOCK = 1 << 16  # bytes that are read at once from the end of a file
_SHOWN = 60  # characters of a damaged line
_log = logging.getLogger(__name__)


def read_lines(data: bytes, name: str) -> list[dict[str, Any]]:
    """The lines that are whole. Others are passed over, and reported once.

    The last one may lack its end without a report: another process is just writing it, or was killed while it did.
    """
    lines = []
    texts = data.split(b"\n")
    for number, text in enumerate(texts, start=1):
        line = parse_line(text)
        if line is not None:
            lines.append(line)
        elif text and number < len(texts):
            _report(name, number, text)
    return lines


def lines_from_the_end(path: Path) -> Iterator[bytes]:
    """The lines of a file without their newlines, the last one first; reads blocks as they are asked for."""
    with open(path, "rb") as file:
        start = file.seek(0, os.SEEK_END)
        rest = b""  # the end of a line that begins in an earlier block
        while start:
            end = start
            start = max(0, end - _BLOCK)
            file.seek(start)
            rest, *lines = (file.read(end - start) + rest).split(b"\n")
            yield from reversed(lines)
        yield rest


def parse_line(text: bytes) -> dict[str, Any] | None:
    """A JSON object of a step, finite numbers and null; None for anything else.

    It may name an event, and what an evaluation has scored, which is an object.

    >>> parse_line(b'{"event": "resume", "step": 3}')
    {'event': 'resume', 'step': 3}
    >>> parse_line(b'{"step": 3, "train/lo'), parse_line(b"[3]"), parse_line(b'{"step": 3, "train/loss": "low"}')
    (None, None, None)
    """
    try:
        line = json.loads(text)
        values = {key: value for key, value in line.items() if value is not None}
        has_event = isinstance(values.pop("event", ""), str) and isinstance(values.pop("scored", {}), dict)
        is_whole = has_event and isinstance(line["step"], int) and all(map(math.isfinite, values.values()))
    except MALFORMED:
        return None
    return line if is_whole else None


@cache  # a report of the run reads the file again and again
def report_line(path: Path, text: bytes) -> None:
    """As `_report`, of a line whose number the file tells."""
    with path.open("rb") as file:
        number = next((number for number, line in enumerate(file, start=1) if line.rstrip(b"\n") == text), 0)
    _report(str(path), number, text)


@cache
def _report(name: str, number: int, text: bytes) -> None:
    shown = text[:_SHOWN].decode(errors="backslashreplace")
    _log.warning(
        "%s: skipped line %d, which is damaged: expected a JSON object with a step and finite numbers or null, got %r",
        name,
        number,
        shown,
    )
