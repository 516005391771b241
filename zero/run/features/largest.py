"""Logs the tensors with the largest gradients, with the statistics of `statistics.every`."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from zero.hosts import agreement
from zero.record.metrics_file import Line
from zero.run.feature import Feature, Moment
from zero.run.run import Run

log = logging.getLogger(__name__)
GRADIENT = "gradient_norm/"
MOST = 3  # tensors that are named


class Largest(Feature):
    """Logs on host 0 which tensors have the largest gradients, at steps with statistics.

    When a run diverges, the gradient of one tensor often dominates many steps before the loss shows it.
    """

    name = "largest"
    changes_nothing = True
    acts_on_every_line = True

    def do(self, run: Run, now: Moment, line: Line) -> None:
        shares = largest_shares(line)
        if shares and agreement.is_host_0():
            named = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
            log.info("step %d: largest shares of the squared gradient norm: %s", now.step, named)


def largest_shares(line: Mapping[str, float]) -> dict[str, float]:
    """The tensors with the largest shares of the squared gradient norm, largest first; {} if the line has none.

    >>> largest_shares({"gradient_norm": 5.0, "gradient_norm/a": 3.0, "gradient_norm/b": 4.0})
    {'b': 0.64, 'a': 0.36}
    """
    squares = {name.removeprefix(GRADIENT): norm**2 for name, norm in line.items() if name.startswith(GRADIENT)}
    total = sum(squares.values())
    if not total:
        return {}
    largest = sorted(squares, key=lambda name: squares[name], reverse=True)[:MOST]
    return {name: squares[name] / total for name in largest}
