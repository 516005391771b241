"""What stands of a corpus: its manifest, the index files made from it, and what a second call finds to be done."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from zero.runtime import storage
from zero.runtime.errors import UserError
from zero.runtime.tokenizers import FileTokenizer, Tokenizer

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "validation")
NO_HASH = 2**64  # higher than any


class Counts(NamedTuple):
    """What some units held for one split."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: int = 0  # of both splits
    lowest: int = NO_HASH

    def plus(self, other: Counts) -> Counts:
        return Counts(
            self.documents + other.documents,
            self.tokens + other.tokens,
            self.bytes + other.bytes,
            self.skipped + other.skipped,
            min(self.lowest, other.lowest),
        )


class Position(NamedTuple):
    """Where a split's next shard begins."""

    unit: int = 0
    skip: int = 0  # tokens of that unit, or rows if each document has its own, which are in the shard before
    counts: Counts = Counts()  # of the units before


def standing(place: str, arguments: dict[str, Any], source_state: str, overwrite: bool) -> dict[str, Any] | None:
    """The manifest of what an earlier call has left, if it is any use; UserError where it was made otherwise."""
    if not storage.exists(storage.join(place, MANIFEST)):
        return None
    manifest = load(place)
    shards = [shard["name"] for split in SPLITS for shard in manifest[split]["shards"]]
    for key, now in arguments.items():
        if manifest.get(key) != now:
            if overwrite or not shards:
                return None
            difference = f"with {key}={manifest.get(key)}, not {key}={now}"
            if key == "source_files":
                difference = f"when {arguments['source']} held other files, or files of other sizes"
            raise UserError(
                f"corpus {place} was prepared {difference}: give another name, or --overwrite to replace it"
            )
    if "unfinished" in manifest and manifest["unfinished"]["source_state"] != source_state:
        if overwrite or not shards:
            return None
        raise UserError(f"corpus {place} is half done, and its source has changed since: --overwrite begins it anew")
    return manifest if set(shards) <= names(place) else None


def load(place: str) -> dict[str, Any]:
    path = storage.join(place, MANIFEST)
    try:
        manifest = json.loads(read(path))
        if not all(isinstance(manifest[split]["shards"], list) for split in SPLITS):
            raise TypeError("shards are not a list")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is no manifest that this version reads: give another name, or remove it") from error
    return manifest


def begin(
    place: str,
    indices: dict[str, str],
    arguments: dict[str, Any],
    source_state: str,
    threshold: int,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Removes what another call has left and writes a manifest without shards; hashes below threshold: validation."""
    clear(place, indices)
    if isinstance(tokenizer, FileTokenizer):
        save(storage.join(place, TOKENIZER), tokenizer.data)
    manifest: dict[str, Any] = arguments | {split: {"shards": []} for split in SPLITS}
    manifest["unfinished"] = {"source_state": source_state, "threshold": threshold}
    manifest["unfinished"] |= {split: Position() for split in SPLITS}
    note(place, manifest)
    return manifest


def finish(place: str, manifest: dict[str, Any], counts: tuple[Counts, Counts], has_ids: bool) -> None:
    del manifest["unfinished"]
    for split, count in zip(SPLITS, counts, strict=True):
        manifest[split] = {
            "documents": count.documents,
            "tokens": count.tokens,
            "bytes": None if has_ids else count.bytes,
            "rows": sum(shard["rows"] for shard in manifest[split]["shards"]),
            "shards": manifest[split]["shards"],
        }
    manifest["skipped"] = counts[0].skipped
    note(place, manifest)


def clear(place: str, indices: dict[str, str]) -> None:
    """Removes a corpus; no index ever lists a shard that is not there."""
    for index in indices.values():
        storage.remove(index)
    for name in [MANIFEST, TOKENIZER, *ours(names(place))]:
        storage.remove(storage.join(place, name))


def ours(names: Iterable[str]) -> set[str]:
    return {name for name in names if re.fullmatch(r"(train|validation)-\d{5,}\.tar", name)}


def sweep(directory: str, name: str) -> None:
    """Removes what a process has left that was killed while it wrote a file; buckets keep no such thing."""
    if not storage.is_remote(directory):
        for path in Path(directory).glob(f".{name}.????????"):
            path.unlink(missing_ok=True)


def note(place: str, manifest: dict[str, Any]) -> None:
    save(storage.join(place, MANIFEST), json.dumps(manifest, indent=1).encode("utf-8") + b"\n")


def index_text(index: str, place: str, split: str, summary: dict[str, Any]) -> bytes:
    """An index file's contents; shards are named relative to it where both lie on this machine or in one bucket."""
    lines = [f"# {last_name(place)}, {split}: {summary['tokens']} tokens of {summary['documents']} documents"]
    bucket, near = _bucket(place), place
    if bucket == _bucket(index):
        start = storage.parent(index).removeprefix(bucket) or "/"
        near = Path(os.path.relpath(place.removeprefix(bucket), start)).as_posix()
    lines += [f"{near}/{shard['name']} # {shard['rows']} rows" for shard in summary["shards"]]
    return ("\n".join(lines) + "\n").encode("utf-8")


def _bucket(path: str) -> str:
    """gs://bucket, or nothing for a local path."""
    return "/".join(path.split("/")[:3]) if storage.is_remote(path) else ""


def read(path: str) -> bytes:
    try:
        return storage.read_bytes(path)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; expected a corpus, or its index file, of data/prepare.py") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def save(path: str, data: bytes) -> None:
    try:
        storage.write(path, data)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


def last_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def names(place: str) -> set[str]:
    """The files of a corpus, temporary ones of a call that was killed included."""
    return {last_name(path) for path in storage.list_files(place)}


@contextmanager
def locked(place: str) -> Iterator[None]:
    """Waits while another process of this machine prepares the same corpus: several hosts may begin at once."""
    if storage.is_remote(place):
        yield  # there the same call writes the same bytes, whole objects each
        return
    Path(place).mkdir(parents=True, exist_ok=True)
    directory = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)
