"""The parts of a source: neighboring files, and pieces of large files of lines, of about a gibibyte.

They are decided only by the names and sizes of the files, so that every call, and every machine, finds
the same ones (docs/decisions/preparing.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from zero.corpus.preparing.sources.files import SourceFile

PART_BYTES = 1 << 30  # of a source: a kill costs the minutes that a core needs to tokenize it


def pieces(files: Iterable[SourceFile], part_bytes: int, is_cut: Callable[[str], bool]) -> Iterator[SourceFile]:
    """The files, those that are larger than a part in equal pieces where the format of their path `is_cut`."""
    for file in files:
        count = -(-file.size // part_bytes)
        if count <= 1 or not is_cut(file.path):
            yield file
            continue
        for number in range(count):
            start = number * file.size // count
            stop = (number + 1) * file.size // count
            piece_name = f"{file.relative} bytes {start} to {stop}"
            yield file._replace(relative=piece_name, size=stop - start, start=start, stop=stop)


def part_bounds(sizes: Sequence[int], part_bytes: int) -> list[tuple[int, int]]:
    """The first and past last piece of each part: as many neighbors as fit, and at least one.

    >>> part_bounds([3, 3, 3, 9, 1], 6)
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    >>> part_bounds([], 6)
    [(0, 0)]
    """
    bounds = []
    first = 0
    bytes_of_part = 0
    for number, size in enumerate(sizes):
        if number > first and bytes_of_part + size > part_bytes:
            bounds.append((first, number))
            first = number
            bytes_of_part = 0
        bytes_of_part += size
    return [*bounds, (first, len(sizes))]
