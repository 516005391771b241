"""The files of a corpus as zero-prepare writes them: names, manifests with their counts, index files; their removal."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from zero.base.errors import UserError
from zero.corpus.format import directory
from zero.corpus.format.manifest import (
    ALL_SPLITS,
    MANIFEST,
    PARTS,
    TOKENIZER,
    check_tokenizer,
    find,
    load,
    shards_of,
    splits_of,
)
from zero.corpus.preparing.sources.changes import NEAR
from zero.corpus.text.special_tokens import COMPANIONS, companions
from zero.corpus.text.tokenizers import FileTokenizer, Tokenizer
from zero.files import storage
from zero.files.parsing import reading

if TYPE_CHECKING:
    from zero.corpus.preparing.sources.source import Source

REPORT = "report.html"
WRITTEN = "written.json"  # says which of the tokenizer's files in a folder are not the user's
NO_HASH = 2**64  # higher than any hash
PART_BYTES_KEY = "part_bytes"  # a key of the manifest of a corpus of many parts
TOKEN_BITS_KEY = "token_bits"  # a key of the manifest of a corpus of arrays that do not say it
_PART_FILE = re.compile(r"part-\d{5,}(\.json|\.statistics\.json\.gz|\.removed\.jsonl\.gz|-\d{5,}\.tar)")
_NO_DOCUMENTS: Counter[str] = Counter()  # which no one adds to


class Counts(NamedTuple):
    """The contents of some units for one split."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: int = 0  # broken documents, of both splits
    lowest: int = NO_HASH  # of the documents' hashes
    short: int = 0  # documents that were left out
    duplicates: int = 0  # of both splits
    long: int = 0  # pairs, and documents of which no completion ends within a row, that were left out
    cut: int = 0  # documents of which only the first row was kept
    truncations: int = 0  # ends of rows within documents that have rows of their own
    dropped_calls: int = 0  # messages whose tool calls the chat template leaves out
    unmatched: int = 0  # examples that have no answer of another prompt
    filtered: Counter[str] = _NO_DOCUMENTS  # documents that were left out, of both splits, by the filter

    def plus(self, other: Counts) -> Counts:
        sums = Counts(*map(operator.add, self, other))
        return sums._replace(lowest=min(self.lowest, other.lowest))


@dataclass(frozen=True)
class PartNames:
    """The names of the files of a part.

    >>> PartNames(None).shard("train", 3, 4), PartNames(12).shard("train", 3, 4), PartNames(12).manifest
    ('train-00003.tar', 'part-00012-00004.tar', 'part-00012.json')
    >>> PartNames(None).statistics, PartNames(12).removed
    ('statistics.json.gz', 'part-00012.removed.jsonl.gz')
    """

    part: int | None  # None: the corpus has one part only

    @property
    def manifest(self) -> str:
        if self.part is None:
            return MANIFEST
        return f"part-{self.part:05d}.json"

    @property
    def statistics(self) -> str:
        """What the page about the corpus shows of the part (`corpus_statistics.py`)."""
        return self._beside("statistics.json.gz")

    @property
    def removed(self) -> str:
        """The list of the documents that were left out."""
        return self._beside("removed.jsonl.gz")

    def _beside(self, name: str) -> str:
        if self.part is None:
            return name
        return f"part-{self.part:05d}.{name}"

    def shard(self, split: str, number_in_split: int, number_in_part: int) -> str:
        """The name of a shard, from the number of shards before it in its split and part."""
        if self.part is None:
            return f"{split}-{number_in_split:05d}.tar"
        return f"part-{self.part:05d}-{number_in_part:05d}.tar"


def find_usable(folder: str, arguments: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The manifest of an earlier call with the same arguments, if all of its shards exist.

    Raises UserError for a corpus that was made with other arguments, unless `overwrite`.
    """
    if not storage.exists(storage.join(folder, MANIFEST)):
        return None
    manifest = load(folder, has_parts=False)
    if not is_made_with(folder, manifest, arguments, overwrite):
        return None
    names = directory.file_names(folder)
    if not {part["name"] for part in manifest.get(PARTS, ())} <= names:
        return None
    manifest = load(folder)
    if {shard["name"] for shard in shards_of(manifest)} <= names:
        return manifest
    return None


def is_made_with(made: str, manifest: dict[str, Any], arguments: dict[str, Any], overwrite: bool) -> bool:
    """Whether a corpus, or a part of one, was made with these arguments.

    Raises UserError, which names `made` and the first difference, if it was not, unless `overwrite`.
    """
    for key in dict.fromkeys([*arguments, PART_BYTES_KEY, TOKEN_BITS_KEY]):
        recorded = manifest.get(key)
        value = arguments.get(key)
        if recorded == value:
            continue
        if overwrite:
            return False
        difference = f"with {key}={recorded}, not {key}={value}"
        if key == "source_files":
            difference = f"when {arguments['source']} had other files, or files of other sizes"
        raise UserError(f"corpus {made} was prepared {difference}: choose another name, or --overwrite to replace it")
    return True


def is_of_source(folder: str, manifest: dict[str, Any], source: Source, overwrite: bool) -> bool:
    """Whether a finished corpus was made of these contents of a source, of the same names and sizes.

    Raises UserError if it was not, unless `overwrite`.
    """
    is_same = manifest.get("source_contents") == source.contents
    if is_same or overwrite:
        return is_same
    name = manifest["source"]
    for number, part in enumerate(manifest.get(PARTS, ())):
        if part["source_contents"] != source.part(number).contents:
            name = str(source.part(number))
            break
    raise UserError(
        f"corpus {folder} was prepared when {name} had other contents, in files of the same sizes: choose another "
        "name, or --overwrite to replace it"
    )


def check_rows_of_source(folder: str, tokenizer: Tokenizer) -> None:
    """Raises UserError if a directory holds a corpus whose rows cannot be a source for this tokenizer."""
    check_tokenizer(folder, tokenizer)
    manifest = find(folder)
    if manifest is None:
        return
    problem = None
    if manifest.get("begin_rows"):
        problem = "--begin-rows, which ends a document at each row"
    elif any(manifest[split].get("truncations") for split in splits_of(manifest)) and manifest.get("pack"):
        problem = f"--pack {manifest['pack']}, which cut documents into rows that are not in order"
    if problem is not None:
        raise UserError(f"corpus {folder} was prepared with {problem}: prepare its text again, {manifest['source']}")


def encoded(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, indent=1).encode("utf-8") + b"\n"


def save(path: str, manifest: dict[str, Any]) -> None:
    directory.write(path, encoded(manifest))


def begin(folder: str, indices: dict[str, str], tokenizer: Tokenizer) -> None:
    """Removes an earlier corpus, except for its parts, which are replaced one by one; writes the tokenizer's files.

    Raises UserError, which names a file that this would remove or replace, if zero-prepare did not write it.
    """
    files: dict[str, bytes] = {}
    if isinstance(tokenizer, FileTokenizer):
        # Read first: the tokenizer may belong to the corpus itself. data.tokenizer is the copy, beside which sampling
        # and export look for the others.
        files = {TOKENIZER: tokenizer.data, **companions(tokenizer.files.folder)}
    _check_written(folder, files)
    remove_corpus(folder, indices)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    directory.write(storage.join(folder, WRITTEN), json.dumps(digests, indent=1).encode() + b"\n")
    for name, data in files.items():
        directory.write(storage.join(folder, name), data)


def _check_written(folder: str, files: dict[str, bytes]) -> None:
    """Raises UserError for a file of a name that zero-prepare uses, unless it wrote it or would write the same."""
    names = directory.file_names(folder)
    single_part = PartNames(None)
    foreign: set[str] = set()
    if WRITTEN not in names and find(folder) is None:  # no corpus has begun here: shards and reports are others'
        foreign = {name for name in names if _PART_FILE.fullmatch(name)} | shard_names(names)
        foreign |= names & {REPORT, single_part.statistics, single_part.removed}
    own = _written(folder)
    for name in names & {TOKENIZER, *COMPANIONS}:
        data = directory.read(storage.join(folder, name))
        if data != files.get(name) and hashlib.sha256(data).hexdigest() != own.get(name):
            foreign.add(name)
    if foreign:
        path = storage.join(folder, min(foreign))
        raise UserError(
            f"{path} is none of the files that zero-prepare has listed in {WRITTEN}, or was changed since. A corpus "
            "here would replace it: choose another name, or move it"
        )


def _written(folder: str) -> dict[str, str]:
    """The SHA-256 of each file of a tokenizer that zero-prepare has written here, by its name."""
    path = storage.join(folder, WRITTEN)
    if not storage.exists(path):
        return {}
    with reading(f"{path}: expected names of files with their SHA-256, as zero-prepare writes them"):
        digests: dict[str, str] = dict(json.loads(directory.read(path)))
    return digests


def finished(
    arguments: dict[str, Any],
    source: Source,
    shards: dict[str, list[dict[str, Any]]],
    counts: Sequence[Counts],
) -> dict[str, Any]:
    """The manifest of a part, or of a corpus, from its shards by split and the totals of the splits."""
    manifest: dict[str, Any] = arguments | {"source_contents": source.contents}
    for (split, split_shards), count in zip(shards.items(), counts, strict=True):
        summary = {
            "documents": count.documents,
            "tokens": count.tokens,
            "bytes": None if source.has_ids else count.bytes,
            "rows": sum(shard["rows"] for shard in split_shards),
            "truncations": count.truncations + sum(shard.get("truncations", 0) for shard in split_shards),
        }
        manifest[split] = summary | {"shards": split_shards}
    manifest["skipped"] = counts[0].skipped
    manifest["short"] = sum(count.short for count in counts)
    manifest["duplicates"] = counts[0].duplicates
    if manifest["filters"]:
        manifest["filtered"] = {name: counts[0].filtered[name] for name in manifest["filters"]}
    if manifest["near_duplicates"]:
        manifest["near"] = counts[0].filtered[NEAR]
    if manifest.get("examples") or (manifest.get("cut_documents") and manifest.get("completions")):
        manifest["long"] = sum(count.long for count in counts)
    if any(count.unmatched for count in counts):
        manifest["unmatched"] = sum(count.unmatched for count in counts)
    if manifest.get("chat_template"):
        manifest["dropped_calls"] = sum(count.dropped_calls for count in counts)
    if manifest.get("cut_documents"):
        manifest["cut"] = sum(count.cut for count in counts)
    return manifest


def joined(
    arguments: dict[str, Any], contents: str, names: Sequence[str], parts: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The manifest of a corpus of many parts: their totals, and the name, checksum and source of each part.

    `names` are the names of the files of `parts`, which list the shards.
    """
    splits = splits_of(parts[0])
    manifest: dict[str, Any] = arguments | {"source_contents": contents}
    summed_keys = ("documents", "tokens", "bytes", "rows", "truncations")
    for split in splits:
        manifest[split] = _sums([part[split] for part in parts], summed_keys)
    manifest |= _sums(parts, ("skipped", "short", "duplicates", "near", "long", "cut", "dropped_calls", "unmatched"))
    if arguments["filters"]:
        manifest["filtered"] = _sums([part["filtered"] for part in parts], arguments["filters"])
    manifest[PARTS] = [
        {
            "name": name,
            "sha256": hashlib.sha256(encoded(part)).hexdigest(),
            "source_contents": part["source_contents"],
            "shards": sum(len(part[split]["shards"]) for split in splits),
        }
        for name, part in zip(names, parts, strict=True)
    ]
    return manifest


def _sums(parts: Sequence[dict[str, Any]], keys: Iterable[str]) -> dict[str, int | None]:
    """The sums over parts for these keys, if some part has them; None if a part's value is None.

    >>> _sums([{"rows": 1, "bytes": None}, {"rows": 2, "bytes": None, "cut": 1}], ["rows", "bytes", "cut", "long"])
    {'rows': 3, 'bytes': None, 'cut': 1}
    """
    sums: dict[str, int | None] = {}
    for key in keys:
        values = [part[key] for part in parts if key in part]
        if values:
            sums[key] = None if None in values else sum(values)
    return sums


def remove_corpus(folder: str, indices: dict[str, str]) -> None:
    """`indices` are the index files of all splits. Index files first: no index ever lists a shard that does not exist.

    Parts stay: whether one is made again is decided by its own manifest.
    """
    for index in indices.values():
        storage.remove(index)
    shards = {name for name in shard_names(directory.file_names(folder)) if not _PART_FILE.fullmatch(name)}
    single_part = PartNames(None)
    own = sorted(_written(folder))
    for name in [REPORT, MANIFEST, single_part.statistics, single_part.removed, *own, *shards]:
        storage.remove(storage.join(folder, name))


def remove_other_parts(folder: str, used: Iterable[str]) -> None:
    """Removes the files of parts except the `used` ones: files of an earlier corpus, or of a killed call."""
    for name in sorted({name for name in directory.file_names(folder) if _PART_FILE.fullmatch(name)} - set(used)):
        storage.remove(storage.join(folder, name))


def shard_names(names: Iterable[str]) -> set[str]:
    """The names that have the form of a shard's."""
    splits = "|".join(ALL_SPLITS)
    return {name for name in names if re.fullmatch(rf"({splits}|part-\d{{5,}})-\d{{5,}}\.tar", name)}


def index_text(index: str, folder: str, split: str, summary: dict[str, Any]) -> bytes:
    """The contents of an index file; shards are named relative to it if both are on this machine or in one bucket."""
    lines = [f"# {os.path.basename(folder)}, {split}: {summary['tokens']} tokens of {summary['documents']} documents"]
    bucket = _bucket(folder)
    target = folder
    if bucket == _bucket(index):
        start = storage.parent(index).removeprefix(bucket) or "/"
        target = os.path.relpath(folder.removeprefix(bucket), start)
    lines += [f"{target}/{shard['name']} # {shard['rows']} rows" for shard in summary["shards"]]
    return ("\n".join(lines) + "\n").encode("utf-8")


def _bucket(path: str) -> str:
    """gs://bucket, or nothing for a local path."""
    if not storage.is_remote(path):
        return ""
    return "/".join(path.split("/")[:3])
