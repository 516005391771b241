"""TFRecords of token ids, read without TensorFlow (google-crc32c, protobuf).

A record is its length (8 bytes, little-endian), a checksum of the length, the data, and a checksum of the data. The
data are a tf.train.Example, of which only an integer list is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, BinaryIO

import google_crc32c
import numpy as np

from zero.base.errors import UserError
from zero.corpus.preparing.documents import Document, Unit
from zero.corpus.preparing.sources.files import open_file

# Part of tensorflow/core/example/example.proto. Its map of features has the same bytes as a list of entries.
_EXAMPLE = """
name: "example.proto" package: "zero" syntax: "proto3"
message_type { name: "Integers" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature" field { name: "integers" number: 3 type_name: "Integers" type: TYPE_MESSAGE } }
message_type { name: "Entry" field { name: "key" number: 1 type: TYPE_STRING }
                             field { name: "value" number: 2 type_name: "Feature" type: TYPE_MESSAGE } }
message_type { name: "Features"
               field { name: "feature" number: 1 label: LABEL_REPEATED type_name: "Entry" type: TYPE_MESSAGE } }
message_type { name: "Example" field { name: "features" number: 1 type_name: "Features" type: TYPE_MESSAGE } }
"""


def record_units(path: str, key: str, size: int) -> Iterator[Unit]:
    """All records of a file in units of about `size` bytes; reads and checks only their lengths."""
    with open_file(path) as file:
        end = file.seek(0, 2)
        start = position = first = number = 0
        while position < end:
            file.seek(position)
            position += 12 + _length(file, f"{path}, record {number}") + 4
            number += 1
            if position > end:
                raise UserError(f"{path}, record {number - 1}: the file ends within it; copy it again")
            if position - start >= size or position == end:
                yield Unit(position - start, partial(_documents, path, key, first, start, position))
                start = position
                first = number


def _documents(path: str, key: str, number: int, start: int, stop: int) -> Iterator[Document]:
    """The records from byte `start` to `stop`, of which the first has this number: a list of integers of each.

    Raises UserError, with the number of the record, for a checksum that does not match or any other content.
    """
    with open_file(path) as file:
        file.seek(start)
        while file.tell() < stop:
            name = f"{path}, record {number}"
            data = file.read(_length(file, name))
            _check(data, file.read(4), name)
            yield Document(_integers(data, key, name), name=name)
            number += 1


def _length(file: BinaryIO, name: str) -> int:
    head = file.read(12)
    _check(head[:8], head[8:], name)
    return struct.unpack("<Q", head[:8])[0]


def _check(data: bytes, checksum: bytes, name: str) -> None:
    crc = google_crc32c.value(data)
    # TFRecord masks its checksums, so that no crc is taken of a crc.
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    if checksum != struct.pack("<I", masked):
        raise UserError(f"{name} does not match its checksum: not a TFRecord file, or damaged; copy it again")


def _integers(data: bytes, key: str, name: str) -> np.ndarray:
    """The feature called `key`, or the only list of integers in an example."""
    from google.protobuf.message import DecodeError

    try:
        features = _example_class().FromString(data).features.feature
    except DecodeError as error:
        raise UserError(f"{name} is not a tf.train.Example; expected one with a list of integers") from error
    lists = {entry.key: entry.value.integers.value for entry in features if entry.value.HasField("integers")}
    if key in lists:
        return np.array(lists[key], np.int64)
    if len(lists) != 1:
        names = ", ".join(sorted(lists)) if lists else "none"
        raise UserError(f'{name}: expected integers under "{key}", or under one name only; found {names}')
    (only,) = lists.values()
    return np.array(only, np.int64)


@cache
def _example_class() -> Any:
    # Imported here because it takes 0.1 s and only this format needs it.
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("zero.Example"))
