"""The learning rate and the context of a step."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero.training.schedules import LearningRate, SequenceLengths

pytestmark = pytest.mark.quick


def test_warmup_and_cosine() -> None:
    """The rate rises in a line and falls in a cosine."""
    rate = LearningRate(3.0, 0.3, warmup_steps=10, total_steps=110)
    got = [float(rate(step)) for step in range(112)]
    np.testing.assert_allclose(got[:10], 0.3 * np.arange(1, 11), rtol=1e-6)
    assert np.argmax(got) == 9 and np.argmin(got[9:]) == 100
    cosine = [0.3 + 2.7 * (1 + math.cos(math.pi * i / 100)) / 2 for i in range(101)]
    np.testing.assert_allclose(got[9:110], cosine, rtol=1e-5)
    np.testing.assert_allclose(got[109:], 0.3, rtol=1e-6)  # the last update, and whatever comes after it


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 5), (4, 5)])
def test_rate_of_short_runs(warmup: int, total: int) -> None:
    rate = LearningRate(1.0, 0.25, warmup, total)
    assert float(rate(total - 1)) == 0.25
    if warmup:
        assert float(rate(0)) == 1 / warmup and float(rate(warmup - 1)) == 1.0


def test_sqrt_decay_has_no_ramp() -> None:
    """Lingvo's rate: 1 / root of max(step, 10,000), from the first step on."""
    rate = LearningRate(0.01, 0.0, warmup_steps=10_000, total_steps=2_000_000, schedule="sqrt_decay")
    got = [float(rate(step)) for step in (0, 9_999, 39_999, 999_999)]
    np.testing.assert_allclose(got, [0.01, 0.01, 0.005, 0.001], rtol=1e-6)


def test_ramped_cosine_ends_before_the_run() -> None:
    """GPT-Neo's rate: the ramp of the warmup times a cosine from step 0 to `lr_decay_end`, then 10 % of the peak."""
    rate = LearningRate(2e-4, 2e-5, 3_000, 400_000, schedule="ramped_cosine", decay_end=300_000)
    for step in (1, 1_500, 2_999, 3_000, 3_001, 150_000, 299_999, 300_000, 350_000, 400_000):
        cosine = (1 + math.cos(math.pi * min(step / 300_000, 1))) / 2
        expected = 2e-4 * (0.9 * cosine + 0.1) * min(step / 3_000, 1)
        assert float(rate(step - 1)) == pytest.approx(expected, rel=1e-5), step
    assert float(LearningRate(0.0, 0.0, 2, 5, schedule="ramped_cosine")(3)) == 0.0


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decay_ends_before_the_run(schedule: str) -> None:
    """The rate is that of a run of `decay_end` steps, and then stays."""
    short, rate = LearningRate(2.0, 0.2, 10, 60, schedule), LearningRate(2.0, 0.2, 10, 110, schedule, decay_end=60)
    steps = range(60)
    np.testing.assert_array_equal([rate(step) for step in steps], [short(step) for step in steps])
    assert float(rate(60)) == float(rate(109)) == pytest.approx(0.2)


def test_rate_without_a_peak_is_nought() -> None:
    assert float(LearningRate(0.0, 0.0, 2, 5)(3)) == 0.0


def test_short_contexts_come_first() -> None:
    """Short contexts come first with as many tokens."""
    context = SequenceLengths(12, ((3, 4), (1, 6)))
    assert [context.at(step) for step in range(6)] == [4, 4, 4, 6, 12, 12]
    rows = np.arange(24).reshape(2, 12)
    cut = context.cut(rows, 2)
    np.testing.assert_array_equal(cut, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], *(cut[:3] + 12)])
    assert context.cut(rows, 3).shape == (4, 6)
    np.testing.assert_array_equal(context.cut(rows, 4), rows)


@given(full=st.integers(2, 2048), data=st.data(), steps=st.integers(0, 500))
def test_linear_growth(full: int, data: st.DataObject, steps: int) -> None:
    """Linear growth is never above its line and ends in time."""
    divisors = [length for length in range(1, full + 1) if full % length == 0]
    shortest = data.draw(st.sampled_from(divisors))
    context = SequenceLengths.linear(full, shortest, steps)
    for step in range(steps):
        line = shortest + (full - shortest) * step / steps
        assert context.at(step) == max(length for length in divisors if length <= line + 1e-6)
    assert context.at(steps) == full


def test_contexts_must_divide() -> None:
    """A context that does not divide the rows is refused."""
    with pytest.raises(ValueError, match="rows of 12 tokens cannot be cut into sequences of 5"):
        SequenceLengths(12, ((1, 5),))
