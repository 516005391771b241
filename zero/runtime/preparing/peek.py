"""Shows rows of a prepared corpus as a person reads them: their text, where documents begin, and what was cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from zero.runtime import storage
from zero.runtime.errors import UserError
from zero.runtime.preparing import manifest
from zero.runtime.preparing.sources.preferences import ANSWERS
from zero.runtime.streaming.index_files import read_index
from zero.runtime.streaming.index_files import row_tokens as tokens_of_row
from zero.runtime.streaming.loader import Loader
from zero.runtime.text.tokenizers import Tokenizer, load_tokenizer

_LARGEST = 1 << 24  # vocabulary: ids are shown, whatever tokenizer they belong to


def peek(index: str, rows: int, tokenizer: Tokenizer | None = None) -> Iterator[str]:
    """Some lines for each of the first rows of an index file.

    Without a tokenizer it is the one that the manifest of the corpus records.

    Raises:
      UserError: there is no such index file, or the corpus has another tokenizer.
    """
    place = storage.parent(read_index(index)[0].path)
    if tokenizer is None:
        recorded = manifest.load(place)["tokenizer"]
        tokenizer = load_tokenizer(recorded if recorded == "bytes" else storage.join(place, manifest.TOKENIZER))
    manifest.check_tokenizer(place, tokenizer)
    length = tokens_of_row(index)
    has_manifest = storage.exists(storage.join(place, manifest.MANIFEST))
    pairs = has_manifest and bool(manifest.load(place).get("preferences"))
    options: dict[str, Any] = {"only_completions": pairs, "pairs": pairs, "shuffle": False, "max_epochs": 1}
    data = Loader(index, global_rows=1, context=length, vocab_size=_LARGEST, **options)
    for number, batch in zip(range(rows), data.batches(), strict=False):
        for name, text in zip(ANSWERS if pairs else [""], batch.tokens.reshape(-1, length), strict=True):
            ids = np.maximum(text, ~text)[text != -1]
            yield from _described(f"row {number}{name and f', {name}'}", ids, length, tokenizer)
    if data.rows < rows:
        yield f"{index} has {data.rows} rows"


def _described(name: str, ids: np.ndarray, length: int, tokenizer: Tokenizer) -> Iterator[str]:
    ends = np.flatnonzero(ids == tokenizer.end_of_text)
    starts = [int(end) + 1 for end in ends if end + 1 < len(ids)]
    lowest, highest = (int(ids.min()), int(ids.max())) if len(ids) else (None, None)
    yield (
        f"{name}: {len(ids)} of {length} tokens, ids {lowest} to {highest} of {tokenizer.vocab_size}; documents "
        f"begin at {', '.join(map(str, starts)) or 'none of its tokens'} after an end of text; "
        f"{'ends with one' if len(ends) and ends[-1] == len(ids) - 1 else 'the last document is cut'}"
    )
    if highest is not None and highest >= tokenizer.vocab_size:
        raise UserError(f"{name} holds token {highest}, outside the vocabulary of {tokenizer.vocab_size}")
    yield f"  {tokenizer.decode(ids.tolist())!r}"
