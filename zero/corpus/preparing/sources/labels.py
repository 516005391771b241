"""Answers labeled as desirable or not: `prompt`, `completion` and `label`, as in TRL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero.base.errors import UserError
from zero.corpus.preparing.documents import Document, found
from zero.corpus.preparing.sources.completions import CompletionReader
from zero.corpus.text.chat_template import ChatTemplate

ANSWER, MISMATCHED = "answer", "another's answer"


@dataclass(frozen=True)
class LabelReader:
    """Reads a prompt and its completion, strings or lists of messages, and a label, a boolean.

    What follows the prompt is learned.
    """

    template: ChatTemplate | None

    def __call__(self, entry: Any, name: str) -> Document:
        fields = entry if isinstance(entry, dict) else {}
        if not isinstance(fields.get("label"), bool):
            raise UserError(f'{name}: expected true or false under "label"; {found(entry)}')
        for key in ("prompt", "completion"):
            if not isinstance(fields.get(key), str | list):
                raise UserError(f'{name}: expected a string or a list of messages under "{key}"; {found(entry)}')
        answer = {key: value for key, value in fields.items() if key != "label"}
        document = CompletionReader(self.template)(answer, name)
        return document._replace(members=(int(fields["label"]),))
