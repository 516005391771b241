"""Rows of neighboring files, read at once: the same as file by file, whatever stands between them."""

import io
import tarfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.helpers.shards import npy
from zero.base.errors import UserError
from zero.corpus.format.memory import Memory
from zero.corpus.format.shards import one_by_one, read_samples

pytestmark = pytest.mark.quick
Members = list[tuple[str, bytes]]
Change = Callable[[Members], None]


def rows_of(count: int) -> Members:
    return [(f"some/{i:03}.input_id.npy", npy(np.arange(i, i + 70, dtype=np.uint16))) for i in range(count)]


def tar_of(members: Members, form: int = tarfile.USTAR_FORMAT) -> bytearray:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return bytearray(file.getvalue())


def read(stream: Any) -> tuple[list[tuple[str, dict[str, bytes]]], str, int]:
    """The samples, the message that reading ends with, and how many samples came together with others."""
    samples: list[tuple[str, dict[str, bytes]]] = []
    together = 0
    try:
        for sample in read_samples("s.tar", stream):
            together += len(sample.get("__keys__", ()))
            for one in one_by_one(sample):
                members = {name: data for name, data in one.items() if name != "__key__"}
                for name, data in members.items():
                    members[name] = npy(data) if isinstance(data, np.ndarray) else bytes(data)
                samples.append((one["__key__"], members))
    except UserError as error:
        return samples, str(error), together
    return samples, "", together


def put(at: int, name: str, data: bytes) -> Change:
    return lambda members: members.insert(at, (name, data))


ROW = npy(np.arange(70, dtype=np.uint16))


@pytest.mark.parametrize(
    "change",
    [
        lambda members: None,
        put(0, "some/a.txt", b"text"),
        put(20, "some/019.length.npy", npy(np.array(3))),  # of the row before
        put(20, "some/020.txt", b"a member before the row"),
        put(20, "some/x.input_id.npy", ROW),  # a shorter name
        put(20, "some/ö1.input_id.npy", ROW),  # as long in bytes
        put(20, "some/x.y.input_id.npy", ROW),  # a dot elsewhere
        put(20, "som/x12.input_id.npy", ROW),  # a slash elsewhere
        put(20, "some/123.INPUT_ID.NPY", ROW),
        put(20, "some/1\n3.input_id.npy", ROW),
        put(20, "some/123.input_id.npyx", ROW),
        put(20, "____/123.input_id.npy", ROW),  # metadata, which is left out
        put(20, "__a__123.input_id.npy", ROW),
        put(20, "some/019.input_id.npy", ROW),  # the name of its neighbor: an error
        put(20, "some/003.input_id.npy", ROW),  # a name from before
        put(20, "some/123.input_id.npy", npy(np.arange(70, dtype=np.int16))),
        put(20, "some/123.input_id.npy", npy(np.arange(71, dtype=np.uint16))),
        put(20, "some/123.input_id.npy", npy(np.arange(70, dtype=np.uint16).reshape(2, 35))),
        put(20, "some/123.input_id.npy", ROW + b"more"),
        put(20, "some/123.input_id.npy", b"no array"),
        put(20, f"{'long' * 40}/123.input_id.npy", ROW),
        put(0, f"{'long' * 40}/123.input_id.npy", ROW),
    ],
)
@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_rows_are_those_of_each_file(change: Change, form: int):
    members = rows_of(40)
    change(members)
    data = tar_of(members, form)
    samples, message, of_file = read(io.BytesIO(data))
    found = read(Memory(memoryview(data)))
    assert found[:2] == (samples, message)
    assert found[2] > 15 and of_file == 0  # most of them at once


def test_folders_of_long_names():
    members = [(f"{'folder/' * 20}{name}", data) for name, data in rows_of(9)]
    data = tar_of(members)
    found = read(Memory(memoryview(data)))
    assert found == (read(io.BytesIO(data))[0], "", 8)


@pytest.mark.parametrize(
    "byte", [*range(0, 103, 7), 100, 110, 124, 135, 140, 148, 150, 154, 155, 156, 157, 257, 345, 511]
)
def test_a_changed_byte_of_a_header_is_seen(byte: int):
    data = tar_of(rows_of(20))
    at = 11 * 1024 + byte
    for value in (data[at] ^ 1, data[at] ^ 0x80):
        changed = data.copy()
        changed[at] = value
        samples, message, _ = read(io.BytesIO(changed))
        assert read(Memory(memoryview(changed)))[:2] == (samples, message)
        assert len(samples) < 20 and "damaged" in message


@pytest.mark.parametrize("carry", [1, -1])
def test_a_checksum_has_octal_digits(carry: int):
    """Not others that make the same number."""
    data = tar_of(rows_of(20))
    ends = {at: data[at + 152 : at + 154] for at in range(9 * 1024, 17 * 1024, 1024)}  # of the octal numbers
    at = next(at for at, end in ends.items() if end[0] > ord("0") and end[1] not in b"07")
    data[at + 152] -= carry
    data[at + 153] += 8 * carry
    samples, message, _ = read(io.BytesIO(data))
    assert read(Memory(memoryview(data)))[:2] == (samples, message) and "damaged" in message


def test_a_header_of_another_row_is_seen():
    """Of the array, whose bytes no checksum covers."""
    data = tar_of(rows_of(20))
    at = data.index(b"(70,)", 11 * 1024)
    data[at : at + 5] = b"(69,)"
    samples, _, _ = read(io.BytesIO(data))
    assert read(Memory(memoryview(data)))[0] == samples


def test_truncated():
    data = tar_of(rows_of(20))
    for size in range(3 * 1024 - 9, 6 * 1024, 333):
        samples, message, _ = read(io.BytesIO(data[:size]))
        assert read(Memory(memoryview(data[:size])))[:2] == (samples, message)
