"""A trained model behind the interface of EleutherAI's lm-evaluation-harness (lm-eval)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from zero.base.errors import WRONG_PATH, Unavailable, UserError, causes, first_line
from zero.corpus.text.tokenizers import Tokenizer
from zero.inference.generate import until_end
from zero.inference.scoring import Passage, Score, batched

LONGEST_ANSWER = 256  # tokens, if a task sets no limit


class HarnessModel(TemplateLM):
    """Answers the harness's requests to score and generate; a context that is too long loses its beginning.

    Args:
      context: tokens that the model sees at once, of which it scores all but the first.
      score: `Scorer.scores`.
      write: `(prompts, count)` to an iterator of the most likely continuations of all prompts so far, until each has
        `count` tokens.
      rows: prompts per batch.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: int,
        score: Callable[[Iterable[Passage]], Iterator[Score]],
        write: Callable[[Sequence[np.ndarray], int], Iterator[list[np.ndarray]]],
        rows: int,
    ) -> None:
        super().__init__()
        self._encoding = tokenizer
        self._context = context
        self._score = score
        self._write = write
        self._rows = rows
        self.is_computing = False  # stays true where an error leaves the model

    @property
    def eot_token_id(self) -> int:
        return self._encoding.special.eos

    @property
    def prefix_token_id(self) -> int:
        """Before a text without context, as the harness's own class for transformers has it."""
        special = self._encoding.special
        return special.eos if special.begin is None else special.begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text; those of the harness's own class where the tokenizer was brought."""
        if not self._encoding.special.is_brought:
            return self._encoding.encode(string).tolist()
        return self._encoding.encode_whole(string, adds_begin=add_special_tokens is not False).tolist()

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        def passages() -> Iterator[Passage]:
            for _, before, text in requests:
                if len(text) >= self._context:
                    raise UserError(f"evaluate.context={self._context}: a task scores {len(text)} tokens at once")
                tokens = np.asarray(before + text, np.int32)[-self._context :]
                yield Passage(tokens, len(tokens) - len(text))

        self.is_computing = True
        scores = [(-float(score.losses.sum()), bool(score.is_greedy.all())) for score in self._score(passages())]
        self.is_computing = False
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows_of_texts = [self._windows(*request.args) for request in requests]
        windows = [(("", ""), *window) for window in chain.from_iterable(windows_of_texts)]
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(score for score, _ in islice(scores, len(of_text))) for of_text in windows_of_texts]

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """The tokens of a text in windows that score each of them once, each with the tokens before it."""
        tokens = self.tok_encode(text)
        rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self._context - 1, 1)
        return list(map(make_disjoint_window, rolling))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts = []
        counts = []
        stops = []
        for text, options in (request.args for request in requests):
            if options.get("do_sample") and options.get("temperature", 1):
                raise UserError("evaluate.harness: a task wants random samples, and only greedy decoding is supported")
            until = options.get("until") or []
            counts.append(options.get("max_gen_toks", LONGEST_ANSWER))
            stops.append([stop for stop in ([until] if isinstance(until, str) else until) if stop])
            tokens = np.asarray(self.tok_encode(text) or [self.prefix_token_id], np.int32)
            prompts.append(tokens[-max(1, self._context - counts[-1]) :])
        self.is_computing = True
        texts = [""] * len(requests)
        # Prompts of like lengths share a batch, and with it a compiled program.
        order = sorted(range(len(requests)), key=lambda i: (counts[i], len(prompts[i])))
        for _, group in groupby(order, key=lambda i: counts[i]):
            for batch in batched(group, self._rows):
                for written in self._write([prompts[i] for i in batch], counts[batch[0]]):
                    ends = [self._until(row, stops[i]) for i, row in zip(batch, written, strict=True)]
                    if all(is_ended for _, is_ended in ends):
                        break
                for i, (text, _) in zip(batch, ends, strict=True):
                    texts[i] = text
        self.is_computing = False
        return texts

    def _until(self, tokens: np.ndarray, stops: Sequence[str]) -> tuple[str, bool]:
        """The text before the first end and the first stop string, and whether it has reached one of them."""
        special = self._encoding.special
        kept = until_end(tokens, (special.eos, *special.ends))
        text = cut = self._encoding.decode(kept, skip_special=True)
        for stop in stops:
            cut = cut.split(stop)[0]
        return cut, len(kept) < len(tokens) or cut != text


@cache
def _task_manager() -> TaskManager:
    return TaskManager()  # reads 14,000 files


def run(model: HarnessModel, tasks: list[Any]) -> dict[str, dict[str, Any]]:
    """The harness's own results of tasks: names, paths of its .yaml files, or dictionaries like these files.

    Raises:
      UserError: there is no such task, its file or its data is missing or wrong, or it does not fit its data.
      Unavailable: the data cannot be reached.
    """
    manager = _task_manager()
    for task in tasks:
        if isinstance(task, str) and task not in manager.all_tasks and not Path(task).is_file():
            raise UserError(f"evaluate.harness: {task}: no such task; `lm_eval ls tasks` lists them")
    model.is_computing = False
    try:
        evaluation = lm_eval.simple_evaluate(
            model=model, tasks=tasks, task_manager=manager, bootstrap_iters=0, log_samples=False
        )
    except Exception as error:  # a task is a program of its author's: YAML, templates, filters, Python
        if model.is_computing or isinstance(error, UserError):
            raise
        # FileNotFoundError: datasets has it without a number.
        outages = (cause for cause in causes(error) if isinstance(cause, OSError) and cause.errno not in WRONG_PATH)
        is_outage = any(not isinstance(cause, FileNotFoundError) for cause in outages)
        names = ", ".join(task if isinstance(task, str) else str(task.get("task")) for task in tasks)
        raise (Unavailable if is_outage else UserError)(f"evaluate.harness: {names}: {first_line(error)}") from error
    assert evaluation is not None  # it is None for ranks other than 0, and the harness takes every host for rank 0
    return evaluation["results"]
