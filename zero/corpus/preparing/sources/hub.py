"""Datasets of the Hugging Face hub, streamed (datasets, of the extra hub)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from zero.corpus.preparing.sources import documents
from zero.corpus.preparing.sources.documents import Document, Reader, Unit
from zero.corpus.preparing.sources.splits import official_splits
from zero.errors import Unavailable, UserError, install_command


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
        path, config, split = parts + [""] * (3 - len(parts))
        try:
            builder = datasets.load_dataset_builder(path, config or None)
            if is_official:
                rows: dict[str, Any] = builder.as_streaming_dataset()
            else:
                rows = {"": builder.as_streaming_dataset(split=split or "train")}
        except (FileNotFoundError, ValueError) as error:  # no such dataset, configuration or split
            raise UserError(f"hf:{name}: {_one_line(error)}") from error
        except OSError as error:  # the hub cannot be reached
            raise Unavailable(f"hf:{name}: {_one_line(error)}") from error
        if is_official and split:
            raise UserError(f"hf:{name}: names a split, and --splits official reads all of them")
        self.splits = official_splits(f"hf:{name}", rows) if is_official else []
        splits: Sequence[int | None] = self.splits or [None]
        self._parts = list(zip(rows, splits, rows.values(), strict=True))
        self.fingerprint = str(builder.hash)  # of the configuration and the revision, or the files

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
                for number, row in enumerate(rows):
                    name = f"hf:{self._name}, {part + ' ' if part else ''}row {number}"
                    yield self._reader(row, name)._replace(split=split)
        except (FileNotFoundError, ValueError) as error:
            raise UserError(f"hf:{self._name} cannot be read: {_one_line(error)}") from error
        except OSError as error:
            raise Unavailable(f"hf:{self._name} cannot be read now: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
