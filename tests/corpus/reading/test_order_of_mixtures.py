"""Mixtures: exact weights, in every batch and far into a run."""

import itertools
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.shards import PATIENT, first_tokens, flat, loader, write_corpus
from zero.base.errors import UserError
from zero.corpus.reading.loader import HostBatch

BOUNDS = [0, 20_000, 40_000]


def mixed(batches: Iterable[Any], bounds: list[int]) -> np.ndarray:
    """Rows of each corpus in each batch, where rows of corpus c read from bounds[c] on."""
    first = np.concatenate([batch.tokens[:, :1].T for batch in batches])
    return np.stack([np.bincount(np.searchsorted(bounds, row, "right") - 1, minlength=len(bounds)) for row in first])


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Index files of three corpora, whose rows begin with 0, 20,000 and 40,000."""
    indices = []
    for number, counts in enumerate([[30] * 8, [25] * 3, [70]]):
        place = tmp_path_factory.mktemp("mixture")
        write_corpus(place, counts, first=BOUNDS[number]).rename(place / f"c{number}.index")
        indices.append(str(place / f"c{number}.index"))
    return indices


def test_mixture_weights(three: list[str]):
    """A mixture keeps its weights in every batch and in the long run."""
    weights = dict(zip(three, (0.6, 0.3, 0.1), strict=True))
    data = loader(weights, global_rows=16)
    batches = list(itertools.islice(data.batches(), 50))
    counts = mixed(batches, BOUNDS)
    expected = 16 * np.array([0.6, 0.3, 0.1])
    assert (np.abs(counts - expected) <= 3).all()  # of one batch
    assert (np.abs(counts.sum(0) - 50 * expected) <= 9).all()  # of all, whatever their number: a row a stream at most
    assert data.rows_seen(50) == dict(zip(("c0", "c1", "c2"), counts.sum(0).tolist(), strict=True))
    assert data.rows_seen(0) == {"c0": 0, "c1": 0, "c2": 0}
    rows = np.concatenate([batch.tokens for batch in batches])
    assert (np.diff(rows) == 1).all()
    own = [rows[(rows[:, 0] >= low) & (rows[:, 0] < low + 20_000), 0] for low in BOUNDS]
    for first, total in zip(own, (240, 75, 70), strict=True):  # each corpus an epoch at a time
        early = first[: total - 8]
        assert len(set(early.tolist())) == len(early)


@settings(PATIENT, max_examples=8)
@given(position=st.integers(0, 60), weights=st.lists(st.integers(1, 99), min_size=3, max_size=3), data=st.data())
def test_mixture_resumes_exactly(three: list[str], position: int, weights: list[int], data):
    """A mixture resumes exactly on any number of hosts."""
    mixture = {index: weight / 10 for index, weight in zip(three, weights, strict=True)}
    global_rows = data.draw(st.sampled_from([4, 8, 12]))
    batches = loader(mixture, global_rows=global_rows).batches()
    cursor = None
    for _ in range(position):
        cursor = next(batches).cursor
    expected = first_tokens(batches, 8)
    hosts = data.draw(st.sampled_from([1, 2, 4]))
    resumed = [
        first_tokens(loader(mixture, global_rows=global_rows, host=host, hosts=hosts).batches(cursor), 8)
        for host in range(hosts)
    ]
    assert [flat(parts) for parts in zip(*resumed, strict=True)] == expected


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_mixture_ends_in_time(three: list[str], epochs: int):
    """A mixture ends before a corpus is read too often."""
    data = loader(dict(zip(three, (0.2, 0.7, 0.1), strict=True)), max_epochs=epochs)
    rows = np.concatenate([batch.tokens[:, 0] for batch in data.batches()])
    most = Counter(rows.tolist())
    assert max(most.values()) == epochs
    second = sum(1 for row in rows if 20_000 <= row < 40_000)
    assert epochs * 75 - 16 <= second <= epochs * 75  # the one that ends first ends whole, but for part of a batch
    assert data.total_batches == len(rows) / 4


def test_mixture_of_one_corpus(three: list[str]):
    """A mixture of one corpus, of any weight, is that corpus."""
    alone = first_tokens(loader(three[0], max_epochs=2).batches())
    assert first_tokens(loader({three[0]: 7}, max_epochs=2).batches()) == alone


def test_a_mixture_far_into_a_run(three: list[str]):
    """Positions are exact where floating point is not: 10^13 rows."""
    data = loader(dict(zip(three, (0.7, 0.2, 0.1), strict=True)), global_rows=8)
    cursor = {**next(data.batches()).cursor, "batches": 10**12}
    batches = list(itertools.islice(data.batches(cursor), 10))
    before, after = data.rows_seen(10**12), data.rows_seen(10**12 + 10)
    assert mixed(batches, BOUNDS).sum(0).tolist() == [after[name] - before[name] for name in after]
    assert before["c0"] + before["c1"] + before["c2"] == 8 * 10**12 and abs(before["c0"] - 5.6e12) <= 8


def test_bad_mixtures(three: list[str]):
    cursor = next(loader({three[0]: 0.5, three[1]: 0.5}).batches()).cursor
    with pytest.raises(UserError, match="cursor belongs to other weights"):
        next(loader({three[0]: 0.6, three[1]: 0.4}).batches(cursor))
    next(loader({three[0]: 5, three[1]: 5}).batches(cursor))
    with pytest.raises(UserError, match="weights of a mixture must be positive, not 0"):
        loader({three[0]: 0, three[1]: 1})
    with pytest.raises(UserError, match="cannot be combined with train_samples"):
        loader({three[0]: 1}, train_samples=3)


CURVES = ([[0, 0.5], [10, 0], [25, 1]], 0.25, [[0, 0.25], [25, 0]])  # stages from batches 0, 10 and 25 on


def test_weights_that_change(three: list[str]):
    """Each stage keeps its weights from its step on, and no corpus begins again."""
    data = loader(dict(zip(three, CURVES, strict=True)), global_rows=16)
    batches = list(itertools.islice(data.batches(), 40))
    counts = mixed(batches, BOUNDS)
    for stage, shares in ((slice(0, 10), (8, 4, 4)), (slice(10, 25), (0, 8, 8)), (slice(25, 40), (12.8, 3.2, 0))):
        assert (np.abs(counts[stage] - shares) <= 3).all()
        assert (counts[stage][:, np.equal(shares, 0)] == 0).all()
    assert data.rows_seen(40) == dict(zip(("c0", "c1", "c2"), counts.sum(0).tolist(), strict=True))
    assert data.epochs_seen(40)["c2"] == counts[:, 2].sum() / 70
    rows = np.concatenate([batch.tokens[:, 0] for batch in batches])
    for low, total in zip(BOUNDS, (240, 75, 70), strict=True):
        own = rows[(rows >= low) & (rows < low + 20_000)][: total - 16]
        assert len(set(own.tolist())) == len(own)


@cache
def changing(three: tuple[str, ...]) -> list[HostBatch]:
    """The batches that the next test resumes from."""
    mixture = dict(zip(three, CURVES, strict=True))
    return list(itertools.islice(loader(mixture, global_rows=8).batches(), 44))


@PATIENT
@given(position=st.integers(0, 40), hosts=st.sampled_from([1, 2, 4]))
def test_changing_weights_resume_exactly(three: list[str], position: int, hosts: int):
    """From any cursor, before, at and after a change, on any number of hosts."""
    mixture = dict(zip(three, CURVES, strict=True))
    batches = changing(tuple(three))[: position + 4]
    cursor = batches[position - 1].cursor if position else None
    parts = [loader(mixture, global_rows=8, host=host, hosts=hosts).batches(cursor) for host in range(hosts)]
    for expected in batches[position:]:
        np.testing.assert_array_equal(np.concatenate([next(part).tokens for part in parts]), expected.tokens)


def test_other_changes_are_another_order(three: list[str]):
    """A cursor belongs to the steps of the changes too; constant weights are as before."""
    cursor = next(loader({three[0]: [[0, 1], [5, 2]], three[1]: 1}).batches()).cursor
    with pytest.raises(UserError, match="cursor belongs to other weights"):
        next(loader({three[0]: [[0, 1], [6, 2]], three[1]: 1}).batches(cursor))
    plain = next(loader({three[0]: 1, three[1]: 1}).batches()).cursor
    next(loader({three[0]: [[0, 1]], three[1]: 1}).batches(plain))
    with pytest.raises(UserError, match="weights of a mixture must be positive"):
        loader({three[0]: [[0, 1], [5, 0]], three[1]: [[0, 1], [5, 0]]})
