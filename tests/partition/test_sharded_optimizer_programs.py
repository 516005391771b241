"""Random trees, chains and programs on three, five and eight devices: as the unsharded program, or refused by name.

The programs reshape, transpose, sort, multiply, factorize, loop and branch; their table has every operation for which
shards have a rule. Each case is decided by its seed: `compare([Case(1234)])` repeats one.
"""

from collections.abc import Iterator

import jax
import pytest

from tests.helpers.array_programs import traced_primitives
from tests.helpers.sharded_programs import Case, Outcome, compare
from zero.partition.rewrite.entry_points import RULES

# Operations that a few of the names make, one of which would be refused.
ELEMENTWISE_NAMES = (
    "elementwise",
    "positions",
    "constants",
    "transpose",
    "expand",
    "loop of halves",
    "fold and unfold",
)
# Other names of operations in the table, of other libraries or other versions of jax.
ABSENT: frozenset[str] = frozenset()


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Separates faults from rounding."""
    with jax.enable_x64(True):
        yield


def check(seeds: range, operations: int) -> Outcome:
    """Of five programs four may communicate; the fifth is refused, or needs no other device."""
    communicating = [Case(seed, operations=operations) for seed in seeds if seed % 5]
    others = [Case(seed, False, operations=3, names=ELEMENTWISE_NAMES) for seed in seeds if seed % 5 == 0]
    outcome = compare(communicating + others)
    jax.clear_caches()
    assert outcome.wrong == []
    return outcome


def test_a_hundred_programs() -> None:
    outcome = check(range(100), operations=2)
    assert len(outcome.equal) >= 85 and len(outcome.refused) <= 15


def check_groups(seeds: range, operations: int) -> None:
    """Of an axis with several copies of the state, and of the columns of a mesh with two axes."""
    copies = [Case(seed, operations=operations, has_copies=True) for seed in seeds]
    columns = [Case(seed, operations=operations, columns=2) for seed in seeds]
    outcome = compare(copies + columns)
    jax.clear_caches()
    assert outcome.wrong == [] and outcome.refused == []


def test_programs_on_copies_and_on_two_axes() -> None:
    check_groups(range(4), operations=2)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(10))
def test_three_hundred_programs_on_copies_and_on_two_axes(part: int) -> None:
    check_groups(range(15 * part, 15 * part + 15), operations=4)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(30))
def test_three_thousand_programs(part: int) -> None:
    first = 1000 + 100 * part
    outcome = check(range(first, first + 100), operations=4)
    print(len(outcome.equal), "equal,", len(outcome.refused), "refused")  # with -s


def test_table_has_all_operations() -> None:
    """Every operation with a rule is in the table of random programs."""
    assert set(RULES) - traced_primitives() == ABSENT
