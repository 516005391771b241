"""The documents of a source, cut into units that processes can read apart from each other (zstandard).

What a unit holds depends on the source alone: what is made of units does not depend on how many processes made it.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
import zstandard

from zero.runtime.corpus.sources import tfrecords
from zero.runtime.corpus.sources.hub import HubDataset
from zero.runtime.errors import UserError

_UNIT = 1 << 20  # bytes of a source: a fraction of a second for a tokenizer
_PACKED = 1 << 16  # bytes of a packed file that are unpacked at once
# What counts as text in a folder. A file outside this list can still be named as the source itself.
_SUFFIXES = """
    .txt .md .rst .tex .org .jsonl .py .pyi .ipynb .c .h .cc .cpp .hpp .cu .cuh .m .rs .go .java .kt .scala .swift .cs
    .js .mjs .jsx .ts .tsx .html .css .rb .php .pl .lua .r .jl .hs .ml .ex .exs .erl .clj .lisp .sh .bash .sql .proto
    .cmake .toml .yaml .yml .ini .cfg
"""
_LINES = re.compile(r"\.jsonl(\.gz|\.zst)?$", re.IGNORECASE)
_RECORDS = re.compile(r"\.tfrecords?(-\d+-of-\d+)?$", re.IGNORECASE)
# Of the standard library: tests are repetitive, encodings and pydoc_data are tables, the rest is not its own.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


class Document(NamedTuple):
    """A text, or the ids of its tokens, or a part of it."""

    content: str | np.ndarray
    is_validation: bool | None = None  # None: its hash decides
    ends: bool = True  # False: the next unit goes on with it
    where: str = ""  # of ids, for errors


class Unit(Protocol):
    """About a mebibyte of a source."""

    @property
    def size(self) -> int:
        """In bytes of the source."""
        ...

    def documents(self) -> Iterator[Document | None]:
        """The documents in it; None for a file that is not UTF-8. Raises UserError for what cannot be read."""
        ...


class Source:
    """Where text comes from: a folder or a file, `hf:` and a dataset, or `"stdlib"`, the running Python's own library.

    Args:
        name: files are told by their suffix: TFRecords, JSON lines, plain or as .gz or .zst, else one text each.
        key: of the text in an object of JSON or a row of a dataset, of the ids in a TFRecord.
        validation_fraction: how much of a lone text is set aside, its last part.

    Raises:
        UserError: there is no such source, or it holds nothing that can be read.
    """

    def __init__(self, name: str, key: str, validation_fraction: float):
        self._key, self._validation_fraction = key, validation_fraction
        self._hub = HubDataset(name.removeprefix("hf:"), key) if name.startswith("hf:") else None
        root = Path(sysconfig.get_paths()["stdlib"]) if name == "stdlib" else Path(name)
        self._files = [] if self._hub else _find(root, name)
        records = sum(map(_is_records, self._files))
        if 0 < records < len(self._files):
            raise UserError(f"{name} holds both TFRecords of tokens and text; expected one or the other")
        self.has_ids = records > 0
        self.is_one_text = len(self._files) == 1 and not records and not _LINES.search(self._files[0].name)
        stats = [(os.path.relpath(file, root), _stat(file)) for file in self._files]
        self.size = None if self._hub else sum(stat.st_size for _, stat in stats)  # bytes; None is unknown
        # What is prepared from: names and sizes, which a copy shares, and for work that is half done, the times too.
        self.fingerprint = self._hub.fingerprint if self._hub else _digest([(n, stat.st_size) for n, stat in stats])
        times = [(self.fingerprint, _UNIT), *((n, stat.st_mtime_ns) for n, stat in stats)]
        self.state = _digest(times)

    def units(self) -> Iterator[Unit]:
        """All units, always the same ones."""
        if self._hub:
            yield from _texts(self._hub.texts())
        elif self.is_one_text:
            yield from _parts(self._files[0], self._validation_fraction)
        elif self.has_ids:
            for file in self._files:
                with _reading(file):
                    for span in tfrecords.spans(file, _UNIT):
                        yield _Records(span, self._key, span.stop - span.start)
        else:
            yield from self._text_files()

    def _text_files(self) -> Iterator[Unit]:
        group: list[Path] = []
        size = 0
        for file in self._files:
            is_lines = _LINES.search(file.name)
            if group and (is_lines or size >= _UNIT):
                yield _Files(tuple(group), size)
                group, size = [], 0
            if is_lines:
                yield from _lines(file, self._key)
            else:
                group.append(file)
                size += _stat(file).st_size
        if group:
            yield _Files(tuple(group), size)


# ---- units -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Files:
    """Whole files, a document each."""

    paths: tuple[Path, ...]
    size: int

    def documents(self) -> Iterator[Document | None]:
        for path in self.paths:
            with _reading(path):
                data = path.read_bytes()
            try:
                yield Document(data.decode("utf-8-sig"))
            except UnicodeDecodeError:
                yield None


@dataclass(frozen=True)
class _Lines:
    """Lines of JSON objects, a document each."""

    path: Path
    first: int  # number of the first line
    lines: bytes
    key: str
    size: int

    def documents(self) -> Iterator[Document | None]:
        for number, line in enumerate(self.lines.split(b"\n"), self.first):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[self.key]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise UserError(f'{self.path}, line {number}: expected a JSON object with a string under "{self.key}"')
            yield Document(text)


@dataclass(frozen=True)
class _Texts:
    """Documents as they are."""

    texts: tuple[str, ...]
    size: int

    def documents(self) -> Iterator[Document | None]:
        yield from map(Document, self.texts)


@dataclass(frozen=True)
class _Part:
    """Some lines of a lone text, which is one document for training and one for validation."""

    path: Path
    text: bytes
    is_validation: bool
    ends: bool
    size: int

    def documents(self) -> Iterator[Document | None]:
        try:
            yield Document(self.text.decode("utf-8"), self.is_validation, self.ends)
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path} is not UTF-8: {error}") from error


@dataclass(frozen=True)
class _Records:
    """TFRecords, a document each."""

    span: tfrecords.Span
    key: str
    size: int

    def documents(self) -> Iterator[Document | None]:
        with _reading(self.span.path):
            for number, ids in enumerate(tfrecords.read(self.span, self.key), self.span.first):
                yield Document(ids, where=f"{self.span.path}, record {number}")


def _texts(texts: Iterator[str]) -> Iterator[Unit]:
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= _UNIT:
            yield _Texts(tuple(group), size)
            group, size = [], 0
    if group:
        yield _Texts(tuple(group), size)


def _lines(path: Path, key: str) -> Iterator[Unit]:
    first, seen, pending = 1, 0, bytearray()
    with _reading(path), open(path, "rb") as file:
        for block in _blocks(file, path):
            pending += block
            cut = pending.rfind(b"\n", len(pending) - len(block)) + 1
            if cut and len(pending) >= _UNIT:
                yield _Lines(path, first, bytes(pending[:cut]), key, file.tell() - seen)
                first, seen = first + pending.count(b"\n", 0, cut), file.tell()
                del pending[:cut]
        if pending:
            yield _Lines(path, first, bytes(pending), key, file.tell() - seen)


def _blocks(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The contents of a file, decompressed."""
    try:
        match path.suffix.lower():
            case ".gz":
                with gzip.open(file) as content:
                    while block := content.read(_UNIT):
                        yield block
            case ".zst":
                yield from _decompress(file, path)
            case _:
                while block := file.read(_UNIT):
                    yield block
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{path} is truncated or damaged: {error}") from error


def _decompress(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The frames of a .zst file. zstandard's own stream takes the end of a file within a frame for the frame's end."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # what `zstd --long=31` writes
    frame = None
    while block := file.read(_PACKED):
        while block:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(block)
            block, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame:
        raise EOFError("the file ends within a frame")


def _parts(path: Path, validation_fraction: float) -> Iterator[Unit]:
    """A lone text, cut at line breaks, or between two characters where there is none for long."""
    with _reading(path), open(path, "rb") as file:
        start = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
        end = file.seek(0, os.SEEK_END)
        cut = max(start, int(end * (1 - validation_fraction)))
        before = max(start, cut - _UNIT)
        file.seek(before)
        cut = before + _whole(file.read(cut - before))
        for is_validation, position, stop in ((False, start, cut), (True, cut, end)):
            file.seek(position)
            while position < stop:
                text = file.read(min(_UNIT, stop - position))
                if not text:
                    raise UserError(f"{path} has shrunk while it was read")
                if position + len(text) < stop:
                    text = text[: _whole(text)]
                position += len(text)
                file.seek(position)
                yield _Part(path, text, is_validation, position == stop, len(text))


def _whole(text: bytes) -> int:
    """How much of a text is whole lines, or, if that is nothing, everything before its last character."""
    if lines := text.rfind(b"\n") + 1:
        return lines
    last = len(text) - 1
    while last > 0 and text[last] & 0xC0 == 0x80:  # a byte within a character
        last -= 1
    return max(last, 0)


# ---- files -----------------------------------------------------------------------------------------------------------


def _find(root: Path, name: str) -> list[Path]:
    """The files that hold the text of a source, in an order that does not depend on the file system."""
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise UserError(f'{name}: no such file or folder; expected one that holds text, hf:<dataset> or "stdlib"')
    is_stdlib = name == "stdlib"
    skip = _NOT_STDLIB if is_stdlib else {"__pycache__", "node_modules"}
    suffixes = {".py"} if is_stdlib else set(_SUFFIXES.split())
    files = []
    for parent, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [folder for folder in folders if folder not in skip and not folder.startswith(".")]
        for path in (Path(parent, file) for file in names):
            is_packed = not is_stdlib and (_LINES.search(path.name) or _is_records(path))
            if (path.suffix.lower() in suffixes or is_packed) and path.is_file():
                files.append(path)
    if not files:
        raise UserError(f"{name} holds no text files; expected some of {' '.join(sorted(suffixes))}")
    return sorted(files, key=lambda file: file.relative_to(root).parts)


def _is_records(path: Path) -> bool:
    return _RECORDS.search(path.name) is not None


def _stat(path: Path) -> os.stat_result:
    with _reading(path):
        return path.stat()


def _refuse(error: OSError) -> None:
    raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _digest(facts: list[tuple[str, int]]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
