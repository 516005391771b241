"""Index files: text files that list the shards of a corpus and the number of rows in each."""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
# As zero-prepare writes it, of so few rows that any shard may hold them; read in a third of the time of other lines.
_PLAIN_LINE = re.compile(r"([^\s#{}\0\ufeff]+) # ([1-9][0-9]{0,6}) rows")
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


class Listed(NamedTuple):
    """A line of an index file."""

    path: str
    rows: int | None  # None: the index file does not record them


def listed_shards(index: str | Path) -> list[Listed]:
    """The shards of an .index file: one path or URL per line, relative to the file; `#` begins a comment.

    A comment of `<n> rows` after a path, as zero-prepare writes it, saves counting the rows of that shard. A path may
    have braces, as in `train-{000000..000099}.tar`. A .tar in place of an index file is its only shard.
    The byte-order mark that some editors write is left out, also in the middle, where two files were joined.

    Raises:
      UserError: the index is missing or empty, is something else, or lists a shard twice.
    """
    if str(index).endswith(SHARD):
        return [Listed(str(index), None)]
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
        # Not splitlines(), which also cuts at characters that a file name may hold, as U+2028.
        lines = content.decode().split("\n")
    path_of = _Paths(storage.parent(index))
    listed: list[Listed] = []
    paths: set[str] = set()
    for number, line in enumerate(lines, 1):
        plain = _PLAIN_LINE.fullmatch(line)
        if plain:
            entries = [Listed(path_of(plain[1]), int(plain[2]))]
        else:
            entries = _listed_in(line, f"index file {index}, line {number}", path_of)
        for entry in entries:
            if entry.path in paths:
                raise UserError(
                    f"index file {index}, line {number}: lists {entry.path} twice; each row is read once per epoch"
                )
            paths.add(entry.path)
            listed.append(entry)
    if not listed:
        raise UserError(f"index file {index} lists no shards; expected one path per line")
    return listed


def _listed_in(line: str, line_name: str, path_of: Callable[[str], str]) -> list[Listed]:
    """The shards of any line of an index file, which may have a comment, braces or nothing."""
    name, *comment = re.split(r"(?:^|\s+)#", line.strip().removeprefix(BYTE_ORDER_MARK).lstrip(), maxsplit=1)
    if "\0" in name:
        raise UserError(f"{line_name}: expected the path of a shard, got {name[:60]!r}")
    if not name:
        return []
    counted = re.match(r"\s*([+-]?[0-9]+) rows\b", "".join(comment))
    rows = int(counted[1]) if counted and len(counted[1]) <= 10 else None
    paths = expand_braces(path_of(name))
    for path in paths:
        if counted and rows is not None and rows < 1:
            raise UserError(f"{line_name}: {counted[1]} rows: expected at least 1; leave out empty shards")
        if counted and (rows is None or not _can_hold(path, rows)):
            raise UserError(f"{line_name}: the shard cannot hold {counted[1][:30]} rows")
    return [Listed(path, rows) for path in paths]


def read_index(index: str | Path, skip_bad: bool = False, on_one_host: OnOneHost = alone) -> list[Shard]:
    """The shards of an .index file (`listed_shards`), those counted whose rows it does not record.

    Whether shards of buckets exist, and how many rows they have, is looked up on one host.

    Raises UserError for a missing or empty index and for shards whose rows cannot be counted, and BadData for shards
    that are missing, unless `skip_bad`.
    """
    listed = listed_shards(index)
    paths = [path for path, _ in listed]
    uncounted = [number for number, (_, rows) in enumerate(listed) if rows is None]

    def look() -> list[list[Any]]:
        missing = _missing(paths)
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
    counted = dict(zip(uncounted, counts, strict=True))
    return [Shard(path, counted[number] if rows is None else rows) for number, (path, rows) in enumerate(listed)]


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


class _Paths:
    """Paths of the names in an index file, as `storage.join` gives them; each folder of theirs is joined once.

    >>> path_of = _Paths("data/index")
    >>> [path_of(name) for name in ("c/0.tar", "c/./1.tar", "c/..", "/2.tar", "gs://b/c/3.tar", "gs://b")]
    ['data/index/c/0.tar', 'data/index/c/1.tar', 'data/index/c/..', '/2.tar', 'gs://b/c/3.tar', 'gs://b']
    >>> path_of("4.tar"), path_of("5.tar"), _Paths("")("6.tar")
    ('data/index/4.tar', 'data/index/5.tar', '6.tar')
    """

    def __init__(self, folder: str):
        self._folder = folder
        self._beginnings: dict[str, str] = {}  # of paths, by the folder that a name has

    def __call__(self, name: str) -> str:
        head, slash, tail = name.rpartition("/")
        is_plain = tail not in ("", ".", "..") and not (slash and (not head or head.endswith("/")))
        if not is_plain:
            return storage.join(self._folder, name)
        if head not in self._beginnings:
            self._beginnings[head] = storage.join(self._folder, f"{head}{slash}0").removesuffix("0")
        return self._beginnings[head] + tail


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


def _missing(paths: list[str]) -> list[str]:
    """The paths that do not exist; not checked in a bucket that may be read but not listed."""
    missing = []
    paths_by_directory: dict[str, list[str]] = {}  # in buckets
    for path in paths:
        if storage.is_remote(path):
            paths_by_directory.setdefault(storage.parent(path), []).append(path)
        elif not os.path.isfile(path):
            missing.append(path)
    for directory, remote in paths_by_directory.items():
        try:
            existing = storage.list_stats(directory, is_deep=False)
        except storage.AccessDenied as error:
            _log.warning("missing shards will be noticed only when they are read: %s", error)
            continue
        missing += [path for path in remote if path not in existing]
    return missing


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
    first = listed_shards(path)[0]
    try:
        return shards.row_tokens(first.path)
    except BadData as error:
        raise BadData(f"index file {path}: {error}") from error


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
