"""Units of .json files: objects, one a line or over several, and arrays of objects or of texts."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from zero.base.errors import UserError, first_line
from zero.corpus.preparing import documents
from zero.corpus.preparing.documents import Document, Reader, Unit, read_entry
from zero.corpus.preparing.sources.compression import checked_blocks, decompressed_blocks
from zero.corpus.preparing.sources.files import SourceFile, open_file
from zero.corpus.preparing.sources.json_lines import json_lines

_SPACE = re.compile(r"[ \t\n\r]*")
_CUT_WITHIN = 16  # characters before the end of a block, within which a cut value ends with an error
Item = tuple[str, Any]  # the place of a value in its file, and the value


def json_units(file: SourceFile, reader: Reader, most: int) -> Iterator[Unit]:
    """The objects of a file in units, as `load_dataset("json")` finds them.

    A text in an array is an object with this text under "text".

    Raises:
      UserError: a value has more than `most` bytes, so that the next one cannot be found.
    """
    if _has_lines(file):
        yield from json_lines(file, reader, most)
        return
    group: list[Item] = []
    size = 0
    told = 0
    with open_file(file.path) as opened:
        blocks = checked_blocks(decompressed_blocks(opened, file.path, documents.UNIT_BYTES), file.path)
        for place, value, characters in _values(blocks, file.path, most):
            group.append((place, {"text": value} if isinstance(value, str) else value))
            size += characters
            if size >= documents.UNIT_BYTES:
                yield Unit(opened.tell() - told, partial(_documents, file.path, group, reader))
                told = opened.tell()
                group = []
                size = 0
        if group:
            yield Unit(opened.tell() - told, partial(_documents, file.path, group, reader))


def _documents(path: str, items: list[Item], reader: Reader) -> Iterator[Document]:
    for place, value in items:
        yield read_entry(reader, value, f"{path}, {place}")


def _has_lines(file: SourceFile) -> bool:
    """Whether the first line of a file is a whole object, or was meant to be one."""
    with open_file(file.path) as opened:
        block = next(decompressed_blocks(opened, file.path, documents.UNIT_BYTES), b"")
    line, end, _ = block.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    line = line.rstrip()
    is_cut = not end and len(block) >= documents.UNIT_BYTES  # a line longer than the block
    return line.startswith(b"{") and (line.endswith(b"}") or is_cut)


def _values(blocks: Iterable[bytes], path: str, most: int = documents.DOCUMENT_BYTES) -> Iterator[tuple[str, Any, int]]:
    """The place of each value, the value, and its characters: the elements of an array, or objects one after another.

    >>> [(place, value) for place, value, _ in _values([b'[{"a": 1},', b' "b"]'], "a.json")]
    [('item 1', {'a': 1}), ('item 2', 'b')]
    >>> list(_values([b'[1, }'], "a.json"))
    Traceback (most recent call last):
    zero.base.errors.UserError: a.json, line 1: expected JSON: Expecting value
    """
    text = _Text(blocks, path, most)
    is_array = text.peek() == "["
    if is_array:
        text.take()
    number = 0
    while (following := text.peek()) and not (is_array and following == "]"):
        if number and is_array:
            if following != ",":
                text.fail("Expecting ',' or ']'")
            text.take()
        number += 1
        place = f"item {number}" if is_array else f"line {text.line}"
        value, characters = text.value()
        yield place, value, characters
    if is_array:
        if not following:
            text.fail("the array does not end")
        text.take()
        if text.peek():
            text.fail("expected nothing after the array")


class _Text:
    """The text of a file, which is read as far as its values need."""

    def __init__(self, blocks: Iterable[bytes], path: str, most: int):
        self._blocks = iter(blocks)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._path = path
        self._most = most
        self._text = ""
        self._at = 0
        self._is_whole = False
        self.line = 1

    def peek(self) -> str:
        """The next character that is no space; empty at the end of the file."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._pass(space.end())
            if self._at < len(self._text) or not self._read():
                return self._text[self._at : self._at + 1]

    def take(self) -> None:
        """Passes a character."""
        self._pass(self._at + 1)

    def value(self) -> tuple[Any, int]:
        """The next value, and its characters."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or not self._read():
                    break
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _CUT_WITHIN
                if not is_cut or not self._read():
                    self._pass(error.pos)
                    self.fail(error.msg)
            except (RecursionError, ValueError) as error:
                self.fail(first_line(error))
        start = self._at
        self._pass(end)
        return value, end - start

    def fail(self, problem: str) -> None:
        """Raises UserError, with the line."""
        raise UserError(f"{self._path}, line {self.line}: expected JSON: {problem}")

    def _pass(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def _read(self) -> bool:
        """Reads as much again as is held, at least a block; whether there was something."""
        held = self._text[self._at :]
        if len(held) > max(self._most, documents.UNIT_BYTES):
            raise UserError(
                f"{self._path}, line {self.line}: a value is longer than --document-bytes {self._most}; name a file "
                "with an object on each line .jsonl, of which --skip-broken leaves out those that are too long"
            )
        parts = [held]
        size = 0
        while not self._is_whole and size <= len(held):
            block = next(self._blocks, None)
            self._is_whole = block is None
            try:
                parts.append(self._decoder.decode(block or b"", final=block is None))
            except UnicodeDecodeError as error:
                raise UserError(f"{self._path} is not UTF-8; convert it with iconv") from error
            size += len(parts[-1])
        if size:
            self._text = "".join(parts)
            self._at = 0
        return size > 0


_DECODER = json.JSONDecoder()
