"""Messages of a line of JSON: their form, and the spans of the rendered text that each role has said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from zero.base.errors import UserError, first_line
from zero.corpus.text.chat_template import ChatTemplate
from zero.corpus.text.special_tokens import TEMPLATE, TOKENIZER_CONFIG

ASSISTANT = "assistant"
VARIABLES = "chat_template_kwargs"  # the key of a line that holds variables of the template, as in TRL
# Who speaks in a conversation of ShareGPT, and the role of its message.
_SHAREGPT = {"human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system"}
_LONGEST_END = 32  # characters of a special token
_SYSTEM = ("system", "developer")  # which templates often write before their loop
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


def checked_variables(value: Any) -> dict[str, Any]:
    """A line's own variables of the chat template, an object; raises UserError for other values."""
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{VARIABLES}: expected an object; found {json.dumps(value)[:80]}")
    return value or {}


def of_sharegpt(conversation: list[Any]) -> list[Message]:
    """The messages of a conversation as ShareGPT has them, `{"from": "human", "value": ...}`.

    Raises:
      UserError: one is something else, or from somebody that no role of a message stands for.

    >>> of_sharegpt([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}])
    [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
    """
    messages = []
    for i, turn in enumerate(conversation):
        if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
            return conversation  # messages under another key
        if turn["from"] not in _SHAREGPT:
            raise UserError(
                f'conversations[{i}] is from {turn["from"]!r}; expected {", ".join(_SHAREGPT)}; write "messages" for '
                "others"
            )
        messages.append({"role": _SHAREGPT[turn["from"]], "content": turn["value"]})
    return messages


def dropped_calls(text: str, messages: list[Message], tools: Any, template: ChatTemplate) -> int:
    """The number of messages whose tool calls are not in the text that a template renders."""
    dropped = 0
    for i, message in enumerate(messages):
        if message.get("tool_calls"):
            without = [*messages[:i], {**message, "tool_calls": None}, *messages[i + 1 :]]
            with suppress(UserError):  # a template that needs the calls writes them
                dropped += template.render(without, add_generation_prompt=False, tools=tools) == text
    return dropped


def learned_spans(
    text: str, messages: list[Message], tools: Any, template: ChatTemplate, roles: tuple[str, ...]
) -> Iterator[Span]:
    """What these roles have said in the rendered text of a conversation.

    A template that marks the assistant's turns with `{% generation %}` decides itself. Other turns are found by
    rendering the conversation up to them and with them: an assistant's begins where an answer would, others with their
    header. Neighboring messages of another role are one turn. Where the template looks ahead, so that a turn is
    rendered in another way when it is the last one, it is what the template's loop writes for its messages.

    Raises:
      UserError: neither finds a turn.
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
        if after.startswith(before) and text.startswith(after):
            yield len(before), len(after)
            continue
        of_messages = template.turns(messages, tools)
        missing = [i for i, message in enumerate(messages) if i not in of_messages and message["role"] not in _SYSTEM]
        if missing:  # another turn may hold its text
            raise UserError(
                f"{template.path} renders message {first} differently when it is the last one, and message "
                f"{missing[0]} outside of its loop over messages: put each answer on its own line, with the "
                "conversation up to it, or mark answers in the template with {% generation %}"
            )
        start = of_messages[first][0]
        stop = of_messages[last - 1][1]
        if role == ASSISTANT:
            start += _header(text[start:stop], template.render(messages[:first], False, tools), before)
        yield start, stop


def _header(turn: str, conversation: str, asking: str) -> int:
    r"""The characters of a turn that ask for the answer: what `asking` adds to the conversation, as far as it has them.

    >>> _header("<a>\nyes", "<u>\nno", "<u>\nno<a>\n<think>"), _header("<a>\n<b>", "", "<a>\n<think>")
    (4, 4)
    """
    added = _common_prefix(conversation, asking)
    # A conversation that is not asked may end with a token that begins with the same characters.
    asked = [asking[start:] for start in range(max(0, added - _LONGEST_END), added + 1)]
    header = max(asked, key=lambda text: _common_prefix(turn, text))
    common = turn[: _common_prefix(turn, header)]
    return len(common) if common == header else common.rfind("\n") + 1


def _common_prefix(one: str, other: str) -> int:
    """The number of characters with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(one), len(other)))


def _turns(messages: list[Message]) -> Iterator[Span]:
    """First and past last messages of each turn."""
    first = 0
    for i in range(1, len(messages) + 1):
        if i == len(messages) or messages[i]["role"] == ASSISTANT or messages[i]["role"] != messages[first]["role"]:
            yield first, i
            first = i
