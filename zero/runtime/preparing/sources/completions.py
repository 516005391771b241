"""Documents in which a model learns completions: prompts with theirs, and conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero.runtime.errors import UserError
from zero.runtime.preparing.sources.documents import Document, found
from zero.runtime.text.chat_template import CONFIG, TEMPLATE, ChatTemplate


@dataclass(frozen=True)
class CompletionReader:
    """Reads `prompt` and `completion`, or `messages`, in which the assistant's turns are the completions."""

    template: ChatTemplate | None

    def __call__(self, entry: Any, name: str) -> Document:
        given = entry if isinstance(entry, dict) else {}
        prompt, completion, messages = (given.get(key) for key in ("prompt", "completion", "messages"))
        if isinstance(prompt, str) and isinstance(completion, str):
            whole = prompt + completion
            return Document(whole, name=name, completions=((len(prompt), len(whole)),))
        if not isinstance(messages, list):
            raise UserError(
                f'{name}: expected strings under "prompt" and "completion", or a list under "messages"; {found(entry)}'
            )
        if self.template is None:
            raise UserError(f"{name}: messages need a chat template, in {CONFIG} or {TEMPLATE} beside the tokenizer")
        try:
            return self._conversation(messages, self.template, name)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error

    def _conversation(self, messages: list[Any], template: ChatTemplate, name: str) -> Document:
        text, completions = template.render(messages, add_generation_prompt=False), []
        for i, message in enumerate(messages):
            if not isinstance(message, dict) or message.get("role") != "assistant":
                continue
            before = template.render(messages[:i], add_generation_prompt=True)
            after = template.render(messages[: i + 1], add_generation_prompt=False)
            if not (after.startswith(before) and text.startswith(after)):
                raise UserError(
                    f"{template.path} renders message {i} in another way when it is the last one: give each answer a "
                    "line of its own, with the conversation up to it"
                )
            completions.append((len(before), len(after)))
        if not completions:
            raise UserError('no message has the role "assistant", so there is nothing to learn')
        return Document(text, name=name, completions=tuple(completions), has_special=True)
