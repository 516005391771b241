"""The line of the log that names the tensors with the largest gradients."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from zero.run.feature import Moment
from zero.run.features.largest import Largest, largest_shares


def test_names_the_largest_gradients(caplog: pytest.LogCaptureFixture) -> None:
    """Only in lines with statistics; three at most, by their share of the squared norm."""
    run: Any = SimpleNamespace()
    feature = Largest()
    line = {
        "gradient_norm": 10.0,
        **{f"gradient_norm/{name}": float(x) for name, x in zip("abcd", (1, 5, 3, 1), strict=True)},
    }
    with caplog.at_level(logging.INFO):
        feature.do(run, Moment(7, False, False), {"gradient_norm": 10.0})
        assert caplog.messages == []
        feature.do(run, Moment(8, False, False), dict(line))
    assert caplog.messages == ["step 8: largest shares of the squared gradient norm: b 69%, c 25%, a 3%"]
    assert sum(largest_shares(line).values()) == pytest.approx(35 / 36)
    assert largest_shares({"gradient_norm/a": 0.0}) == {}
