"""Local paths and URLs of buckets as strings: telling them apart, joining, the parent directory."""

from __future__ import annotations

import itertools
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter, methodcaller
from pathlib import Path

from zero.base.errors import UserError

SCHEME = "gs"  # of a bucket that is named without one
SCHEMES = (SCHEME, "s3", "az", "abfs", "hf")
_IN_BUCKET = re.compile(rf"(?:{'|'.join(SCHEMES)})://[^/]")


def is_remote(url: str | Path) -> bool:
    """Whether this is a bucket, or a file or folder in one.

    Raises:
      UserError: a URL with another scheme, as https://, or without a bucket, or a command, which webdataset would run.
    """
    if _IN_BUCKET.match(str(url)):
        return True
    if str(url).startswith("pipe:"):
        raise UserError(f"{url}: commands are never run; download the data, or give its URL in a bucket")
    if "://" not in str(url):
        return False
    raise UserError(f"{url}: expected a local path or gs://bucket/name (in place of gs also {', '.join(SCHEMES[1:])})")


def are_remote(urls: Sequence[str]) -> bool:
    """Whether all are in buckets, of a million files too; UserError as from `is_remote`."""
    return all(map(_IN_BUCKET.match, urls)) or all(map(is_remote, urls))


def is_root(url: str | Path) -> bool:
    """Whether this is a bucket itself, which is a folder.

    >>> is_root("gs://bucket"), is_root("gs://bucket/"), is_root("gs://bucket/a"), is_root("bucket")
    (True, True, False, False)
    """
    return "://" in str(url) and not split(url)[1].strip("/")


def scheme(url: str | Path) -> str:
    """The scheme of a URL.

    >>> scheme("s3://bucket/corpus/0.tar")
    's3'
    """
    return str(url).partition("://")[0]


def split(url: str | Path) -> tuple[str, str]:
    """The bucket of a URL and the name within it.

    >>> split("gs://bucket/corpus/0.tar")
    ('bucket', 'corpus/0.tar')
    """
    bucket_name, _, name = str(url).partition("://")[2].partition("/")
    return bucket_name, name


def bucket(path: str) -> str:
    """The URL of `data.bucket_path`: a bucket, or a directory in one; without a scheme it is Google's.

    >>> bucket("name/of/it/"), bucket("s3://name")
    ('gs://name/of/it', 's3://name')
    """
    return path.rstrip("/") if "://" in path else f"{SCHEME}://{path.strip('/')}"


def join(directory: str | Path, path: str | Path) -> str:
    """`path` relative to a directory, local or in a bucket; absolute paths and URLs are returned unchanged.

    >>> join("gs://bucket/index", "../corpus/0.tar")
    'gs://bucket/corpus/0.tar'
    >>> join("gs://bucket/index", "/data/0.tar")
    '/data/0.tar'
    >>> join("gs://bucket", "0.tar"), join("gs://bucket/index", "../../0.tar")
    ('gs://bucket/0.tar', 'gs://bucket/0.tar')
    """
    if "://" in str(path) or os.path.isabs(path):
        return str(path)
    if "://" not in str(directory):
        return str(Path(directory, path))
    bucket_name, place = split(directory)
    # As in a file system, nothing is above the root.
    name = posixpath.normpath(posixpath.join("/", place, Path(path).as_posix())).strip("/")
    return f"{scheme(directory)}://{bucket_name}/{name}".rstrip("/")


def parent(url: str | Path) -> str:
    """The directory of a file; a bucket is its own.

    >>> parent("gs://bucket/a/0.tar"), parent("gs://bucket/0.tar"), parent("gs://bucket"), parent("0.tar")
    ('gs://bucket/a', 'gs://bucket', 'gs://bucket', '.')
    """
    head, _, name = str(url).rpartition("/")
    if name and "://" in head:
        return head
    if is_root(url):
        return str(url).rstrip("/")
    if "://" in str(url):
        return head
    return os.path.dirname(url) or "."


def by_folder(urls: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Neighboring files of the same folder, after what their paths begin with.

    >>> list(by_folder(["gs://bucket/a/0.tar", "gs://bucket/a/1.tar", "2.tar"]))
    [('gs://bucket/a/', ['gs://bucket/a/0.tar', 'gs://bucket/a/1.tar']), ('', ['2.tar'])]
    """
    urls = list(urls)
    first = 0
    for beginning, files in itertools.groupby(_beginnings(urls)):
        end = first + len(list(files))
        yield "".join(beginning), urls[first:end]
        first = end


def one_of_each_folder(urls: Iterable[str]) -> list[str]:
    """One file of each folder of these, for what depends on the folder alone.

    >>> one_of_each_folder(["gs://bucket/a/0.tar", "2.tar", "gs://bucket/a/1.tar"])
    ['gs://bucket/a/1.tar', '2.tar']
    """
    urls = list(urls)
    return list(dict(zip(_beginnings(urls), urls, strict=True)).values())


def _beginnings(urls: Iterable[str]) -> Iterator[tuple[str, str]]:
    """What is before the last slash of each, and the slash; without a call of Python for each of a million."""
    return map(itemgetter(0, 1), map(methodcaller("rpartition", "/"), urls))


def relative(path: str, base: str) -> str:
    """A path as it is named from a folder above it, or "." for that folder itself.

    >>> relative("gs://bucket/a/0.tar", "gs://bucket"), relative("a/0.tar", "a/"), relative("gs://bucket/a", "gs://bucket/a")
    ('a/0.tar', '0.tar', '.')
    """
    if "://" not in path:
        return os.path.relpath(path, base)
    return path.removeprefix(base.rstrip("/")).lstrip("/") or "."
