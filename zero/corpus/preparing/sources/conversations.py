"""Messages of a line of JSON: their form, and the spans of the rendered text that each role has said."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from zero.base.errors import Unavailable, UserError, first_line
from zero.corpus.preparing.documents import kind_of_value, shown
from zero.corpus.preparing.sources.record_keys import IMAGES, NOT_TEXT, WEIGHT, RecordKeys, is_empty
from zero.corpus.text.chat_template import ChatTemplate
from zero.corpus.text.special_tokens import TEMPLATE, TOKENIZER_CONFIG
from zero.files.parsing import reading

ASSISTANT = "assistant"
VARIABLES = "chat_template_kwargs"  # the key of a line that holds variables of the template, as in TRL
# Who speaks in a conversation of ShareGPT, and the role of its message.
_SHAREGPT = {"human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system"}
_MEDIA = re.compile("image|audio|video|file|document", re.IGNORECASE)  # in the type of a part of a content
_LONGEST_END = 32  # characters of a special token
_SYSTEM = ("system", "developer")  # which templates often write before their loop
SYSTEM_KEYS = ("system", "system_prompt", "system_message")  # of a record, which hold the text of its first message
MARKS = (
    "weight",
    "train",
    "training",
    "loss",
)  # of a message: whether it is learned (OpenAI, axolotl, ms-swift, xtuner)
_MARK = "0 or false: this message is not learned"
_PARTS = "zero learns whole messages: divide the message, or mark it as a whole with weight 0 or 1"
# Keys of records of conversations, beside that of the messages.
OF_CHATS = {
    **dict.fromkeys(SYSTEM_KEYS, "the text of a first message of the role system"),
    "tools": "a list of functions, or its JSON, for the template",
    VARIABLES: "variables of the template",
}
REFUSED_IN_CHATS = {
    **IMAGES,
    **WEIGHT,
    "functions": 'write them as "tools", a list of {"type": "function", "function": ...}',
}
MESSAGE = RecordKeys(
    '{"role": ..., "content": ...}',
    {
        "role": "who says it",
        "content": "a text; or a list or object that the template writes out",
        "tool_calls": "calls of tools; those that the template leaves out are counted",
        **dict.fromkeys(MARKS, _MARK),
    },
    {
        **IMAGES,
        **dict.fromkeys(("train_detail", "training_detail", "loss_mask", "loss_scale", "loss_weight", "mask"), _PARTS),
        "masked": 'write "train": false',
    },
)
TURN = RecordKeys(
    '{"from": ..., "value": ...} (ShareGPT)',
    {"from": "human, user, gpt, assistant or system", "value": "a text", **dict.fromkeys(MARKS, _MARK)},
    MESSAGE.refused,
)
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
            raise UserError(f"{key}[{i}].tool_calls: expected a list of objects; found {shown(calls)}")
        content = message.get("content")
        if not isinstance(content, str | list | dict) and not (content is None and _says_more(message)):
            raise UserError(f"{key}[{i}].content is {kind_of_value(content)}; expected a string")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and _MEDIA.search(str(part.get("type"))):
                raise UserError(f"{key}[{i}].content has a part of the type {shown(part['type'])}; {NOT_TEXT}")
        mark_of(message, f"{key}[{i}]")
    return value


def _says_more(message: Message) -> bool:
    """Whether an assistant says something beside its content, such as calls of tools or thoughts."""
    others = message.keys() - {"role", "content", "name", "id", *MARKS}
    return message["role"] == ASSISTANT and any(not is_empty(message[key]) for key in others)


def mark_of(message: Message, place: str) -> bool | None:
    """Whether a message is to be learned, as its marks say; None if it has none.

    Raises UserError for marks of another kind, and for two that contradict each other.

    >>> mark_of({"role": "assistant", "weight": 0}, "messages[1]"), mark_of({"role": "user"}, "messages[0]")
    (False, None)
    """
    marks = {key: message[key] for key in MARKS if message.get(key) is not None}
    for key, value in marks.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise UserError(f"{place}.{key} is {shown(value)}; expected 0 or 1, false or true")
    if len(set(marks.values())) > 1:
        raise UserError(f"{place}: {' and '.join(marks)} contradict each other")
    return bool(next(iter(marks.values()))) if marks else None


def check_marks(messages: list[Message], key: str, is_learned: bool) -> None:
    """Raises UserError for a mark where all messages under a key are learned, or none is, whatever they say."""
    for i, message in enumerate(messages):
        if mark_of(message, f"{key}[{i}]") not in (None, is_learned):
            all_or_none = "all" if is_learned else "none"
            raise UserError(
                f'{key}[{i}] is marked otherwise, but {all_or_none} of "{key}" is learned: write the conversation as '
                '"messages" of --completions'
            )


def check_roles(messages: list[Message], key: str, roles: tuple[str, ...]) -> None:
    """Raises UserError for a message that is marked to be learned and whose role is not."""
    for i, message in enumerate(messages):
        if mark_of(message, f"{key}[{i}]") and message["role"] not in roles:
            raise UserError(
                f'{key}[{i}] is marked to be learned, and --loss-on does not name its role, "{message["role"]}"'
            )


def unread_of(messages: list[Message], key: str, template: ChatTemplate) -> tuple[str, ...]:
    """Keys of messages that the template does not name; raises UserError for those that are refused."""
    known = _words(template.text + (template.with_tools or ""))
    names: dict[str, None] = {}
    for message in messages:
        names |= dict.fromkeys(MESSAGE.unread(message, f"{key}.", known))
    return tuple(names)


@functools.lru_cache(maxsize=8)
def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


def with_system(messages: list[Message], entry: Mapping[str, Any]) -> list[Message]:
    """The messages, begun by the system text of a record that has one beside them, as LLaMA-Factory and axolotl do.

    Raises UserError for a text that differs from that of a first message.

    >>> with_system([{"role": "user", "content": "a"}], {"system": "Be short."})[0]
    {'role': 'system', 'content': 'Be short.'}
    """
    texts = {key: entry[key] for key in SYSTEM_KEYS if not is_empty(entry.get(key))}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise UserError(f'expected a string under "{key}"; found {kind_of_value(text)}')
    if messages and messages[0]["role"] in _SYSTEM:
        texts["messages[0]"] = messages[0].get("content")
    if any(text != other for text in texts.values() for other in texts.values()):
        raise UserError(f"{' and '.join(texts)} hold different system texts: keep one")
    if not texts or "messages[0]" in texts:
        return messages
    return [{"role": _SYSTEM[0], "content": next(iter(texts.values()))}, *messages]


def rendered(messages: list[Message], tools: Any, template: ChatTemplate, place: str) -> str:
    """The text of a conversation under the key `place`.

    Raises UserError if the template does not write a content that is no string, or a system text, and as its `render`.
    """
    odd = [i for i, message in enumerate(messages) if isinstance(message.get("content"), list | dict)]
    problem = "which {} does not write: join its texts to one string"
    try:
        text = template.render(messages, add_generation_prompt=False, tools=tools)
    except UserError as error:
        if odd and not isinstance(error, Unavailable):
            kind = kind_of_value(messages[odd[0]]["content"])
            raise UserError(f"{place}[{odd[0]}].content is {kind}, {problem.format(template.path)}") from error
        raise
    for i in odd:
        content = messages[i]["content"]
        parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        texts = [str(part.get(str(part.get("type", "text")), "")).strip() for part in parts]
        is_printed = str(content) in text and str(content) != json.dumps(content, default=str)  # as Python writes it
        if is_printed or any(part not in text for part in texts):
            raise UserError(f"{place}[{i}].content is {kind_of_value(content)}, {problem.format(template.path)}")
    return text


def check_system(entry: Mapping[str, Any], text: str, template: ChatTemplate) -> None:
    """Raises UserError if the template leaves out a system text that a record has beside its messages."""
    for key in SYSTEM_KEYS:
        if not is_empty(entry.get(key)) and entry[key].strip() not in text:
            raise UserError(f'{template.path} writes no system text, and the line has one under "{key}"')


def checked_tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools of a line: a list of objects, or the JSON of one; None for none. Raises UserError for other values."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UserError(f"tools: expected a list, or the JSON of one: {first_line(error)}") from error
    if not is_empty(value) and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise UserError(f"tools: expected a list of objects; found {shown(value)}")
    return value or None


def checked_variables(value: Any) -> dict[str, Any]:
    """A line's own variables of the chat template, an object; raises UserError for other values."""
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{VARIABLES}: expected an object; found {shown(value)}")
    with reading(f"{VARIABLES}: expected an object of JSON; found {shown(value)}"):
        json.dumps(value)
    return value or {}


def sharegpt_messages(conversation: list[Any]) -> list[Message]:
    """The messages of a conversation as ShareGPT has them, `{"from": "human", "value": ...}`.

    Raises:
      UserError: one is something else, or from somebody that no role of a message stands for.

    >>> sharegpt_messages([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}])
    [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
    """
    messages = []
    for i, turn in enumerate(conversation):
        if not is_turn(turn):
            return conversation  # messages under another key
        speaker = turn["from"]
        if not isinstance(speaker, str) or speaker not in _SHAREGPT:
            raise UserError(
                f'conversations[{i}] is from {speaker!r}; expected {", ".join(_SHAREGPT)}; write "messages" for others'
            )
        marks = {key: turn[key] for key in MARKS if key in turn}
        messages.append({"role": _SHAREGPT[speaker], "content": turn["value"], **marks})
    return messages


def is_turn(turn: Any) -> bool:
    """Whether an element of a conversation is as ShareGPT has it."""
    return isinstance(turn, dict) and {"from", "value"} <= turn.keys()


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

    Messages that are marked with 0 or false are not learned.

    Raises:
      UserError: neither finds a turn, or marks are none that can be followed.
    """
    marks = [mark_of(message, f"messages[{i}]") for i, message in enumerate(messages)]
    marked = template.marks_generation and ASSISTANT in roles
    if marked:
        left_out = [i for i, mark in enumerate(marks) if mark is False and messages[i]["role"] == ASSISTANT]
        yield from _outside(template.generated(messages, tools), left_out, messages, tools, template)
    for first, last in _turns(messages):
        role = messages[first]["role"]
        if role not in roles or (marked and role == ASSISTANT):
            continue
        if False in marks[first:last]:
            if {False} != {*marks[first:last]}:
                raise UserError(f'neighboring messages of the role "{role}" are one turn: mark all of them, or none')
            continue
        before = ""
        if first or role == ASSISTANT:
            before = template.render(messages[:first], add_generation_prompt=role == ASSISTANT, tools=tools)
        after = template.render(messages[:last], add_generation_prompt=False, tools=tools)
        if after.startswith(before) and text.startswith(after):
            yield len(before), len(after)
            continue
        message_spans = template.turns(messages, tools)
        missing = [i for i, message in enumerate(messages) if i not in message_spans and message["role"] not in _SYSTEM]
        if missing:  # another turn may hold its text
            raise UserError(
                f"{template.path} renders message {first} differently when it is the last one, and message "
                f"{missing[0]} outside of its loop over messages: put each answer on its own line, with the "
                "conversation up to it, or mark answers in the template with {% generation %}"
            )
        start = message_spans[first][0]
        stop = message_spans[last - 1][1]
        if role == ASSISTANT:
            start += _header(text[start:stop], template.render(messages[:first], False, tools), before)
        yield start, stop


def _outside(
    spans: list[Span], left_out: list[int], messages: list[Message], tools: Any, template: ChatTemplate
) -> list[Span]:
    """The spans that a template marks, without those within messages that are not learned."""
    if not left_out:
        return spans
    message_spans = template.turns(messages, tools)
    if missing := [i for i in left_out if i not in message_spans]:
        raise UserError(
            f"message {missing[0]} is marked not to be learned, and {template.path} writes it outside of its loop over "
            "messages: remove the mark, or {% generation %} from the template"
        )
    turns = [message_spans[i] for i in left_out]
    return [(start, stop) for start, stop in spans if not any(a <= start and stop <= b for a, b in turns)]


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
