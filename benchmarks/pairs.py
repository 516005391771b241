# nice -n 19 python benchmarks/pairs.py pairs.jsonl [--pairs 500] [--groups 200] [--seed 0]
#
# Trains random pairs of keys at other valid values for three steps, on 8 virtual devices, in one process: half of the
# pairs are a key that changes no loss beside one of the step or the data, the others two of the latter; and random
# groups of three to six keys. The job, the values, and what each promises are in tests/helpers/pairs.py. Each run is a
# line of the file; a second call with the same file continues. Ends with the number of pairs and groups that trained as
# promised and of those refused by name, and names all others, of which there have to be none: they are status 1.
"""Random pairs and groups of keys: each trains as its keys promise, or is refused by name."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.helpers import cli, pairs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="a line per run and per pair; an earlier call's file is continued")
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--groups", type=int, default=0, help="of three to six keys")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results = options.results.absolute()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        pairs.compile_quickly(Path(place) / "compiled")
        tried = pairs.Tried(cli.make_workplace(Path(place) / "workplace"), results)
        drawn: list[tuple[str, ...]] = [*pairs.random_pairs(options.pairs, options.seed)]
        for overrides in (*drawn, *pairs.random_groups(options.groups, options.seed)):
            verdict = tried.verdict(*overrides)
            counts[verdict.kind] += 1
            if verdict.kind == pairs.WRONG:
                print(f"{' '.join(overrides)}: {verdict.reason}", file=sys.stderr, flush=True)
    print(", ".join(f"{kind}: {count}" for kind, count in sorted(counts.items())))
    return 1 if counts[pairs.WRONG] else 0


if __name__ == "__main__":
    sys.exit(main())
