"""Writes small token shards, and reads them through a loader.

- `npy`, `write_tar`, `write_corpus`: arrays, shards, and shards with an index file; rows of `CONTEXT` tokens.
- `loader`, `tokens_of`, `first_tokens`, `flat`: a loader of an index, and what it reads.
- `Unsliced`: numbers of rows that must not be added up again and again.
- `PATIENT`, `COUNTS`: settings and a strategy of hypothesis.
"""

import io
import itertools
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.helpers.loaders import open_loader
from zero.corpus.reading.loader import HostBatch, Loader

CONTEXT = 4
VOCAB = 60_000


def npy(array: np.ndarray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def write_corpus(
    directory: Path, counts: list[int], rows_per_member: int = 3, counted: bool = True, first: int = 0
) -> Path:
    """Shards of rows that all begin with their number: row i reads i, i + 1, i + 2, ..., from `first` on."""
    lines = []
    for number, count in enumerate(counts):
        rows = (np.arange(first, first + count)[:, None] + np.arange(CONTEXT + 1)).astype(np.uint16)
        starts = range(0, count, rows_per_member)
        members = {f"{first + i:06}.input_id.npy": npy(rows[i : i + rows_per_member]) for i in starts}
        write_tar(directory / f"shard-{number}.tar", members)
        lines.append(f"shard-{number}.tar" + (f" # {count} rows" if counted else ""))
        first += count
    (directory / "it.index").write_text("\n".join(["# a corpus", "", *lines]) + "\n")
    return directory / "it.index"


def loader(index: Any, **options: Any) -> Loader:
    return open_loader(index, **({"global_rows": 4, "context": CONTEXT, "vocab_size": VOCAB} | options))


def tokens_of(data: Loader, cursor: dict[str, int] | None = None) -> list[list[list[int]]]:
    return [batch.tokens.tolist() for batch in data.batches(cursor)]


def first_tokens(batches: Iterator[HostBatch], count: int | None = None) -> list[list[int]]:
    return [batch.tokens[:, 0].tolist() for batch in itertools.islice(batches, count)]


def flat(lists: Iterable[list]) -> list:
    return list(itertools.chain.from_iterable(lists))


PATIENT = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
COUNTS = st.lists(st.integers(1, 12), min_size=1, max_size=9)


class Unsliced(tuple[int, ...]):
    """Rows of shards that must not be cut: a cut costs as much as all shards before it."""

    def __getitem__(self, index):
        assert not isinstance(index, slice)
        return super().__getitem__(index)
