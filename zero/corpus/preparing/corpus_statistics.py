"""What the page about a corpus shows of its documents: collected unit by unit, added up over units and over parts.

All of it is bounded, and the order in which units, parts or workers come decides nothing: numbers are sums, and
examples are those with the lowest hashes. A part has a file of it beside its manifest, and a list of what it left out.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

import numpy as np

from zero.corpus.format import directory
from zero.corpus.preparing.corpus_files import PartNames
from zero.corpus.text.tokenizers import Tokenizer
from zero.files import storage
from zero.files.parsing import reading

EXAMPLES = 10  # of what each option has left out
ROWS = 100
UNREAD = 100  # names of keys that are not read
BINS = 4  # of lengths, from one power of two to the next
_EXAMPLE_BYTES = 600  # of a page, of the text of an example
_ROW_BYTES = 6000
_SHOWN_UNREAD = 12
_READ_AT_ONCE = 32  # files of parts
DEDUPLICATE = "deduplicate"  # names of options, used as reasons like the names of filters
MINIMUM_TOKENS = "minimum-tokens"
ROW_TOKENS = "row-tokens"


def option_of(reason: str) -> str:
    """What is shown of a reason why documents were left out: an option of `zero-prepare`.

    >>> option_of(DEDUPLICATE)
    '--deduplicate'
    """
    return f"--{reason}"


class Size(NamedTuple):
    """Documents that are in the corpus."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0

    def plus(self, other: Size) -> Size:
        return Size(self.documents + other.documents, self.tokens + other.tokens, self.bytes + other.bytes)


@dataclass
class Example:
    """A text that was left out, or a row.

    Attributes:
      origin: where the first one with this text is in the source; of a row, its split and its number in the part.
      times: how many documents with this text were left out.
    """

    origin: str
    text: str
    times: int = 1


@dataclass
class HashSample:
    """The examples with the lowest keys, at most `most`.

    One that stays was never dropped, so that its `times` are all there are.

    >>> sample = HashSample(1)
    >>> for key, text in ((7, "b"), (3, "a"), (5, "c"), (3, "a")):
    ...     sample.add(key, Example(text, text))
    >>> sample.examples
    {3: Example(origin='a', text='a', times=2)}
    """

    most: int
    examples: dict[int, Example] = field(default_factory=dict)

    def would_keep(self, key: int) -> bool:
        """Whether `add` would keep an example with this key."""
        return key in self.examples or len(self.examples) < self.most or key < max(self.examples)

    def add(self, key: int, example: Example) -> None:
        if key in self.examples:
            self.examples[key].times += example.times
        elif self.would_keep(key):
            self.examples[key] = example
            if len(self.examples) > self.most:
                del self.examples[max(self.examples)]


@dataclass
class LeftOut:
    """Documents that one option has left out."""

    documents: int = 0
    bytes: int = 0
    sample: HashSample = field(default_factory=lambda: HashSample(EXAMPLES))

    def add(self, other: LeftOut) -> None:
        self.documents += other.documents
        self.bytes += other.bytes
        for key, example in other.sample.examples.items():
            self.sample.add(key, example)


@dataclass
class CorpusStatistics:
    """Statistics of a unit, a part or a corpus.

    Attributes:
      sources: by the folder or file of the source.
      lengths: how many documents have such a number of tokens, by the number of its bin.
      left_out: by the name of the option, without its dashes.
      rows: of all splits.
      unread: how many documents have each key that is not read, of the `UNREAD` first names.
    """

    sources: dict[str, Size] = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    rows: HashSample = field(default_factory=lambda: HashSample(ROWS))
    unread: Counter[str] = field(default_factory=Counter)

    def leave_unread(self, keys: Iterable[str]) -> None:
        """Counts the keys of a document that are not read."""
        self.unread.update(set(keys))
        self._bound()

    def _bound(self) -> None:
        """A name that is among the first of all is among the first of each part, and is never dropped."""
        if len(self.unread) > UNREAD:
            for name in sorted(self.unread)[UNREAD:]:
                del self.unread[name]

    def count(self, source: str, documents: int, tokens: int, size: int, is_whole: bool) -> None:
        """Counts a document of the corpus, or a piece of one."""
        self.sources[source] = self.sources.get(source, Size()).plus(Size(documents, tokens, size))
        if is_whole:
            self.lengths[bin_of(tokens)] += 1

    def leave_out(self, reason: str, origin: str, content: str | np.ndarray, tokenizer: Tokenizer) -> None:
        """Counts a document that was left out."""
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content.tobytes()
        left_out = self.left_out.setdefault(reason, LeftOut())
        left_out.documents += 1
        left_out.bytes += len(data)
        key = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
        if left_out.sample.would_keep(key):
            left_out.sample.add(key, Example(origin, _cut(_text(content, tokenizer), _EXAMPLE_BYTES)))

    def add(self, other: CorpusStatistics) -> None:
        for source, size in other.sources.items():
            self.sources[source] = self.sources.get(source, Size()).plus(size)
        self.lengths.update(other.lengths)
        for reason, left_out in other.left_out.items():
            self.left_out.setdefault(reason, LeftOut()).add(left_out)
        for key, row in other.rows.examples.items():
            self.rows.add(key, row)
        self.unread.update(other.unread)
        self._bound()


def bin_of(tokens: int) -> int:
    """The number of the bin of a length, of which there are four from one power of two to the next.

    >>> [bin_of(tokens) for tokens in (1, 2, 3, 4, 1000, 1024)]
    [0, 4, 6, 8, 39, 40]
    """
    return (tokens**BINS).bit_length() - 1


class RowSample:
    """A hundred rows of a part, chosen by a hash of their numbers."""

    def __init__(self, part: int | None, tokenizer: Tokenizer, texts: Sequence[str] = ("",)):
        self._part = part or 0
        self._names = texts  # of an example
        self._tokenizer = tokenizer
        self._rows: dict[int, tuple[str, list[np.ndarray]]] = {}

    def add(self, split: str, first: int, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Rows (n, T) or (n, k, T) of a shard, and the number of tokens in each; `first` is the number of the first."""
        numbers = np.arange(first, first + len(rows), dtype=np.uint64)
        keys = _mixed(numbers, f"{split} {self._part}")
        for index in np.argsort(keys, kind="stable")[:ROWS].tolist():
            key = int(keys[index])
            if len(self._rows) >= ROWS:
                highest = max(self._rows)
                if key > highest:
                    break
                del self._rows[highest]
            texts = zip(np.atleast_2d(rows[index]), np.atleast_1d(lengths[index]), strict=True)
            self._rows[key] = (f"{split}, row {first + index}", [ids[:length].copy() for ids, length in texts])

    def examples(self) -> HashSample:
        """The rows as texts."""
        sample = HashSample(ROWS)
        for key, (origin, texts) in self._rows.items():
            text = _row_text(texts[0], self._tokenizer)
            for name, ids in zip(self._names[1:], texts[1:], strict=True):
                text += f"\n―――― {name} ――――\n{_row_text(ids, self._tokenizer)}"
            place = f"part {self._part}, {origin}"
            sample.add(key, Example(place, _cut(text, _ROW_BYTES)))
        return sample


def _mixed(numbers: np.ndarray, salt: str) -> np.ndarray:
    """A hash of each number, uint64 (n,): the finalizer of splitmix64 (Steele et al., 2014)."""
    start = np.uint64(int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest()))
    with np.errstate(over="ignore"):
        mixed = start + (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _row_text(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """The documents of a row, with a line between them."""
    is_end = ids == tokenizer.end_of_text
    documents = np.split(ids[~is_end], np.cumsum(~is_end)[is_end])
    texts = [tokenizer.decode(document.tolist()) for document in documents]
    return "\n―――― end of text ――――\n".join(texts)


def _text(content: str | np.ndarray, tokenizer: Tokenizer) -> str:
    """Enough of the text of a document for an example."""
    if isinstance(content, str):
        return content[:_EXAMPLE_BYTES]
    return tokenizer.decode(content[:_EXAMPLE_BYTES].tolist())


def _cut(text: str, most: int) -> str:
    """The beginning of a text, at most as many bytes as fit on the page.

    >>> _cut("<<<<", 8), _cut("four", 8)
    ('<<…', 'four')
    """
    text = "".join(map(_shown, text[:most]))
    size = 0
    for index, character in enumerate(text):
        size += len(escape(character).encode("utf-8", "replace"))
        if size > most:
            return f"{text[:index]}…"
    return text


def _shown(character: str) -> str:
    return character if character.isprintable() or character in "\n\t" else "\ufffd"


class RemovedList:
    """The documents that were left out, a line of JSON each, packed: about ten bytes each in memory and on the disk."""

    def __init__(self) -> None:
        self.documents = 0
        self._packed = bytearray()
        self._packer = zlib.compressobj(level=9, wbits=31)  # of a gzip file, without a time

    def add(self, documents: Iterable[tuple[str, str]]) -> None:
        """Appends documents: where each is in the source, and why it was left out."""
        for origin, reason in documents:
            line = json.dumps({"document": origin, "left_out_by": option_of(reason)}, ensure_ascii=False)
            self._packed += self._packer.compress(line.encode("utf-8", "replace") + b"\n")
            self.documents += 1

    def data(self) -> bytes:
        """The whole file; nothing can be appended after it."""
        self._packed += self._packer.flush()
        return bytes(self._packed)


def read_removed(path: str) -> Iterator[dict[str, str]]:
    """The lines of such a list."""
    with gzip.open(io.BytesIO(directory.read(path))) as lines:
        yield from map(json.loads, lines)


def save(folder: str, names: PartNames, statistics: CorpusStatistics, removed: RemovedList) -> None:
    """Writes the statistics of a part, and the list of left-out documents if there are any."""
    path = storage.join(folder, names.removed)
    if removed.documents:
        directory.write(path, removed.data())
    else:
        storage.remove(path)  # left by a call with other options
    data = gzip.compress(json.dumps(_encoded(statistics)).encode(), mtime=0)
    directory.write(storage.join(folder, names.statistics), data)


def load(folder: str, names: Sequence[str]) -> CorpusStatistics:
    """The statistics of all parts, whose files have these names; a few of them are in memory at a time.

    Raises:
      UserError: a file cannot be read.
    """
    statistics = CorpusStatistics()
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        for first in range(0, len(names), _READ_AT_ONCE):
            paths = [storage.join(folder, name) for name in names[first : first + _READ_AT_ONCE]]
            for part_statistics in pool.map(_load, paths):
                statistics.add(part_statistics)
    return statistics


def _load(path: str) -> CorpusStatistics:
    with reading(f"{path} does not hold statistics of a part"):
        return _decoded(json.loads(gzip.decompress(directory.read(path))))


def _encoded(statistics: CorpusStatistics) -> dict[str, Any]:
    encoded = {
        "sources": statistics.sources,
        "lengths": sorted(statistics.lengths.items()),
        "left_out": {reason: _encoded_left_out(left_out) for reason, left_out in sorted(statistics.left_out.items())},
        "rows": _encoded_examples(statistics.rows),
    }
    if statistics.unread:
        encoded["unread"] = sorted(statistics.unread.items())
    return encoded


def _encoded_left_out(left_out: LeftOut) -> dict[str, Any]:
    examples = _encoded_examples(left_out.sample)
    return {"documents": left_out.documents, "bytes": left_out.bytes, "examples": examples}


def _encoded_examples(sample: HashSample) -> list[tuple[int, str, str, int]]:
    return [(key, entry.origin, entry.text, entry.times) for key, entry in sorted(sample.examples.items())]


def _decoded(entries: dict[str, Any]) -> CorpusStatistics:
    sources = {name: Size(*size) for name, size in entries["sources"].items()}
    lengths = Counter({int(number): int(count) for number, count in entries["lengths"]})
    left_out = {reason: _decoded_left_out(entry) for reason, entry in entries["left_out"].items()}
    unread = Counter({name: int(count) for name, count in entries.get("unread", ())})
    return CorpusStatistics(sources, lengths, left_out, _decoded_examples(ROWS, entries["rows"]), unread)


def _decoded_left_out(entry: dict[str, Any]) -> LeftOut:
    return LeftOut(entry["documents"], entry["bytes"], _decoded_examples(EXAMPLES, entry["examples"]))


def _decoded_examples(most: int, entries: Iterable[Sequence[Any]]) -> HashSample:
    return HashSample(most, {key: Example(origin, text, times) for key, origin, text, times in entries})


def unread_note(statistics: CorpusStatistics) -> str | None:
    """One line about the keys of records that are not read, those of most documents first; None if there are none.

    >>> unread_note(CorpusStatistics(unread=Counter({"id": 2, "url": 3})))
    'keys not read: url, id'
    """
    names = [name for name, _ in sorted(statistics.unread.items(), key=lambda item: (-item[1], item[0]))]
    if not names:
        return None
    more = [] if len(names) <= _SHOWN_UNREAD else ["..."]
    return f"keys not read: {', '.join([*names[:_SHOWN_UNREAD], *more])}"
