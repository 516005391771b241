"""What a file is that is not the text its name promises, judging by its first bytes, with the remedy."""

from __future__ import annotations

import re
from typing import NamedTuple

HEAD_BYTES = 512  # of a file, enough for each entry of `KINDS`


class Kind(NamedTuple):
    """A kind of files that are not text in UTF-8."""

    begins: re.Pattern[bytes]
    meaning: str  # after the name of the file, with the remedy; {} is that name


def _kind(pattern: bytes, meaning: str) -> Kind:
    return Kind(re.compile(pattern, re.DOTALL), meaning)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
IS_LFS_POINTER = "is a pointer of Git LFS, not the file that it stands for; fetch that with git lfs pull"
_OFFICE = rb"PK\x03\x04.{26}(\[Content_Types\]\.xml|_rels/|docProps/|xl/|word/)"
# No pattern matches text: it holds a byte that UTF-8 or a text does not have, or is a line that only such files have.
KINDS = (
    _kind(re.escape(LFS_POINTER), IS_LFS_POINTER),
    _kind(_OFFICE, "is an Office document; save a table as .csv, a text as .txt"),
    _kind(rb"PK(\x03\x04|\x05\x06)", "is a zip archive; unpack it and pass the folder"),
    _kind(rb"%PDF-\d\.\d[\r\n]", "is a PDF; extract its text first, for example with pdftotext"),
    _kind(
        rb"\x80[\x02-\x05]|\([dl]p\d\r?\n|ccopy_reg\n",
        "is a pickle, which can run any code and is never loaded; write its documents as JSON lines or Parquet",
    ),
    _kind(rb"SQLite format 3\x00", 'is an SQLite database; export a table: sqlite3 -header -csv {} "SELECT ..."'),
    _kind(rb"\x1f\x8b", "is compressed with gzip; add .gz to its name"),
    _kind(rb"\xfd7zXZ\x00", "is compressed with xz; add .xz to its name"),
    _kind(rb"\x28\xb5\x2f\xfd", "is compressed with zstd; add .zst to its name"),
    _kind(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "is compressed with bzip2; unpack it with bunzip2"),
    _kind(rb"7z\xbc\xaf\x27\x1c|Rar!\x1a\x07", "is an archive; unpack it and pass the folder"),
    _kind(rb".{257}ustar(\x00|  \x00)", "is a tar; add .tar to its name"),
    _kind(rb"PAR1[\x00-\x08\x0e-\x1f]", "is a Parquet file; add .parquet to its name"),
    _kind(rb"ARROW1\x00\x00", "is an Arrow file; add .arrow to its name"),
    _kind(rb"\x93NUMPY", "is an array of numpy; add .npy to its name"),
    _kind(rb"\x89HDF\r\n\x1a\n", "is an HDF5 file; write its documents as JSON lines or Parquet"),
    _kind(rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a.{0,3}\x00|\xd0\xcf\x11\xe0", "is an image or an old Office document"),
    _kind(rb"\xff\xfe\x00\x00|\x00\x00\xfe\xff", "is UTF-32; convert it: iconv -f UTF-32 -t UTF-8 {}"),
    _kind(rb"\xff\xfe|\xfe\xff", "is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {}"),
    _kind(rb"([\t-~]\x00){2}", "is UTF-16; convert it: iconv -f UTF-16LE -t UTF-8 {}"),
    _kind(rb"(\x00[\t-~]){2}", "is UTF-16; convert it: iconv -f UTF-16BE -t UTF-8 {}"),
)


def what_it_is(head: bytes, name: str) -> str | None:
    """The kind of a file by its first bytes; None for what may be text.

    >>> what_it_is("text".encode("utf-16"), "a.txt")
    'is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 a.txt'
    >>> what_it_is(b"SQLite format 3 is a file format", "a.txt") is None
    True
    """
    for kind in KINDS:
        if kind.begins.match(head):
            return kind.meaning.replace("{}", name)
    return None
