"""Answers labeled as desirable or not: `prompt`, `completion` and `label`, as in TRL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from zero.base.errors import UserError
from zero.corpus.preparing.documents import Document, found, shown
from zero.corpus.preparing.sources.completions import ANSWERS, TEXTS, CompletionReader
from zero.corpus.preparing.sources.record_keys import RecordKeys
from zero.corpus.text.chat_template import ChatTemplate

ANSWER, MISMATCHED = "answer", "another's answer"


def _labeled(form: RecordKeys) -> RecordKeys:
    """The records of a form with a label."""
    refused = {key: remedy for key, remedy in form.refused.items() if key != "label"}
    read = {**form.read, "label": "true or false: whether the completion is desirable"}
    return RecordKeys(form.form.replace("}", ', "label": true}'), read, refused)


@dataclass(frozen=True)
class LabelReader:
    """Reads a prompt and its completion, strings or lists of messages, and a label, a boolean.

    What follows the prompt is learned.
    """

    template: ChatTemplate | None
    FORMS: ClassVar = tuple(map(_labeled, (TEXTS, ANSWERS)))

    def __call__(self, entry: Any, name: str) -> Document:
        fields = entry if isinstance(entry, dict) else {}
        label = fields.get("label")
        if not isinstance(label, bool):
            seen = found(entry, given="--labels")
            problem = seen if label is None else f"it is {shown(label)}: write true for a desirable answer"
            raise UserError(f'{name}: expected true or false under "label"; {problem}')
        for key in ("prompt", "completion"):
            if not isinstance(fields.get(key), str | list):
                seen = found(entry, given="--labels")
                raise UserError(f'{name}: expected a string or a list of messages under "{key}"; {seen}')
        answer = {key: value for key, value in fields.items() if key != "label"}
        document = CompletionReader(self.template)(answer, name)
        return document._replace(members=(int(label),))
