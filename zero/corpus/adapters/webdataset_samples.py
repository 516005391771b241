"""Rows as the first stage of a webdataset pipeline; webdataset itself is not needed for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from zero.corpus.rows import Rows


def samples(rows: Rows) -> Callable[[], Iterator[dict[str, Any]]]:
    """The rows one by one, as samples with the members that a shard has: `wds.DataPipeline(samples(rows), ...)`.

    `rows.state()` is the state at the sample's batch.
    """

    def one_by_one() -> Iterator[dict[str, Any]]:
        for tokens in rows:
            batch = rows.state()["batches"] - 1
            for number, row in enumerate(tokens):
                yield {"__key__": f"{batch:09d}-{number:05d}", "__url__": "zero.corpus.Rows", "input_id.npy": row}

    return one_by_one
