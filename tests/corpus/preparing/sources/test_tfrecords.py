"""TFRecords: written by Google's own protobuf, read by zero's reader, and refused where a bit is wrong."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.records import example, record
from zero.base.errors import UserError
from zero.corpus.preparing.sources.tfrecords import record_units


def read_all(path: Path, size: int = 100) -> list[np.ndarray]:
    documents = [document for unit in record_units(str(path), "ids", size) for document in unit.documents()]
    return [np.asarray(document.content) for document in documents if document is not None]


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1))), st.integers(1, 200))
def test_integers_come_back(tmp_path_factory: pytest.TempPathFactory, lists: list[list[int]], size: int):
    path = tmp_path_factory.mktemp("records") / "a.tfrecord"
    path.write_bytes(b"".join(record(example(ids=ids, weight=[0.5], other=[7], name=[b"x"])) for ids in lists))
    units = list(record_units(str(path), "ids", size))
    assert sum(unit.size for unit in units) == path.stat().st_size
    assert all(unit.size >= size for unit in units[:-1])
    assert [ids.tolist() for ids in read_all(path, size=size)] == lists


def test_one_list_needs_no_name(tmp_path: Path):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(record(example(tokens=[1, 2, 300], weight=[0.5])))
    assert [ids.tolist() for ids in read_all(path)] == [[1, 2, 300]]
    unpacked = "0a12 0a10 0a03696473 1209 1a07 0801 08ac02 0807"  # a tag before each value
    path.write_bytes(record(bytes.fromhex(unpacked)))
    assert [ids.tolist() for ids in read_all(path)] == [[1, 300, 7]]


def test_what_is_wrong_is_named(tmp_path: Path):
    path = tmp_path / "a.tfrecord"
    good = record(example(ids=[1, 2]))
    for data, message in [
        (good + record(example(a=[1], b=[2])), r'record 1: expected integers under "ids", .*found a, b'),
        (good + record(example(a=[0.5])), r"record 1: expected integers .*found none"),
        (good + record(b"\x07"), "record 1 is not a tf.train.Example"),
        (good + record(b"\x0a\x09\x00"), "record 1 is not a tf.train.Example"),
        (good + good[:-1], "record 1: the file ends within it"),
        (good + good[:11], "record 1 does not match its checksum"),
        (b"plain text that is no record", "record 0 does not match its checksum"),
    ]:
        path.write_bytes(data)
        with pytest.raises(UserError, match=rf"a\.tfrecord, {message}"):
            read_all(path)


@given(st.integers(0, 8 * 100))
def test_a_flipped_bit_is_seen(tmp_path_factory: pytest.TempPathFactory, bit: int):
    path = tmp_path_factory.mktemp("records") / "a.tfrecord"
    data = bytearray(record(example(ids=[1, 2, 3])) * 2)
    bit %= 8 * len(data)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"record {bit // 8 // (len(data) // 2)} does not match its checksum"):
        read_all(path)
