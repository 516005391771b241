"""Runs the passes over a whole source alone, for their memory and disk.

- `source_in_parts`: a file of lines in so many parts. `run_passes`: those of one option.
"""

from pathlib import Path

from zero.corpus.preparing import shuffle
from zero.corpus.preparing.duplicates import PASSES, find_duplicates
from zero.corpus.preparing.engines import LocalEngine
from zero.corpus.preparing.near_duplicates import Nearness, find_near_duplicates
from zero.corpus.preparing.sources.source import Source


def source_in_parts(path: Path, parts: int) -> Source:
    return Source(str(path), "text", 0.05, part_bytes=-(-path.stat().st_size // parts))


def run_passes(option: str, source: Source, place: str) -> int:
    """The passes of an option in this process; returns the bytes of their files."""
    if option == "deduplicate":
        find_duplicates(LocalEngine(1), source, place)
    elif option == "near-duplicates":
        find_near_duplicates(LocalEngine(1), source, place, Nearness())
    else:
        for number in range(source.parts):
            shuffle.write_texts(place, number, source.part(number), source.parts)
        for number in range(source.parts):
            shuffled = shuffle.read_shuffled(place, number, source.parts)
            assert any(list(unit.documents()) for unit in shuffled.units())
    return sum(path.stat().st_size for path in Path(place, PASSES).iterdir())
