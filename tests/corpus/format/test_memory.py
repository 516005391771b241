"""Memory that is used again: a file longer than the last one, and one that grows while it is read."""

import os
import threading
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from zero.corpus.format.memory import ReadBuffer

pytestmark = pytest.mark.quick


def test_read_files_of_any_size(tmp_path: Path):
    buffer = ReadBuffer()
    for size in (3, 700_000, 0, 4096, 700_001):
        content = os.urandom(size)
        (tmp_path / "x").write_bytes(content)
        with open(tmp_path / "x", "rb") as file:
            assert bytes(buffer.read(file)) == content


def test_a_file_that_grows_is_read_to_its_end(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"a" * 5000)

    class Growing:
        """A file to which another process appends after its size was asked for."""

        def __init__(self, file: BinaryIO):
            self.fileno = file.fileno
            self.read = file.read
            self._file = file

        def readinto(self, memory: memoryview) -> int:
            with open(tmp_path / "x", "ab") as other:
                other.write(b"b" * 9000)
            return self._file.readinto(memory)  # type: ignore[attr-defined]

    with open(tmp_path / "x", "rb") as file:
        assert bytes(ReadBuffer().read(cast(BinaryIO, Growing(file)))) == b"a" * 5000 + b"b" * 9000


def test_the_memory_is_used_again_by_its_thread_alone(tmp_path: Path):
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 100)
    buffer = ReadBuffer()

    def read(name: str) -> memoryview:
        with open(tmp_path / name, "rb") as file:
            return buffer.read(file)

    first = read("a")
    other = threading.Thread(target=read, args=["b"])
    other.start()
    other.join()
    assert bytes(first) == b"a" * 100
    read("c")
    assert bytes(first) == b"c" * 100
