"""Compares a corpus with its manifest: shards, index files and the tokenizer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from zero.base.errors import UserError
from zero.corpus.format import directory, manifest
from zero.corpus.format.manifest import PARTS, TOKENIZER, splits_of
from zero.corpus.preparing import corpus_files
from zero.corpus.text.tokenizers import Tokenizer, is_same_tokenizer
from zero.files import storage


def verify(folder: str, tokenizer: Tokenizer | None = None) -> list[str]:
    """All differences from the manifest, one line each: missing, damaged or unknown shards, another tokenizer.

    `folder` is the directory of a corpus, or one of its index files, which is then compared as well.

    Raises:
        UserError: there is no prepared corpus.
    """
    index = folder if folder.endswith(".index") else None
    if index:
        folder = _directory_of(index)
    loaded = manifest.load(folder)
    differences = []
    if index:
        split = index.removesuffix(".index").rpartition("_")[2]
        is_known = split in splits_of(loaded)
        if not is_known or directory.read(index) != corpus_files.index_text(index, folder, split, loaded[split]):
            differences.append(f"{index} does not list the shards of {folder} as its manifest does")
    differences += _part_differences(folder, loaded)
    differences += _shard_differences(folder, loaded)
    differences += _tokenizer_differences(folder, loaded["tokenizer"], tokenizer)
    return differences


def _directory_of(index: str) -> str:
    """The directory of the first shard that an index file lists."""
    lines = directory.read(index).decode("utf-8", "replace").split("\n")
    paths = [line for line in lines if line and not line.startswith("#")]
    if not paths:
        raise UserError(f"{index} lists no shards")
    return storage.parent(storage.join(storage.parent(index), paths[0].partition(" ")[0]))


def _part_differences(folder: str, loaded: dict[str, Any]) -> Iterator[str]:
    """Differences of the manifests of parts from the checksums that the manifest of the corpus records."""
    for part in loaded.get(PARTS, ()):
        path = storage.join(folder, part["name"])
        if hashlib.sha256(directory.read(path)).hexdigest() != part["sha256"]:
            yield f"{path} does not match its checksum"


def _shard_differences(folder: str, loaded: dict[str, Any]) -> Iterator[str]:
    existing = directory.file_names(folder)
    listed = {shard["name"]: shard for shard in manifest.shards_of(loaded)}
    for name in sorted(corpus_files.shard_names(existing) - set(listed)):
        yield f"{storage.join(folder, name)} is not in the manifest"
    for name, shard in tqdm(listed.items(), desc="verifying", unit="shard", disable=None, leave=False):
        path = storage.join(folder, name)
        if name not in existing:
            yield f"{path} is missing"
        elif len(data := directory.read(path)) != shard["size"]:
            yield f"{path} has {len(data)} bytes; expected {shard['size']}{_remedy(folder, name)}"
        elif hashlib.sha256(data).hexdigest() != shard["sha256"]:
            yield f"{path} does not match its checksum{_remedy(folder, name)}"


def _remedy(folder: str, shard: str) -> str:
    """What makes the part of a shard again; nothing for a corpus of one part."""
    part = re.match(r"part-\d+", shard)
    if part is None:
        return ""
    return f"; remove {storage.join(folder, part[0])}.json, and repeat the command that made the corpus"


def _tokenizer_differences(folder: str, recorded: str, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Tokenizers are compared by their hash: the name of the file may differ."""
    if recorded != "bytes":
        path = storage.join(folder, TOKENIZER)
        if not storage.exists(path):
            yield f"{path} is missing"
        elif hashlib.sha256(directory.read(path)).hexdigest()[:16] != recorded.rpartition(":")[2]:
            yield f"{path} is not the tokenizer of this corpus, {recorded}"
    if tokenizer and not is_same_tokenizer(tokenizer.name, recorded):
        yield f"{folder} was prepared with tokenizer {recorded}, not {tokenizer.name}"
