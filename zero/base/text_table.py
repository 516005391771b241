"""Rows of text in columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def in_columns(rows: Sequence[Sequence[str]], justify: Callable[[str, int], str] = str.rjust) -> list[str]:
    """A line per row, with each column as wide as its longest cell; `justify` is `str.ljust` or `str.rjust`.

    >>> in_columns([["leaf", "bytes"], ["a", "1,024"]])
    ['leaf  bytes', '   a  1,024']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_line(row, widths, justify) for row in rows]


def _line(cells: Sequence[str], widths: Sequence[int], justify: Callable[[str, int], str]) -> str:
    return "  ".join(justify(cell, width) for cell, width in zip(cells, widths, strict=True)).rstrip()
