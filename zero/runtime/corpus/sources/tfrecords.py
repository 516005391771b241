"""TFRecords of token ids, read without TensorFlow (google-crc32c).

A record is its length (8 bytes, little-endian), a checksum of the length, the data, and a checksum of the data. The
data are a tf.train.Example in protobuf's wire format, of which only an integer list is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import google_crc32c
import numpy as np

from zero.runtime.corpus.sources import documents
from zero.runtime.corpus.sources.documents import Document, Unit
from zero.runtime.corpus.sources.files import named_errors
from zero.runtime.errors import UserError


class Span(NamedTuple):
    """Consecutive records of a file."""

    path: Path
    start: int  # in bytes
    stop: int
    first: int  # number of the first record, from 0


@dataclass(frozen=True)
class RecordSpan:
    """A span of records, one document each."""

    span: Span
    key: str
    size: int

    def documents(self) -> Iterator[Document | None]:
        with named_errors(self.span.path):
            for number, ids in enumerate(read(self.span, self.key), self.span.first):
                yield Document(ids, name=f"{self.span.path}, record {number}")


def record_units(path: Path, key: str) -> Iterator[Unit]:
    with named_errors(path):
        for span in spans(path, documents.UNIT_BYTES):
            yield RecordSpan(span, key, span.stop - span.start)


def spans(path: Path, size: int) -> Iterator[Span]:
    """All records of a file in spans of about `size` bytes; reads and checks only their lengths."""
    with open(path, "rb") as file:
        end = file.seek(0, 2)
        start = position = first = number = 0
        while position < end:
            file.seek(position)
            position += 12 + _length(file, path, number) + 4
            number += 1
            if position - start >= size or position >= end:
                if position > end:
                    raise UserError(f"{path}, record {number - 1}: the file ends within it")
                yield Span(path, start, position, first)
                start, first = position, number


def read(span: Span, key: str) -> Iterator[np.ndarray]:
    """The int64 lists of a span's records: the feature called `key`, or the only list of integers in an example.

    Raises UserError, with the number of the record, for a checksum that does not match or any other content.
    """
    with open(span.path, "rb") as file:
        file.seek(span.start)
        number = span.first
        while file.tell() < span.stop:
            data = file.read(_length(file, span.path, number))
            _check(data, file.read(4), span.path, number)
            try:
                found = _integer_lists(data)
            except (IndexError, ValueError, UnicodeDecodeError) as error:
                raise UserError(f"{span.path}, record {number} is not a tf.train.Example") from error
            if key not in found and len(found) != 1:
                raise UserError(
                    f'{span.path}, record {number}: expected integers under "{key}", or under one name only; '
                    f"found {', '.join(sorted(found)) or 'none'}"
                )
            yield found[key] if key in found else next(iter(found.values()))
            number += 1


def _length(file: BinaryIO, path: Path, number: int) -> int:
    head = file.read(12)
    _check(head[:8], head[8:], path, number)
    return struct.unpack("<Q", head[:8])[0]


def _check(data: bytes, checksum: bytes, path: Path, number: int) -> None:
    crc = google_crc32c.value(data)
    masked = (
        (crc >> 15 | crc << 17) + 0xA282EAD8
    ) & 0xFFFFFFFF  # as TFRecord stores it, so that no crc is taken of a crc
    if checksum != struct.pack("<I", masked):
        raise UserError(f"{path}, record {number} does not match its checksum: not a TFRecord file, or a damaged one")


def _integer_lists(example: bytes) -> dict[str, np.ndarray]:
    """Example { Features features = 1 }, Features { map<string, Feature> feature = 1 }."""
    found = {}
    for features in _fields(example, 1):
        for entry in _fields(features, 1):  # string key = 1, Feature value = 2
            name = b"".join(_fields(entry, 1)).decode("utf-8")
            for feature in _fields(entry, 2):
                for integers in _fields(feature, 3):  # Int64List { repeated int64 value = 1 }, packed or not
                    found[name] = _varints(b"".join(_fields(integers, 1)))
    return found


def _fields(message: bytes, wanted: int) -> Iterator[bytes]:
    """The contents of the fields with this number; for an integer its varint."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        start = position
        match tag & 7:
            case 0:
                _, position = _varint(message, position)
            case 1:
                position += 8
            case 2:
                length, start = _varint(message, position)
                position = start + length
            case 5:
                position += 4
            case kind:
                raise ValueError(f"wire type {kind}")
        if position > len(message):
            raise ValueError("a field extends past the end of its message")
        if tag >> 3 == wanted:
            yield message[start:position]


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """An integer and where it ends: seven bits per byte, lowest first; the eighth bit says that more follow."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7


def _varints(data: bytes) -> np.ndarray:
    """All integers of a packed list, int64."""
    raw = np.frombuffer(data, np.uint8)
    last = raw < 128  # the last byte of each integer
    if not len(raw):
        return np.zeros(0, np.int64)
    if not last[-1]:
        raise ValueError("the list ends within an integer")
    starts = np.concatenate([[0], np.flatnonzero(last)[:-1] + 1])
    place = np.arange(len(raw)) - np.repeat(starts, np.diff(np.append(starts, len(raw))))
    if place.max() > 9:
        raise ValueError("an integer of more than ten bytes")
    parts = (raw & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(parts, starts).view(np.int64)
