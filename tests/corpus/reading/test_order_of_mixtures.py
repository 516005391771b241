"""Mixtures: exact weights, in every batch and far into a run."""

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.shards import PATIENT, first_tokens, flat, loader, write_corpus
from zero.base.errors import UserError
from zero.corpus.reading.loader import HostBatch
from zero.corpus.reading.order import Mixture, exact_weights

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


SHARES = [0.58565179, 0.28421973, 0.13012848]  # gave 80 rows in place of 64 in versions that counted in int64 alone


def exact_counts(weights: list[float], streams: int, stream: int, rows: list[int]) -> list[list[int]]:
    """`Mixture.counts` at each number of rows, in fractions."""
    shares = exact_weights(weights)
    of_rows = []
    for row in rows:
        left, weight_left = row, Fraction(1)
        counts = []
        for share in shares[:-1]:
            part = math.floor(left * share / weight_left + Fraction(stream, streams)) if share else 0
            counts.append(part)
            left -= part
            weight_left -= share
        of_rows.append([*counts, left])
    return [list(of_corpus) for of_corpus in zip(*of_rows, strict=True)]


def token_shares(numbers: list[float]) -> list[float]:
    return [number / sum(numbers) for number in numbers]


WEIGHTS = st.lists(st.floats(1e3, 1e6), min_size=2, max_size=50).map(token_shares) | st.lists(
    st.just(0.0) | st.floats(1e-6, 1e18), min_size=2, max_size=50
).filter(any)
EDGES = [0, 2**31, 2**32, 2**53, 2**62]  # rows of a stream


@settings(PATIENT, max_examples=100)
@given(weights=WEIGHTS, streams=st.integers(1, 64), edge=st.sampled_from(EDGES), data=st.data())
def test_counts_are_exact_at_any_weight(weights: list[float], streams: int, edge: int, data):
    stream = data.draw(st.integers(0, streams - 1))
    first = max(0, edge + data.draw(st.integers(-30, 30)))
    count = data.draw(st.integers(0, 40))
    counts = Mixture(exact_weights(weights), streams).counts(stream, first, count)
    assert counts.dtype == np.int64
    assert counts.tolist() == exact_counts(weights, streams, stream, list(range(first, first + count + 1)))


# Digests of counts in the first version, whose checkpoints resume.
@pytest.mark.parametrize(
    ("weights", "streams", "digest"),
    [
        ([0.7, 0.3], 4, "640eeb662ae8aed4"),
        ([0.6, 0.3, 0.1], 8, "7eb4d5ec237aaaec"),
        ([1, 2, 3, 4, 5], 16, "9798da7ee6aa6b29"),
        ([0.123456, 0.654321, 0.222223], 16, "527cc041d0049b08"),
        (list(range(1, 51)), 16, "1f5e9c6851a00a0f"),
        ([0.000001, 0.5, 0.0, 0.499999], 3, "512168d2fbdc7984"),
        ([0.57961234, 0.42038766], 5, "d5ec2d928dc3d94f"),  # of two corpora more decimals were right as well
        ([1234567, 7654321, 99, 1], 7, "2d892366d242e876"),
    ],
)
def test_orders_that_were_right_stay(weights: list[float], streams: int, digest: str):
    mixture = Mixture(exact_weights(weights), streams)
    joined = hashlib.sha256()
    for stream in (0, streams // 2, streams - 1):
        for row, count in ((0, 400), (10**6 + 3, 200), (10**12 + 7, 200), (2**53 - 50, 100)):
            joined.update(np.ascontiguousarray(mixture.counts(stream, row, count)).tobytes())
    assert joined.hexdigest()[:16] == digest


@settings(PATIENT, max_examples=4)
@given(weights=st.lists(st.floats(0.01, 1), min_size=3, max_size=3).map(token_shares), stops=st.data())
@example(weights=SHARES, stops=None)
def test_batches_of_any_weight_are_full_and_resume(three: list[str], weights: list[float], stops):
    """Killed twice and continued from the cursor, on one host and two; each batch has its rows."""
    mixture = dict(zip(three, weights, strict=True))
    whole = list(itertools.islice(loader(mixture, global_rows=64).batches(), 12))
    assert {len(batch.tokens) for batch in whole} == {64}
    shares = mixed(whole, BOUNDS).sum(0) / (64 * 12)
    assert np.abs(shares - weights).max() < 0.02
    cursor = None
    done = 0
    for hosts, end in ((1, 5 if stops is None else stops.draw(st.integers(1, 6))), (2, 9), (1, 12)):
        parts = [loader(mixture, global_rows=64, host=host, hosts=hosts).batches(cursor) for host in range(hosts)]
        for expected in whole[done:end]:
            batches = [next(part) for part in parts]
            np.testing.assert_array_equal(np.concatenate([batch.tokens for batch in batches]), expected.tokens)
            cursor = batches[0].cursor
        done = end


def test_rows_of_each_batch_are_counted(three: list[str], monkeypatch: pytest.MonkeyPatch):
    """A mixture that puts a row into two corpora ends the run, before the batch is handed out."""
    right = Mixture.counts

    def wrong(mixture: Mixture, stream: int, row: int, count: int = 0) -> np.ndarray:
        counts = right(mixture, stream, row, count)
        if count:
            counts[0, -1] += 2
        return counts

    monkeypatch.setattr(Mixture, "counts", wrong)
    with pytest.raises(RuntimeError, match="rows, expected 64: the order of the corpora"):
        next(loader(dict(zip(three, SHARES, strict=True)), global_rows=64).batches())


def test_positions_of_wrong_batches_are_named(three: list[str], caplog: pytest.LogCaptureFixture):
    """A cursor of a version whose counts overflowed continues, with a warning, once; others do so without one."""
    for weights, is_named in ((SHARES, True), ([0.579612, 0.312312, 0.108076], False)):
        data = loader(dict(zip(three, weights, strict=True)), global_rows=64)
        cursor = list(itertools.islice(data.batches(), 3))[-1].cursor
        before = {key: value for key, value in cursor.items() if key != "rows_of_corpora_are_exact"}
        assert (before != cursor) == is_named
        caplog.clear()
        after = next(data.batches(before)).cursor
        assert ("among the 3 batches before it, some may have more rows" in caplog.text) == is_named
        caplog.clear()
        next(data.batches(after))
        assert not caplog.text


def test_weights_that_would_be_rounded_to_nothing(three: list[str]):
    with pytest.raises(UserError, match="expected 0, or at least 1e-06, not 3e-07"):
        loader(dict(zip(three, (0.5, 0.4999997, 3e-7), strict=True)))
    loader(dict(zip(three, (500, 499.9997, 3e-4), strict=True)))
