"""The files of a source: which files of a folder count as text, and errors that name the file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero.runtime.errors import UserError

# Suffixes of text in a folder. A file with any other suffix can still be given as the source itself.
_SUFFIXES = """
    .txt .md .rst .tex .org .jsonl .py .pyi .ipynb .c .h .cc .cpp .hpp .cu .cuh .m .rs .go .java .kt .scala .swift .cs
    .js .mjs .jsx .ts .tsx .html .css .rb .php .pl .lua .r .jl .hs .ml .ex .exs .erl .clj .lisp .sh .bash .sql .proto
    .cmake .toml .yaml .yml .ini .cfg
"""
_JSON_LINES = re.compile(r"\.jsonl(\.gz|\.zst)?$", re.IGNORECASE)
_TFRECORDS = re.compile(r"\.tfrecords?(-\d+-of-\d+)?$", re.IGNORECASE)
# Left out of the standard library: tests are repetitive, encodings and pydoc_data are tables, packages are not its own.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def is_json_lines(path: Path) -> bool:
    return _JSON_LINES.search(path.name) is not None


def is_tfrecords(path: Path) -> bool:
    return _TFRECORDS.search(path.name) is not None


def find_files(root: Path, name: str) -> list[Path]:
    """The files with the text of source `name`, in an order that does not depend on the file system."""
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise UserError(f'{name}: no such file or folder; expected one that holds text, hf:<dataset> or "stdlib"')
    is_stdlib = name == "stdlib"
    skip = _NOT_STDLIB if is_stdlib else {"__pycache__", "node_modules"}
    suffixes = {".py"} if is_stdlib else set(_SUFFIXES.split())
    files = []
    for parent, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [folder for folder in folders if folder not in skip and not folder.startswith(".")]
        for path in (Path(parent, file) for file in names):
            is_packed = not is_stdlib and (is_json_lines(path) or is_tfrecords(path))
            if (path.suffix.lower() in suffixes or is_packed) and path.is_file():
                files.append(path)
    if not files:
        raise UserError(f"{name} holds no text files; expected some of {' '.join(sorted(suffixes))}")
    return sorted(files, key=lambda file: file.relative_to(root).parts)


def stat(path: Path) -> os.stat_result:
    with named_errors(path):
        return path.stat()


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Raises UserError, which names the file, for an OSError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _raise(error: OSError) -> None:
    raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
