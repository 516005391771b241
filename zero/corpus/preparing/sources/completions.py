"""Documents in which a model learns completions: prompts with theirs, and conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from zero.base.errors import UserError
from zero.corpus.preparing.documents import Document, found
from zero.corpus.preparing.sources.conversations import (
    ASSISTANT,
    OF_CHATS,
    REFUSED_IN_CHATS,
    TURN,
    VARIABLES,
    check_marks,
    check_roles,
    check_system,
    checked_messages,
    checked_tools,
    checked_variables,
    dropped_calls,
    is_turn,
    learned_spans,
    mark_of,
    needed,
    rendered,
    sharegpt_messages,
    unread_of,
    with_system,
)
from zero.corpus.preparing.sources.record_keys import RecordKeys
from zero.corpus.text.chat_template import ChatTemplate

LEARNED = (ASSISTANT,)  # roles, by default


_LABEL = (
    '"label" says which completions are desirable, and --completions would learn all of them: remove the lines whose '
    "label is false, and the key"
)
_IN_CHATS = "a prompt that is a string has no place for it: write it into the prompt, or give messages"
_REFUSED = {**REFUSED_IN_CHATS, "label": _LABEL, "kto_tag": _LABEL}
TEXTS = RecordKeys(
    '{"prompt": "...", "completion": "..."}',
    {"prompt": "a string, which is read", "completion": "a string, which is learned"},
    {**_REFUSED, **dict.fromkeys([*OF_CHATS, "history"], _IN_CHATS)},
)
ANSWERS = RecordKeys(
    '{"prompt": [...], "completion": [...]}',
    {"prompt": "messages, which are read", "completion": "messages, which are learned", **OF_CHATS},
    _REFUSED,
)
CHAT = RecordKeys(
    '{"messages": [...]}', {"messages": "messages, of which those of --loss-on are learned", **OF_CHATS}, _REFUSED
)
SHAREGPT = RecordKeys(
    '{"conversations": [...]}', {"conversations": "the same, or turns of ShareGPT", **OF_CHATS}, _REFUSED
)


@dataclass(frozen=True)
class CompletionReader:
    """Reads `prompt` and `completion`, or `messages`, in which the turns of `roles` are the completions.

    ShareGPT's `conversations` are read as messages.
    """

    template: ChatTemplate | None
    roles: tuple[str, ...] = LEARNED
    FORMS: ClassVar = (TEXTS, ANSWERS, CHAT, SHAREGPT)

    def __call__(self, entry: Any, name: str) -> Document:
        fields = entry if isinstance(entry, dict) else {}
        try:
            return self._document(fields, name)
        except UserError as error:
            raise type(error)(f"{name}: {error}") from error

    def _document(self, entry: dict[str, Any], name: str) -> Document:
        if "label" in entry:
            raise UserError(_LABEL)
        prompt, completion, messages = (entry.get(key) for key in ("prompt", "completion", "messages"))
        if isinstance(prompt, str) and isinstance(completion, str):
            whole = prompt + completion
            return Document(whole, name=name, completions=((len(prompt), len(whole)),), unread=TEXTS.unread(entry))
        if isinstance(prompt, list) and isinstance(completion, list):
            return self._answer(entry, name)
        if isinstance(messages, list):
            return self._conversation(entry, messages, "messages", name, CHAT.unread(entry))
        conversation = entry.get("conversations")
        if isinstance(conversation, list):
            unread = [*SHAREGPT.unread(entry)]
            for turn in conversation:
                unread += TURN.unread(turn, "conversations.") if is_turn(turn) else ()
            return self._conversation(entry, sharegpt_messages(conversation), "conversations", name, unread)
        if isinstance(entry.get("instruction"), str):
            raise UserError(
                'Alpaca lines do not say how to format a prompt: write "messages", a user\'s with the instruction '
                'and its input and the assistant\'s with the output, or "prompt" and "completion"'
            )
        raise UserError(
            'expected "prompt" and "completion", both strings or both lists of messages, or a list under "messages"; '
            f"{found(entry, given='--completions') if entry else found(None)}"
        )

    def _answer(self, entry: dict[str, Any], name: str) -> Document:
        """A prompt and its completion, both lists of messages; everything after the prompt is learned, as in TRL."""
        template = needed(self.template).with_variables(checked_variables(entry.get(VARIABLES)))
        tools = checked_tools(entry.get("tools"))
        prompt, completion = (checked_messages(entry[key], key) for key in ("prompt", "completion"))
        unread = (*ANSWERS.unread(entry), *unread_of(prompt, "prompt", template))
        unread += unread_of(completion, "completion", template)
        check_marks(prompt, "prompt", is_learned=False)
        check_marks(completion, "completion", is_learned=True)
        prompt = with_system(prompt, entry)
        before = template.render(prompt, add_generation_prompt=True, tools=tools)
        text = rendered([*prompt, *completion], tools, template, "prompt and completion")
        check_system(entry, text, template)
        if not text.startswith(before):
            raise UserError(
                f'{template.path} renders "prompt" differently when "completion" follows: give both as "messages"'
            )
        dropped = dropped_calls(text, [*prompt, *completion], tools, template)
        return Document(
            text,
            name=name,
            completions=((len(before), len(text)),),
            has_special=True,
            is_exact=True,
            dropped_calls=dropped,
            unread=unread,
        )

    def _conversation(
        self, entry: dict[str, Any], messages: Any, key: str, name: str, unread: Sequence[str]
    ) -> Document:
        template = needed(self.template).with_variables(checked_variables(entry.get(VARIABLES)))
        tools = checked_tools(entry.get("tools"))
        messages = checked_messages(messages, key)
        check_roles(messages, key, self.roles)
        unread = (*unread, *unread_of(messages, key, template))
        messages = with_system(messages, entry)
        if not any(message["role"] in self.roles for message in messages):
            roles = " or ".join(f'"{role}"' for role in self.roles)
            raise UserError(f"no message has the role {roles}, so there is nothing to learn")
        text = rendered(messages, tools, template, key)
        check_system(entry, text, template)
        spans = tuple(learned_spans(text, messages, tools, template, self.roles))
        if not spans and all(mark_of(message, "") is False for message in messages if message["role"] in self.roles):
            raise UserError("all messages are marked not to be learned, so there is nothing to learn")
        if not spans:
            raise UserError(f"{template.path} marks no text of these messages with {{% generation %}}")
        return Document(
            text,
            name=name,
            completions=spans,
            has_special=True,
            is_exact=template.marks_generation and self.roles == LEARNED,
            dropped_calls=dropped_calls(text, messages, tools, template),
            unread=unread,
        )
