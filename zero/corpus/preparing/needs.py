"""What an option that looks at all documents needs of memory and disk, said before it begins.

Each option knows its own needs (`needs` beside its passes), from the number of documents and the size of their text;
these are estimated from the first documents of three parts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

from zero.corpus.preparing.documents import Unit
from zero.corpus.preparing.sources.source import Source
from zero.files import storage

PROCESS_BYTES = 52_000_000  # of a process that reads documents: libraries and a unit, before it holds anything else


@dataclass(frozen=True)
class SourceSize:
    """An estimate of the contents of a source.

    Attributes:
      line_bytes: of all documents, as lines of JSON in which a shuffle writes them.
      sampled: the documents that were read for this estimate.
    """

    documents: int
    line_bytes: int
    parts: int
    sampled: int


@dataclass(frozen=True)
class Needs:
    """Bytes of memory per process beyond `PROCESS_BYTES`, and of disk in the corpus's directory until it is done."""

    memory: int
    disk: int

    def described(self, option: str, size: SourceSize, folder: str, processes: int | None) -> str:
        """A line for the user; `processes` counts those of this machine, None means workers of a runner."""
        disk_note = ""
        if self.disk:
            disk_note = f"{readable(self.disk)} of disk in {storage.join(folder, 'passes')}{_free(folder)}, and "
        each = "each worker"
        if processes is not None:
            each = "the process" if processes == 1 else f"each of {processes} processes"
        return (
            f"--{option} needs about {disk_note}{readable(PROCESS_BYTES + self.memory)} of memory in {each}, for about "
            f"{size.documents:,} documents (estimated from {size.sampled:,})"
        )


def measure(source: Source, lines_of: Callable[[Unit], tuple[int, int]], is_near: bool = True) -> SourceSize | None:
    """The size of a source by the first unit of three parts; None if its size is not known.

    Of a source that is not near, in a bucket, only one part is asked, because an object may be read whole for that.

    Args:
      lines_of: the number of documents of a unit, and the bytes of their lines.
    """
    if not source.size:
        return None
    documents = 0
    line_bytes = 0
    read = 0
    for number in sorted({0, source.parts // 2, source.parts - 1} if is_near else {0}):
        for unit in source.part(number).units():
            unit_lines, unit_bytes = lines_of(unit)
            documents += unit_lines
            line_bytes += unit_bytes
            read += unit.size
            break
    share = source.size / max(read, 1)
    estimated = max(documents, int(documents * share))
    return SourceSize(estimated, max(line_bytes, int(line_bytes * share)), source.parts, documents)


def readable(size: int) -> str:
    """A number of bytes with a unit.

    >>> readable(5_400_000), readable(12_000_000_000)
    ('5.4 MB', '12 GB')
    """
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.2g} {unit}" if value < 10 else f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _free(folder: str) -> str:
    if storage.is_remote(folder):
        return ""
    return f" ({readable(shutil.disk_usage(folder).free)} are free)"
