"""Documents in which a model learns completions: prompts with theirs, and conversations of a chat template (jinja2)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from zero.runtime import storage
from zero.runtime.corpus.sources.documents import Document, found
from zero.runtime.errors import UserError

_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


@dataclass(frozen=True)
class ChatTemplate:
    """How a tokenizer spells a conversation: its Jinja template, rendered as transformers renders it.

    A template sees no clock, so that the same conversation is always the same text.
    """

    path: str
    text: str
    special_tokens: tuple[tuple[str, str], ...]  # such as ("bos_token", "<s>")

    @property
    def digest(self) -> str:
        """Of all that decides what is rendered."""
        return hashlib.sha256(json.dumps([self.text, self.special_tokens]).encode()).hexdigest()[:16]

    def render(self, messages: Sequence[Any], add_generation_prompt: bool) -> str:
        """The text of a conversation; with `add_generation_prompt` up to where an answer begins.

        Raises UserError for messages that the template does not accept.
        """
        try:
            return _compiled(self.text).render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **dict(self.special_tokens),
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise UserError(f"{self.path} cannot render these messages: {error}") from error


def load_chat_template(tokenizer: str) -> ChatTemplate | None:
    """The chat template beside a tokenizer file, where a Hugging Face folder has it; None if it has none."""
    folder = storage.parent(tokenizer)
    paths = {name: storage.join(folder, name) for name in (_CONFIG, _TEMPLATE)}
    config = json.loads(storage.read_bytes(paths[_CONFIG])) if storage.exists(paths[_CONFIG]) else {}
    path, text = paths[_CONFIG], config.get("chat_template")
    if isinstance(text, list):  # several, by name
        text = {entry["name"]: entry["template"] for entry in text}.get("default")
    if storage.exists(paths[_TEMPLATE]):
        path, text = paths[_TEMPLATE], storage.read_bytes(paths[_TEMPLATE]).decode("utf-8")
    if text is None:
        return None
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    spelled = {key: value["content"] if isinstance(value, dict) else value for key, value in tokens.items()}
    return ChatTemplate(path, text, tuple(sorted(item for item in spelled.items() if isinstance(item[1], str))))


@dataclass(frozen=True)
class CompletionReader:
    """Reads `prompt` and `completion`, or `messages`, of which what the assistant says is completions."""

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
            raise UserError(f"{name}: messages need a chat template, in {_CONFIG} or {_TEMPLATE} beside the tokenizer")
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


class _Generation(Extension):
    """`{% generation %}`, with which some templates mark what an assistant says; it is rendered like any text."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _compiled(text: str) -> jinja2.Template:
    extensions: list[Any] = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(text)
