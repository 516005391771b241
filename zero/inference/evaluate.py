"""`mode=evaluate`: the loss on the validation set, and tasks of lm-evaluation-harness."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from zero.base.errors import UserError
from zero.config.check import values_on_all_hosts
from zero.config.keys import values_in_scores
from zero.corpus.format.index_files import Shard, named_sets, paths_of, read_index
from zero.corpus.format.manifest import check_tokenizers
from zero.corpus.reading.contents import contents_of
from zero.corpus.text.chat_template import load_chat_template
from zero.hosts import startup
from zero.hosts.agreement import is_host_0
from zero.hosts.same_configuration import check_same_configuration
from zero.hosts.watchdog import ending_together
from zero.inference.adapted_models import adapted_models
from zero.inference.config import EvaluateConfig
from zero.inference.follow import follow, follower_tracker, wait_for_checkpoint
from zero.inference.harness_tasks import run_tasks, task_digests
from zero.inference.manner import Manner
from zero.inference.score_identity import score_identity
from zero.inference.scoring import Scorer, score_sets
from zero.inference.top_tokens import store_top_tokens
from zero.inference.trained_model import open_model, place_model
from zero.models.config import GPTConfig

log = logging.getLogger(__name__)

RESULT_FILE = "evaluation.json"


@ending_together()
def evaluate(config: EvaluateConfig, size: GPTConfig, run_directory: Path) -> int:
    """Scores the whole validation set and the tasks of `evaluate.harness`; prints the result as JSON.

    `evaluate.adapters` scores each set of adapters, merged into a base that is read once; `evaluate.follow` scores each
    checkpoint for as long as the run trains.

    Returns:
      The exit status, 0.

    Raises:
      UserError: there is no such run or task, or the context is longer than the model's.
    """
    context = config.evaluate.context or config.data.max_context
    if size.has_learned_positions and context > size.block_size:
        raise UserError(
            f"evaluate.context={context}: expected at most {size.block_size}, the learned positions of the model"
        )
    rows = config.training.batch_size
    if config.evaluate.follow:
        wait_for_checkpoint(Path(str(config.model.model_path)))
    startup.start(**asdict(config.distributed), overlap_gathers=config.zero.overlap_gathers)
    check_same_configuration(values_on_all_hosts(config), asdict(size))
    model = place_model(size, rows, config.model, config.data, config.zero, config.evaluate)
    if config.evaluate.adapters is None:
        scorer = Scorer(open_model(model, config.model, config.data, config.evaluate.ema), context, rows)
        if config.evaluate.follow:
            run = Path(str(config.model.model_path))
            tracker = partial(follower_tracker, run, run_directory, config.data, asdict(config))
            follow(
                run, scorer, config.evaluate.ema, partial(_result, config, scorer), _identity(config, scorer), tracker
            )
            return 0
        if config.evaluate.top_tokens is not None:
            for index in itertools.chain.from_iterable(map(paths_of, _sets(config).values())):
                store_top_tokens(scorer, index, config.evaluate.top_tokens)
        result = _result(config, scorer)
    else:
        result = {"run": str(config.model.model_path), "context": context, "adapters": {}}
        scorer = None
        for place, trained in adapted_models(config.evaluate, config.model, config.data, model):
            scorer = scorer or Scorer(trained, context, rows)
            scorer.trained = trained
            result["adapters"][place] = {"step": trained.step, **_scores(config, scorer)}
            log.info("%s is scored", place)
    if is_host_0():
        text = json.dumps(result, indent=2)
        (run_directory / RESULT_FILE).write_text(text + "\n")
        print(text)
        log.info("written to %s", run_directory / RESULT_FILE)
    return 0


def _result(config: EvaluateConfig, scorer: Scorer) -> dict[str, Any]:
    """The entry of evaluation.json for the scorer's weights."""
    described = {"run": str(config.model.model_path), "step": scorer.trained.step, "context": scorer.context}
    return {**described, **_scores(config, scorer)}


def _identity(config: EvaluateConfig, scorer: Scorer) -> dict[str, Any]:
    """Everything except the weights that the scores of a step depend on, as JSON."""
    identity = score_identity(values_in_scores(config), scorer.trained.model)
    del identity["model"]  # a run has one
    if config.evaluate.validation:
        for name, index in _sets(config).items():
            shards = [(shard, shard.rows) for shard in _shards([index])]
            identity.setdefault("sets", {})[name] = list(contents_of(shards))
    manner = _manner(config)
    identity["tasks"] = task_digests(config.evaluate.harness, manner)
    identity["template"] = None if manner.template is None else manner.template.digest
    return identity


def _sets(config: EvaluateConfig) -> dict[str, str | list[str]]:
    return named_sets(config.evaluate.index or config.data.index_path_validation, config.data.bucket_path)


def _shards(indices: Iterable[str | list[str]]) -> list[Shard]:
    """The shards of index files, or of lists of them."""
    paths = itertools.chain.from_iterable(map(paths_of, indices))
    return list(itertools.chain.from_iterable(map(read_index, paths)))


def _manner(config: EvaluateConfig) -> Manner:
    """How harness tasks are prompted; raises UserError if the tokenizer lacks the chat template."""
    options = config.evaluate
    template = None
    if options.chat:
        name = config.data.tokenizer
        template = None if name == "bytes" else load_chat_template(name, time.time())
        if template is None:
            raise UserError(f"evaluate.chat=true: data.tokenizer={name} has no chat template beside it")
        template = template.with_variables(options.template_variables)
    return Manner(template, options.system, options.few_shots, options.limit)


def _scores(config: EvaluateConfig, scorer: Scorer) -> dict[str, Any]:
    """The means of the validation set, and under "harness" the results of the tasks."""
    result: dict[str, Any] = {}
    if config.evaluate.validation:
        sets = _sets(config)
        check_tokenizers([shard.path for shard in _shards(sets.values())], scorer.trained.tokenizer)
        stride = None if config.evaluate.carry else config.evaluate.stride or -(-scorer.context // 2)
        result |= score_sets(scorer, sets, stride, config.training.loss_on == "completion")
    if config.evaluate.harness:
        result["harness"] = run_tasks(scorer, config.evaluate.harness, _manner(config))
    return result
