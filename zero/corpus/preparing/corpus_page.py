"""report.html of a corpus: what was kept and what was left out, on one page without a server (jinja2, uPlot).

It is written last, after the manifest and the index files: a corpus whose page cannot be written is whole, and a page
that is missing is made by the next call, from the statistics that lie beside the manifests of the parts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero.base.plural import counted
from zero.corpus.format import directory
from zero.corpus.format.manifest import PARTS, splits_of
from zero.corpus.preparing import corpus_statistics
from zero.corpus.preparing.corpus_files import REPORT, PartNames
from zero.corpus.preparing.corpus_statistics import BINS, CorpusStatistics, Size, option_of
from zero.files import storage
from zero.pages.facts import Fact
from zero.pages.render import data_island, part, render

PAGE = Path(__file__).parent / "page"
MOST_SOURCES = 40  # rows of their table; the others are one row
FEW_ROWS = 10  # that are shown before a reader asks for the others
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceRow:
    """A row of the table of sources."""

    name: str
    cells: tuple[str, ...]


def write_report(folder: str, manifest: Mapping[str, Any]) -> None:
    """Writes the page of a corpus, from its manifest and the statistics of its parts.

    Without the statistics of a part, as in a copy of shards and manifest, there is no page, and the log says so.
    """
    names = statistics_files(manifest)
    missing = set(names) - directory.file_names(folder)
    if missing:
        _log.warning("%s has no %s, because %s is missing; --overwrite prepares it again", folder, REPORT, min(missing))
        return
    page = render(PAGE / "corpus.html.jinja", values(folder, manifest, corpus_statistics.load(folder, names)))
    directory.write(storage.join(folder, REPORT), page.encode("utf-8", "replace"))


def statistics_files(manifest: Mapping[str, Any]) -> list[str]:
    """The names of the files with the statistics of the parts of a corpus."""
    parts: list[int | None] = list(range(len(manifest[PARTS]))) if PARTS in manifest else [None]
    return [PartNames(number).statistics for number in parts]


def values(folder: str, manifest: Mapping[str, Any], statistics: CorpusStatistics) -> dict[str, Any]:
    """What the template shows."""
    rows = [statistics.rows.examples[key] for key in sorted(statistics.rows.examples)]
    lengths = [(number, statistics.lengths[number]) for number in sorted(statistics.lengths)]
    return {
        "title": f"Corpus {storage.join(folder, 'x').split('/')[-2]}",
        "source": manifest["source"],
        "tokenizer": manifest["tokenizer"],
        "contents": _contents(manifest),
        "kept": _kept(manifest, statistics),
        "left_out": _left_out(manifest, statistics),
        "sources": _sources(statistics, has_bytes=manifest["train"]["bytes"] is not None),
        "lengths": [(_bin_text(number), f"{count:,}") for number, count in lengths],
        "left_out_texts": [
            (option_of(reason), statistics.left_out[reason].documents, _examples(statistics, reason))
            for reason in _reasons(statistics)
        ],
        "rows": rows[:FEW_ROWS],
        "more_rows": rows[FEW_ROWS:],
        "histogram": data_island({"bins": BINS, "counts": lengths}),
        "styles": part("uPlot.min.css") + part("style.css"),
        "scripts": part("uPlot.iife.min.js") + part("common.js") + part("lengths.js", PAGE),
    }


def _contents(manifest: Mapping[str, Any]) -> list[Fact]:
    lines = []
    for split in splits_of(dict(manifest)):
        summary = manifest[split]
        shards = counted(len(summary["shards"]), "shard")
        rows = f"{counted(summary['rows'], 'row')} of {manifest['row_tokens']:,} in {shards}"
        documents = counted(summary["documents"], "document")
        lines.append(Fact(split, counted(summary["tokens"], "token"), f"{documents}, {rows}"))
    if PARTS in manifest:
        lines.append(Fact("parts", f"{len(manifest[PARTS]):,}"))
    return lines


def _kept(manifest: Mapping[str, Any], statistics: CorpusStatistics) -> list[Fact]:
    """Sizes over all splits."""
    splits = [manifest[split] for split in splits_of(dict(manifest))]
    documents = sum(split["documents"] for split in splits)
    tokens = sum(split["tokens"] for split in splits)
    lines = [
        Fact("documents", f"{documents:,}"),
        Fact("tokens", f"{tokens:,}", f"{tokens / max(documents, 1):,.0f} per document"),
    ]
    if manifest["train"]["bytes"] is not None:
        size = sum(split["bytes"] for split in splits)
        lines.append(Fact("text", f"{size:,} bytes"))
        bytes_per_token = f"{size / max(tokens, 1):.2f} bytes per token"
        lines.append(Fact("tokens per byte", f"{tokens / max(size, 1):.4f}", bytes_per_token))
    if not manifest.get("examples"):  # they have several texts in a row
        row_tokens = sum(split["rows"] for split in splits) * (
            manifest["row_tokens"] - bool(manifest.get("begin_rows"))
        )
        lines.append(Fact("padding", f"{1 - tokens / max(row_tokens, 1):.2%}", "of the tokens of rows"))
    return lines


def _left_out(manifest: Mapping[str, Any], statistics: CorpusStatistics) -> list[Fact]:
    lines = []
    for reason in _reasons(statistics):
        left_out = statistics.left_out[reason]
        lines.append(Fact(option_of(reason), f"{left_out.documents:,}", f"documents, {left_out.bytes:,} bytes"))
    if manifest.get("cut"):
        lines.append(Fact("--cut-documents", f"{manifest['cut']:,}", "documents were cut to a row"))
    return lines or [Fact("nothing", "0", "documents")]


def _reasons(statistics: CorpusStatistics) -> list[str]:
    """Why documents were left out, most frequent first."""
    return sorted(statistics.left_out, key=lambda reason: (-statistics.left_out[reason].documents, reason))


def _examples(statistics: CorpusStatistics, reason: str) -> list[corpus_statistics.Example]:
    examples = statistics.left_out[reason].sample.examples
    return [examples[key] for key in sorted(examples)]


def _sources(statistics: CorpusStatistics, has_bytes: bool) -> list[SourceRow]:
    """The largest sources, and the others together."""
    tokens = sum(size.tokens for size in statistics.sources.values())
    names = sorted(statistics.sources, key=lambda name: (-statistics.sources[name].tokens, name))
    shown = [(name, statistics.sources[name]) for name in names[:MOST_SOURCES]]
    if len(names) > MOST_SOURCES:
        others = Size()
        for name in names[MOST_SOURCES:]:
            others = others.plus(statistics.sources[name])
        shown.append((f"{len(names) - MOST_SOURCES:,} others", others))
    return [SourceRow(name, _cells(size, tokens, has_bytes)) for name, size in shown]


def _cells(size: Size, tokens: int, has_bytes: bool) -> tuple[str, ...]:
    text_cells = ("–", "–")
    if has_bytes:
        text_cells = (f"{size.bytes:,}", f"{size.tokens / max(size.bytes, 1):.4f}")
    return (f"{size.documents:,}", f"{size.tokens:,}", f"{size.tokens / max(tokens, 1):.1%}", *text_cells)


def _bin_text(number: int) -> str:
    """The lengths of a bin.

    >>> _bin_text(40), _bin_text(0), _bin_text(6)
    ('1,024 to 1,217', '1', '3')
    """
    first = _first_of_bin(number)
    last = max(first, _first_of_bin(number + 1) - 1)
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _first_of_bin(number: int) -> int:
    """The lowest length of a bin: the fourth root of a power of two, rounded up."""
    low = int(2 ** (number / BINS)) - 1
    while low < 1 or corpus_statistics.bin_of(low) < number:
        low += 1
    return low
