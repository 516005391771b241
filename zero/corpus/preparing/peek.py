"""Shows rows of a prepared corpus to a reader: their text, where documents begin, and what was cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from zero.base.errors import UserError
from zero.corpus.format import manifest
from zero.corpus.format.crop import Crop
from zero.corpus.format.index_files import Shard, read_index
from zero.corpus.format.shards import RowFormat, decode, open_shard, read_samples, row_tokens
from zero.corpus.preparing.example_kinds import ExampleKind, example_of, kind_of
from zero.corpus.text.tokenizers import MOST_TOKENS, Tokenizer, load_tokenizer
from zero.files import storage


def peek(index: str, rows: int, tokenizer: Tokenizer | None = None) -> Iterator[str]:
    """Two lines for each of some rows that are spread over an index file, and one about all rows of their shards.

    Without a tokenizer it is the one that the manifest of the corpus records.

    Raises:
      UserError: the index file does not exist, the corpus has another tokenizer, or a token is outside the vocabulary.
    """
    if rows < 1:
        raise UserError(f"--peek {rows}: expected at least one row")
    shards = read_index(index)
    folder = storage.parent(shards[0].path)
    if tokenizer is None:
        is_bytes = manifest.load(folder)["tokenizer"] == "bytes"
        tokenizer = load_tokenizer("bytes" if is_bytes else storage.join(folder, manifest.TOKENIZER))
    manifest.check_tokenizer(folder, tokenizer)
    recorded = manifest.load(folder) if storage.exists(storage.join(folder, manifest.MANIFEST)) else {}
    is_packed = recorded.get("pack") is not None
    kind = kind_of(recorded)
    names = ("",) if kind is None else kind.texts
    total = int(shards.rows.sum())
    shown = min(rows, total)
    rows_shown = {number * total // shown for number in range(shown)}
    seen = _Seen()
    length = row_tokens(shards[0].path)
    first = 0
    for shard in shards:
        shown_of_shard = {number - first for number in rows_shown if first <= number < first + shard.rows}
        if shown_of_shard:
            seen.shards += 1
            begins = None if is_packed or first else True  # whether a document begins in the first column
            for i, (name, ids) in enumerate(_texts(shard, length, kind)):
                number = i // len(names)
                seen.add(ids, length, tokenizer)
                if number in shown_of_shard:
                    row_name = f"row {first + number}"
                    if name:
                        row_name += f", {name}"
                    yield _described(row_name, ids, length, tokenizer, True if name else begins)
                    yield f"  {tokenizer.decode(ids.tolist())!r}"
                begins = None if is_packed else bool(len(ids)) and int(ids[-1]) == tokenizer.end_of_text
        first += shard.rows
    yield seen.described(len(shards), length, tokenizer, "texts" if len(names) > 1 else "rows")
    if total < rows:
        yield f"{index} has {total} rows"


def _texts(shard: Shard, length: int, kind: ExampleKind | None) -> Iterator[tuple[str, np.ndarray]]:
    """The tokens of each row without padding; of an example, the tokens of its texts with their names."""
    is_example = kind is not None
    names = ("",) if kind is None else kind.texts
    form = RowFormat(length, MOST_TOKENS, only_completions=is_example, example=example_of(kind))
    with open_shard(shard.path) as stream:
        for sample in read_samples(shard.path, stream):
            sample_name = f"shard {shard.path}, sample {sample['__key__']}"
            rows = decode(sample, sample_name, form, Crop(), np.zeros)
            for row, size in zip(rows.tokens, rows.lengths, strict=True):
                for name, text in zip(names, row.reshape(len(names), -1), strict=True):
                    yield name, np.maximum(text, ~text)[text != -1] if is_example else text[:size]


@dataclass
class _Seen:
    """All rows of the shards that were read."""

    shards: int = 0
    rows: int = 0
    cut: int = 0  # rows that end within a document
    padding: int = 0  # tokens
    ids: list[int] = field(default_factory=list)  # the lowest and the highest, once there is one

    def add(self, ids: np.ndarray, length: int, tokenizer: Tokenizer) -> None:
        if len(ids):
            self.ids = [min([*self.ids, int(ids.min())]), max([*self.ids, int(ids.max())])]
            self.cut += int(ids[-1]) != tokenizer.end_of_text
            if self.ids[1] >= tokenizer.vocab_size:
                raise UserError(
                    f"row {self.rows} of those read holds token {self.ids[1]}, outside the vocabulary of "
                    f"{tokenizer.vocab_size}"
                )
        self.rows += 1
        self.padding += length - len(ids)

    def described(self, shards: int, length: int, tokenizer: Tokenizer, unit: str) -> str:
        return (
            f"{self.shards} of {shards} shards: {self.rows} {unit}, ids {_span(self.ids)} of {tokenizer.vocab_size}; "
            f"{self.cut} {unit} end within a document; {self.padding} of {self.rows * length} tokens are padding"
        )


def _described(name: str, ids: np.ndarray, length: int, tokenizer: Tokenizer, begins: bool | None) -> str:
    ends = np.flatnonzero(ids == tokenizer.end_of_text)
    starts = _starts(ids, tokenizer)
    if begins:
        starts = sorted({0, *starts})
    sentences = [f"documents begin at {', '.join(map(str, starts))}" if starts else "no document begins"]
    if begins is False:
        sentences.append("the first one is the rest of a document")
    elif begins is None:
        sentences.append("column 0 begins a document, or the rest of one")
    if len(ids) and (not len(ends) or ends[-1] != len(ids) - 1):
        sentences.append("the last document is cut")
    span = [int(ids.min()), int(ids.max())] if len(ids) else []
    return f"{name}: {len(ids)} of {length} tokens, ids {_span(span)} of {tokenizer.vocab_size}; {'; '.join(sentences)}"


def _starts(ids: np.ndarray, tokenizer: Tokenizer) -> list[int]:
    """Where documents begin by their tokens: at one that begins each of them, or after the end of text.

    An end of text that also ends the turns of a conversation begins nothing.
    """
    special = tokenizer.special
    first, ends = special.separators
    begins = [token for token in first if token != special.end_of_text]
    if special.end_of_text in first:
        ends = (*ends, special.end_of_text)
    is_start = np.isin(ids, begins)
    is_start[1:] |= np.isin(ids[:-1], ends)
    return [int(start) for start in np.flatnonzero(is_start)]


def _span(ids: list[int]) -> str:
    if not ids:
        return "none"
    return f"{ids[0]} to {ids[1]}"
