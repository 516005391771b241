"""Documents in which a model learns completions: prompts with theirs, and conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero.base.errors import UserError
from zero.corpus.preparing.documents import Document, found
from zero.corpus.preparing.sources.conversations import (
    ASSISTANT,
    VARIABLES,
    checked_messages,
    checked_tools,
    checked_variables,
    dropped_calls,
    learned_spans,
    needed,
    of_sharegpt,
)
from zero.corpus.text.chat_template import ChatTemplate

LEARNED = (ASSISTANT,)  # roles, by default


@dataclass(frozen=True)
class CompletionReader:
    """Reads `prompt` and `completion`, or `messages`, in which the turns of `roles` are the completions.

    ShareGPT's `conversations` are read as messages.
    """

    template: ChatTemplate | None
    roles: tuple[str, ...] = LEARNED

    def __call__(self, entry: Any, name: str) -> Document:
        fields = entry if isinstance(entry, dict) else {}
        try:
            return self._document(fields, name)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error

    def _document(self, entry: dict[str, Any], name: str) -> Document:
        if "label" in entry:
            raise UserError(
                '"label" says which completions are desirable, and --completions would learn all of them: remove the '
                "lines whose label is false, and the key"
            )
        prompt, completion, messages = (entry.get(key) for key in ("prompt", "completion", "messages"))
        if isinstance(prompt, str) and isinstance(completion, str):
            whole = prompt + completion
            return Document(whole, name=name, completions=((len(prompt), len(whole)),))
        if isinstance(prompt, list) and isinstance(completion, list):
            return self._answer(entry, name)
        if isinstance(messages, list):
            return self._conversation(entry, messages, name)
        if isinstance(entry.get("conversations"), list):
            return self._conversation(entry, of_sharegpt(entry["conversations"]), name)
        if isinstance(entry.get("instruction"), str):
            raise UserError(
                'Alpaca lines do not say how to format a prompt: write "messages", a user\'s with the instruction '
                'and its input and the assistant\'s with the output, or "prompt" and "completion"'
            )
        raise UserError(
            'expected "prompt" and "completion", both strings or both lists of messages, or a list under "messages"; '
            f"{found(entry) if entry else found(None)}"
        )

    def _answer(self, entry: dict[str, Any], name: str) -> Document:
        """A prompt and its completion, both lists of messages; everything after the prompt is learned, as in TRL."""
        template = needed(self.template).with_variables(checked_variables(entry.get(VARIABLES)))
        tools = checked_tools(entry.get("tools"))
        prompt, completion = (checked_messages(entry[key], key) for key in ("prompt", "completion"))
        before = template.render(prompt, add_generation_prompt=True, tools=tools)
        text = template.render([*prompt, *completion], add_generation_prompt=False, tools=tools)
        if not text.startswith(before):
            raise UserError(
                f'{template.path} renders "prompt" differently when "completion" follows: give both as "messages"'
            )
        dropped = dropped_calls(text, [*prompt, *completion], tools, template)
        spans = ((len(before), len(text)),)
        return Document(text, name=name, completions=spans, has_special=True, is_exact=True, dropped_calls=dropped)

    def _conversation(self, entry: dict[str, Any], messages: Any, name: str) -> Document:
        template = needed(self.template).with_variables(checked_variables(entry.get(VARIABLES)))
        tools = checked_tools(entry.get("tools"))
        messages = checked_messages(messages, "messages")
        if not any(message["role"] in self.roles for message in messages):
            roles = " or ".join(f'"{role}"' for role in self.roles)
            raise UserError(f"no message has the role {roles}, so there is nothing to learn")
        text = template.render(messages, add_generation_prompt=False, tools=tools)
        spans = tuple(learned_spans(text, messages, tools, template, self.roles))
        if not spans:
            raise UserError(f"{template.path} marks no text of these messages with {{% generation %}}")
        return Document(
            text,
            name=name,
            completions=spans,
            has_special=True,
            is_exact=template.marks_generation and self.roles == LEARNED,
            dropped_calls=dropped_calls(text, messages, tools, template),
        )
