"""A trained model behind the interface of EleutherAI's lm-evaluation-harness (lm-eval)."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from zero.base.errors import WRONG_PATH, Unavailable, UserError, causes, first_line
from zero.corpus.text.chat_template import ChatTemplate
from zero.corpus.text.tokenizers import Tokenizer
from zero.inference.generate import until_end
from zero.inference.manner import PLAIN, Manner
from zero.inference.scoring import Passage, Score, batched

log = logging.getLogger(__name__)

LONGEST_ANSWER = 256  # tokens, if a task sets no limit
# Generation settings that are ignored because greedy decoding does not depend on them.
_OF_SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p")
# Settings that say where documents and the task are; documents that depend on `metadata` are compared themselves.
_SOURCES = {"dataset_path", "dataset_name", "dataset_kwargs", "metadata"}


class HarnessModel(TemplateLM):
    """Answers the harness's requests to score and generate, like its own class for transformers.

    A prompt that is too long loses its beginning; a warning counts such prompts.

    Args:
      context: the model's positions, `max_length` of that class: tokens that it reads at once, or reads and writes.
      score: `Scorer.scores`.
      write: `(prompts, count)` to an iterator of the most likely continuations of all prompts so far, until each has
        `count` tokens.
      rows: prompts per batch.
      template: renders prompts as conversations; None: prompts are plain text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: int,
        score: Callable[[Iterable[Passage]], Iterator[Score]],
        write: Callable[[Sequence[np.ndarray], int], Iterator[list[np.ndarray]]],
        rows: int,
        template: ChatTemplate | None = None,
    ) -> None:
        super().__init__()
        self._encoding = tokenizer
        self._context = context
        self._score = score
        self._write = write
        self._rows = rows
        self._template = template
        self._asks_without_system = False
        self.is_computing = False  # stays true if the model raises

    @property
    def eot_token_id(self) -> int:
        return self._encoding.special.eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context, as in the harness's class for transformers."""
        special = self._encoding.special
        return special.eos if special.begin is None else special.begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text; with a model from the hub, the same as the harness's own class."""
        if not self._encoding.special.is_brought:
            return self._encoding.encode(string).tolist()
        return self._encoding.encode_whole(string, adds_begin=add_special_tokens is not False).tolist()

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        longest = self._context + 1
        self._log_cuts(sum(len(before) + len(text) > longest for _, before, text in requests), len(requests))

        def passages() -> Iterator[Passage]:
            for _, before, text in requests:
                if len(text) > self._context:
                    raise UserError(f"evaluate.context={self._context}: a task scores {len(text)} tokens at once")
                tokens = np.asarray(before + text, np.int32)[-longest:]
                yield Passage(tokens, len(tokens) - len(text))

        self.is_computing = True
        scores = [(-float(score.losses.sum()), bool(score.is_greedy.all())) for score in self._score(passages())]
        self.is_computing = False
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows_by_text = [self._windows(*request.args) for request in requests]
        windows = [(("", ""), *window) for window in chain.from_iterable(windows_by_text)]
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(score for score, _ in islice(scores, len(windows))) for windows in windows_by_text]

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """The tokens of a text in windows that score each of them once, each with the tokens before it."""
        tokens = self.tok_encode(text)
        rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self._context, 1)
        return list(map(make_disjoint_window, rolling))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts = []
        counts = []
        stops = []
        cuts = 0
        for text, options in (request.args for request in requests):
            count, until = self._checked(options)
            tokens = np.asarray(self.tok_encode(text) or [self.prefix_token_id], np.int32)
            cuts += len(tokens) > self._context - count
            counts.append(count)
            stops.append(until)
            prompts.append(tokens[-(self._context - count) :])
        self._log_cuts(cuts, len(requests))
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

    def _checked(self, options: dict[str, Any]) -> tuple[int, list[str]]:
        """The longest answer, in tokens, and the texts at which it stops, of a request.

        Raises:
          UserError: it requests something other than greedy decoding, or leaves no position for the prompt.
        """
        known: dict[str, Any] = dict(normalize_gen_kwargs(options, LONGEST_ANSWER))
        if known.get("do_sample"):
            raise UserError("evaluate.harness: a task wants random samples, and only greedy decoding is supported")
        count = known.pop("max_gen_toks")
        until = [stop for stop in known.pop("until") if stop]
        others = [key for key in known if key not in _OF_SAMPLING]
        if others:
            raise UserError(
                f"evaluate.harness: a task sets {others[0]}={known[others[0]]}, which zero does not support"
            )
        if count >= self._context:
            raise UserError(
                f"evaluate.context={self._context}: a task writes up to {count} tokens, which leaves no room for its "
                "prompt; expected a longer context, or a smaller max_gen_toks in generation_kwargs of the task"
            )
        eos = self._encoding.decode([self._encoding.special.eos])
        return count, [*until, eos] if eos else until

    def _log_cuts(self, cuts: int, requests: int) -> None:
        if cuts:
            log.warning(
                "%d of %d requests lose the beginning of their prompt: evaluate.context is %d tokens",
                cuts,
                requests,
                self._context,
            )

    def _until(self, tokens: np.ndarray, stops: Sequence[str]) -> tuple[str, bool]:
        """The text before the first end of text or stop string, and whether there is one."""
        special = self._encoding.special
        kept = until_end(tokens, (special.eos, *special.ends))
        text = self._encoding.decode(kept, skip_special=True)
        cut = postprocess_generated_text(text, list(stops), None)
        return cut, len(kept) < len(tokens) or cut != text

    @property
    def tokenizer_name(self) -> str:
        """Identifies the tokenizer and the chat template."""
        digest = "" if self._template is None else f" {self._template.digest}"
        return f"{self._encoding.name}{digest}".replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if self._template is not None and chat_template:
            return self._template.text
        return None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, up to where the answer begins, or up to the end of a begun answer.

        A template that rejects the system text is rendered without it, as in the harness's class for transformers.
        """
        assert self._template is not None
        try:
            text = self._template.render(chat_history, add_generation_prompt)
        except UserError as error:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            if not self._asks_without_system:
                log.warning("%s; retrying without the system prompt", error)
            self._asks_without_system = True
            text = self._template.render(others, add_generation_prompt)
        if add_generation_prompt:
            return text
        return _up_to(text, chat_history[-1]["content"])


def _up_to(text: str, answer: str) -> str:
    """The text of a conversation up to the end of its last answer, which the template may have stripped."""
    start = text.rindex(answer.strip())
    whole = start + len(answer.lstrip())
    if text[start:whole] == answer.lstrip():
        return text[:whole]
    return text[: start + len(answer.strip())]


@cache
def _task_manager() -> TaskManager:
    return TaskManager()  # reads 14,000 files


def run(model: HarnessModel, tasks: list[Any], manner: Manner = PLAIN) -> dict[str, dict[str, Any]]:
    """The harness's results for tasks: names, paths of its .yaml files, or dictionaries like these files.

    Raises:
      UserError: there is no such task, its file or its data is missing or wrong, or it does not fit its data.
      Unavailable: the data cannot be reached.
    """
    manager = _task_manager()
    _check_names(tasks, manager)
    with _task_errors(tasks, model):
        evaluation = lm_eval.simple_evaluate(
            model=model,
            tasks=tasks,
            num_fewshot=manner.few_shots,
            limit=manner.limit,
            system_instruction=manner.system,
            apply_chat_template=manner.template is not None,
            fewshot_as_multiturn=manner.template is not None,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=False,
        )
    assert evaluation is not None  # it is None for ranks other than 0, and the harness takes every host for rank 0
    return evaluation["results"]


def task_digests(tasks: Sequence[str], few_shots: int | None = None) -> dict[str, str]:
    """What the results of each task depend on besides the model: its settings, with their functions, and its documents.

    The documents are loaded, because their file may change while the task stays the same.

    Args:
      few_shots: examples per prompt; None for each task's own number.

    Raises as `run`.
    """
    manager = _task_manager()
    _check_names(tasks, manager)
    with _task_errors(tasks):
        loaded = {name: manager.load([name])["tasks"] for name in tasks}
        return {name: _digest(parts, few_shots) for name, parts in loaded.items()}


def _digest(parts: Mapping[str, Any], few_shots: int | None) -> str:
    """A digest of the parts of a task: itself, or the tasks of a group."""
    digest = hashlib.sha256()
    for name, part in sorted(parts.items()):
        settings = {key: value for key, value in part.dump_config().items() if key not in _SOURCES}
        shots = part.config.num_fewshot if few_shots is None else few_shots
        examples = part.fewshot_docs() if shots else []
        for fact in chain([name, settings], part.eval_docs, [None], examples):
            digest.update(json.dumps(fact, sort_keys=True, default=_text).encode() + b"\n")
    return digest.hexdigest()[:16]


def _text(value: Any) -> str:
    """A function's name, because its text has an address; the text of any other object."""
    return value.__qualname__ if inspect.isroutine(value) else str(value)


def _check_names(tasks: Sequence[Any], manager: TaskManager) -> None:
    """Raises UserError for a name that is neither a task of the harness nor a file."""
    for task in tasks:
        if isinstance(task, str) and task not in manager.all_tasks and not Path(task).is_file():
            raise UserError(f"evaluate.harness: {task}: no such task; `lm_eval ls tasks` lists them")


@contextmanager
def _task_errors(tasks: Sequence[Any], model: HarnessModel | None = None) -> Iterator[None]:
    """Turns a task's errors, except those of the model, into UserError or Unavailable with the task's name."""
    if model is not None:
        model.is_computing = False
    try:
        yield
    except Exception as error:  # a task is a program by its author: YAML, templates, filters, Python
        if isinstance(error, UserError) or (model is not None and model.is_computing):
            raise
        # FileNotFoundError: datasets raises it without an errno.
        outages = (cause for cause in causes(error) if isinstance(cause, OSError) and cause.errno not in WRONG_PATH)
        is_outage = any(not isinstance(cause, FileNotFoundError) for cause in outages)
        names = ", ".join(task if isinstance(task, str) else str(task.get("task")) for task in tasks)
        raise (Unavailable if is_outage else UserError)(f"evaluate.harness: {names}: {first_line(error)}") from error
