"""A `Loader` from one flat list of options, as tests vary them."""

from dataclasses import fields
from typing import Any

from zero.corpus.format.shards import RowFormat
from zero.corpus.reading.loader import Batching, Loader, RowOrder


def open_loader(index: Any, **options: Any) -> Loader:
    """Each option goes into the record that has it, or to the loader itself; `host` of `hosts` reads its part."""
    options |= {"parts": (options.pop("host", 0),), "count": options.pop("hosts", 1)}

    def taken(record: Any) -> Any:
        names = [field.name for field in fields(record)]
        return record(**{name: options.pop(name) for name in names if name in options})

    return Loader(index, taken(Batching), taken(RowFormat), taken(RowOrder), **options)
