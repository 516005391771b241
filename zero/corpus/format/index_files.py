"""Index files: text files that list the shards of a corpus and the number of rows in each."""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zero.base.errors import UserError, file_error
from zero.corpus.format import shards
from zero.corpus.format.one_host import OnOneHost, alone, looked_up
from zero.corpus.format.own_formats import MANIFEST, SHARD, compression_of, kind_of_file, kind_of_folder
from zero.corpus.format.shards import BadData
from zero.files import storage
from zero.files.parsing import reading

MOST_ROWS = 2**31 - 1  # of a shard in a bucket, whose size is not known yet
FEW_ROWS = 2**24  # that need no more than 128 MiB for their order: what is missing of a truncated shard can be skipped
BYTE_ORDER_MARK = "\ufeff"
Weight = float | Sequence[Sequence[float]]  # of a corpus: a number, or [[step, weight], ...] with steps from 0 on
# As zero-prepare writes them, below a comment, of so few rows that any shard may hold them: a million are read at once.
_PLAIN_LINES = re.compile(r"^([^\s#{}\0\ufeff]+\.tar)(?: # ([1-9][0-9]{0,6}) rows)?$", re.MULTILINE)
_COMMENT_LINES = re.compile(r"^#", re.MULTILINE)
_BRACES = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")  # of a shell; others are characters of a name
_log = logging.getLogger(__name__)

PATHS = "the path of an index file, a list of paths"
SETS = "{name: a path or a list, ...} with names of letters and digits, and . - _ between them"


@dataclass(frozen=True, slots=True)
class Shard:
    """One tar file and the number of rows in it."""

    path: str  # or gs://bucket/name
    rows: int

    @property
    def name(self) -> str:
        """Directory and file name, which stay the same when a corpus moves to another disk or a bucket."""
        path = self.path if storage.is_remote(self.path) else os.path.abspath(self.path)
        return "/".join(path.rsplit("/", 2)[-2:])


@dataclass(frozen=True, eq=False)
class Shards:
    """Shards in columns: a million objects would take as long as all else of a start.

    Attributes:
      paths: of each.
      rows: in each, int64 (shards,); 0 where they are not known yet.

    >>> list(Shards(["a.tar", "b.tar"], np.array([3, 4])))
    [Shard(path='a.tar', rows=3), Shard(path='b.tar', rows=4)]
    """

    paths: list[str]
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> Shard:
        return Shard(self.paths[place], int(self.rows[place]))

    def __iter__(self) -> Iterator[Shard]:
        return map(Shard, self.paths, self.rows.tolist())

    @cached_property
    def by_folder(self) -> list[tuple[str, list[str]]]:
        """Neighboring paths of the same folder, after what they begin with."""
        return list(storage.by_folder(self.paths))

    @property
    def names(self) -> list[str]:
        """The `name` of each."""
        names: list[str] = []
        for beginning, paths in self.by_folder:
            folder = Shard(paths[0], 0).name.rpartition("/")[0]
            names += [f"{folder}/{path[len(beginning) :]}" for path in paths]
        return names

    def only(self, chosen: np.ndarray) -> Shards:
        """Those that are chosen, by a bool (shards,)."""
        if chosen.all():
            return self
        return Shards(list(itertools.compress(self.paths, chosen.tolist())), self.rows[chosen])

    @staticmethod
    def joined(parts: Iterable[Shards]) -> Shards:
        """All shards of one part after the other.

        >>> Shards.joined([Shards(["a.tar"], np.array([3])), Shards(["b.tar"], np.array([4]))]).rows
        array([3, 4])
        """
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        rows = [np.zeros(0, np.int64), *(part.rows for part in parts)]
        return Shards(list(itertools.chain.from_iterable(part.paths for part in parts)), np.concatenate(rows))


def listed_shards(index: str | Path) -> Shards:
    """The shards of an .index file: one path or URL per line, relative to the file; `#` begins a comment.

    A comment of `<n> rows` after a path, as zero-prepare writes it, saves counting the rows of that shard. A path may
    have braces, as in `train-{000000..000099}.tar`. A .tar in place of an index file is its only shard.
    The byte-order mark that some editors write is left out, also in the middle, where two files were joined.

    Raises:
      UserError: the index is missing or empty, is something else, or lists a shard twice.
    """
    if str(index).endswith(SHARD):
        return Shards([str(index)], np.zeros(1, np.int64))
    text = _text_of(index)
    plain = _PLAIN_LINES.findall(text)
    paths = _paths_of(storage.parent(index), [name for name, _ in plain])
    lines = text.count("\n") + (not text.endswith("\n"))
    if paths and len(plain) + len(_COMMENT_LINES.findall(text)) == lines and len(set(paths)) == len(paths):
        return Shards(paths, np.array([int(rows or 0) for _, rows in plain], np.int64))
    listed: dict[str, int] = {}
    for line_name, entries in _listed_lines(index, text):
        for path, rows in entries:
            if path in listed:
                raise UserError(f"{line_name}: lists {path} twice; each row is read once per epoch")
            listed[path] = rows
    if not listed:
        raise UserError(f"index file {index} lists no shards; expected one path per line")
    return Shards(list(listed), np.array(list(listed.values()), np.int64))


def _text_of(index: str | Path) -> str:
    """The text of an index file; UserError if it is missing or something else."""
    try:
        content = storage.read_bytes(index)
    except FileNotFoundError:
        raise UserError(f"index file {index}: no such file; zero-prepare writes one") from None
    except OSError as error:
        raise file_error(f"index file {index} cannot be read: {error}{_folder_note(index)}", error) from error
    kind = kind_of_file(str(index), content)
    if kind is not None:
        raise UserError(f"index file {index} is {kind}; expected NAME_train.index, which zero-prepare writes beside it")
    compression = compression_of(content)
    if compression is not None:
        raise UserError(
            f"index file {index} is compressed ({compression}); expected an index file. Shards of other programs can "
            f"be converted: zero-prepare {index} --tokenizer tokenizer.json"
        )
    with reading(f"index file {index} is not UTF-8 text"):
        return content.decode()


def _paths_of(folder: str, names: Iterable[str]) -> list[str]:
    """Paths of the names of files in an index file, as `storage.join` gives them; each folder of theirs is joined once.

    >>> _paths_of("data/index", ["c/0.tar", "c/1.tar", "/2.tar", "gs://b/c/3.tar", "4.tar"])
    ['data/index/c/0.tar', 'data/index/c/1.tar', '/2.tar', 'gs://b/c/3.tar', 'data/index/4.tar']
    """
    paths: list[str] = []
    for beginning, names_of_folder in storage.by_folder(names):
        joined = storage.join(folder, f"{beginning}0").removesuffix("0")
        paths += [joined + name[len(beginning) :] for name in names_of_folder]
    return paths


def _listed_lines(index: str | Path, text: str) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """The shards of each line of an index file with their rows, after what messages call the line."""
    folder = storage.parent(index)
    # Not splitlines(), which also cuts at characters that a file name may hold, as U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        line_name = f"index file {index}, line {number}"
        yield line_name, _listed_in(line, line_name, folder)


def _listed_in(line: str, line_name: str, folder: str) -> list[tuple[str, int]]:
    """The shards of any line of an index file, which may have a comment, braces or nothing."""
    name, *comment = re.split(r"(?:^|\s+)#", line.strip().removeprefix(BYTE_ORDER_MARK).lstrip(), maxsplit=1)
    if "\0" in name:
        raise UserError(f"{line_name}: expected the path of a shard, got {name[:60]!r}")
    if not name:
        return []
    counted = re.match(r"\s*([+-]?[0-9]+) rows\b", "".join(comment))
    paths = expand_braces(storage.join(folder, name))
    if counted is None:
        return [(path, 0) for path in paths]
    rows = int(counted[1]) if len(counted[1]) <= 10 else None
    if rows is not None and rows < 1:
        raise UserError(f"{line_name}: {counted[1]} rows: expected at least 1; leave out empty shards")
    if rows is None or not all(_can_hold(path, rows) for path in paths):
        raise UserError(f"{line_name}: the shard cannot hold {counted[1][:30]} rows")
    return [(path, rows) for path in paths]


def read_index(index: str | Path, skip_bad: bool = False, on_one_host: OnOneHost = alone) -> Shards:
    """The shards of an .index file (`listed_shards`), those counted whose rows it does not record.

    Whether shards of buckets exist, and how many rows they have, is looked up on one host.

    Raises UserError for a missing or empty index and for shards whose rows cannot be counted, and BadData for shards
    that are missing, unless `skip_bad`.
    """
    listed = listed_shards(index)
    paths = listed.paths
    uncounted = np.flatnonzero(listed.rows == 0).tolist()

    def look() -> list[list[Any]]:
        missing = _missing(listed)
        if missing and not skip_bad:
            return [missing, []]
        return [missing, [shards.count_rows(paths[number]) for number in uncounted]]

    try:
        missing, counts = looked_up(on_one_host, f"shards of {index}", paths, look, given=uncounted)
    except UserError as error:
        raise type(error)(f"index file {index}: {error}") from error
    if missing and not skip_bad:
        shown = missing[0] if missing[0].isprintable() else repr(missing[0])  # else a blank of no width is not seen
        problem = "is not a file" if os.path.exists(missing[0]) else "is missing"
        raise BadData(f"index file {index}: shard {shown} {problem}")
    listed.rows[uncounted] = counts
    return listed


def _folder_note(index: str | Path) -> str:
    """What a folder is that was given in place of an index file."""
    folder = Path(index)
    if not folder.is_dir():
        return ""
    names = [path.relative_to(folder).as_posix() for path in (*folder.glob("*"), *folder.glob("*/_*"))]
    kind = "the directory of a corpus" if MANIFEST in names else kind_of_folder(names)
    if kind is None:
        return ""
    return f"; it is {kind}"


def expand_braces(name: str) -> list[str]:
    """The paths of a name with braces, as a shell and webdataset expand them; a file of that name is itself.

    >>> expand_braces("gs://bucket/train-{008..011}.tar")[-2:], expand_braces("{a,b}.index"), expand_braces("{a}")
    (['gs://bucket/train-010.tar', 'gs://bucket/train-011.tar'], ['a.index', 'b.index'], ['{a}'])
    """
    if _BRACES.search(name) is None or os.path.exists(name):
        return [name]
    import braceexpand  # imported here because most programs need it for no path

    with reading(f"{name}: its braces do not follow the syntax of a shell"):
        return list(braceexpand.braceexpand(name))


def index_paths(value: Any, bucket_path: str | None) -> str | list[str] | dict[str, Weight]:
    """A Loader's `index` from `data.index_path_train`, or of a validation set: index files, or their weights.

    Relative paths are in the bucket, if there is one.
    """
    if isinstance(value, str):
        if not bucket_path:
            return value
        return storage.join(storage.bucket(bucket_path), value)
    if all(isinstance(entry, str) for entry in value):
        return [str(index_paths(entry, bucket_path)) for entry in value]
    return {str(index_paths(entry["index"], bucket_path)): entry["weight"] for entry in value}


def named_sets(value: Any, bucket_path: str | None) -> dict[str, Any]:
    """The index file, or the list of them, of each validation set; the only name is "" where sets have none.

    >>> named_sets({"pile_cc": "a.index", "arxiv": ["b.index"]}, None)
    {'pile_cc': 'a.index', 'arxiv': ['b.index']}
    >>> named_sets(["a.index"], "bucket"), named_sets(None, None)
    ({'': ['gs://bucket/a.index']}, {})
    """
    if value is None:
        return {}
    sets = value if isinstance(value, dict) else {"": value}
    return {name: index_paths(index, bucket_path) for name, index in sets.items()}


def _can_hold(path: str, rows: int) -> bool:
    """Whether a shard may have this many rows: each has at least one byte, and takes 8 in the order of the rows."""
    if rows <= FEW_ROWS:  # without asking the disk about each of a million shards
        return True
    most = os.path.getsize(path) if os.path.isfile(path) else MOST_ROWS  # a bucket's size is not known
    return rows <= most


def _missing(shards: Shards) -> list[str]:
    """The paths that do not exist; not checked in a bucket that may be read but not listed."""
    missing = []
    listed = cache(_listed_folder)
    for _, files in shards.by_folder:
        if storage.is_remote(files[0]):
            existing = listed(storage.parent(files[0]))
            missing += [path for path in files if existing is not None and path not in existing]
        else:
            missing += [path for path in files if not os.path.isfile(path)]
    return missing


def _listed_folder(folder: str) -> Mapping[str, Any] | None:
    """The files of a folder in a bucket; None if it may not be listed."""
    try:
        return storage.list_stats(folder, is_deep=False)
    except storage.AccessDenied as error:
        _log.warning("missing shards will be noticed only when they are read: %s", error)
        return None


def paths_of(index: str | Path | Iterable[str | Path]) -> list[str]:
    """The index files that are read together: one, several that form one corpus, or the files of a mixture.

    >>> paths_of("data/index/a.index"), paths_of(["a.index", "{b,c}.index"])
    (['data/index/a.index'], ['a.index', 'b.index', 'c.index'])
    """
    names = [index] if isinstance(index, str | Path) else index
    return list(itertools.chain.from_iterable(expand_braces(str(name)) for name in names))


def row_tokens(index: str | Path | Sequence[str | Path]) -> int:
    """The number of tokens per row in the shards, according to the first row.

    Raises:
      BadData: the first shard is missing or damaged; the message names the index file.
    """
    path = paths_of(index)[0]
    try:
        return shards.row_tokens(_first_shard(path))
    except BadData as error:
        raise BadData(f"index file {path}: {error}") from error


def _first_shard(index: str) -> str:
    """The path of the first shard that an index file lists, without reading the other lines."""
    if index.endswith(SHARD):
        return index
    for _, entries in _listed_lines(index, _text_of(index)):
        for path, _ in entries:
            return path
    return listed_shards(index)[0].path  # which says that there is none


def row_lengths(indices: Iterable[str], *, skip_bad: bool) -> set[int]:
    """The numbers of tokens per row in these index files, by the first row of each.

    Raises:
      BadData: one cannot be read, unless `skip_bad` leaves it out.
    """
    lengths = set()
    for index in indices:
        try:
            lengths.add(row_tokens(index))
        except BadData:
            if not skip_bad:
                raise
    return lengths


def is_paths(value: Any) -> bool:
    """Whether a value is the path of an index file or a list of them, and not a mixture."""
    paths = value if isinstance(value, list) else [value]
    return bool(paths) and all(isinstance(path, str) and path for path in paths)


def is_sets(value: Any) -> bool:
    """Whether a value is names of validation sets, each with the path of an index file or a list of them."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(name, str) and re.fullmatch(r"\w[\w.-]*", name) for name in value)
        and all(map(is_paths, value.values()))
    )
