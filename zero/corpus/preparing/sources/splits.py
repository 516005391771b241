"""Splits that a source gives itself: files and datasets named after them, and the sizes of the parts of one text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from zero.base.errors import UserError
from zero.corpus.preparing.documents import TEST, TRAIN, VALIDATION

OFFICIAL = "official"
_WORDS = {"train": TRAIN, "training": TRAIN, "test": TEST, "testing": TEST}
_WORDS |= dict.fromkeys(("val", "valid", "validation", "dev", "eval", "heldout"), VALIDATION)


def split_of(name: str) -> int | None:
    """The split that the path of a file, or the name of a dataset's split, begins to say.

    >>> split_of("wiki.valid.tokens"), split_of("train/test_1.txt"), split_of("book.txt")
    (1, 0, None)
    """
    words = re.split(r"[^a-z]+", name.lower())
    return next((_WORDS[word] for word in words if word in _WORDS), None)


def official_splits(source: str, names: Iterable[str]) -> list[int]:
    """The split of each of these files or datasets.

    Raises:
      UserError: a name says none, or there is none for training or for validation.
    """
    names = list(names)
    splits = [split_of(name) for name in names]
    expected = "--splits official expects names with train, validation (val, valid, dev, heldout) or test"
    known = [split for split in splits if split is not None]
    if len(known) < len(splits):
        raise UserError(f"{source}: {expected}; found {names[splits.index(None)]}")
    if not {TRAIN, VALIDATION} <= set(known):
        raise UserError(f"{source}: {expected}, of which the first two are needed; found {', '.join(names[:5])}")
    return known


def part_sizes(splits: str) -> list[int]:
    """The bytes of the parts of one text: for training, for validation, and perhaps for a test.

    >>> part_sizes("90_000_000,5_000_000,5_000_000")
    [90000000, 5000000, 5000000]
    """
    parts = splits.split(",")
    if len(parts) not in (2, 3) or not all(re.fullmatch(r"\s*[0-9][0-9_]*\s*", part) for part in parts):
        raise UserError(f"--splits {splits}: expected official, or two or three numbers of bytes with commas between")
    return [int(part) for part in parts]
