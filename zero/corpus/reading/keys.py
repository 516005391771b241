"""The keys that decide which rows the training and validation sets consist of, and how many rows a batch has."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero.base.keys import INT32, INT64, SMALLEST, Check, Mistakes, at_least, key, not_empty, one_of, zero_or_more
from zero.corpus.format.crop import CROPS
from zero.corpus.format.index_files import PATHS, SETS, index_paths, is_paths, is_sets, named_sets, paths_of
from zero.corpus.reading.order import weight_stages
from zero.corpus.reading.synthetic import SYNTHETIC

_MIXTURE = (
    "[{index: path, weight: 0.7}, ...], files with different names, or weight: [[0, weight], [step, weight], ...]"
)


def is_validation(value: Any) -> bool:
    """Whether a value names validation sets, or none."""
    return value is None or is_paths(value) or is_sets(value)


def _is_weight(value: Any, lowest: float = 0) -> bool:
    return type(value) in (int, float) and lowest <= value < math.inf


def _is_curve(value: Any) -> bool:
    """Whether a value is [[step, weight], ...] with rising steps from 0 on, and a weight above 0 among them."""
    if not isinstance(value, list) or not value:
        return False
    pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2]
    if len(pairs) < len(value) or not all(type(step) is int and _is_weight(weight) for step, weight in pairs):
        return False
    steps, weights = zip(*pairs, strict=True)
    return steps[0] == 0 and all(a < b <= INT32 for a, b in itertools.pairwise(steps)) and max(weights) > 0


def is_mixture(value: Any) -> bool:
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        return False
    is_whole = all(
        entry.keys() == {"index", "weight"}
        and isinstance(entry["index"], str)
        and (_is_weight(entry["weight"], lowest=SMALLEST) or _is_curve(entry["weight"]))
        for entry in value
    )
    if not is_whole or not all(sum(weights) > 0 for _, weights in weight_stages(entry["weight"] for entry in value)):
        return False
    # The metrics name a corpus by the stem of its index file.
    return len({Path(entry["index"]).stem for entry in value}) == len(value)


@dataclass(frozen=True)
class SetKeys:
    """Where the validation sets are, in section `data`."""

    corpus: str | None = key(
        "stdlib",
        not_empty(),
        "The source to tokenize on this machine if the index files are missing; null: index files must exist.",
        "synthetic: random rows; synthetic:ones: rows of ones. Both are computed: no index file is read, and there is "
        "no validation.",
    )
    index_path_validation: Any = key(
        "data/index/stdlib_validation.index",
        Check(is_validation, f"{PATHS}, {SETS}, or null"),
        "An index file, or a list of them; null: no validation.",
        "{web: web.index, code: [a.index, b.index]}: named sets, which add validation/web/loss and "
        "validation/web/bits_per_byte; the total is the mean over the tokens of all sets.",
    )
    bucket_path: str | None = key(
        None,
        not_empty(),
        "A bucket of Google Cloud Storage, as bucket or bucket/folder, or a URL such as s3://bucket/folder: relative "
        "index files and checkpoint_directory are in it; null: local disk.",
    )

    @property
    def is_synthetic(self) -> bool:
        """Whether rows are computed, and no file is read."""
        return self.corpus in SYNTHETIC

    @property
    def has_validation_set(self) -> bool:
        return self.index_path_validation is not None and not self.is_synthetic

    def validation_sets(self) -> dict[str, Any]:
        """The index file, or the list of them, of each validation set by its name."""
        return named_sets(self.index_path_validation, self.bucket_path)


@dataclass(frozen=True)
class RowSelectionKeys(SetKeys):
    """All keys of the rows that are read, in section `data`."""

    index_path_train: Any = key(
        "data/index/stdlib_train.index",
        Check(lambda value: is_paths(value) or is_mixture(value), f"{PATHS}, or {_MIXTURE}"),
        "An index file; a list of them; or a weighted mixture, [{index: a.index, weight: 0.7}, ...].",
        "A weight that changes over training: {index: a.index, weight: [[0, 0.7], [9000, 0.1]]}, 0.7 in the first "
        "9,000 steps, then 0.1.",
    )
    crop: str = key(
        "first",
        one_of(*CROPS),
        "How rows longer than max_context are read. first: only their first max_context tokens. all: cut into "
        "sequences of max_context tokens, without the remainder.",
        "random: one sequence per row and epoch, at an offset drawn from the seed, the epoch and the row; validation "
        "then reads as all does.",
        fixed=True,
    )
    train_samples: int | None = key(None, at_least(1, INT64), "Rows of the training set per epoch; null: all.")
    shuffle_shards: int = key(
        16,
        at_least(1),
        "Number of shards whose rows are shuffled together; preferably a multiple of the number of hosts.",
        fixed=True,
    )
    max_skipped_rows: int = key(
        0,
        zero_or_more(),
        "How many missing or damaged training rows to skip before training stops with an error; 0: the first one "
        "stops it.",
    )
    cache_directory: str | None = key(
        None,
        not_empty(),
        "A local directory that caches shards read from a bucket, in at most 90 % of the disk's free space; raises an "
        "error if all shards are local; null: no cache.",
        per_host=True,
    )

    def training_index(self) -> Any:
        """The index file of the training set, the list of them, or their weights."""
        return index_paths(self.index_path_train, self.bucket_path)

    def index_files(self, *, with_sets: bool) -> list[str]:
        """The paths of the index files of the training set, and of the validation sets."""
        sets = [self.training_index()]
        if with_sets:
            sets += self.validation_sets().values()
        return list(itertools.chain.from_iterable(map(paths_of, sets)))

    def order_mistakes(self) -> Mistakes:
        if not is_paths(self.index_path_train) and self.train_samples is not None:
            yield "data.train_samples", "null, as data.index_path_train is a mixture"

    def without_effect(self) -> Mistakes:
        """Keys of files where rows are computed, each with the reason."""
        names = ("index_path_train", "index_path_validation", "shuffle_shards", "max_skipped_rows", "cache_directory")
        if self.is_synthetic:
            for name in names:
                yield f"data.{name}", f"data.corpus={self.corpus} reads no files"


@dataclass(frozen=True)
class ScoredKeys:
    """How many rows are computed at once, and which of their tokens count, in section `training`."""

    batch_size: int = key(
        8,
        at_least(1),
        "Sequences of max_context tokens per host and optimizer step, split into gradient_accumulation_steps "
        "micro-batches; in mode=evaluate, rows per host and forward pass.",
        "A resume keeps the total over all hosts, and divides it among the current hosts.",
    )
    loss_on: str = key(
        "all",
        one_of("all", "completion"),
        "Which tokens the loss covers: all, or completion, in a corpus of zero-prepare --completions.",
        in_scores=True,
    )


@dataclass(frozen=True)
class EpochKeys:
    """How often the training set is read, in section `training`."""

    max_epochs: int | None = key(
        None,
        at_least(1),
        "Maximum number of passes over the training set; null: as many as total_steps needs.",
    )
