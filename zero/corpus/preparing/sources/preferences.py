"""Pairs of answers to one prompt, one of them preferred: `prompt`, `chosen` and `rejected`, as in TRL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero.base.errors import UserError
from zero.corpus.preparing.documents import Document, found
from zero.corpus.preparing.sources.conversations import (
    ASSISTANT,
    VARIABLES,
    Message,
    checked_messages,
    checked_tools,
    checked_variables,
    dropped_calls,
    needed,
)
from zero.corpus.text.chat_template import ChatTemplate

CHOSEN, REJECTED = ANSWERS = ("chosen", "rejected")


@dataclass(frozen=True)
class PreferenceReader:
    """Reads a pair: strings, or lists of messages; of these the prompt may also begin both answers instead.

    What follows the prompt is learned.
    """

    template: ChatTemplate | None

    def __call__(self, entry: Any, name: str) -> Document:
        fields = entry if isinstance(entry, dict) else {}
        absent = [key for key in ANSWERS if not isinstance(fields.get(key), str | list)]
        if absent:
            raise UserError(f'{name}: expected a string or a list of messages under "{absent[0]}"; {found(entry)}')
        try:
            read = self._messages if isinstance(fields[CHOSEN], list) else self._strings
            chosen, rejected = read(fields, name)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        return chosen._replace(other_texts=(rejected,))

    def _strings(self, entry: dict[str, Any], name: str) -> list[Document]:
        for key in ("prompt", REJECTED):
            if not isinstance(entry.get(key), str):
                kind = "nothing" if key not in entry else type(entry[key]).__name__
                raise UserError(f'expected a string under "{key}", as under "{CHOSEN}"; found {kind}')
        prompt = entry["prompt"]
        texts = [prompt + entry[key] for key in ANSWERS]
        return [Document(text, name=name, completions=((len(prompt), len(text)),)) for text in texts]

    def _messages(self, entry: dict[str, Any], name: str) -> list[Document]:
        template = needed(self.template).with_variables(checked_variables(entry.get(VARIABLES)))
        tools = checked_tools(entry.get("tools"))
        answers = [checked_messages(entry[key], key) for key in ANSWERS]
        prompt: list[Message] = []
        if entry.get("prompt") is not None:
            prompt = checked_messages(entry["prompt"], "prompt")
        else:  # what both begin with
            same = [a == b for a, b in zip(*answers, strict=False)]
            shared = same.index(False) if False in same else len(same)
            prompt = answers[0][:shared]
            answers = [answer[shared:] for answer in answers]
        if not prompt or prompt[-1]["role"] == ASSISTANT:
            raise UserError('expected messages under "prompt", or at the beginning of both answers, that ask for one')
        before = template.render(prompt, add_generation_prompt=True, tools=tools)
        documents = []
        for key, answer in zip(ANSWERS, answers, strict=True):
            if not answer or answer[0]["role"] != ASSISTANT:
                raise UserError(f'expected a message of the role "{ASSISTANT}" after the prompt under "{key}"')
            text = template.render([*prompt, *answer], add_generation_prompt=False, tools=tools)
            if not text.startswith(before):
                raise UserError(f'{template.path} renders the prompt differently with the answer under "{key}"')
            spans = ((len(before), len(text)),)
            dropped = dropped_calls(text, [*prompt, *answer], tools, template)
            documents.append(Document(text, name=name, completions=spans, has_special=True, dropped_calls=dropped))
        return documents
