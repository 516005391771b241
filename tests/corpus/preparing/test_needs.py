"""What options that look at all documents need is said before they begin, and is what they take."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.corpora import REPOSITORY, call
from tests.helpers.needs import run_passes, source_in_parts
from zero.corpus.preparing import duplicates, near_duplicates, shuffle
from zero.corpus.preparing.near_duplicates import Nearness
from zero.corpus.preparing.needs import PROCESS_BYTES, measure
from zero.corpus.preparing.sources.source import Source

CLOSE = 1.5  # times as much, or as little, as was said
WORDS = [f"w{number}" for number in range(3000)]
# The option, documents and words of each that take the memory of some units or more.
LARGE = {"deduplicate": (250_000, 2), "near-duplicates": (12_000, 20), "shuffle": (8_000, 800)}


def write(path: Path, documents: int, words: int) -> Path:
    chosen = random.Random(0)
    with path.open("w") as file:
        for number in range(documents):
            file.write(json.dumps({"text": f"{number} {' '.join(chosen.choices(WORDS, k=words))}"}) + "\n")
    return path


def said(option: str, source: Source) -> tuple[int, int]:
    """Bytes of memory and of disk."""
    size = measure(source, shuffle.bytes_of_lines)
    assert size is not None
    if option == "near-duplicates":
        needs = near_duplicates.needs(size, Nearness())
    else:
        needs = {"deduplicate": duplicates.needs, "shuffle": shuffle.needs}[option](size)
    return PROCESS_BYTES + needs.memory, needs.disk


@pytest.mark.parametrize("option", LARGE)
def test_disk_is_what_was_said(tmp_path: Path, option: str):
    source = source_in_parts(write(tmp_path / "lines.jsonl", 1500, 30), 3)
    _, disk = said(option, source)
    real = run_passes(option, source, str(tmp_path / "c"))
    assert disk / CLOSE < real < disk * CLOSE, (real, disk)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("option", LARGE)
def test_memory_is_what_was_said(tmp_path: Path, option: str, parts: int):
    """The most that a process of its own has held."""
    path = write(tmp_path / "lines.jsonl", *LARGE[option])
    memory, disk = said(option, source_in_parts(path, parts))
    arguments = [option, str(path), str(parts), str(tmp_path / "c")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    real, real_disk = map(int, done.stdout.split())
    assert memory / CLOSE < real < memory * CLOSE, (real, memory)
    if disk:
        assert disk / CLOSE < real_disk < disk * CLOSE, (real_disk, disk)


PROGRAM = """
import re, sys
from pathlib import Path
from tqdm import tqdm
from zero.corpus.preparing import prepare
from tests.helpers.needs import run_passes, source_in_parts
option, path, parts, place = sys.argv[1:]
source = source_in_parts(Path(path), int(parts))
size = 0
if option == "deduplicate" and parts == "1":
    prepare._leave_out_duplicates(source, 1, tqdm(disable=True))
else:
    size = run_passes(option, source, place)
(peak,) = re.findall(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(1024 * int(peak), size)
"""


def test_command_says_it_first(tmp_path: Path):
    """A line for each option, once: a corpus that is finished needs nothing."""
    path = write(tmp_path / "lines.jsonl", 300, 30)
    options = ["--deduplicate", "--near-duplicates", "0.8", "--shuffle", "--part-bytes", "20000", "--workers", "1"]
    places = ["--directory", str(tmp_path / "corpus"), "--index-directory", str(tmp_path / "index")]
    done = call(path, *options, *places)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[:3]
    place = tmp_path / "corpus" / "lines" / "passes"
    for option, line in zip(("deduplicate", "near-duplicates", "shuffle"), lines, strict=True):
        assert line.startswith(f"--{option} needs about ") and f" of disk in {place} (" in line
        assert " of memory in the process, for about 300 documents (estimated from 300)" in line, line
    assert "needs about" not in call(path, *options, *places).stdout
