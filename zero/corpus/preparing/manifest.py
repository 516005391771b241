"""The manifest of a corpus: its arguments, its shards, and the position to continue from; its index files."""

from __future__ import annotations

import json
import logging
import operator
import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from zero.corpus.preparing import directory
from zero.corpus.text.special_tokens import COMPANIONS, companions
from zero.corpus.text.tokenizers import FileTokenizer, Tokenizer, is_same_tokenizer
from zero.errors import UserError, file_error
from zero.files import storage
from zero.files.parsing import MALFORMED, reading

if TYPE_CHECKING:
    from zero.corpus.preparing.sources.source import Source

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SPECIAL_TOKENS = "special_tokens"  # a key of the manifest
SPLITS = ("train", "validation")  # of every corpus
ALL_SPLITS = (*SPLITS, "test")
NO_HASH = 2**64  # higher than any hash
_log = logging.getLogger(__name__)


class Counts(NamedTuple):
    """The contents of some units for one split."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: int = 0  # files of both splits
    lowest: int = NO_HASH  # of the documents' hashes
    short: int = 0  # documents that were left out
    duplicates: int = 0  # of both splits
    long: int = 0  # pairs that were left out
    cut: int = 0  # documents of which only the first row was kept
    truncations: int = 0  # cuts of documents that have rows of their own

    def plus(self, other: Counts) -> Counts:
        sums = Counts(*map(operator.add, self, other))
        return sums._replace(lowest=min(self.lowest, other.lowest))


class UnitPosition(NamedTuple):
    """The position in the source at which the next shard of a split begins."""

    unit: int = 0
    skip: int = 0  # tokens of that unit, or rows if each document has its own, that belong to the shard before
    counts: Counts = Counts()  # of the units before


def splits_of(manifest: dict[str, Any]) -> tuple[str, ...]:
    return tuple(split for split in ALL_SPLITS if split in SPLITS or split in manifest)


def shards_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """What the manifest records of each shard, of all splits."""
    shards: list[dict[str, Any]] = []
    for split in splits_of(manifest):
        shards += manifest[split]["shards"]
    return shards


def find_usable(place: str, arguments: dict[str, Any], source_state: str, overwrite: bool) -> dict[str, Any] | None:
    """The manifest of an earlier call with the same arguments, if all of its shards exist.

    Raises UserError for a corpus that was made with other arguments, unless `overwrite`.
    """
    if not storage.exists(storage.join(place, MANIFEST)):
        return None
    manifest = load(place)
    shards = [shard["name"] for shard in shards_of(manifest)]
    for key, value in arguments.items():
        if manifest.get(key) != value:
            if overwrite or not shards:
                return None
            difference = f"with {key}={manifest.get(key)}, not {key}={value}"
            if key == "source_files":
                difference = f"when {arguments['source']} held other files, or files of other sizes"
            raise UserError(
                f"corpus {place} was prepared {difference}: choose another name, or --overwrite to replace it"
            )
    if "unfinished" in manifest and manifest["unfinished"]["source_state"] != source_state:
        if overwrite or not shards:
            return None
        raise UserError(f"corpus {place} is half done, and its source has changed since: --overwrite starts again")
    return manifest if set(shards) <= directory.file_names(place) else None


def is_of_source(place: str, manifest: dict[str, Any], source: str, contents: str, overwrite: bool) -> bool:
    """Whether a finished corpus was made of these contents of a source, of the same names and sizes.

    Raises UserError if it was not, unless `overwrite`. A manifest of an earlier version records no contents: it is
    taken for such a corpus, with a warning, unless `overwrite`.
    """
    recorded = manifest.get("source_contents")
    if recorded == contents or overwrite:
        return recorded == contents
    if recorded is None:
        _log.warning(
            "corpus %s is of a version that recorded only names and sizes of the files of %s: kept without a "
            "comparison of contents; --overwrite prepares it again",
            place,
            source,
        )
        return True
    raise UserError(
        f"corpus {place} was prepared when {source} had other contents, in files of the same sizes: choose another "
        "name, or --overwrite to replace it"
    )


def load(place: str) -> dict[str, Any]:
    path = storage.join(place, MANIFEST)
    with reading(f"{path} is not a manifest that this version can read, choose another name, or remove it"):
        manifest: dict[str, Any] = json.loads(directory.read(path))
        _check_form(manifest)
    return manifest


def find(place: str) -> dict[str, Any] | None:
    """The manifest of a directory of shards; None if it has none, or a file of this name that is something else."""
    path = storage.join(place, MANIFEST)
    try:
        data = storage.read_bytes(path)
    except (FileNotFoundError, NotADirectoryError, storage.AccessDenied):  # a bucket that may not be listed denies
        return None
    except OSError as error:
        raise file_error(f"{path} cannot be read: {error.strerror or error}", error) from error
    try:
        manifest: dict[str, Any] = json.loads(data)
        _check_form(manifest)
    except MALFORMED:
        return None
    return manifest


def recorded_checksums(place: str) -> dict[str, str]:
    """The SHA-256 of each shard in a directory, by its name, as the manifest records them; {} without a manifest."""
    manifest = find(place)
    if manifest is None:
        return {}
    return {shard["name"]: shard["sha256"] for shard in shards_of(manifest) if isinstance(shard.get("sha256"), str)}


def _check_form(manifest: dict[str, Any]) -> None:
    """Raises one of `zero.files.parsing.MALFORMED` if a value is missing or of another type."""
    is_done = "unfinished" not in manifest
    expected: list[tuple[Any, type]] = [(manifest["tokenizer"], str)]
    for split in splits_of(manifest):
        expected.append((manifest[split]["shards"], list))
        expected += [(shard["name"], str) for shard in manifest[split]["shards"]]
        expected += [(shard["rows"], int) for shard in manifest[split]["shards"]]
        if is_done:
            expected += [(manifest[split][key], int) for key in ("documents", "tokens", "rows")]
        else:
            unit, skip, counts = manifest["unfinished"][split]
            expected += [(number, int) for number in (unit, skip, *Counts(*counts))]
    for value, kind in expected:
        if not isinstance(value, kind):
            raise TypeError(f"expected {kind.__name__}, found {value!r}")


def check_tokenizer(place: str, tokenizer: Tokenizer) -> None:
    """Raises UserError if the corpus in `place` was prepared with another tokenizer; shards without a manifest pass."""
    place = place if storage.is_remote(place) else os.path.normpath(place)
    manifest = find(place)
    if manifest is not None and not is_same_tokenizer(manifest["tokenizer"], tokenizer.name):
        own = manifest["tokenizer"] if manifest["tokenizer"] == "bytes" else storage.join(place, TOKENIZER)
        raise UserError(
            f"corpus {place} was prepared with tokenizer {manifest['tokenizer']}, not {tokenizer.name}: name its own, "
            f"{own}"
        )
    recorded = None if manifest is None else manifest.get(SPECIAL_TOKENS)
    if recorded is not None and recorded != described(tokenizer):
        raise UserError(
            f"corpus {place} was prepared with {SPECIAL_TOKENS} {recorded}, and those of {tokenizer.name} are "
            f"{described(tokenizer)}: name its own, {storage.join(place, TOKENIZER)}"
        )


def described(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The special tokens of documents, as a manifest records them; None without files that describe the tokenizer."""
    special = tokenizer.special
    return {"before": list(special.before), "end_of_text": special.end_of_text} if special.is_brought else None


def check_tokenizers(shards: Iterable[str], tokenizer: Tokenizer) -> None:
    """Raises UserError if one of these shards was prepared with another tokenizer than `data.tokenizer`."""
    for place in sorted({storage.parent(shard) for shard in shards}):
        try:
            check_tokenizer(place, tokenizer)
        except UserError as error:
            raise UserError(f"data.tokenizer: {error}") from error


def save(place: str, manifest: dict[str, Any]) -> None:
    directory.write(storage.join(place, MANIFEST), json.dumps(manifest, indent=1).encode("utf-8") + b"\n")


def begin(
    place: str,
    indices: dict[str, str],
    arguments: dict[str, Any],
    source: Source,
    threshold: int,
    tokenizer: Tokenizer,
    splits: Sequence[str],
) -> dict[str, Any]:
    """Removes an earlier corpus and writes a manifest without shards; hashes below `threshold` are for validation."""
    # Read first: the tokenizer may be that of the corpus itself.
    copied = companions(tokenizer.files.folder) if isinstance(tokenizer, FileTokenizer) else {}
    remove_corpus(place, indices)
    if isinstance(tokenizer, FileTokenizer):
        directory.write(storage.join(place, TOKENIZER), tokenizer.data)
        # data.tokenizer is the copy, beside which sampling and export look for them.
        for name, data in copied.items():
            directory.write(storage.join(place, name), data)
    contents = {"source_contents": source.contents}
    manifest: dict[str, Any] = arguments | contents | {split: {"shards": []} for split in splits}
    manifest["unfinished"] = {"source_state": source.state, "threshold": threshold}
    manifest["unfinished"] |= {split: UnitPosition() for split in splits}
    save(place, manifest)
    return manifest


def finish(place: str, manifest: dict[str, Any], counts: Sequence[Counts], has_ids: bool) -> None:
    del manifest["unfinished"]
    for split, count in zip(splits_of(manifest), counts, strict=True):
        shards = manifest[split]["shards"]
        summary = {
            "documents": count.documents,
            "tokens": count.tokens,
            "bytes": None if has_ids else count.bytes,
            "rows": sum(shard["rows"] for shard in shards),
        }
        truncations = [shard["truncations"] for shard in shards if "truncations" in shard]
        if truncations or count.truncations:
            summary["truncations"] = sum(truncations) + count.truncations
        manifest[split] = summary | {"shards": shards}
    manifest["skipped"] = counts[0].skipped
    manifest["short"] = sum(count.short for count in counts)
    manifest["duplicates"] = counts[0].duplicates
    if manifest.get("preferences"):
        manifest["long"] = sum(count.long for count in counts)
    if manifest.get("cut_documents"):
        manifest["cut"] = sum(count.cut for count in counts)
    save(place, manifest)


def remove_corpus(place: str, indices: dict[str, str]) -> None:
    """`indices` are those of all splits. Index files first: no index ever lists a shard that does not exist."""
    for index in indices.values():
        storage.remove(index)
    for name in [MANIFEST, TOKENIZER, *COMPANIONS, *shard_names(directory.file_names(place))]:
        storage.remove(storage.join(place, name))


def shard_names(names: Iterable[str]) -> set[str]:
    """The names that have the form of a shard's."""
    splits = "|".join(ALL_SPLITS)
    return {name for name in names if re.fullmatch(rf"({splits})-\d{{5,}}\.tar", name)}


def index_text(index: str, place: str, split: str, summary: dict[str, Any]) -> bytes:
    """The contents of an index file; shards are named relative to it if both are on this machine or in one bucket."""
    lines = [f"# {os.path.basename(place)}, {split}: {summary['tokens']} tokens of {summary['documents']} documents"]
    bucket = _bucket(place)
    target = place
    if bucket == _bucket(index):
        start = storage.parent(index).removeprefix(bucket) or "/"
        target = os.path.relpath(place.removeprefix(bucket), start)
    lines += [f"{target}/{shard['name']} # {shard['rows']} rows" for shard in summary["shards"]]
    return ("\n".join(lines) + "\n").encode("utf-8")


def _bucket(path: str) -> str:
    """gs://bucket, or nothing for a local path."""
    return "/".join(path.split("/")[:3]) if storage.is_remote(path) else ""
