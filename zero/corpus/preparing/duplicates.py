"""Equal documents of different parts: found before anything is tokenized, in two passes, by a digest of their text.

The first pass reads each part and writes the digests of its documents, in groups by the digest. The second reads a
group of all parts and writes, for each part, the places of all documents but the first of each digest. Both are tasks
of an engine, which meet only in files (`passes/` in the directory of the corpus); their order decides nothing. The
files take 28 bytes per document, and the memory of the second pass about 70 for each document of 64 parts.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zero.corpus.format import directory
from zero.corpus.preparing.engines import Engine
from zero.corpus.preparing.needs import Needs, SourceSize
from zero.corpus.preparing.part_tasks import part_tasks
from zero.corpus.preparing.processes import Task
from zero.corpus.preparing.sources.changes import digests
from zero.corpus.preparing.sources.source import Source
from zero.files import storage

NAME = "duplicates"
PARTS_PER_GROUP = 64  # so that a group of digests is about as large as the digests of this many parts
PASSES = "passes"
BYTES_IN_MEMORY = 70  # of the second pass, for a document of its group
BYTES_IN_SET = 110  # for a document of a source of one part
_DOCUMENT = np.dtype([("high", "<u8"), ("low", "<u8"), ("part", "<u4"), ("unit", "<u4"), ("place", "<u4")])
PLACE = np.dtype([("unit", "<u4"), ("place", "<u4")])
Places = Mapping[int, frozenset[int]]  # in a unit, by its number


def find_duplicates(engine: Engine, source: Source, folder: str) -> int:
    """Writes the places of duplicates, for `read_places`; returns the number of groups."""
    groups = -(-source.parts // PARTS_PER_GROUP)
    for _ in engine.run(_WriteDigests(folder, groups), part_tasks(source), folder):
        pass
    group_tasks = [Task(f"group {group} of digests", group) for group in range(groups)]
    for _ in engine.run(_WritePlaces(folder, source.parts), group_tasks, folder):
        pass
    return groups


def read_places(folder: str, name: str, part: int, groups: int) -> dict[int, frozenset[int]]:
    """The places of the documents of a part that the passes of this name leave out, by their unit."""
    places: dict[int, set[int]] = {}
    for group in range(groups):
        for unit, place_in_unit in load(pass_file(folder, name, group, part)).tolist():
            places.setdefault(unit, set()).add(place_in_unit)
    return {unit: frozenset(unit_places) for unit, unit_places in sorted(places.items())}


def digest_of_places(places: Places) -> str:
    """What identifies these places, in the manifest of a part.

    >>> digest_of_places({3: frozenset([2, 1])})
    'f5450fd63bee0e21'
    """
    lines = [f"{unit} {' '.join(map(str, sorted(unit_places)))}" for unit, unit_places in sorted(places.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def remove_passes(folder: str) -> None:
    """Removes the files of both passes."""
    passes = storage.join(folder, PASSES)
    for path in storage.list_files(passes):
        storage.remove(path)
    if not storage.is_remote(passes) and os.path.isdir(passes):
        os.rmdir(passes)


@dataclass(frozen=True)
class _WriteDigests:
    """The first pass, over one part."""

    folder: str
    groups: int

    def __call__(self, numbered: tuple[int, Source]) -> None:
        number, part = numbered
        unit_documents = [np.zeros(0, _DOCUMENT)]
        unit_documents += [_documents(number, index, digests(unit)) for index, unit in enumerate(part.units())]
        documents = np.concatenate(unit_documents)
        del unit_documents
        for group in range(self.groups):
            save(pass_file(self.folder, "digests", number, group), documents[documents["high"] % self.groups == group])


def _documents(part: int, unit: int, unit_digests: list[bytes | None]) -> np.ndarray:
    """The documents of a unit that have a digest."""
    places = [index for index, digest in enumerate(unit_digests) if digest is not None]
    halves = np.frombuffer(b"".join(digest for digest in unit_digests if digest is not None), ">u8").reshape(-1, 2)
    documents = np.zeros(len(places), _DOCUMENT)
    documents["high"], documents["low"] = halves.T
    documents["part"] = part
    documents["unit"] = unit
    documents["place"] = places
    return documents


def needs(size: SourceSize) -> Needs:
    """What both passes need, or, of a source of one part, the set of all digests."""
    if size.parts == 1:
        return Needs(memory=BYTES_IN_SET * size.documents, disk=0)
    groups = -(-size.parts // PARTS_PER_GROUP)
    in_memory = size.documents // min(groups, size.parts)
    return Needs(memory=BYTES_IN_MEMORY * in_memory, disk=_DOCUMENT.itemsize * size.documents)


@dataclass(frozen=True)
class _WritePlaces:
    """The second pass, over one group of digests."""

    folder: str
    parts: int

    def __call__(self, group: int) -> None:
        documents = np.concatenate([load(pass_file(self.folder, "digests", part, group)) for part in range(self.parts)])
        # By the digest, and then by the place, so that the first one of each digest is the earliest.
        documents = documents[np.lexsort([documents[key] for key in ("place", "unit", "part", "low", "high")])]
        is_same = (documents["high"][1:] == documents["high"][:-1]) & (documents["low"][1:] == documents["low"][:-1])
        repeated = documents[1:][is_same]
        for part in range(self.parts):
            part_repeats = repeated[repeated["part"] == part]
            save(pass_file(self.folder, NAME, group, part), part_repeats[["unit", "place"]].astype(PLACE))


def pass_file(folder: str, name: str, first: int, second: int) -> str:
    return storage.join(folder, f"{PASSES}/{name}-{first:05d}-{second:05d}.npy")


def save(path: str, array: np.ndarray) -> None:
    data = io.BytesIO()
    np.save(data, array, allow_pickle=False)
    directory.write(path, data.getvalue())


def load(path: str) -> Any:
    return np.load(io.BytesIO(directory.read(path)), allow_pickle=False)
