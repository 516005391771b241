"""Units of plain text: whole files, one document each, and the parts of a single text."""

from __future__ import annotations

import codecs
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import BinaryIO

from zero.base.errors import UserError
from zero.corpus.preparing import documents
from zero.corpus.preparing.documents import NOT_UTF8, Document, Unit, broken, decoded, too_long
from zero.corpus.preparing.kinds_of_files import HEAD_BYTES, what_it_is
from zero.corpus.preparing.sources.files import open_file


def whole_files(paths: Iterable[tuple[str, str]], most: int) -> Iterator[Document]:
    """Files with one document each, of at most `most` bytes: their paths, and the names they are counted under."""
    for path, source in paths:
        with open_file(path) as file:
            data = file.read(most + 1)
        kind = what_it_is(data[:HEAD_BYTES], path)
        if kind is not None:
            yield broken(path, f"{path} {kind}", data.decode("utf-8", "replace"), source)
        elif len(data) > most:
            yield too_long(path, data.decode("utf-8", "replace"), most, source)
        else:
            yield decoded(data, path, source)


def _text_part(path: str, text: bytes, split: int, begins: bool, ends: bool) -> Iterator[Document]:
    """Some lines of a single text, which makes one document for training and one for validation."""
    try:
        yield Document(text.decode("utf-8"), split, ends, begins=begins)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} {NOT_UTF8}") from error


def text_parts(path: str, validation_fraction: float, sizes: Sequence[int] | None = None) -> Iterator[Unit]:
    """A single text, cut at line breaks, or between two characters where no line ends within a unit.

    The splits are parts of these sizes in bytes, each begun at the beginning of a character; or the last part is for
    validation, from the beginning of a line.
    """
    with open_file(path) as file:
        head = file.read(HEAD_BYTES)
        if (kind := what_it_is(head, path)) is not None:
            raise UserError(f"{path} {kind}")
        start = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
        end = file.seek(0, os.SEEK_END)
        if sizes is None:
            cut = max(start, int(end * (1 - validation_fraction)))
            before = max(start, cut - documents.UNIT_BYTES)
            file.seek(before)
            cuts = [before + _whole_lines(file.read(cut - before))]
        else:
            if sum(sizes) != end:
                raise UserError(f"{path} has {end} bytes, and --splits {','.join(map(str, sizes))} is {sum(sizes)}")
            cuts = [_character(file, cut) for cut in itertools.accumulate(sizes[:-1])]
        for split, (position, stop) in enumerate(itertools.pairwise([start, *cuts, end])):
            file.seek(position)
            first = position
            while position < stop:
                text = file.read(min(documents.UNIT_BYTES, stop - position))
                if not text:
                    raise UserError(f"{path} has shrunk while it was read")
                if position + len(text) < stop:
                    text = text[: _whole_lines(text)]
                begins = position == first
                position += len(text)
                file.seek(position)
                yield Unit(len(text), partial(_text_part, path, text, split, begins, position == stop))


def _character(file: BinaryIO, position: int) -> int:
    """The beginning of the character that this byte belongs to."""
    file.seek(max(0, position - 3))
    return position - _bytes_within(file.read(min(3, position) + 1))


def _whole_lines(text: bytes) -> int:
    """How many bytes of a text are whole lines; if it has none, how many are before its last character."""
    return text.rfind(b"\n") + 1 or max(0, len(text) - 1 - _bytes_within(text))


def _bytes_within(text: bytes) -> int:
    """How many bytes at the end of a text are within its last character, after the first byte of it."""
    count = 0
    while count < len(text) - 1 and text[-1 - count] & 0xC0 == 0x80:
        count += 1
    return count
