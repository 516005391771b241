"""A model as EleutherAI's lm-evaluation-harness asks for one, so that its tasks run on it (lm-eval)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from zero.runtime.errors import UserError
from zero.runtime.tokenizers import Tokenizer

LONGEST_ANSWER = 256  # tokens, where a task does not say


class Harness(TemplateLM):
    """Scores and writes what the harness asks for; a context that is too long loses its beginning.

    Args:
      tokenizer: of the model.
      context: tokens that the model sees at once, of which it scores all but the first.
      score: `(tokens, first)` to the losses in nats of the tokens from `first` on, and whether each was the likeliest.
      write: prompts and a number of tokens to each prompt's likeliest continuation of that many tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: int,
        score: Callable[[Iterable[tuple[np.ndarray, int]]], Iterator[tuple[np.ndarray, np.ndarray]]],
        write: Callable[[Sequence[np.ndarray], int], Sequence[np.ndarray]],
    ) -> None:
        super().__init__()
        self._encoding, self._context, self._score, self._write = tokenizer, context, score, write

    @property
    def eot_token_id(self) -> int:
        return self._encoding.end_of_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._encoding.encode(string).tolist()

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        def passages() -> Iterator[tuple[np.ndarray, int]]:
            for _, before, text in requests:
                if len(text) >= self._context:
                    raise UserError(f"evaluate.context={self._context}: a task scores {len(text)} tokens at once")
                tokens = np.asarray(before + text, np.int32)[-self._context :]
                yield tokens, len(tokens) - len(text)

        return [(-float(losses.sum()), bool(is_greedy.all())) for losses, is_greedy in self._score(passages())]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(self.tok_encode(text), self.eot_token_id, self._context - 1, 1)
            ]
            for (text,) in (request.args for request in requests)
        ]
        scored = iter(self._loglikelihood_tokens([(("", ""), *window) for one in windows for window in one]))
        return [sum(next(scored)[0] for _ in one) for one in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        texts = []
        for prompt, how in (request.args for request in requests):
            if how.get("do_sample") and how.get("temperature", 1):
                raise UserError("evaluate.harness: a task wants text drawn at random, here the likeliest is written")
            count = how.get("max_gen_toks", LONGEST_ANSWER)
            tokens = np.asarray(self.tok_encode(prompt) or [self.eot_token_id], np.int32)[
                -max(1, self._context - count) :
            ]
            (written,) = self._write([tokens], count)
            ends = np.flatnonzero(written == self.eot_token_id)
            text = self._encoding.decode(written[: ends[0]] if len(ends) else written)
            stops = how.get("until") or []
            for stop in [stops] if isinstance(stops, str) else stops:
                text = text.split(stop)[0] if stop else text
            texts.append(text)
        return texts


@cache
def _every_task() -> TaskManager:
    return TaskManager()  # which reads 14,000 files


def run(model: Harness, tasks: list[Any]) -> dict[str, dict[str, Any]]:
    """The harness's own results, by task.

    Args:
      model: what is asked.
      tasks: names of the harness, paths of its .yaml files, or dictionaries as these hold.

    Raises:
      UserError: there is no such task, or its data cannot be had.
    """
    manager = _every_task()
    for task in tasks:
        if isinstance(task, str) and task not in manager.all_tasks and not Path(task).is_file():
            raise UserError(f"evaluate.harness: {task}: no such task; `lm_eval ls tasks` lists them")
    try:
        found = lm_eval.simple_evaluate(
            model=model, tasks=tasks, task_manager=manager, bootstrap_iters=0, log_samples=False
        )
    except ConnectionError as error:
        raise UserError(f"evaluate.harness: {str(error).splitlines()[0]}") from error
    assert found is not None  # as it is for other ranks than 0; every host of ours is 0
    return found["results"]
