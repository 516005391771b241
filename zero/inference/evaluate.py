"""`mode=evaluate`: makes the outputs that are asked for, such as the loss on the validation set, of trained weights."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from zero.base.errors import UserError
from zero.base.keys import values_in_scores
from zero.config.check import values_on_all_hosts
from zero.files import storage
from zero.hosts import startup, watchdog
from zero.hosts.agreement import is_host_0
from zero.hosts.same_configuration import check_same_configuration
from zero.hosts.watchdog import ending_together
from zero.inference.adapted_models import adapted_models
from zero.inference.config import EvaluateConfig, outputs
from zero.inference.follow import follow, follower_tracker, wait_for_checkpoint
from zero.inference.score_identity import score_identity
from zero.inference.scoring import Scorer
from zero.inference.trained_model import open_model, place_model
from zero.models.config import GPTConfig

log = logging.getLogger(__name__)

RESULT_FILE = "evaluation.json"


@ending_together()
def evaluate(config: EvaluateConfig, model_config: GPTConfig, run_directory: Path) -> int:
    """Makes every output that is asked for, in the order of `zero.inference.config.outputs`; prints them as JSON.

    `evaluate.adapters` scores each set of adapters, merged into a base that is read once; `evaluate.follow` scores each
    checkpoint for as long as the run trains.

    Returns:
      The exit status, 0.

    Raises:
      UserError: there is no such run or task, or the context is longer than the model's.
    """
    context = config.context
    if model_config.has_learned_positions and context > model_config.block_size:
        raise UserError(
            f"evaluate.context={context}: expected at most {model_config.block_size}, the learned positions of the "
            "model"
        )
    rows = config.training.batch_size
    run = str(config.model.model_path)
    if config.evaluate.follow:
        wait_for_checkpoint(Path(run))
    startup.start(**asdict(config.distributed), overlap_gathers=config.zero.overlap_gathers)
    check_same_configuration(values_on_all_hosts(config), asdict(model_config))
    asked = [output for output in outputs(config) if output.is_asked]

    def make(scorer: Scorer) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for output in asked:
            result |= output.evaluate(scorer)
        return result

    def described(scorer: Scorer) -> dict[str, Any]:
        return {"run": run, "step": scorer.trained.step, "context": context, **make(scorer)}

    model = place_model(model_config, rows, config.model, config.data, config.zero, config.evaluate)
    if config.evaluate.adapters is not None:
        by_adapter = {}
        scorer = None
        for source, trained in adapted_models(
            config.evaluate.adapters, config.model, config.data, model, config.evaluate.ema
        ):
            scorer = scorer or Scorer(trained, context, rows)
            scorer.trained = trained
            by_adapter[source] = {"step": trained.step, **make(scorer)}
            log.info("%s is scored", source)
        _write(run_directory, {"run": run, "context": context, "adapters": by_adapter})
        return 0
    scorer = Scorer(open_model(model, config.model, config.data, config.evaluate.ema), context, rows)
    watchdog.wait_without_limit()
    if not config.evaluate.follow:
        _write(run_directory, described(scorer))
        return 0
    identity = score_identity(values_in_scores(config), scorer.trained.model)
    del identity["model"]  # a run has one
    for output in asked:
        identity |= output.identity()
    tracker = partial(follower_tracker, Path(run), run_directory, config.data, asdict(config))
    follow(Path(run), scorer, config.evaluate.ema, partial(described, scorer), identity, tracker)
    return 0


def _write(run_directory: Path, result: dict[str, Any]) -> None:
    """Host 0 writes the result, and prints it."""
    if not is_host_0():
        return
    text = json.dumps(result, indent=2)
    storage.write(run_directory / RESULT_FILE, f"{text}\n".encode())
    print(text)
    log.info("written to %s", run_directory / RESULT_FILE)
