"""zero's own formats, known by their names and first bytes: if one is given in place of another, the error names it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection

from zero.files.parsing import MALFORMED

INDEX = ".index"  # the suffix of an index file
SHARD = ".tar"
MANIFEST = "manifest.json"
_MANIFEST_NAME = re.compile(r"manifest\.json|part-\d{5,}\.json")
_OF_MANIFEST = {"row_tokens", "tokenizer", "train", "validation"}
_OF_RUN = "config.yaml"
_OTHERS_OF_RUN = {"command.json", "layout.txt", "metrics.jsonl"}
_OF_CHECKPOINT = re.compile(r"(\d+/)?_CHECKPOINT_METADATA")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\0": "xz", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd"}


def is_index(path: str) -> bool:
    return path.endswith(INDEX)


def kind_of_file(path: str, data: bytes) -> str | None:
    """What a file of zero's own is, such as a manifest, from its contents; None for any other file.

    >>> kind_of_file("c/manifest.json", b'{"row_tokens": 8, "tokenizer": "bytes", "train": {}, "validation": {}}')
    'the manifest of a corpus'
    """
    if not _MANIFEST_NAME.fullmatch(os.path.basename(path)):
        return None
    try:
        manifest = json.loads(data)
        return "the manifest of a corpus" if _OF_MANIFEST <= manifest.keys() else None
    except MALFORMED:
        return None


def kind_of_folder(names: Collection[str]) -> str | None:
    """What a folder of zero's own is, by the names of the files in it; a corpus has a manifest to look into.

    >>> kind_of_folder(["config.yaml", "metrics.jsonl", "report.html"]), kind_of_folder(["240/_CHECKPOINT_METADATA"])
    ('a run directory', 'a folder of checkpoints')
    """
    if _OF_RUN in names and not _OTHERS_OF_RUN.isdisjoint(names):
        return "a run directory"
    if any(_OF_CHECKPOINT.fullmatch(name) for name in names):
        return "a folder of checkpoints"
    return None


def compression_of(data: bytes) -> str | None:
    """The format in which these first bytes of a file are compressed.

    >>> import gzip
    >>> compression_of(gzip.compress(b"rows")), compression_of(b"rows")
    ('gzip', None)
    """
    return next((name for magic, name in _COMPRESSED.items() if data.startswith(magic)), None)
