"""Tasks of EleutherAI's lm-evaluation-harness on a trained model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from zero.base.errors import UserError, install_command
from zero.corpus.text.chat_template import ChatTemplate
from zero.inference.generate import generate
from zero.inference.manner import PLAIN, Manner
from zero.inference.scoring import Scorer
from zero.training.inference import Sampling
from zero.training.programs import make_inference

CHUNK = 16  # tokens between two checks whether all texts have ended


def run_tasks(scorer: Scorer, tasks: list[Any], manner: Manner = PLAIN) -> dict[str, dict[str, Any]]:
    """The harness's results, keyed by task: a name of the harness, or the path of a .yaml file.

    Raises UserError if lm-eval is not installed, or a task or its data cannot be found.
    """
    return _adapter_module().run(adapter(scorer, manner.template), tasks, manner)


def task_digests(tasks: Sequence[str], manner: Manner) -> dict[str, str]:
    """The identity of each task: a digest of its settings and documents, independent of where they are stored.

    Raises as `run_tasks`.
    """
    return _adapter_module().task_digests(tasks, manner.few_shots) if tasks else {}


def numbers_of(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The metrics of tasks as `harness/TASK/METRIC`, without their standard errors."""
    numbers = {}
    for task, metrics in results.items():
        for metric, value in metrics.items():
            if isinstance(value, int | float) and "stderr" not in metric:
                numbers[f"harness/{task}/{metric.partition(',')[0]}"] = value
    return numbers


def adapter(scorer: Scorer, template: ChatTemplate | None = None) -> Any:
    """Wraps the model in the interface of the harness, with the scorer's context as the positions of the model."""
    trained = scorer.trained
    greedy = make_inference(trained.model, Sampling(temperature=0.0))

    def write(prompts: Sequence[np.ndarray], count: int) -> Iterator[list[np.ndarray]]:
        for rows in generate(greedy, trained.params, prompts, count, seed=0, chunk=CHUNK):
            yield [row[len(prompt) :][:count] for row, prompt in zip(rows, prompts, strict=True)]

    # A passage has the target of the last position, too.
    score = partial(scorer.scores, length=scorer.context + 1)
    rows = scorer.batch_rows
    return _adapter_module().HarnessModel(trained.tokenizer, scorer.context, score, write, rows, template)


def _adapter_module() -> Any:
    """The module that imports lm-eval, an extra because it installs 40 packages."""
    try:
        from zero.inference import lm_eval_adapter
    except ModuleNotFoundError as error:
        raise UserError(f"evaluate.harness: {error.name} is missing; {install_command('lm-eval')}") from error
    return lm_eval_adapter
