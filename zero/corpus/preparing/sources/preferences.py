"""Pairs of answers to one prompt, one of them preferred: `prompt`, `chosen` and `rejected`, as in TRL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from zero.base.errors import UserError
from zero.corpus.preparing.documents import Document, found, kind_of_value
from zero.corpus.preparing.sources.conversations import (
    ASSISTANT,
    OF_CHATS,
    REFUSED_IN_CHATS,
    VARIABLES,
    Message,
    check_marks,
    check_system,
    checked_messages,
    checked_tools,
    checked_variables,
    dropped_calls,
    needed,
    rendered,
    unread_of,
    with_system,
)
from zero.corpus.preparing.sources.record_keys import RecordKeys
from zero.corpus.text.chat_template import ChatTemplate

CHOSEN, REJECTED = ANSWERS = ("chosen", "rejected")
_REFUSED = {
    **REFUSED_IN_CHATS,
    "margin": "no objective of zero reads it: leave the key out",
    "label": "--labels reads it, beside a prompt and one completion",
    "kto_tag": '--labels reads it as "label", beside a prompt and one completion',
}
_IN_CHATS = "a prompt that is a string has no place for it: write it into the prompt, or give messages"
TEXTS = RecordKeys(
    '{"prompt": "...", "chosen": "...", "rejected": "..."}',
    {"prompt": "a string; without it what both answers begin with", **dict.fromkeys(ANSWERS, "a string")},
    {**_REFUSED, **dict.fromkeys(OF_CHATS, _IN_CHATS)},
)
CHATS = RecordKeys(
    '{"prompt": [...], "chosen": [...], "rejected": [...]}',
    {
        "prompt": "messages; without them, or as a string among them, what both answers begin with",
        **dict.fromkeys(ANSWERS, "messages"),
        **OF_CHATS,
    },
    _REFUSED,
)


@dataclass(frozen=True)
class PreferenceReader:
    """Reads a pair: strings, or lists of messages; the prompt may also begin both answers instead.

    What follows the prompt is learned.
    """

    template: ChatTemplate | None
    FORMS: ClassVar = (TEXTS, CHATS)

    def __call__(self, entry: Any, name: str) -> Document:
        fields = entry if isinstance(entry, dict) else {}
        absent = [key for key in ANSWERS if not isinstance(fields.get(key), str | list)]
        if absent:
            seen = found(entry, given="--preferences")
            raise UserError(f'{name}: expected a string or a list of messages under "{absent[0]}"; {seen}')
        try:
            if isinstance(fields[CHOSEN], list):
                chosen, rejected = self._messages(fields, name)
            else:
                chosen, rejected = self._strings(fields, name)
        except UserError as error:
            raise type(error)(f"{name}: {error}") from error
        return chosen._replace(other_texts=(rejected,))

    def _strings(self, entry: dict[str, Any], name: str) -> list[Document]:
        prompt = entry.get("prompt")
        for key, value in {"prompt": prompt, REJECTED: entry[REJECTED]}.items():
            if not isinstance(value, str) and not (key == "prompt" and value is None):
                raise UserError(f'expected a string under "{key}", as under "{CHOSEN}"; found {kind_of_value(value)}')
        texts = [entry[key] for key in ANSWERS]
        if prompt is None:
            prompt = shared_text(*texts)
            if not prompt:
                raise UserError('expected a string under "prompt", or one that begins both answers')
        else:
            texts = [prompt + text for text in texts]
        unread = TEXTS.unread(entry)
        return [Document(text, name=name, completions=((len(prompt), len(text)),), unread=unread) for text in texts]

    def _messages(self, entry: dict[str, Any], name: str) -> list[Document]:
        template = needed(self.template).with_variables(checked_variables(entry.get(VARIABLES)))
        tools = checked_tools(entry.get("tools"))
        answers = [checked_messages(entry[key], key) for key in ANSWERS]
        unread = CHATS.unread(entry)
        for key, answer in zip(ANSWERS, answers, strict=True):
            unread += unread_of(answer, key, template)
        prompt: list[Message] = []
        said = entry.get("prompt")
        if said is None or isinstance(said, str):
            prompt = shared_messages(*answers)
            answers = [answer[len(prompt) :] for answer in answers]
            if isinstance(said, str) and not any(message.get("content") == said for message in prompt):
                raise UserError(
                    'expected messages under "prompt", or a string that is one of the messages that begin both answers'
                )
        else:
            prompt = checked_messages(said, "prompt")
            unread += unread_of(prompt, "prompt", template)
        if not prompt or prompt[-1]["role"] == ASSISTANT:
            raise UserError('expected messages under "prompt", or at the beginning of both answers, that ask for one')
        check_marks(prompt, "prompt", is_learned=False)
        prompt = with_system(prompt, entry)
        before = template.render(prompt, add_generation_prompt=True, tools=tools)
        documents = []
        for key, answer in zip(ANSWERS, answers, strict=True):
            if not answer or answer[0]["role"] != ASSISTANT:
                raise UserError(f'expected a message of the role "{ASSISTANT}" after the prompt under "{key}"')
            check_marks(answer, key, is_learned=True)
            text = rendered([*prompt, *answer], tools, template, f"prompt and {key}")
            check_system(entry, text, template)
            if not text.startswith(before):
                raise UserError(f'{template.path} renders the prompt differently with the answer under "{key}"')
            spans = ((len(before), len(text)),)
            dropped = dropped_calls(text, [*prompt, *answer], tools, template)
            documents.append(
                Document(text, name=name, completions=spans, has_special=True, dropped_calls=dropped, unread=unread)
            )
        return documents


def shared_messages(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """The messages that begin both, as TRL extracts a prompt: the last message of each is always of the answer.

    >>> ask, yes = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "yes"}
    >>> shared_messages([ask, yes], [ask, yes])
    [{'role': 'user', 'content': 'a?'}]
    """
    shared = 0
    for one, other in zip(chosen[:-1], rejected[:-1], strict=False):
        if one != other:
            break
        shared += 1
    return chosen[:shared]


def shared_text(chosen: str, rejected: str) -> str:
    """The text that begins both, as TRL extracts a prompt: without a space at its end.

    >>> shared_text("Human: a? Assistant: yes", "Human: a? Assistant: no")
    'Human: a? Assistant:'
    """
    same = [a == b for a, b in zip(chosen, rejected, strict=False)]
    if False not in same:  # one is the beginning of the other
        return chosen[: max(0, len(same) - 1)]
    return chosen[: same.index(False)].removesuffix(" ")
