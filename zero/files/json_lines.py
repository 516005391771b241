"""Files of one JSON object per line, read without the lines that are damaged."""

from __future__ import annotations

import json
import logging
import math
from functools import cache
from typing import Any, NamedTuple

from zero.files.parsing import MALFORMED

_SHOWN = 60  # characters of a damaged line
_log = logging.getLogger(__name__)


class Lines(NamedTuple):
    """The lines of a file, without their newlines."""

    whole: list[bytes]
    damaged: list[bytes]


def split_lines(data: bytes) -> Lines:
    """The lines of a file that are JSON objects with a step, and those that are not.

    >>> split_lines(b'{"step": 1}\\n{"step": 2, "tra{"step": 3}\\n{"step": 4}')
    Lines(whole=[b'{"step": 1}', b'{"step": 4}'], damaged=[b'{"step": 2, "tra{"step": 3}'])
    """
    lines = Lines([], [])
    for text in data.split(b"\n"):
        if text:
            (lines.damaged if parse_line(text) is None else lines.whole).append(text)
    return lines


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
def _report(name: str, number: int, text: bytes) -> None:
    shown = text[:_SHOWN].decode(errors="backslashreplace")
    _log.warning(
        "%s: skipped line %d, which is damaged: expected a JSON object with a step and finite numbers or null, got %r",
        name,
        number,
        shown,
    )
