"""Messages of a line of JSON: their form, and the spans of the rendered text that each role has said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from zero.base.errors import UserError, first_line
from zero.corpus.text.chat_template import ChatTemplate
from zero.corpus.text.special_tokens import TEMPLATE, TOKENIZER_CONFIG

ASSISTANT = "assistant"
Message = dict[str, Any]
Span = tuple[int, int]  # of characters: start, stop


def needed(template: ChatTemplate | None) -> ChatTemplate:
    """The chat template; raises UserError if there is none."""
    if template is None:
        raise UserError(f"messages need a chat template, in {TOKENIZER_CONFIG} or {TEMPLATE} beside the tokenizer")
    return template


def checked_messages(value: Any, key: str) -> list[Message]:
    """The messages under a key; raises UserError for other values, with the key and the place in it."""
    if not isinstance(value, list):
        raise UserError(f'expected a list of messages under "{key}"; found {type(value).__name__}')
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            kind = ", ".join(sorted(map(str, message))) if isinstance(message, dict) else type(message).__name__
            raise UserError(f'{key}[{i}]: expected an object with a "role"; found {kind}')
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise UserError(f"{key}[{i}].tool_calls: expected a list of objects; found {json.dumps(calls)[:80]}")
    return value


def checked_tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools of a line: a list of objects, or the JSON of one; None for none. Raises UserError for other values."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UserError(f"tools: expected a list, or the JSON of one: {first_line(error)}") from error
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise UserError(f"tools: expected a list of objects; found {json.dumps(value)[:80]}")
    return value or None


def learned_spans(
    text: str, messages: list[Message], tools: Any, template: ChatTemplate, roles: tuple[str, ...]
) -> Iterator[Span]:
    """What these roles have said in the rendered text of a conversation.

    A template that marks the assistant's turns with `{% generation %}` decides itself. Other turns are found by
    rendering the conversation up to them and with them: an assistant's begins where an answer would, others with their
    header. Neighbouring messages of another role are one turn.

    Raises:
      UserError: the template renders a turn in another way when it is the last one.
    """
    marked = template.marks_generation and ASSISTANT in roles
    if marked:
        yield from template.generated(messages, tools)
    for first, last in _turns(messages):
        role = messages[first]["role"]
        if role not in roles or (marked and role == ASSISTANT):
            continue
        before = ""
        if first or role == ASSISTANT:
            before = template.render(messages[:first], add_generation_prompt=role == ASSISTANT, tools=tools)
        after = template.render(messages[:last], add_generation_prompt=False, tools=tools)
        if not (after.startswith(before) and text.startswith(after)):
            raise UserError(
                f"{template.path} renders message {first} in another way when it is the last one: give each answer a "
                "line of its own, with the conversation up to it, or mark answers in the template with "
                "{% generation %}"
            )
        yield len(before), len(after)


def _turns(messages: list[Message]) -> Iterator[Span]:
    """First and past last messages of each turn."""
    first = 0
    for i in range(1, len(messages) + 1):
        if i == len(messages) or messages[i]["role"] == ASSISTANT or messages[i]["role"] != messages[first]["role"]:
            yield first, i
            first = i
