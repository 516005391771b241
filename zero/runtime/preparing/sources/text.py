"""Units of plain text: whole files, one document each, and the parts of a single text."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from zero.runtime.errors import UserError
from zero.runtime.preparing.sources import documents
from zero.runtime.preparing.sources.documents import Document, Unit
from zero.runtime.preparing.sources.files import named_errors


def whole_files(paths: Iterable[Path]) -> Iterator[Document | None]:
    """Files that are one document each."""
    for path in paths:
        with named_errors(path):
            data = path.read_bytes()
        try:
            yield Document(data.decode("utf-8-sig"))
        except UnicodeDecodeError:
            yield None


def _text_part(path: Path, text: bytes, is_validation: bool, ends: bool) -> Iterator[Document | None]:
    """Some lines of a single text, which makes one document for training and one for validation."""
    try:
        yield Document(text.decode("utf-8"), is_validation, ends)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}") from error


def text_parts(path: Path, validation_fraction: float) -> Iterator[Unit]:
    """A single text, cut at line breaks, or between two characters where no line ends within a unit."""
    with named_errors(path), open(path, "rb") as file:
        start = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
        end = file.seek(0, os.SEEK_END)
        cut = max(start, int(end * (1 - validation_fraction)))
        before = max(start, cut - documents.UNIT_BYTES)
        file.seek(before)
        cut = before + _whole_lines(file.read(cut - before))
        for is_validation, position, stop in ((False, start, cut), (True, cut, end)):
            file.seek(position)
            while position < stop:
                text = file.read(min(documents.UNIT_BYTES, stop - position))
                if not text:
                    raise UserError(f"{path} has shrunk while it was read")
                if position + len(text) < stop:
                    text = text[: _whole_lines(text)]
                position += len(text)
                file.seek(position)
                yield Unit(len(text), partial(_text_part, path, text, is_validation, position == stop))


def _whole_lines(text: bytes) -> int:
    """How many bytes of a text are whole lines; if it has none, how many are before its last character."""
    if lines := text.rfind(b"\n") + 1:
        return lines
    last = len(text) - 1
    while last > 0 and text[last] & 0xC0 == 0x80:  # a byte within a character
        last -= 1
    return max(last, 0)
