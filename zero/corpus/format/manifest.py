"""The manifest of a corpus, and of a part of one, as every reader needs it: its splits, its shards, its tokenizer."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from zero.base.errors import UserError, file_error, reason
from zero.corpus.format import directory
from zero.corpus.format.own_formats import MANIFEST
from zero.corpus.text.tokenizers import Tokenizer, is_same_tokenizer
from zero.files import storage
from zero.files.parsing import MALFORMED, reading

TOKENIZER = "tokenizer.json"
SPECIAL_TOKENS = "special_tokens"  # a key of the manifest
SPLITS = ("train", "validation")  # of every corpus
ALL_SPLITS = (*SPLITS, "test")
PARTS = "parts"  # a key of the manifest of a corpus of many parts: the list of them
_THREADS = 16  # that wait for a bucket
_log = logging.getLogger(__name__)


def splits_of(manifest: dict[str, Any]) -> tuple[str, ...]:
    return tuple(split for split in ALL_SPLITS if split in SPLITS or split in manifest)


def shards_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """What the manifest records of each shard, of all splits."""
    shards: list[dict[str, Any]] = []
    for split in splits_of(manifest):
        shards += manifest[split]["shards"]
    return shards


def load(folder: str, has_parts: bool = True) -> dict[str, Any]:
    """The manifest of a corpus; of one in parts with the shards of all parts, which are read unless not `has_parts`."""
    path = storage.join(folder, MANIFEST)
    manifest = load_file(path)
    if PARTS in manifest and has_parts:
        for split in splits_of(manifest):
            manifest[split] = manifest[split] | {"shards": []}
        for part in load_parts(folder, [part["name"] for part in manifest[PARTS]]):
            for split in splits_of(manifest):
                manifest[split]["shards"] += part[split]["shards"]
    return manifest


def load_file(path: str) -> dict[str, Any]:
    """The manifest of a corpus or of a part, as it is stored."""
    with reading(f"{path} is not a manifest that this version can read; choose another name, or remove it"):
        manifest: dict[str, Any] = json.loads(directory.read(path))
        _check_form(manifest)
    return manifest


def load_parts(folder: str, names: Iterable[str]) -> list[dict[str, Any]]:
    """The manifests of parts, by the names of their files; several requests at once, for a bucket."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda name: load_file(storage.join(folder, name)), names))


def find(folder: str) -> dict[str, Any] | None:
    """The manifest of a directory of shards; None if it has none, or a file of this name that is something else."""
    path = storage.join(folder, MANIFEST)
    try:
        data = storage.read_bytes(path)
    except (FileNotFoundError, NotADirectoryError, storage.AccessDenied):  # a bucket that may not be listed denies
        return None
    except OSError as error:
        raise file_error(f"{path} cannot be read: {reason(error)}", error) from error
    try:
        manifest: dict[str, Any] = json.loads(data)
        _check_form(manifest)
    except MALFORMED:
        return None
    return manifest


def recorded_checksums(folder: str) -> Callable[[str], str | None]:
    """What the manifest records of a shard of a directory, by its name: a SHA-256; None for a shard that it lacks.

    In a corpus of many parts it is the digest of the part's manifest, which lists the shard's own: a start reads one
    file.
    """
    manifest = find(folder)
    if manifest is None:
        return lambda name: None
    if PARTS in manifest:
        of_part = {part["name"].removesuffix(".json"): part["sha256"] for part in manifest[PARTS]}

        def recorded(name: str) -> str | None:
            part, _, number = name.removesuffix(".tar").rpartition("-")
            if part not in of_part:
                return None
            return f"{of_part[part]} {number}"

        return recorded
    return _checksums(manifest).get


def shard_checksums(folder: str) -> Callable[[str], str | None]:
    """The SHA-256 that the manifest records of a shard of a directory, by its name; None for a shard that it lacks.

    The manifest of a part is read when its first shard is asked for. UserError if it is not the one that the manifest
    of the corpus lists.
    """
    manifest = find(folder)
    if manifest is None:
        return lambda name: None
    if PARTS not in manifest:
        return _checksums(manifest).get
    digests = {part["name"]: part["sha256"] for part in manifest[PARTS]}

    @functools.cache
    def of_part(name: str) -> dict[str, str]:
        path = storage.join(folder, name)
        if hashlib.sha256(directory.read(path)).hexdigest() != digests[name]:
            raise UserError(f"{path} does not match its checksum in {storage.join(folder, MANIFEST)}")
        return _checksums(load_file(path))

    def recorded(name: str) -> str | None:
        part = f"{name.rpartition('-')[0]}.json"
        return of_part(part).get(name) if part in digests else None

    return recorded


def _checksums(manifest: dict[str, Any]) -> dict[str, str]:
    """The SHA-256 of each shard that a manifest lists itself, by its name."""
    return {shard["name"]: shard["sha256"] for shard in shards_of(manifest) if isinstance(shard.get("sha256"), str)}


def _check_form(manifest: dict[str, Any]) -> None:
    """Raises one of `zero.files.parsing.MALFORMED` if a value is missing or of another type."""
    expected: list[tuple[Any, type]] = [(manifest["tokenizer"], str)]
    for part in manifest.get(PARTS, ()):
        expected += [(part[key], str) for key in ("name", "sha256", "source_contents")]
    for split in splits_of(manifest):
        if PARTS not in manifest:
            expected.append((manifest[split]["shards"], list))
            expected += [(shard["name"], str) for shard in manifest[split]["shards"]]
            expected += [(shard["rows"], int) for shard in manifest[split]["shards"]]
        expected += [(manifest[split][key], int) for key in ("documents", "tokens", "rows")]
    for value, kind in expected:
        if not isinstance(value, kind):
            raise TypeError(f"expected {kind.__name__}, found {value!r}")


def check_tokenizer(folder: str, tokenizer: Tokenizer) -> None:
    """Raises UserError if this corpus was prepared with another tokenizer; shards without a manifest pass."""
    folder = folder if storage.is_remote(folder) else os.path.normpath(folder)
    manifest = find(folder)
    if manifest is not None and not is_same_tokenizer(manifest["tokenizer"], tokenizer.name):
        name_or_file = manifest["tokenizer"] if manifest["tokenizer"] == "bytes" else storage.join(folder, TOKENIZER)
        raise UserError(
            f"corpus {folder} was prepared with tokenizer {manifest['tokenizer']}, not {tokenizer.name}: use its own, "
            f"{name_or_file}"
        )
    recorded = None if manifest is None else manifest.get(SPECIAL_TOKENS)
    if recorded is not None and recorded != described(tokenizer):
        raise UserError(
            f"corpus {folder} was prepared with {SPECIAL_TOKENS} {recorded}, and those of {tokenizer.name} are "
            f"{described(tokenizer)}: name its own, {storage.join(folder, TOKENIZER)}"
        )


def described(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The special tokens of documents, as a manifest records them; None without files that describe the tokenizer."""
    special = tokenizer.special
    if not special.is_brought:
        return None
    ends = {"end_of_text": special.end_of_text, "answer_end": special.answer_end}
    return {"before": list(special.before), **ends}


def check_tokenizers(shards: Iterable[str], tokenizer: Tokenizer) -> None:
    """Raises UserError if one of these shards was prepared with another tokenizer than `data.tokenizer`."""
    for folder in sorted(map(storage.parent, storage.one_of_each_folder(shards))):
        try:
            check_tokenizer(folder, tokenizer)
        except UserError as error:
            raise UserError(f"data.tokenizer: {error}") from error
