"""Counts at n, 2n, 4n and 8n grow as benchmarks/growth.py says: a square is seen without a clock."""

import pytest

from benchmarks.growth import GROWTHS, Growth, counts


@pytest.mark.slow
@pytest.mark.parametrize("growth", GROWTHS, ids=lambda growth: f"{growth.of}: {growth.what}")
def test_counts_grow_as_they_should(growth: Growth) -> None:
    first, *_, last = counts(growth)
    assert first > 0
    assert last <= first * growth.most
