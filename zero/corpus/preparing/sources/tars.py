"""Units of tar files in webdataset's convention: samples of text, of JSON, or of a tensor of token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from zero.corpus.format.shards import read_samples
from zero.corpus.preparing import documents
from zero.corpus.preparing.documents import Document, Reader, TextReader, Unit, decoded
from zero.corpus.preparing.sources.compression import damage_named, decompressed
from zero.corpus.preparing.sources.files import open_file
from zero.corpus.preparing.sources.tensors import read_tensor
from zero.errors import UserError
from zero.files.parsing import reading


def tar_units(path: str, reader: Reader) -> Iterator[Unit]:
    """The samples of a tar in units of about `UNIT_BYTES` of their contents."""
    group: list[Document] = []
    size = told = 0
    with _samples(path) as (samples, file):
        for sample in samples:
            group += _documents(path, sample, reader)
            size += sum(len(value) for key, value in sample.items() if key != "__key__")
            if size >= documents.UNIT_BYTES:
                yield Unit(file.tell() - told, partial(iter, tuple(group)))
                group = []
                size = 0
                told = file.tell()
        whole = file.seek(0, 2)
    if group or told < whole:
        yield Unit(whole - told, partial(iter, tuple(group)))


def has_tensors(path: str) -> bool:
    """Whether the first sample holds a tensor of token ids, and not text."""
    with _samples(path) as (samples, _):
        sample = next(samples, {})
    return any(_is_tensor(key) for key in sample)


@contextmanager
def _samples(path: str) -> Iterator[tuple[Iterator[dict[str, Any]], Any]]:
    """The samples of a tar, and the file that they are read from."""
    with open_file(path) as file, damage_named(path):
        yield read_samples(path, decompressed(file, path)), file


def _is_tensor(suffix: str) -> bool:
    return suffix == "pth" or suffix.endswith(".pth")


def _documents(path: str, sample: dict[str, Any], reader: Reader) -> Iterator[Document]:
    name = f"{path}, sample {sample['__key__']}"
    suffixes = [key for key in sample if key != "__key__"]
    tensors = [key for key in suffixes if _is_tensor(key)]
    if len(tensors) == 1:
        rows = read_tensor(sample[tensors[0]], f"{name}, member {tensors[0]}")
        # Another program has joined documents and cut them: nothing is added between its rows.
        yield from (Document(row, name=name, is_complete=True) for row in rows.reshape(-1, rows.shape[-1]))
    elif "txt" in suffixes and isinstance(reader, TextReader):
        yield decoded(sample["txt"], name)
    elif "json" in suffixes:
        with reading(f"{name}, member json: expected a JSON object"):
            entry = json.loads(sample["json"])
        yield reader(entry, name)
    else:
        raise UserError(f"{name}: expected a member .txt, .json or .pth; found {', '.join(sorted(suffixes))}")
