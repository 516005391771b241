"""Datasets of the Hugging Face hub, streamed (datasets, of the extra hub)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from zero.base.errors import Unavailable, UserError, install_command
from zero.corpus.preparing import documents
from zero.corpus.preparing.documents import TRAIN, VALIDATION, Document, Reader, Unit, as_text, read_entry
from zero.corpus.preparing.sources.splits import official_splits


class _Place(NamedTuple):
    """The parts of a name; an empty one is the default."""

    path: str
    config: str = ""
    split: str = ""


class HubDataset:
    """One split of a dataset: `name`, `name:config` or `name:config:split`, where an empty part is the default one.

    With `is_official` the documents of all splits, each in its own; `splits` are theirs.

    A name may also be a folder of Parquet or JSON files. Raises UserError if it does not exist or the hub cannot be
    reached.
    """

    def __init__(self, name: str, reader: Reader, is_official: bool = False):
        try:
            import datasets
        except ImportError:
            raise UserError(f"hf:{name}: the datasets library is missing; {install_command('hub')}") from None
        self._name = name
        self._reader = reader
        parts = name.split(":")
        if not parts[0] or len(parts) > 3:
            raise UserError(f"hf:{name}: expected hf:name, hf:name:config or hf:name:config:split")
        address = _Place(*parts)
        try:
            builder = datasets.load_dataset_builder(address.path, address.config or None)
            if is_official:
                rows: dict[str, Any] = builder.as_streaming_dataset()
            else:
                rows = {"": builder.as_streaming_dataset(split=address.split or "train")}
        except (FileNotFoundError, ValueError) as error:  # no such dataset, configuration or split
            raise UserError(f"hf:{name}: {_one_line(error)}") from error
        except OSError as error:  # the hub cannot be reached
            raise Unavailable(f"hf:{name}: {_one_line(error)}") from error
        if is_official and address.split:
            raise UserError(f"hf:{name}: names a split, but --splits official reads all of them")
        self.splits = official_splits(f"hf:{name}", rows) if is_official else []
        # Without validation a fraction of the training split is set aside, as of a source without splits.
        splits: Sequence[int | None] = self.splits or [None]
        if VALIDATION not in self.splits:
            splits = [None if split == TRAIN else split for split in splits]
        names = list(map(str, builder.info.splits or builder.config.data_files or ()))
        self.left_alone = [] if is_official or address.split else [name for name in names if name != "train"]
        self._parts = list(zip(rows, splits, rows.values(), strict=True))
        self.fingerprint = str(builder.hash)  # of the configuration and the revision, or the files
        # In bytes, of each file of the parts above, in their order; of all together, 0, where a file is not a shard.
        split_rows = {name or address.split or "train": rows_of_split for name, rows_of_split in rows.items()}
        self.sizes = _file_sizes(builder.config.data_files, split_rows)

    def files(self, first: int, last: int) -> HubDataset:
        """The dataset of these files, by their places in `sizes`."""
        files = []
        for part, split, rows in self._parts:
            for number in range(rows.num_shards):
                files.append((f"{part} file {number}".strip(), split, rows.shard(rows.num_shards, number)))
        dataset = copy.copy(self)
        dataset._parts = files[first:last]
        dataset.sizes = self.sizes[first:last]
        dataset.fingerprint = f"{self.fingerprint} files {first} to {last}"
        return dataset

    def units(self) -> Iterator[Unit]:
        group: list[Document] = []
        size = 0
        for document in self.documents():
            group.append(document)
            size += len(document.content)
            if size >= documents.UNIT_BYTES:
                yield Unit(size, partial(iter, tuple(group)))
                group = []
                size = 0
        if group:
            yield Unit(size, partial(iter, tuple(group)))

    def documents(self) -> Iterator[Document]:
        """The units of all rows, in the dataset's order."""
        try:
            for part, split, rows in self._parts:
                address = f"hf:{self._name}, {part} row" if part else f"hf:{self._name}, row"
                for number, row in enumerate(rows):
                    yield read_entry(self._reader, as_text(row), f"{address} {number}")._replace(split=split)
        except (FileNotFoundError, ValueError) as error:
            raise UserError(f"hf:{self._name} cannot be read: {_one_line(error)}") from error
        except OSError as error:
            raise Unavailable(f"hf:{self._name} cannot be read now: {_one_line(error)}") from error


def _file_sizes(files_of_split: Any, rows_of_split: dict[str, Any]) -> list[int]:
    """The sizes of the files that hold the rows of each split; [0] where its shards are something else than files."""
    sizes: list[int] = []
    for split, rows in rows_of_split.items():
        paths = list((files_of_split or {}).get(split, ()))
        if len(paths) != rows.num_shards or any("::" in path for path in paths):
            return [0]
        sizes += map(_file_size, paths)
    return sizes


def _file_size(path: str) -> int:
    import fsspec

    files, name = fsspec.core.url_to_fs(path)
    try:
        return int(files.info(name)["size"])
    except OSError as error:
        raise Unavailable(f"{path}: its size could not be determined: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
