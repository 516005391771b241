"""`mode=train`: the training loop; after each step: log, evaluate, save, stop."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from zero.config.schema import Config
from zero.errors import UserError
from zero.hosts.watchdog import ending_together
from zero.inference.generate import generate
from zero.models.config import GPTConfig
from zero.run.active_run import ActiveRun
from zero.run.resume import save_restored
from zero.run.setup import open_run
from zero.run.validation import validation_metrics
from zero.run_directory import SAMPLES_FILE, mirror
from zero.tracking.goodput import counts_as

log = logging.getLogger(__name__)

GIB = 2**30
REPORT_SECONDS = 10  # between two reports, each of which takes up to a second
SUMMARY = {  # values of a line of metrics that are shown: unit and format
    "train/loss": (1, "loss {:.3f}"),
    "validation/loss": (1, "validation {:.3f}"),
    "tokens_per_second": (1, "{:,.0f} tokens/s"),
    "mfu": (1, "MFU {:.1%}"),
    "predicted_speed": (1, "{:.0%} of the predicted speed"),
    "peak_memory": (GIB, "peak {:.2f} GiB"),
}


@ending_together()
def train(config: Config, size: GPTConfig, run_directory: Path) -> int:
    """Trains until the schedule or the data ends, or until a signal arrives.

    Returns:
      The exit status: 0 when finished, 75 when stopped after a saved checkpoint.

    Raises:
      UserError: the configuration, the data or a checkpoint is wrong.
      KeyboardInterrupt: a signal arrived before there was anything to save.
    """
    with open_run(config, size, run_directory) as run:
        if run is None:
            return 0
        save_restored(run)
        with run.goodput.phase("steps"):
            is_finished = _loop(run)
        if not is_finished:
            return run.stop()
        run.checkpoints.wait()
        if run.tracker is not None:
            mirror(run.directory, run.checkpoints.directory)
        log.info("finished at step %d; run directory: %s", run.position.step, run.directory)
        return 0


def _loop(run: ActiveRun) -> bool:
    """Trains to the last step; False if the run was stopped earlier."""
    pending = run.position.unevaluated  # a signal came before the evaluation of the checkpoint
    if pending is not None:
        if not _evaluate_and_log(run, pending):
            return False
        _report(run, pending)
    with closing(run.batches()) as batches:
        for step, batch in batches:
            if not run.dispatch(step, batch):
                return False
            due = run.due(step)
            if not due.log:
                continue
            line, is_stop = run.read_metrics(), due.stop
            if due.evaluate and not due.stop:
                is_stop = not _evaluate_and_log(run, line)
            else:
                run.position.unevaluated = line if due.evaluate and run.has_evaluation else None
                run.log(line)
            run.bar.set_postfix_str(_summary(line))
            if is_stop:
                return False
            if due.save:
                run.save(line.get("validation/loss"))
            if due.protect:
                run.protect()
            if due.evaluate:
                _report(run, line)
            run.metrics.restart()
    return run.position.step >= run.last_step  # total_steps may have been lowered below the step that was resumed


def _evaluate_and_log(run: ActiveRun, line: dict[str, Any]) -> bool:
    """Logs the metrics with the validation loss; False if the run was stopped during the evaluation."""
    is_evaluated = _evaluate(run, line)
    run.position.unevaluated = None if is_evaluated else line
    run.log(line)
    return is_evaluated


@counts_as("evaluation")
def _evaluate(run: ActiveRun, line: dict[str, Any]) -> bool:
    """Adds the losses on validation sets to the metrics, and the results of tasks if they are due; False if stopped."""
    if run.validation:
        losses = validation_metrics(run)
        if losses is None:
            return False
        line |= losses
    training, frequency = run.config.training, run.config.training.harness_frequency
    if frequency is not None:
        is_last = line["step"] >= run.last_step
        if is_last or line["step"] % (frequency * training.evaluation_frequency) == 0:
            line |= run.harness_results()
    return True


@counts_as("evaluation")
def _report(run: ActiveRun, line: dict[str, Any]) -> None:
    """Writes a sample after an evaluation; all hosts sample, host 0 writes.

    The plot and the HTML report are written with it, at most every `REPORT_SECONDS` and at the last step. Training
    continues if they cannot be written.
    """
    text = ""
    if count := run.config.training.sample_tokens:
        prompt = np.asarray([run.tokenizer.end_of_text], np.int32)
        tokens = next(generate(run.inference, run.weights, [prompt], count, seed=run.position.step, chunk=count))
        text = run.tokenizer.decode(tokens[0, 1:])
    if run.tracker is None:
        return
    log.info("step %d: %s", line["step"], _summary(line))
    is_last = line["step"] >= run.last_step
    try:
        with (run.directory / SAMPLES_FILE).open("a") as file:
            file.write(f"--- step {line['step']}\n{text}\n")
        if is_last or time.monotonic() - run.reported_at > REPORT_SECONDS:
            _draw(run.directory)
            run.reported_at = time.monotonic()
    except (OSError, ValueError, RuntimeError, UserError) as error:  # matplotlib raises RuntimeErrors of fonts
        log.warning("step %d: the report of the run could not be written: %s", line["step"], error)
    if is_last:
        log.info("the model writes:\n%s", text)


def _draw(run_directory: Path) -> None:
    # A second of imports, which the first step does not wait for.
    from zero.report.html_report import REPORT_FILE, write_report
    from zero.report.plot import draw_run

    draw_run(run_directory)
    write_report([run_directory], run_directory / REPORT_FILE)


def _summary(line: dict[str, float | int]) -> str:
    known = {name: shown for name, shown in SUMMARY.items() if line.get(name) is not None}
    return ", ".join(form.format(line[name] / unit) for name, (unit, form) in known.items())
