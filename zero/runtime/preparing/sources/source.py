"""A source of documents by its name: opens files, datasets and TFRecords, and cuts them into units."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from zero.runtime.errors import UserError
from zero.runtime.preparing.sources import documents
from zero.runtime.preparing.sources.documents import Reader, TextReader, Unit
from zero.runtime.preparing.sources.files import find_files, is_json_lines, is_tfrecords, stat
from zero.runtime.preparing.sources.hub import HubDataset
from zero.runtime.preparing.sources.json_lines import json_lines
from zero.runtime.preparing.sources.text import text_parts, whole_files


class Source:
    """A folder or a file, `hf:` and a dataset, or `"stdlib"`, the library of the running Python.

    Args:
        name: the suffix of a file decides: TFRecords, JSON lines, plain or as .gz or .zst, else one text per file.
        key: of the text in an object of JSON or a row of a dataset, of the ids in a TFRecord.
        validation_fraction: how much of a single text is set aside for validation, its last part.
        reader: of objects of JSON and rows of a dataset, where they are not a text under `key`; then the source holds
            nothing else.

    Raises:
        UserError: there is no such source, or nothing in it can be read.
    """

    def __init__(self, name: str, key: str, validation_fraction: float, reader: Reader | None = None):
        self._key, self._validation_fraction = key, validation_fraction
        self._reader = reader or TextReader(key)
        self._hub = HubDataset(name.removeprefix("hf:"), self._reader) if name.startswith("hf:") else None
        root = Path(sysconfig.get_paths()["stdlib"]) if name == "stdlib" else Path(name)
        self._files = [] if self._hub else find_files(root, name)
        records = sum(map(is_tfrecords, self._files))
        if 0 < records < len(self._files):
            raise UserError(f"{name} holds both TFRecords of tokens and text; expected one or the other")
        others = [file for file in self._files if not is_json_lines(file)]
        if reader is not None and others:
            raise UserError(f"{others[0]}: expected JSON lines, as --completions reads prompts with their completions")
        self.has_ids = records > 0
        self.is_one_text = len(self._files) == 1 and not records and not is_json_lines(self._files[0])
        stats = [(os.path.relpath(file, root), stat(file)) for file in self._files]
        self.size = None if self._hub else sum(status.st_size for _, status in stats)  # bytes; None is unknown
        # A hash of names and sizes, which a copy shares; the state of an unfinished corpus also depends on the times.
        sizes = [(path, status.st_size) for path, status in stats]
        self.fingerprint = self._hub.fingerprint if self._hub else _digest(sizes)
        times = [(path, status.st_mtime_ns) for path, status in stats]
        self.state = _digest([(self.fingerprint, documents.UNIT_BYTES), *times])

    def units(self) -> Iterator[Unit]:
        """All units, the same ones at every call."""
        if self._hub:
            yield from self._hub.units()
        elif self.is_one_text:
            yield from text_parts(self._files[0], self._validation_fraction)
        elif self.has_ids:
            # protobuf takes a tenth of a second to import
            from zero.runtime.preparing.sources.tfrecords import record_units

            for file in self._files:
                yield from record_units(file, self._key, documents.UNIT_BYTES)
        else:
            yield from self._text_units()

    def _text_units(self) -> Iterator[Unit]:
        group: list[Path] = []
        size = 0
        for file in self._files:
            if group and (is_json_lines(file) or size >= documents.UNIT_BYTES):
                yield Unit(size, partial(whole_files, tuple(group)))
                group, size = [], 0
            if is_json_lines(file):
                yield from json_lines(file, self._reader)
            else:
                group.append(file)
                size += stat(file).st_size
        if group:
            yield Unit(size, partial(whole_files, tuple(group)))


def _digest(facts: list[tuple[str, int]]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
