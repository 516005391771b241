"""Files that are read as one text with their markup, and the program that extracts the text of each kind."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

from zero.base.plural import counted

EXTRACTORS = {  # the suffixes that each reads
    "trafilatura": (".html", ".htm", ".xhtml"),
    "a parser of the format": (".xml", ".yaml", ".yml"),
    "jupyter nbconvert --to markdown": (".ipynb",),
    "pandoc --to plain": (".tex", ".rtf"),
}


def markup_remarks(paths: Iterable[str]) -> list[str]:
    """What a user is told about the files with markup among these.

    >>> markup_remarks(["a.html", "b.htm", "c.txt"])
    ['2 files are read with their markup (.html, .htm): trafilatura extracts the text of such files']
    """
    counts = Counter(os.path.splitext(path)[1].lower() for path in paths)
    remarks = []
    for extractor, suffixes in EXTRACTORS.items():
        present = [suffix for suffix in suffixes if counts[suffix]]
        if present:
            total = sum(counts[suffix] for suffix in present)
            are = "is read with its" if total == 1 else "are read with their"
            kinds = ", ".join(present)
            remarks.append(
                f"{counted(total, 'file')} {are} markup ({kinds}): {extractor} extracts the text of such files"
            )
    return remarks
