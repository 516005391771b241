"""Documents in which a model learns completions: prompts with theirs, and conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero.base.errors import UserError
from zero.corpus.preparing.documents import Document, found
from zero.corpus.preparing.sources.conversations import (
    ASSISTANT,
    checked_messages,
    checked_tools,
    learned_spans,
    needed,
)
from zero.corpus.text.chat_template import ChatTemplate

LEARNED = (ASSISTANT,)  # roles, by default


@dataclass(frozen=True)
class CompletionReader:
    """Reads `prompt` and `completion`, or `messages`, in which the turns of `roles` are the completions."""

    template: ChatTemplate | None
    roles: tuple[str, ...] = LEARNED

    def __call__(self, entry: Any, name: str) -> Document:
        fields = entry if isinstance(entry, dict) else {}
        prompt, completion, messages = (fields.get(key) for key in ("prompt", "completion", "messages"))
        if isinstance(prompt, str) and isinstance(completion, str):
            whole = prompt + completion
            return Document(whole, name=name, completions=((len(prompt), len(whole)),))
        if not isinstance(messages, list):
            raise UserError(
                f'{name}: expected strings under "prompt" and "completion", or a list under "messages"; {found(entry)}'
            )
        try:
            return self._conversation(fields, name)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error

    def _conversation(self, entry: dict[str, Any], name: str) -> Document:
        template = needed(self.template)
        tools = checked_tools(entry.get("tools"))
        messages = checked_messages(entry["messages"], "messages")
        if not any(message["role"] in self.roles for message in messages):
            roles = " or ".join(f'"{role}"' for role in self.roles)
            raise UserError(f"no message has the role {roles}, so there is nothing to learn")
        text = template.render(messages, add_generation_prompt=False, tools=tools)
        spans = tuple(learned_spans(text, messages, tools, template, self.roles))
        if not spans:
            raise UserError(f"{template.path} marks no text of these messages with {{% generation %}}")
        return Document(text, name=name, completions=spans, has_special=True)
