"""The table of report.html that shows which classes a classifier confuses."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NamedTuple

from zero.record.run_record import RunRecord
from zero.training.objectives.classification import CONFUSION

_PREFIX = f"validation/{CONFUSION}/"


class Confusion(NamedTuple):
    """The shares of the texts of an evaluation, in percent of those with the same label.

    Attributes:
      step: of the evaluation.
      names: of the classes.
      rows: of each label, the shares of its texts by the class with the highest score; dashes for one without texts.
    """

    step: int
    names: Sequence[str]
    rows: Sequence[Sequence[str]]


def confusion(run: RunRecord) -> Confusion | None:
    """The table of the newest evaluation; None without one.

    >>> line = {"step": 4, **{f"validation/confusion/{place}": x for place, x in [("0/0", 0.3), ("0/1", 0.1)]}}
    >>> line |= {"validation/confusion/1/0": 0.0, "validation/confusion/1/1": 0.0}
    >>> from zero.record.history import History
    >>> history = History(1, line, line, {}, [line], [], [], 0)
    >>> confusion(RunRecord(None, "", {}, history, [], "", None, "", None))
    Confusion(step=4, names=['0', '1'], rows=[['75.0 %', '25.0 %'], ['–', '–']])
    """
    lines = [line for line in run.history.evaluations if f"{_PREFIX}0/0" in line]
    if not lines:
        return None
    line = lines[-1]
    classes = sum(name.startswith(f"{_PREFIX}0/") for name in line)
    named = run.config.get("objective.label_names", "null")
    names = list(map(str, range(classes))) if named == "null" else ast.literal_eval(named)  # as flat_config writes it
    shares = [[line[f"{_PREFIX}{label}/{chosen}"] for chosen in range(classes)] for label in range(classes)]
    return Confusion(line["step"], names, [_percent(row) for row in shares])


def _percent(shares: Sequence[float]) -> list[str]:
    total = sum(shares)
    if not total:
        return ["–"] * len(shares)
    return [f"{share / total:.1%}".replace("%", " %") for share in shares]
