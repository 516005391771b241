"""The start of a host whose index lists a million shards, and of one that reads a mixture of fifty corpora.

    python benchmarks/reading_at_size.py --shards 1000000

Writes empty files of these names and an index with the rows of each, then times what a host does before its first
read: reading the index, identifying the shards by the manifest, and finding its first shuffle buffer in the order.
Seconds are of the CPU; memory is the most that the process has held. Nothing is read of the shards.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero.corpus.format.index_files import Shards, read_index
from zero.corpus.reading.contents import contents_of
from zero.corpus.reading.order import Order

SHARDS_PER_PART = 64
ROWS = 8192
HOSTS = 2048


@contextmanager
def measured(name: str) -> Iterator[None]:
    begin = time.process_time()
    yield
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{name:44} {time.process_time() - begin:7.2f} CPU s, {memory:6.0f} MiB at most")


def write(place: Path, name: str, shards: int) -> Path:
    """An index of so many empty shards in parts, beside their manifest."""
    folder = place / name
    folder.mkdir()
    lines = []
    parts = []
    for part in range(-(-shards // SHARDS_PER_PART)):
        parts.append({"name": f"part-{part:05d}.json", "sha256": f"{part:064x}", "source_contents": "", "shards": 0})
        for number in range(min(SHARDS_PER_PART, shards - part * SHARDS_PER_PART)):
            shard = f"part-{part:05d}-{number:05d}.tar"
            os.close(os.open(folder / shard, os.O_CREAT))
            lines.append(f"{name}/{shard} # {ROWS} rows\n")
    split = {"documents": 0, "tokens": 0, "rows": 0}
    manifest = {"tokenizer": "bytes", "train": split, "validation": split, "parts": parts}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    index = place / f"{name}_train.index"
    index.write_text("".join(lines))
    return index


def start(indices: list[Path]) -> None:
    shards: list[Shards] = []
    with measured("  index files"):
        shards = [read_index(index) for index in indices]
    with measured("  identity"):
        for of_index in shards:
            contents_of(of_index)
    with measured("  order, to the first buffer of a host"):
        for of_index in shards:
            streams = min(HOSTS, len(of_index))
            next(Order(tuple(of_index.rows.tolist()), streams, 1, 0, None).buffers(streams - 1, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--corpora", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        of_mixture = [write(place, f"c{number}", options.shards // 100) for number in range(options.corpora)]
        print(f"{options.corpora} corpora of {options.shards // 100} shards")
        start(of_mixture)
        whole = write(place, "whole", options.shards)
        print(f"one corpus of {options.shards} shards")
        start([whole])


if __name__ == "__main__":
    main()
