"""A corpus at size: CPU seconds per megabyte, equal bytes on an engine, recall and precision of near duplicates.

    python benchmarks/corpus_at_size.py /tmp/size --megabytes 200 --near
    python benchmarks/corpus_at_size.py /tmp/size --megabytes 20000 --part-megabytes 250 --runner --kills 10

Writes JSON lines of synthetic text, documents of 350 words on average from a vocabulary of 50,000 words by Zipf's law,
in files of a part each; without `--near`, files beyond the first gigabyte are copies with their letters exchanged. One
document in twenty has a planted copy in a later file, of which a run of words is replaced: half of the copies have a
Jaccard index of their 5-grams between 0.75 and 1 with their original, half of them 0.5. The corpus is prepared by two
processes of this machine, and with `--runner` by Apache Beam's DirectRunner in two processes too, whose shards are
compared by their checksums. With `--kills` all processes of each preparation are killed so many times, at random
instants, and it is started again each time. Seconds are of the CPU, of all processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from zero.corpus.preparing.corpus_statistics import read_removed

WORDS = 50_000
LENGTH = 350  # words of a document, on average
PLANTED = 20  # one document of so many has a copy
NGRAM = 5
OWN = 1_000_000_000  # bytes, after which files are copies with other letters, unless near duplicates are looked for
RUNNER = ["--runner", "DirectRunner", "--direct_running_mode=multi_processing", "--direct_num_workers=2"]


def documents(chosen: np.random.Generator, count: int) -> Iterator[list[int]]:
    """Documents as the numbers of their words."""
    lengths = chosen.gamma(2.0, LENGTH / 2, count).astype(int) + NGRAM
    words = np.minimum(chosen.zipf(1.3, lengths.sum()), WORDS) - 1
    words = (words * 7919 + np.arange(len(words)) % 17 * 31) % WORDS
    for document in np.split(words, np.cumsum(lengths)[:-1]):
        yield document.tolist()


def copied(document: list[int], chosen: np.random.Generator, is_near: bool) -> list[int]:
    """A copy of which a run of words is replaced: w words change w + 4 of the 5-grams."""
    grams = len(document) - NGRAM + 1
    share = chosen.uniform(0.01, 0.14) if is_near else 0.33
    changed = max(1, int(grams * share) - NGRAM + 1)
    start = int(chosen.integers(0, len(document) - changed + 1))
    return [*document[:start], *chosen.integers(0, WORDS, changed).tolist(), *document[start + changed :]]


def jaccard(one: list[int], other: list[int]) -> float:
    """The share of 5-grams that two documents have in common."""
    sets = [{tuple(text[start : start + NGRAM]) for start in range(len(text) - NGRAM + 1)} for text in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def write(folder: Path, size: int, file_bytes: int) -> dict[str, float]:
    """Files of lines; returns the Jaccard index of each planted copy with its original, by its place."""
    spelled = [f"{np.base_repr(number * 2654435761 % 2**31, 36).lower()}" for number in range(WORDS)]
    chosen = np.random.default_rng(0)
    planted: dict[str, float] = {}
    waiting: list[tuple[list[int], float]] = []
    folder.mkdir(parents=True)
    written = 0
    number = 0
    while written < size:
        path = folder / f"{number:05}.jsonl"
        copies, waiting = waiting, []
        with path.open("w") as file:
            line = 0
            while file.tell() < min(file_bytes, size - written):
                for document in documents(chosen, 200):
                    line += 1
                    file.write(json.dumps({"text": " ".join(map(spelled.__getitem__, document))}) + "\n")
                    if line % PLANTED == 0:
                        copy = copied(document, chosen, is_near=line % (2 * PLANTED) == 0)
                        waiting.append((copy, jaccard(document, copy)))
                    elif line % PLANTED == 1 and copies:
                        copy, share = copies.pop()
                        line += 1
                        file.write(json.dumps({"text": " ".join(map(spelled.__getitem__, copy))}) + "\n")
                        planted[f"{path}, line {line}"] = share
        written += path.stat().st_size
        number += 1
    return planted


def write_like(files: list[Path], size: int) -> None:
    """Further files, up to so many bytes: those of a list in turn, each with its letters and digits exchanged."""
    symbols = b"abcdefghijklmnopqrstuvwxyz0123456789"
    chosen = np.random.default_rng(1)
    number = len(files)
    written = sum(path.stat().st_size for path in files)
    while written < size:
        exchange = bytes.maketrans(symbols, bytes(chosen.permutation(list(symbols)).tolist()))
        text = files[number % len(files)].read_bytes().translate(exchange)
        text = text.replace(b'{"' + b"text".translate(exchange) + b'"', b'{"text"')
        path = files[0].with_name(f"{number:05}.jsonl")
        path.write_bytes(text)
        written += len(text)
        number += 1


class Command:
    """`zero-prepare` in processes that are killed together."""

    def __init__(self, source: Path, place: Path, options: list[str]) -> None:
        self.words = [sys.executable, "data/prepare.py", str(source), "--name", "c", "--directory", f"{place}/corpus"]
        self.words += ["--index-directory", f"{place}/index", *options]
        self.corpus = place / "corpus" / "c"

    def start(self) -> subprocess.Popen[bytes]:
        repository = str(Path(__file__).parents[1])
        environment = os.environ | {"PYTHONPATH": repository}
        return subprocess.Popen(self.words, cwd=repository, env=environment, start_new_session=True)

    def parts(self) -> int:
        """Parts that are finished: each has a manifest."""
        return len(list(self.corpus.glob("part-?????.json")))

    def kill_after(self, parts: int, delay: float) -> None:
        """Starts it, and kills it so many seconds after this number of parts is finished."""
        process = self.start()
        while self.parts() < parts:
            assert process.poll() is None, f"ended before {parts} parts were finished: status {process.returncode}"
            time.sleep(0.2)
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print(f"  killed with {self.parts()} parts finished", flush=True)

    def finish(self) -> None:
        status = self.start().wait()
        assert status == 0, f"zero-prepare ended with status {status}"


def prepare(command: Command, kills: int, parts: int) -> float:
    """Prepares a corpus, killed so many times over its parts.

    Returns its CPU seconds, without those of the children of processes that were killed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    chosen = np.random.default_rng(kills)
    for finished in sorted(chosen.choice(parts - 3, kills, replace=False).tolist()):
        command.kill_after(finished, float(chosen.uniform(0, 10)))
    command.finish()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def checksums(corpus: Path) -> dict[str, str]:
    """SHA-256 of each shard, by its name."""
    digests = {}
    for path in sorted(corpus.glob("*.tar")):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def judged(corpus: Path, planted: dict[str, float]) -> None:
    """Prints which planted copies were left out, by their similarity, and what else was."""
    removed = set()
    for path in sorted(corpus.glob("*removed.jsonl.gz")):
        removed |= {entry["document"] for entry in read_removed(str(path)) if "near" in entry["left_out_by"]}
    for low, high in ((0.0, 0.6), (0.6, 0.75), (0.75, 0.8), (0.8, 0.85), (0.85, 0.9), (0.9, 1.01)):
        of_bin = [place for place, share in planted.items() if low <= share < high]
        if of_bin:
            left_out = sum(place in removed for place in of_bin) / len(of_bin)
            bounds = f"{low:.2f} to {min(high, 1):.2f}"
            print(f"  {len(of_bin):7} copies with a Jaccard index from {bounds}: {left_out:.4f} left out")
    near = {place for place, share in planted.items() if share >= 0.8}
    print(f"  recall {len(near & removed) / max(len(near), 1):.4f} at 0.8 and above, of {len(near)} copies")
    print(
        f"  precision {len(near & removed) / max(len(removed), 1):.4f}, of {len(removed)} documents that were left out"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where source and corpora are written, and removed again")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--part-megabytes", type=int, default=50)
    parser.add_argument("--near", action="store_true", help="leave near duplicates out")
    parser.add_argument("--runner", action="store_true", help="by Apache Beam too, and compare the shards")
    parser.add_argument("--kills", type=int, default=0, help="kill each preparation so many times")
    given = parser.parse_args()
    source = given.folder / "source"
    size = given.megabytes * 1_000_000
    part_bytes = given.part_megabytes * 1_000_000
    planted = write(source, size if given.near else min(size, OWN), part_bytes - 2_000_000)
    write_like(sorted(source.iterdir()), size)
    options = ["--part-bytes", str(part_bytes), *(["--near-duplicates", "0.8"] if given.near else [])]
    parts = len(list(source.iterdir()))
    engines = {"two processes": ["--workers", "2"]} | ({"DirectRunner": RUNNER} if given.runner else {})
    shards: list[dict[str, str]] = []
    for engine, of_engine in engines.items():
        place = given.folder / "prepared"
        command = Command(source, place, [*options, *of_engine])
        began = time.monotonic()
        seconds = prepare(command, given.kills, parts)
        rate = given.megabytes / seconds
        took = f"{seconds:.1f} CPU s, {time.monotonic() - began:.0f} s"
        print(f"{engine}: {given.megabytes} MB in {took}, {rate:.2f} MB per CPU s", flush=True)
        if given.near and not shards:
            judged(command.corpus, planted)
        shards.append(checksums(command.corpus))
        shutil.rmtree(place)
    if given.runner:
        different = [name for name in shards[0] if shards[0][name] != shards[1].get(name)]
        print(f"{len(shards[0])} shards; names equal: {shards[0].keys() == shards[1].keys()}; different: {different}")
    shutil.rmtree(source)


if __name__ == "__main__":
    main()
