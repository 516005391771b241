"""Whole steps: the coordinate check of benchmarks/coordinate_check.py at a few widths, with one seed."""

import dataclasses
from functools import cache

import pytest

from benchmarks import coordinate_check
from benchmarks.coordinate_check import FLAT, RATE, STEPS, Sizes, config_of, mistakes
from zero.models.config import GPTConfig


@cache
def slopes(parametrization: str, widths: tuple[int, ...], seeds: int) -> dict[str, float]:
    return Sizes(parametrization, list(widths), STEPS, RATE, seeds).slopes(STEPS)


@pytest.mark.wide  # of the check itself; test_step_mup.py shows the rates
def test_mup_is_stable_in_width() -> None:
    """In mup no tensor grows or vanishes with the width."""
    found = slopes("mup", (64, 512), 1)
    assert {name: x for name, x in found.items() if not abs(x) <= FLAT} == {}
    assert len(found) == 20


@pytest.mark.slow
def test_standard_logits_grow() -> None:
    """In the standard parametrization logits grow with the width, where those of mup do not."""
    assert mistakes(slopes("standard", (64, 256), 1), slopes("mup", (64, 512), 1)) == []


@pytest.mark.slow  # of the check itself; test_step_mup.py shows the rates
def test_check_sees_undivided_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check sees rates that are not divided by the width.

    Then only the initial weights are those of mup.
    """

    def at_the_base(parametrization: str, width: int) -> GPTConfig:
        return dataclasses.replace(config_of(parametrization, width), mup_base_width=width)

    monkeypatch.setattr(coordinate_check, "config_of", at_the_base)
    wrong = mistakes(slopes("standard", (64, 256), 1), Sizes("mup", [64, 256], STEPS, RATE, seeds=1).slopes(STEPS))
    assert any("logits" in line for line in wrong) and len(wrong) > 5
