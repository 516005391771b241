"""Splits that a source gives itself: files and datasets named after them, and the sizes of the parts of one text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from zero.base.errors import UserError
from zero.corpus.preparing.documents import TEST, TRAIN, VALIDATION

OFFICIAL, ALL = "official", "all"  # values of --splits
_WORDS = {"train": TRAIN, "training": TRAIN, "test": TEST, "testing": TEST}
_WORDS |= dict.fromkeys(("val", "valid", "validation", "dev", "eval", "heldout"), VALIDATION)


def split_of(name: str) -> int | None:
    """The split that the path of a file, or the name of a dataset's split, says: the first folder that says one.

    >>> names = "wiki.valid.tokens", "train/test_1.txt", "test_corpus_train.index", "book.txt"
    >>> tuple(map(split_of, names))
    (1, 0, 0, None)
    """
    for part in name.lower().split("/"):
        said = [_WORDS[word] for word in re.split(r"[^a-z]+", part) if word in _WORDS]
        if said:
            return said[-1]
    return None


def split_of_data(relative: str, is_data: bool) -> int | None:
    """The split that a file certainly belongs to: code and prose may be about tests, in folders of that name.

    >>> split_of_data("a/dev.jsonl", True), split_of_data("test/a.py", False), split_of_data("src/test/train.py", False)
    (1, 2, None)
    """
    *folders, name = relative.split("/")
    for folder in folders if is_data else folders[:1]:
        if folder.lower() in _WORDS:
            return _WORDS[folder.lower()]
    if not is_data:
        return None
    return split_of(name)


def official_splits(source: str, names: Iterable[str]) -> list[int]:
    """The split of each of these files or datasets.

    Raises:
      UserError: a name says none, or there is none for training.
    """
    names = list(names)
    splits = [split_of(name) for name in names]
    expected = "--splits official expects names with train, and validation (val, valid, dev, heldout) or test"
    known = [split for split in splits if split is not None]
    if len(known) < len(splits):
        raise UserError(f"{source}: {expected}; found {names[splits.index(None)]}")
    if TRAIN not in known:
        raise UserError(f"{source}: {expected}; found {', '.join(names[:5])}")
    return known


def described_splits(counts: Mapping[int | None, int], what: str) -> str:
    """How many files or rows there are of each split.

    >>> described_splits({0: 3, 2: 1, None: 1}, "files")
    'train (3 files), test (1 files), no split (1 files)'
    """
    names = {TRAIN: "train", VALIDATION: "validation", TEST: "test", None: "no split"}
    return ", ".join(f"{name} ({counts[split]} {what})" for split, name in names.items() if split in counts)


def part_sizes(splits: str) -> list[int]:
    """The bytes of the parts of one text: for training, for validation, and perhaps for a test.

    >>> part_sizes("90_000_000,5_000_000,5_000_000")
    [90000000, 5000000, 5000000]
    """
    parts = splits.split(",")
    if len(parts) not in (2, 3) or not all(re.fullmatch(r"\s*[0-9][0-9_]*\s*", part) for part in parts):
        raise UserError(
            f"--splits {splits}: expected official, all, or two or three numbers of bytes with commas between"
        )
    return [int(part) for part in parts]
