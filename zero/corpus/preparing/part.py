"""A part of a corpus, prepared independently: the same bytes in any process, on any machine, in any order of parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from zero.base.errors import UserError
from zero.corpus.format import directory
from zero.corpus.format import manifest as manifests
from zero.corpus.preparing import corpus_files, corpus_statistics, duplicates, near_duplicates
from zero.corpus.preparing.corpus_files import PartNames
from zero.corpus.preparing.duplicates import digest_of_places, read_places
from zero.corpus.preparing.engines import Engine, Work
from zero.corpus.preparing.part_tasks import part_tasks
from zero.corpus.preparing.shuffle import read_shuffled, write_texts
from zero.corpus.preparing.sources.source import Source
from zero.corpus.preparing.writer import write_shards
from zero.corpus.text.tokenizers import Tokenizer
from zero.files import storage


@dataclass(frozen=True)
class PartJob:
    """What the parts of a corpus have in common; it can be pickled."""

    folder: str
    arguments: dict[str, Any]  # of the corpus, as its manifest records them
    tokenizer: Tokenizer
    overwrite: bool  # replaces parts that were made with other arguments, or of other contents
    skip_broken: int = 0  # documents of the corpus that may be left out because they cannot be read
    duplicate_groups: int = 0  # of digests, where duplicates are left out (`duplicates.py`)
    near_groups: int = 0  # of bands, where near duplicates are
    shuffled_parts: int = 0  # of which the texts of each part are, where documents are shuffled (`shuffle.py`)

    @property
    def threshold(self) -> int:
        """Documents with a hash below it are for validation."""
        return int(self.arguments["validation_fraction"] * 2**64)

    def arguments_of(self, part: Source) -> dict[str, Any]:
        """The arguments as the manifest of a part records them."""
        return dict(self.arguments) | {"source_files": part.fingerprint}

    def __call__(self, numbered: tuple[int, Source]) -> None:
        """Prepares a part, alone in its process."""
        number, part = numbered
        with tqdm(disable=True) as bar:
            prepare_part(self, number, part, 1, bar)


def prepare_part(job: PartJob, number: int, part: Source, workers: int, bar: tqdm) -> None:
    """Writes the shards of a part, and then its manifest, unless they are there already.

    Raises:
      UserError: the part cannot be prepared, or was made with other arguments or of other contents.
    """
    names = PartNames(number)
    path = storage.join(job.folder, names.manifest)
    try:
        arguments = job.arguments_of(part)
        if job.shuffled_parts:
            shuffled = read_shuffled(job.folder, number, job.shuffled_parts)
            part.shuffled = shuffled.units
            arguments["shuffled"] = shuffled.digest
        else:
            arguments |= mark_duplicates(job, number, part)
        if storage.exists(path):
            manifest = manifests.load_file(path)
            if _is_kept(names, manifest, job, arguments, part):
                bar.update(part.size)
                return
            storage.remove(path)
        written = write_shards(
            part, job.folder, names, arguments, job.threshold, job.tokenizer, workers, bar, job.skip_broken
        )
    except UserError as error:
        raise type(error)(f"part {number} ({part}): {error}") from error
    corpus_statistics.save(job.folder, names, written.statistics, written.removed)
    corpus_files.save(path, corpus_files.finished(arguments, part, written.shards, written.counts))


def mark_duplicates(job: PartJob, number: int, part: Source) -> dict[str, str]:
    """Marks left-out documents in the units of a part; returns what its manifest records about them."""
    recorded = {}
    if job.duplicate_groups:
        part.duplicates = read_places(job.folder, duplicates.NAME, number, job.duplicate_groups)
        recorded["left_out"] = digest_of_places(part.duplicates)
    if job.near_groups:
        part.near_duplicates = read_places(job.folder, near_duplicates.NAME, number, job.near_groups)
        recorded["left_out_near"] = digest_of_places(part.near_duplicates)
    return recorded


@dataclass(frozen=True)
class WriteTexts:
    """The pass before a shuffle, over one part."""

    job: PartJob
    parts: int

    def __call__(self, numbered: tuple[int, Source]) -> None:
        number, part = numbered
        mark_duplicates(self.job, number, part)
        write_texts(self.job.folder, number, part, self.parts)


def _is_kept(names: PartNames, manifest: dict[str, Any], job: PartJob, arguments: dict[str, Any], part: Source) -> bool:
    """Whether an earlier call has made this part, and all of its files exist."""
    path = storage.join(job.folder, names.manifest)
    if not corpus_files.is_made_with(path, manifest, arguments, job.overwrite):
        return False
    if not corpus_files.is_of_source(path, manifest, part, job.overwrite):
        return False
    files = [names.statistics, *(shard["name"] for shard in manifests.shards_of(manifest))]
    return all(storage.exists(storage.join(job.folder, name)) for name in files)


def has_parts_of(folder: str, arguments: dict[str, Any], source: Source) -> bool:
    """Whether an earlier call has begun this corpus: some part was made with these arguments, of these files."""
    if source.parts == 1:
        return False
    existing = directory.file_names(folder)
    for number in range(source.parts):
        name = PartNames(number).manifest
        if name in existing:
            expected = arguments | {"source_files": source.part(number).fingerprint}
            manifest = manifests.load_file(storage.join(folder, name))
            return all(manifest.get(key) == value for key, value in expected.items())
    return False


def write_parts(source: Source, job: PartJob, engine: Engine, bar: tqdm) -> None:
    """Prepares all parts that are missing, and compares the others with their source."""
    existing = directory.file_names(job.folder)
    made = [number for number in range(source.parts) if PartNames(number).manifest in existing]
    missing = [number for number in range(source.parts) if PartNames(number).manifest not in existing]
    # Each part in its own process; the last ones, which are too few for all processes, one by one in all of them.
    count = len(missing) - engine.remainder(len(missing))
    alone = [*made, *missing[:count]]
    for number in run_tasks(engine, job, source, alone, job.folder):
        bar.update(source.part(number).size)
    for number in missing[count:]:
        prepare_part(job, number, source.part(number), engine.workers, bar)


def run_tasks(engine: Engine, work: Work, source: Source, numbers: Sequence[int], folder: str) -> Iterator[int]:
    """Calls `work` with the number and the source of each of these parts; yields the numbers as the parts are done."""
    for task in engine.run(work, part_tasks(source, numbers), folder):
        number, _ = task.argument
        yield number
