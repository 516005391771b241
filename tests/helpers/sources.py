"""Writes the same documents as a file of each format that zero-prepare reads.

- `write_text`, `write_ids`: by the name of a format, a function of `(path without a suffix, documents)`.
- `torch_tensor`: a file of torch.save with integers, written without torch.
"""

import csv
import gzip
import io
import json
import lzma
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from tests.helpers.records import example, record

END = 0  # of text, of bytes


def _lines(documents: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()


def _packed(suffix: str, pack: Callable[[bytes], bytes]) -> Callable[[Path, list[str]], None]:
    return lambda path, documents: _write(path, suffix, pack(_lines(documents)))


def _write(path: Path, suffix: str, data: bytes) -> None:
    path.with_name(path.name + suffix).write_bytes(data)


def _csv(path: Path, documents: list[str]) -> None:
    with path.with_name(path.name + ".csv").open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([["number", "text"], *enumerate(documents)])


def _table(documents: list[str]) -> Any:
    import pyarrow

    return pyarrow.table({"number": range(len(documents)), "text": documents})


def _parquet(path: Path, documents: list[str]) -> None:
    from pyarrow import parquet

    parquet.write_table(_table(documents), path.with_name(path.name + ".parquet"), row_group_size=5)


def _arrow_file(path: Path, documents: list[str]) -> None:
    import pyarrow

    with pyarrow.OSFile(str(path.with_name(path.name + ".feather")), "wb") as file:
        with pyarrow.ipc.new_file(file, _table([]).cast(_table(["a"]).schema).schema) as writer:
            writer.write_table(_table(documents), max_chunksize=7)


def _arrow_stream(path: Path, documents: list[str]) -> None:
    import pyarrow

    with pyarrow.OSFile(str(path.with_name(path.name + ".arrow")), "wb") as file:
        table = _table(documents)
        with pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)


def tar(members: dict[str, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _json(path: Path, documents: list[str]) -> None:
    """One array over several lines, as pandas and Alpaca have it."""
    _write(path, ".json", json.dumps([{"text": text} for text in documents], indent=1).encode())


def parquet_bytes(columns: dict[str, Any]) -> bytes:
    """A table of these columns as a file."""
    import pyarrow
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


def _tar_of_text(path: Path, documents: list[str]) -> None:
    _write(path, ".tar", tar({f"{i:04}.txt": text.encode() for i, text in enumerate(documents)}))


def _tar_of_json(path: Path, documents: list[str]) -> None:
    members = {f"{i:04}.json": json.dumps({"text": text}).encode() for i, text in enumerate(documents)}
    _write(path, ".tar.xz", tar(members, "w:xz"))


write_text: dict[str, Callable[[Path, list[str]], None]] = {
    "jsonl": _packed(".jsonl", bytes),
    "jsonl.gz": _packed(".jsonl.gz", gzip.compress),
    "json.xz": _packed(".json.xz", lzma.compress),
    "jsonl.zst": _packed(".jsonl.zst", zstandard.compress),
    "json": _json,
    "lines of .json": _packed(".json", bytes),
    "csv": _csv,
    "parquet": _parquet,
    "feather": _arrow_file,
    "arrow": _arrow_stream,
    "tar": _tar_of_text,
    "tar.xz": _tar_of_json,
}


def _ids(documents: list[str]) -> list[np.ndarray]:
    return [np.append(np.frombuffer(text.encode(), np.uint8), END).astype(np.int64) for text in documents]


def _npy(path: Path, documents: list[str]) -> None:
    np.save(path.with_name(path.name + ".npy"), np.concatenate(_ids(documents)).astype(np.int32))


def _nanogpt(path: Path, documents: list[str]) -> None:
    _write(path, ".bin", np.concatenate(_ids(documents)).astype("<u2").tobytes())


def _llm_c(path: Path, documents: list[str]) -> None:
    tokens = np.concatenate(_ids(documents)).astype("<u2")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    _write(path, ".bin", header.tobytes() + tokens.tobytes())


def _megatron(path: Path, documents: list[str]) -> None:
    """As the writer of Megatron-LM does: sequences, their places, and the first sequence of each document."""
    megatron(path, [ids.astype("<u2") for ids in _ids(documents)], 8)


def megatron(path: Path, lists: list[np.ndarray], code: int) -> None:
    """The tokens of documents, whose type has this number."""
    halves = [half for ids in lists for half in np.split(ids, [len(ids) // 2])]  # of two sequences each
    sizes = np.array([len(half) for half in halves])
    places = np.concatenate([[0], np.cumsum(sizes)[:-1]]) * lists[0].itemsize
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(halves), len(lists) + 1)
    starts = np.arange(len(lists) + 1) * 2
    arrays = (sizes.astype("<i4"), places.astype("<i8"), starts.astype("<i8"))
    _write(path, ".idx", head + b"".join(array.tobytes() for array in arrays))
    _write(path, ".bin", b"".join(half.tobytes() for half in halves))


def _tfrecords(path: Path, documents: list[str]) -> None:
    _write(path, ".tfrecord", b"".join(record(example(ids=ids.tolist())) for ids in _ids(documents)))


def _tensors(path: Path, documents: list[str]) -> None:
    """As fattorib/ZeRO-transformer's shards: joined and cut into rows, one tensor per sample."""
    joined = np.concatenate(_ids(documents))
    rows = np.split(joined, range(16, len(joined), 16))
    _write(path, ".tar.gz", tar({f"{i:04}.input_id.pth": torch_tensor(row) for i, row in enumerate(rows)}, "w:gz"))


write_ids: dict[str, Callable[[Path, list[str]], None]] = {
    "npy": _npy,
    "nanoGPT": _nanogpt,
    "llm.c": _llm_c,
    "Megatron": _megatron,
    "tfrecord": _tfrecords,
    "torch": _tensors,
}


def torch_tensor(values: np.ndarray) -> bytes:
    """What torch.save writes of a one-dimensional LongTensor (a test compares it with torch's own)."""
    count = len(values)
    description = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\0((X\x07\0\0\0storageq\x01ctorch\nLongStorage\nq\x02"
        b"X\x01\0\0\x000q\x03X\x03\0\0\0cpuq\x04J" + struct.pack("<i", count) + b"tq\x05QK\0J"
        + struct.pack("<i", count) + b"\x85q\x06K\x01\x85q\x07\x89ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b."
    )  # fmt: skip
    return torch_zip(description, values.astype("<i8").tobytes())


def torch_zip(description: bytes, storage: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        entries = {"data.pkl": description, "byteorder": b"little", "data/0": storage, "version": b"3\n"}
        for name, data in entries.items():
            archive.writestr(f"archive/{name}", data)
    return buffer.getvalue()
