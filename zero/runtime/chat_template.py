"""Chat templates: how a tokenizer spells a conversation, rendered as transformers renders it (jinja2)."""

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
from zero.runtime.errors import UserError

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"  # files beside a tokenizer


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
    """The chat template beside the file of a tokenizer, as in a Hugging Face folder; None where there is none."""
    folder = storage.parent(tokenizer)
    paths = {name: storage.join(folder, name) for name in (CONFIG, TEMPLATE)}
    config = json.loads(storage.read_bytes(paths[CONFIG])) if storage.exists(paths[CONFIG]) else {}
    path, text = paths[CONFIG], config.get("chat_template")
    if isinstance(text, list):  # several, by name
        text = {entry["name"]: entry["template"] for entry in text}.get("default")
    if storage.exists(paths[TEMPLATE]):
        path, text = paths[TEMPLATE], storage.read_bytes(paths[TEMPLATE]).decode("utf-8")
    if text is None:
        return None
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    spelled = {key: value["content"] if isinstance(value, dict) else value for key, value in tokens.items()}
    return ChatTemplate(path, text, tuple(sorted(item for item in spelled.items() if isinstance(item[1], str))))


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
