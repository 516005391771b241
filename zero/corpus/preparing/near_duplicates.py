"""Nearly equal documents, by MinHash and locality-sensitive hashing (datasketch, the extra near-duplicates).

As in Lee et al., arXiv 2107.06499, section 4.2: a document is its set of 5-grams of words, two are near where the
Jaccard index of their sets is at least a threshold, 0.8 by default, and candidates are those that share a band of
MinHash signatures. There signatures have 9,000 values in 20 bands, and candidates are compared by their edit distance;
here they have 128, in the bands that datasketch finds best where a missed pair weighs nineteen times as much as a
proposed one that is not near, and candidates are compared by all 128 values, of which one byte each is kept. A document
is left out if an earlier one is near it: the first of a group stays.

Two passes, as for equal documents (`duplicates.py`), with one group of bands per part: 2.4 KB of disk per document for
the 16 bands of 0.8, and a few times a group's files in memory.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from zero.base.errors import UserError, install_command
from zero.corpus.preparing.documents import Document, Unit
from zero.corpus.preparing.duplicates import PLACE, load, pass_file, save
from zero.corpus.preparing.engines import Engine
from zero.corpus.preparing.needs import Needs, SourceSize
from zero.corpus.preparing.part_tasks import part_tasks
from zero.corpus.preparing.processes import Task
from zero.corpus.preparing.sources.source import Source

NAME = "near"
COPIES = 2.2  # in memory of the rows of a group, and of a part
COPIES_OF_ONLY_PART = 3.2
LIBRARY_BYTES = 66_000_000  # of datasketch, which imports scipy
PROPOSED_AND_MISSED = (0.05, 0.95)  # weights: a pair that is proposed is compared again, one that is missed is not
HASH = "sums of crc32"  # of an n-gram
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd; 2**64 over the golden ratio
COMPARED = 64  # documents of a band, the earliest ones, with which a later one is compared


@dataclass(frozen=True)
class Nearness:
    """When two documents are near."""

    threshold: float = 0.8
    ngram: int = 5  # words
    permutations: int = 128
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise UserError(
                f"--near-duplicates {self.threshold}: expected a share between 0 and 1, such as 0.8; for equal "
                "documents --deduplicate"
            )

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> Nearness | None:
        """The one that a manifest records; None without one."""
        recorded = manifest.get("near_duplicates")
        if recorded is None:
            return None
        return cls(recorded["threshold"])

    @property
    def bands(self) -> tuple[int, int]:
        """How many bands there are, and the values of each."""
        return _bands(self.threshold, self.permutations)

    def recorded(self) -> dict[str, Any]:
        """The parameters, as a manifest records them."""
        bands, rows = self.bands
        return asdict(self) | {"bands": bands, "rows": rows, "hash": HASH}

    def signature(self, document: Document) -> np.ndarray:
        """The MinHash values of a text, uint64 (permutations,)."""
        assert isinstance(document.content, str)
        minhash = _empty(self.permutations, self.seed).copy()
        minhash.update_batch(ngram_hashes(document.content.split(), self.ngram).tolist())
        return minhash.hashvalues


def find_near_duplicates(engine: Engine, source: Source, folder: str, nearness: Nearness) -> None:
    """Writes the places of documents that are similar to an earlier one, for `duplicates.read_places`."""
    groups = source.parts
    for _ in engine.run(_WriteBands(folder, groups, nearness), part_tasks(source), folder):
        pass
    group_tasks = [Task(f"group {group} of bands", group) for group in range(groups)]
    for _ in engine.run(_WritePlaces(folder, source.parts, nearness), group_tasks, folder):
        pass


def ngram_hashes(words: Sequence[str], ngram: int) -> np.ndarray:
    """Hashes of 32 bits of all n-grams, or of the whole where there are fewer words: uint64 (n-grams,).

    Each word is hashed once, and sums are made for all n-grams at a time, in a fifth of the time that it takes to hash
    each n-gram's text.

    >>> first, second, third = ngram_hashes("a rose is a rose is".split(), 4).tolist()
    >>> ngram_hashes("a rose is a".split(), 4).tolist() == [first], first == second
    (True, False)
    """
    word_hashes = np.array([zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in words], np.uint64)
    count = max(1, len(words) - ngram + 1)
    total = np.zeros(count, np.uint64)
    for offset in range(min(ngram, len(words))):
        total = (total + word_hashes[offset : offset + count]) * MULTIPLIER  # modulo 2**64
    return total >> np.uint64(32)


def similarity(signature: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The estimated Jaccard index of a document and each of others, from a byte of each MinHash value.

    Two bytes are equal by chance once in 256.

    Args:
      signature: uint8 (p,)
      others: uint8 (n, p)

    >>> similarity(np.zeros(4, np.uint8), np.array([[0, 0, 0, 0], [0, 0, 1, 1]], np.uint8)).round(3).tolist()
    [1.0, 0.498]
    """
    share = (others == signature).mean(axis=1)
    return (share - 1 / 256) / (1 - 1 / 256)


def _dtype(permutations: int) -> np.dtype:
    places = [("part", "<u4"), ("unit", "<u4"), ("place", "<u4")]
    return np.dtype([("key", "<u8"), *places, ("signature", "u1", (permutations,))])


@dataclass(frozen=True)
class _WriteBands:
    """The first pass, over one part: a row for each band of each document."""

    folder: str
    groups: int
    nearness: Nearness

    def __call__(self, numbered: tuple[int, Source]) -> None:
        number, part = numbered
        group_rows: list[list[np.ndarray]] = [[] for _ in range(self.groups)]
        for unit, unit_documents in enumerate(part.units()):
            rows = self._rows(number, unit, unit_documents)
            groups = rows["key"] % self.groups
            for group in range(self.groups):
                group_rows[group].append(rows[groups == group])
        none = np.zeros(0, _dtype(self.nearness.permutations))
        for group in range(self.groups):
            save(pass_file(self.folder, "bands", number, group), np.concatenate([none, *group_rows[group]]))
            group_rows[group] = []

    def _rows(self, part: int, number: int, unit: Unit) -> np.ndarray:
        """The rows of a unit, with the rows of each document together."""
        bands, length = self.nearness.bands
        keys: list[int] = []
        places: list[int] = []
        signatures: list[np.ndarray] = []
        for index, document in enumerate(unit.documents()):
            if document.left_out_by is not None or not document.content:
                continue
            values = self.nearness.signature(document)
            for band in range(bands):
                band_values = values[band * length : (band + 1) * length].tobytes() + bytes([band])
                keys.append(int.from_bytes(hashlib.blake2b(band_values, digest_size=8).digest()))
            places.append(index)
            signatures.append(values.astype(np.uint8))
        rows = np.zeros(len(keys), _dtype(self.nearness.permutations))
        if places:
            rows["key"] = keys
            rows["part"] = part
            rows["unit"] = number
            rows["place"] = np.repeat(places, bands)
            rows["signature"] = np.repeat(signatures, bands, axis=0)
        return rows


@dataclass(frozen=True)
class _WritePlaces:
    """The second pass, over one group of bands of all parts."""

    folder: str
    parts: int
    nearness: Nearness

    def __call__(self, group: int) -> None:
        rows = np.concatenate([load(pass_file(self.folder, "bands", part, group)) for part in range(self.parts)])
        rows = rows[np.lexsort([rows[key] for key in ("place", "unit", "part", "key")])]
        bounds = np.concatenate([[0], np.flatnonzero(np.diff(rows["key"])) + 1, [len(rows)]])
        is_near = np.zeros(len(rows), bool)
        for index in np.flatnonzero(np.diff(bounds) > 1):  # most keys have one document
            first, end = bounds[index : index + 2]
            signatures = rows["signature"][first:end]
            for number in range(1, end - first):
                earlier = signatures[: min(number, COMPARED)]
                is_near[first + number] = (similarity(signatures[number], earlier) >= self.nearness.threshold).any()
        near = rows[["part", "unit", "place"]][is_near]
        for part in range(self.parts):
            places = np.unique(near[near["part"] == part][["unit", "place"]].astype(PLACE))
            save(pass_file(self.folder, NAME, group, part), places)


def needs(size: SourceSize, nearness: Nearness) -> Needs:
    """What both passes need: a group of bands is as large as the bands of a part."""
    bands, _ = nearness.bands
    document_bytes = bands * _dtype(nearness.permutations).itemsize
    copies = COPIES_OF_ONLY_PART if size.parts == 1 else COPIES
    in_memory = copies * document_bytes * size.documents / size.parts
    return Needs(memory=int(in_memory) + LIBRARY_BYTES, disk=document_bytes * size.documents)


@cache
def _bands(threshold: float, permutations: int) -> tuple[int, int]:
    """The best ones of datasketch, which integrates the chances of all others: a tenth of a second."""
    lsh = _library().MinHashLSH(threshold=threshold, num_perm=permutations, weights=PROPOSED_AND_MISSED)
    return lsh.b, lsh.r


@cache
def _empty(permutations: int, seed: int) -> Any:
    """The MinHash of no shingles, made once: to draw its permutations takes longer than to hash a short document."""
    return _library().MinHash(num_perm=permutations, seed=seed, hashfunc=int)  # what comes in is hashed


def _library() -> Any:
    try:
        import datasketch
    except ImportError:
        raise UserError(
            f"--near-duplicates: the datasketch library is missing; {install_command('near-duplicates')}"
        ) from None
    return datasketch
