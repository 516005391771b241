"""Tokens per second of the loader against webdataset's own pipeline and against reading without any order.

    python benchmarks/loader.py

One process, about five minutes. Each contestant reads the same tokens from a warm page cache, `--epochs` times, and
returns shuffled int32 batches; the raw ones only read every byte, or make int32 arrays of them too. Rounds take turns.
What counts is the median of the CPU seconds of the process, all threads together. A busy machine changes them less than
the seconds of a clock, and slows down what leaves the caches.
"""

from __future__ import annotations

import argparse
import functools
import io
import statistics
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from zero.corpus.format.shards import RowFormat
from zero.corpus.reading.loader import Batching, Loader, RowOrder

CONTEXT, VOCAB, BATCH = 1024, 50304, 32
CORPORA = ((96, 1024, 256), (96, 4096, 256), (96, 1024, 1))  # shards, rows of a shard, rows of a member


def write_shards(directory: Path, shards: int, rows: int, rows_per_member: int) -> Path:
    """Shards of random uint16 tokens; the index file."""
    generator = np.random.default_rng(0)
    directory.mkdir()
    for number in range(shards):
        with tarfile.open(directory / f"{number:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for first in range(0, rows, rows_per_member):
                tokens = generator.integers(0, VOCAB, (rows_per_member, CONTEXT), np.uint16)
                buffer = io.BytesIO()
                np.save(buffer, tokens if rows_per_member > 1 else tokens[0], allow_pickle=False)
                member = tarfile.TarInfo(f"{first:09d}.input_id.npy")
                member.size = buffer.tell()
                buffer.seek(0)
                archive.addfile(member, buffer)
    index = directory / "it.index"
    index.write_text("".join(f"{number:05d}.tar # {rows} rows\n" for number in range(shards)))
    return index


def read_with_loader(index: Path, epochs: int) -> Iterator[int]:
    for batch in Loader(index, Batching(BATCH), RowFormat(CONTEXT, VOCAB), RowOrder(max_epochs=epochs)).batches():
        yield batch.tokens.size


def read_with_webdataset(index: Path, many_rows: bool) -> Iterator[int]:
    """The pipeline of webdataset's documentation, with a shuffle buffer of 2,000 samples."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # it is imported if it is there, for nothing here
    import webdataset

    urls = [str(path) for path in sorted(index.parent.glob("*.tar"))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = webdataset.WebDataset(urls, shardshuffle=len(urls)).decode().to_tuple("input_id.npy")
        if many_rows:
            data = data.unbatched()
        for (tokens,) in data.shuffle(2000).batched(BATCH):
            yield np.asarray(tokens, np.int32).size


def raw(index: Path) -> Iterator[int]:
    for path in sorted(index.parent.glob("*.tar")):
        yield np.frombuffer(path.read_bytes(), np.uint16).size


def raw_integers(index: Path) -> Iterator[int]:
    """The same, as the int32 arrays that a step takes."""
    for path in sorted(index.parent.glob("*.tar")):
        yield np.frombuffer(path.read_bytes(), np.uint16).astype(np.int32).size


def tar(index: Path) -> Iterator[int]:
    """Python's tarfile and numpy, in order, nothing checked."""
    for path in sorted(index.parent.glob("*.tar")):
        with tarfile.open(path, "r|") as archive:
            for member in archive:
                file = archive.extractfile(member)
                assert file
                yield np.load(io.BytesIO(file.read()), allow_pickle=False).size


def memory_map(index: Path) -> Iterator[int]:
    """Random rows of one flat file, which is what a corpus that fits one disk can be."""
    flat = np.memmap(index.parent / "flat.bin", np.uint16, "r").reshape(-1, CONTEXT)
    order = np.random.default_rng(0).permutation(len(flat))
    for first in range(0, len(order), BATCH):
        yield flat[order[first : first + BATCH]].astype(np.int32).size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for shards, rows, rows_per_member in CORPORA:
            corpus = f"{shards} shards of {rows} rows, {rows_per_member} per member"
            index = write_shards(Path(directory, corpus), shards, rows, rows_per_member)
            flat = np.zeros((shards * rows, CONTEXT), np.uint16)
            flat.tofile(index.parent / "flat.bin")

            def repeated(contestant: Callable[[Path], Iterator[int]], index: Path) -> Iterator[int]:
                for _ in range(options.epochs):
                    yield from contestant(index)

            with_webdataset = functools.partial(read_with_webdataset, many_rows=rows_per_member > 1)
            contestants: dict[str, Callable[[Path], Iterator[int]]] = {
                "this loader": functools.partial(read_with_loader, epochs=options.epochs),
                "webdataset": functools.partial(repeated, with_webdataset),
                "tarfile, in order": functools.partial(repeated, tar),
                "bytes of the files": functools.partial(repeated, raw),
                "bytes, as int32": functools.partial(repeated, raw_integers),
                "memory map": functools.partial(repeated, memory_map),
            }
            seconds: dict[str, list[float]] = {name: [] for name in contestants}
            for _ in range(options.rounds):
                for name, contestant in contestants.items():
                    begin = time.process_time()
                    assert sum(contestant(index)) >= 0.99 * options.epochs * flat.size
                    seconds[name].append(time.process_time() - begin)
            print(f"\n{corpus}, {CONTEXT} tokens each", flush=True)
            speeds = {
                name: options.epochs * flat.size / statistics.median(of_rounds) for name, of_rounds in seconds.items()
            }
            for name, speed in speeds.items():
                of_webdataset = speed / speeds["webdataset"]
                of_bytes = speed / speeds["bytes, as int32"]
                print(
                    f"{name:20} {speed / 1e6:8.1f} M tokens per CPU second, {of_webdataset:6.2f} x webdataset, "
                    f"{of_bytes:5.2f} of the bytes as int32"
                )


if __name__ == "__main__":
    main()
