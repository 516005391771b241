"""`evaluate.harness`: tasks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from zero.base.errors import UserError
from zero.base.keys import at_least, key
from zero.corpus.text.chat_template import load_chat_template
from zero.corpus.text.tokenizers import TokenizerKeys
from zero.inference.harness_tasks import run_tasks, task_digests
from zero.inference.manner import Manner
from zero.inference.output import Output
from zero.inference.scoring import Scorer


class Harness(Output):
    """The harness's own results, under "harness"."""

    key = "evaluate.harness"

    @dataclass(frozen=True)
    class Keys:
        harness: list[str] = key(
            [],
            None,
            "Tasks of lm-evaluation-harness such as lambada_openai, or paths of its YAML files, which can run Python; "
            "needs the extra lm-eval.",
            in_scores=True,
        )
        chat: bool = key(
            False,
            None,
            "Render prompts of harness tasks with the chat template beside data.tokenizer, as for instruct models.",
            in_scores=True,
        )
        template_variables: dict[str, Any] = key(
            {}, None, "Variables of the chat template, such as {enable_thinking: false}.", in_scores=True
        )
        system: str | None = key(None, None, "A system prompt for harness tasks.", in_scores=True)
        few_shots: int | None = key(
            None,
            at_least(0),
            "Number of few-shot examples in the prompts of harness tasks; null: each task's own default.",
            in_scores=True,
        )
        limit: int | None = key(
            None, at_least(1), "Score at most this many documents of each harness task; null: all.", in_scores=True
        )

    def __init__(self, keys: Keys, text: TokenizerKeys):
        self._keys = keys
        self._tokenizer = text.tokenizer

    @property
    def is_asked(self) -> bool:
        return bool(self._keys.harness)

    def identity(self) -> dict[str, Any]:
        manner = self._manner()
        template = None if manner.template is None else manner.template.digest
        return {"tasks": task_digests(self._keys.harness, manner), "template": template}

    def evaluate(self, scorer: Scorer) -> dict[str, Any]:
        return {"harness": run_tasks(scorer, self._keys.harness, self._manner())}

    def _manner(self) -> Manner:
        """How harness tasks are prompted; raises UserError if the tokenizer lacks the chat template."""
        keys = self._keys
        if not keys.chat:
            return Manner(None, keys.system, keys.few_shots, keys.limit)
        template = None if self._tokenizer == "bytes" else load_chat_template(self._tokenizer, time.time())
        if template is None:
            raise UserError(f"evaluate.chat=true: data.tokenizer={self._tokenizer} has no chat template beside it")
        template = template.with_variables(keys.template_variables)
        return Manner(template, keys.system, keys.few_shots, keys.limit)
