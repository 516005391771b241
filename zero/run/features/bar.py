"""The progress bar of host 0, with the newest metrics."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from zero.config.schema import Config
from zero.hosts import agreement
from zero.hosts.signals import IgnoreBrokenPipe
from zero.run.feature import Feature, Moment
from zero.run.run import Line, Run
from zero.training.batch import Batch

log = logging.getLogger(__name__)

GIB = 2**30
SUMMARY = {  # values of a line of metrics that are shown: unit and format
    "train/loss": (1, "loss {:.3f}"),
    "validation/loss": (1, "validation {:.3f}"),
    "tokens_per_second": (1, "{:,.0f} tokens/s"),
    "mfu": (1, "MFU {:.1%}"),
    "predicted_speed": (1, "{:.0%} of the predicted speed"),
    "peak_memory": (GIB, "peak {:.2f} GiB"),
}


class Bar(Feature):
    """Shows the steps and a summary of each line; an evaluation is a line of the log as well."""

    name = "bar"
    takes_every_line = True

    def __init__(self, config: Config, run: Run) -> None:
        self._stack = ExitStack()
        self._bar = self._stack.enter_context(
            tqdm(
                total=run.last_step,
                initial=run.position.step,
                unit="step",
                disable=not agreement.is_host_0(),
                dynamic_ncols=True,
                file=IgnoreBrokenPipe(sys.stderr),
            )
        )
        self._stack.enter_context(logging_redirect_tqdm())

    def after_step(self, run: Run, step: int, batch: Batch) -> None:
        self._bar.update()

    def do(self, run: Run, now: Moment, line: Line) -> None:
        self._bar.set_postfix_str(summary(line))
        if now.is_evaluation and agreement.is_host_0():
            log.info("step %d: %s", now.step, summary(line))

    def close(self) -> None:
        self._stack.close()


def summary(line: Line) -> str:
    """The values of a line that are shown.

    >>> summary({"step": 3, "train/loss": 2.5, "tokens_per_second": 12345.6})
    'loss 2.500, 12,346 tokens/s'
    """
    shown = {name: form for name, form in SUMMARY.items() if line.get(name) is not None}
    return ", ".join(form.format(line[name] / unit) for name, (unit, form) in shown.items())
