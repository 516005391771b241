"""The files of a source, on this machine or in a bucket: which of them count as text, and errors that name the file.

A file is named by its path or URL. An object of a bucket is read whole into memory, and its checksum compared.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import io
import itertools
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import BinaryIO, NamedTuple

from zero.base.errors import UserError, file_error, reason
from zero.corpus.format.index_files import expand_braces, listed_shards
from zero.corpus.format.own_formats import MANIFEST, is_index, kind_of_file, kind_of_folder
from zero.files import storage
from zero.files.storage.objects import ObjectStat

_OF_DATASETS = ("dataset_info.json", "state.json", "dataset_dict.json")  # beside the tables that its library saves
# Suffixes of text in a folder. A file with any other suffix can still be given as the source itself.
_SUFFIXES = """
    .txt .md .rst .tex .org .py .pyi .ipynb .c .h .cc .cpp .hpp .cu .cuh .m .rs .go .java .kt .scala .swift .cs
    .js .mjs .jsx .ts .tsx .html .css .rb .php .pl .lua .r .jl .hs .ml .ex .exs .erl .clj .lisp .sh .bash .sql .proto
    .cmake .toml .yaml .yml .ini .cfg
"""
_WILDCARD = re.compile(r"[*?\[]")
_VARIABLE = re.compile(r"[*?\[{]")  # in a glob, or in braces
# Left out of the standard library: tests are repetitive, encodings and pydoc_data are tables, packages are not its own.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_NOT_TEXT = {"__pycache__", "node_modules"}


_BLOCK = 1 << 20  # bytes that are hashed at once
_RANGE = 8 << 20  # bytes of an object per request


class SourceFile(NamedTuple):
    path: str  # or the URL of an object
    relative: str  # to the source
    size: int
    changed: int | str  # its modification time in ns, or the version of an object
    stated: str | None = None  # the bucket's checksum of the object, or else its version
    start: int = 0  # of a piece of a file: the lines that begin from here
    stop: int | None = None  # up to here; None: the file is whole

    @property
    def folders(self) -> list[str]:
        """The names of the source's folders that contain it."""
        return self.relative.split("/")[:-1]


def find_files(source: str, has_format: Callable[[str], bool], left_out: list[str] | None = None) -> list[SourceFile]:
    """The files of a file, folder, glob or "stdlib", in an order that does not depend on the file system.

    Of a folder these are files of text, and those that `has_format`; of a glob all that match. Braces name several of
    them. An index file stands for the shards it lists. The other files of a folder are named in `left_out`.

    Raises:
      UserError: there are none, or zero wrote them for another use: a manifest, a run, checkpoints.
    """
    is_stdlib = source == "stdlib"
    skip = _NOT_STDLIB if is_stdlib else _NOT_TEXT
    suffixes = {".py"} if is_stdlib else set(_SUFFIXES.split())
    roots = [sysconfig.get_paths()["stdlib"]] if is_stdlib else expand_braces(source)

    def is_skipped(folder: str) -> bool:
        return folder in skip or folder.startswith(".")

    def is_readable(path: str) -> bool:
        return os.path.splitext(path)[1].lower() in suffixes or (not is_stdlib and has_format(path))

    chosen: list[SourceFile] = []
    for root in roots:
        find = _find_remote if storage.is_remote(root) else _find_local
        files, is_folder = find(root, root if len(roots) == 1 else _base(source))
        if is_folder:
            _refuse_folder(root, files)
            files = [file for file in files if not any(map(is_skipped, file.folders))]
            if left_out is not None:
                paths = {file.path for file in files}
                others = [
                    file.relative for file in files if not (is_readable(file.path) or _is_read_beside(file.path, paths))
                ]
                left_out += [name for name in others if name.rpartition("/")[2] not in _OF_DATASETS]
            listed = [file.path for file in files]
            files = [file for file in files if is_readable(file.path)]
            if not files and any(path.endswith(".json") for path in listed):
                raise UserError(
                    f"{root} holds .json files, which a folder may have for settings: pass them as a glob, "
                    f"'{storage.join(root, '*.json')}'"
                )
            if not files:
                raise UserError(f"{root} holds no text files; expected some of {' '.join(sorted(suffixes))}")
        else:
            files = list(itertools.chain.from_iterable(map(_with_shards, files)))
        if not files:
            raise UserError(
                f'{root}: no such file or folder; expected one that holds text, a glob, hf:<dataset> or "stdlib"'
            )
        chosen += files
    names = Counter(file.relative for file in chosen)
    name, count = names.most_common(1)[0]
    if count > 1:
        raise UserError(f"{source}: {name} appears {count} times; a source lists each file once")
    return sorted(chosen, key=lambda file: file.relative.split("/"))


def _is_read_beside(path: str, paths: Container[str]) -> bool:
    """Whether a file is the index of Megatron's tokens, which is read with its .bin.

    >>> _is_read_beside("a.idx", {"a.idx", "a.bin"}), _is_read_beside("b.idx", {"b.idx"})
    (True, False)
    """
    return path.endswith(".idx") and f"{path.removesuffix('.idx')}.bin" in paths


def _refuse_folder(root: str, files: list[SourceFile]) -> None:
    """Raises UserError for a folder that zero wrote for another use than as a source."""
    names = [storage.relative(file.path, root) for file in files]
    kind = kind_of_folder(names)
    if kind is not None:
        raise UserError(f"{root} is {kind}; expected text, token ids, or an index file of shards")
    if MANIFEST in names and _kind_of(storage.join(root, MANIFEST)) is not None:
        raise UserError(
            f"{root} is a corpus of zero-prepare, with rows of all its splits; expected an index file of it, such as "
            f"data/index/{os.path.basename(root.rstrip('/'))}_train.index"
        )


def _kind_of(path: str) -> str | None:
    with open_file(path) as file:
        return kind_of_file(path, file.read())


def _with_shards(file: SourceFile) -> list[SourceFile]:
    """The file itself; of an index file, the shards it lists; a manifest is refused."""
    if is_index(file.path):
        return _shards_of(file)
    if file.path.endswith(".json") and (kind := _kind_of(file.path)) is not None:
        raise UserError(f"{file.path} is {kind}; an index file of the corpus is a source, such as NAME_train.index")
    return [file]


def _shards_of(index: SourceFile) -> list[SourceFile]:
    paths = listed_shards(index.path).paths
    stats: dict[str, ObjectStat] = {}
    for folder in map(storage.parent, filter(storage.is_remote, storage.one_of_each_folder(paths))):
        with suppress(storage.AccessDenied):  # a bucket that may be read but not listed
            stats |= storage.list_stats(folder)
    name = os.path.basename(index.path)
    shards = []
    for number, path in enumerate(paths):
        relative = f"{name}/{number:06d}/{os.path.basename(path)}"
        try:
            if storage.is_remote(path):
                shards.append(_object_file(path, relative, stats[path] if path in stats else storage.stat(path)))
            else:
                shards.append(_file(path, relative))
        except FileNotFoundError:
            raise UserError(f"index file {index.path}: {path} is missing") from None
    return shards


def _find_local(root: str, base: str) -> tuple[list[SourceFile], bool]:
    """All files, and whether they come from a folder; their names are relative to `base`, or to the base of a glob."""
    is_folder = os.path.isdir(root)
    if is_folder:
        paths = _walk(root)
    elif os.path.exists(root):
        paths = [root]
    else:
        base = _base(base)
        paths = glob.glob(root, recursive=True)
    return [_file(path, os.path.relpath(path, base)) for path in paths if os.path.isfile(path)], is_folder


def _walk(root: str) -> list[str]:
    """All files below a folder, except for folders without text: a virtual environment has many files."""
    paths = []
    for parent, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [folder for folder in folders if folder not in _NOT_TEXT and not folder.startswith(".")]
        paths += [os.path.join(parent, name) for name in names]
    return paths


def _file(path: str, relative: str) -> SourceFile:
    with named_errors(path):
        status = os.stat(path)
    return SourceFile(path, relative, status.st_size, status.st_mtime_ns)


def _find_remote(root: str, base: str) -> tuple[list[SourceFile], bool]:
    """The same of objects."""
    if _WILDCARD.search(root):
        from fsspec.utils import glob_translate

        base = _base(base)
        stats = storage.list_stats(_base(root))
        # As in a shell, * does not match across folders, and ** does where it is all between two slashes.
        parts = [part if part == "**" else re.sub(r"\*+", "*", part) for part in root.split("/")]
        pattern = re.compile(glob_translate("/".join(parts)))
        paths = [path for path in stats if pattern.fullmatch(path)]
        return [_object_file(path, storage.relative(path, base), stats[path]) for path in paths], False
    try:
        stat = storage.stat(root)
        return [_object_file(root, storage.relative(root, base), stat)], False
    except FileNotFoundError:
        stats = storage.list_stats(root.rstrip("/"))
        files = [_object_file(path, storage.relative(path, base), stats[path]) for path in stats]
        return files, len(stats) > 0


def _object_file(url: str, relative: str, stat: ObjectStat) -> SourceFile:
    checksum = stat.checksum
    stated = f"version {stat.version}" if checksum is None else f"{checksum.algorithm} {checksum.value}"
    return SourceFile(url, relative, stat.size, stat.version, stated)


def digest_of_contents(files: Sequence[SourceFile]) -> str:
    """A digest of names and contents. Files of this machine are read, objects of a bucket are not."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing leaves Python's lock to others
        contents = list(pool.map(_contents, files))
    lines = [[file.relative, digest] for file, digest in zip(files, contents, strict=True)]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]


def _contents(file: SourceFile) -> str:
    if file.stated is not None:
        return file.stated
    digest = hashlib.sha256()
    left = file.size
    with open_file(file.path) as opened:
        opened.seek(file.start)
        while block := opened.read(_BLOCK if file.stop is None else min(_BLOCK, left)):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _base(pattern: str) -> str:
    """The folder above the first wildcard of a glob, or above the first brace."""
    start = _VARIABLE.search(pattern)
    if not start:
        return pattern
    return storage.parent(pattern[: start.start() + 1])


@contextmanager
def open_file(path: str) -> Iterator[BinaryIO]:
    """A file of a source to read from; errors name it."""
    with named_errors(path):
        if storage.is_remote(path):
            yield io.BytesIO(_object(path))
        else:
            with open(path, "rb") as file:
                yield file


@contextmanager
def open_piece(file: SourceFile) -> Iterator[BinaryIO]:
    """A file of which perhaps only a piece is read: then an object of a bucket is not held in memory whole."""
    if file.stop is None or not storage.is_remote(file.path):
        with open_file(file.path) as opened:
            yield opened
        return
    with named_errors(file.path), io.BufferedReader(storage.RangeReader(file.path), _RANGE) as reader:
        yield reader


@functools.lru_cache(maxsize=1)
def _object(url: str) -> bytes:
    """The newest object, for the units that are cut from it in order."""
    return storage.read_bytes(url)


@contextmanager
def named_errors(path: str) -> Iterator[None]:
    """Raises UserError, which names the file, for an OSError."""
    try:
        yield
    except OSError as error:
        raise file_error(f"{path} cannot be read: {reason(error)}", error) from error


def _raise(error: OSError) -> None:
    raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
