"""The types that all sources produce: documents, in units that worker processes can read independently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

UNIT_BYTES = 1 << 20  # of a source per unit: a fraction of a second for a tokenizer


class Document(NamedTuple):
    """A text, or the ids of its tokens, or a part of either."""

    content: str | np.ndarray
    is_validation: bool | None = None  # None: decided by its hash
    ends: bool = True  # False: the next unit continues it
    name: str = ""  # of ids, for errors


class Unit(Protocol):
    """About `UNIT_BYTES` of a source. What is in it depends on the source alone, not on the number of workers."""

    @property
    def size(self) -> int:
        """In bytes of the source."""
        ...

    def documents(self) -> Iterator[Document | None]:
        """Its documents; None for a file that is not UTF-8. Raises UserError for what cannot be read."""
        ...
