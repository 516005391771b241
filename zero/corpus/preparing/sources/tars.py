"""Units of tar files, read by webdataset: samples of text, of JSON, or of token ids.

Importing webdataset takes 0.7 s, and 6.4 s and 510 MiB where torch is installed: only a source of tars does it, in the
process that cuts it into units.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from zero.base.errors import UserError
from zero.corpus.format.example import TEXT
from zero.corpus.format.shards import COMPLETIONS, LENGTHS, ROWS, lengths_of, rows_of
from zero.corpus.format.tar import check_kind, check_rest, tar_header
from zero.corpus.preparing import documents
from zero.corpus.preparing.documents import Document, Reader, TextReader, Unit, broken, decoded, read_entry
from zero.corpus.preparing.sources.compression import damage_named, decompressed
from zero.corpus.preparing.sources.files import open_file
from zero.corpus.preparing.sources.joined_rows import JoinedRows
from zero.corpus.preparing.sources.tensors import read_tensor
from zero.files.parsing import MALFORMED, reading

_TEXT = ("txt", "text", "transcript")  # suffixes that webdataset decodes to text
_JSON = ("json", "jsn")
_IDS = ("npy", "pth")
_BLOCK = 512  # bytes, in which a tar is written
# How webdataset takes names with further dots.
_DOTS = (
    "found {}, which webdataset takes for one sample, as a key ends at the first dot of a name; replace the other dots "
    "in the names of the files"
)


def tar_units(path: str, reader: Reader, rows: JoinedRows, most: int) -> Iterator[Unit]:
    """The samples of a tar in units of about `UNIT_BYTES` of their contents.

    Token ids become documents through `rows`, which keeps a document that continues in the next tar.
    """
    group: list[Document] = []
    size = told = 0
    with _samples(path, most) as (samples, file):
        for sample in samples:
            member = _ids_member(sample)
            name = f"{path}, sample {sample['__key__']}"
            if member is None:
                group.append(_document(name, sample, reader))
            else:
                group += rows.add(*_rows(name, sample, member), name)
            size += sum(len(value) for key, value in sample.items() if not key.startswith("__"))
            if size >= documents.UNIT_BYTES:
                yield Unit(file.tell() - told, partial(iter, tuple(group)))
                group = []
                size = 0
                told = file.tell()
        group += rows.end_shard()
        whole = file.seek(0, 2)
    if group or told < whole:
        yield Unit(whole - told, partial(iter, tuple(group)))


def holds_ids(path: str) -> bool:
    """Whether the first sample holds token ids, and not text."""
    with _samples(path) as (samples, _):
        sample = next(samples, {})
    return _ids_member(sample) is not None


@contextmanager
def _samples(path: str, most: int = documents.DOCUMENT_BYTES) -> Iterator[tuple[Iterator[dict[str, Any]], BinaryIO]]:
    """The samples of a tar, and the file that they are read from."""
    with open_file(path) as file, damage_named(path):
        yield _grouped(path, WholeTar(decompressed(file, path), path, most)), file


def _grouped(path: str, tar: WholeTar) -> Iterator[dict[str, Any]]:
    """The samples as webdataset groups them; raises UserError for a tar that is truncated or damaged."""
    from webdataset.tariterators import group_by_keys, tar_file_expander

    try:
        yield from group_by_keys(tar_file_expander([{"url": path, "stream": tar}]))
        tar.check()
    except (*MALFORMED, tarfile.TarError) as error:
        # webdataset adds arguments to errors.
        if isinstance(error, UserError):
            raise UserError(str(error.args[0])) from error
        problem = tar.problem or str(error.args[0] if error.args else type(error).__name__)
        if "duplicate file name" in problem:
            member = problem.partition(": duplicate")[0]
            raise UserError(f"{path}: {member} is there twice; expected each file once, in capitals or not") from error
        raise UserError(f"{path} is truncated or damaged: {problem}; copy it again") from error


class WholeTar(io.RawIOBase):
    """A tar to read forward. It notices damaged headers and a missing end, which tarfile takes for the end."""

    problem: str | None = None

    def __init__(self, file: BinaryIO, path: str, most: int):
        self._file = file
        self._path = path
        self._most = most
        self._skip = 0  # bytes to the next header
        self._header = b""
        self._is_ended = False

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        data = self._file.read(-1 if size is None else size)
        self._follow(data)
        return data

    def check(self) -> None:
        """Raises EOFError if the end of the archive has not been read, and UserError if more follows it."""
        if not self._is_ended:
            self._fail(EOFError("unexpected end of file"))
        while rest := self._file.read(1 << 20):
            check_rest(self._path, rest)

    def _follow(self, data: bytes) -> None:
        """Checks the headers in the next bytes."""
        if not data:
            self.check()
        at = 0
        while at < len(data) and not self._is_ended:
            skipped = min(self._skip, len(data) - at)
            self._skip -= skipped
            at += skipped
            if self._skip:
                return
            part = data[at : at + _BLOCK - len(self._header)]
            self._header += part
            at += len(part)
            if len(self._header) < _BLOCK:
                return
            try:
                size = tar_header(self._header)
            except ValueError as error:
                self._fail(error)
            if size is not None:
                check_kind(self._path, self._header)
                if size > self._most:  # webdataset reads it whole
                    raise UserError(
                        f"{self._path}: a file of {size} bytes is longer than --document-bytes {self._most}"
                    )
            self._header = b""
            self._is_ended = size is None
            if size is not None:
                self._skip = size + -size % _BLOCK
        if self._is_ended:
            check_rest(self._path, data[at:])

    def _fail(self, error: Exception) -> None:
        self.problem = str(error)
        raise error


def _suffixes(sample: Mapping[str, Any], kinds: tuple[str, ...]) -> list[str]:
    """The members of a sample that have some of webdataset's suffixes, individually compressed or not."""
    return [key for key in sample if not key.startswith("__") and key.removesuffix(".gz").rpartition(".")[2] in kinds]


def _ids_member(sample: Mapping[str, Any]) -> str | None:
    """The member that holds token ids; None if it is text."""
    candidates = [key for key in _suffixes(sample, _IDS) if key not in (LENGTHS, COMPLETIONS)]
    named = [key for key in candidates if key.removesuffix(".gz") in (ROWS, "input_id.pth")]
    if named:
        return named[0]
    if len(candidates) == 1 and not _suffixes(sample, _TEXT + _JSON):
        return candidates[0]
    return None


def _rows(name: str, sample: dict[str, Any], member: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows of token ids (n, R), and the number of tokens in each (n,)."""
    data = _decoded(member, sample[member], ())
    if member.removesuffix(".gz").endswith("pth"):
        rows = read_tensor(data, f"{name}, member {member}")
        rows = rows.reshape(-1, rows.shape[-1])
        return rows, np.full(len(rows), rows.shape[1])
    if COMPLETIONS in sample:
        raise UserError(f"{name} marks completions, which other rows would lose: prepare its text again")
    rows = rows_of(sample | {ROWS: data}, name, TEXT)
    return rows, lengths_of(sample, name, rows)


def _document(name: str, sample: dict[str, Any], reader: Reader) -> Document:
    for kinds in (_TEXT, _JSON) if isinstance(reader, TextReader) else (_JSON,):
        members = _suffixes(sample, kinds)
        if not members:
            continue
        # A sample of several texts has one with no other name.
        member = min(members, key=len)
        if len(members) > 1 and "." in member.removesuffix(".gz"):
            return broken(name, f"{name}: {_DOTS.format(', '.join(sorted(members)))}", ", ".join(members))
        if kinds is _TEXT:
            return decoded(_decoded(member, sample[member], ()), name)
        try:
            with reading(f"{name}, member {member}: expected a JSON object"):
                entry = _decoded(member, sample[member], _JSON)
        except UserError as error:
            return broken(name, str(error), sample[member].decode("utf-8", "replace"))
        return read_entry(reader, entry, name)
    members = sorted(key for key in sample if not key.startswith("__"))
    problem = f"expected a member .txt, .json, .npy or .pth; found {', '.join(members)}"
    if len(_suffixes(sample, _IDS)) > 1:
        problem = _DOTS.format(", ".join(members))
    return broken(name, f"{name}: {problem}", ", ".join(members))


def _decoded(suffix: str, data: bytes, kinds: tuple[str, ...]) -> Any:
    """A member as webdataset decodes it, of these kinds; of others its bytes. Its pickles are never read."""
    from webdataset import autodecode

    def decoded_entry(key: str, data: bytes) -> Any:
        kind = key.rpartition(".")[2]
        if kind not in kinds:
            return None
        return autodecode.decoders[kind](data)

    return autodecode.Decoder([decoded_entry], post=[]).decode1(suffix, data)
