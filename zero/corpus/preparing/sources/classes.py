"""Texts with the class that each belongs to, as classifiers of transformers are trained on: `text` and `label`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from zero.base.errors import UserError
from zero.base.keys import INT32
from zero.corpus.preparing.documents import Document, TextReader, shown
from zero.corpus.preparing.sources.record_keys import RecordKeys

CLASSIFIED_TEXT = "text"
NAMES = "--label-names"


@dataclass(frozen=True)
class ClassReader:
    """Reads a text and its label: a number from 0 on, or one of `names`.

    The tokens are those of transformers' tokenizers: nothing is added after the text.
    """

    text_key: str = "text"
    label_key: str = "label"
    names: tuple[str, ...] = ()
    FORMS: ClassVar = (
        RecordKeys(
            '{"text": "...", "label": 0}',
            {
                "text": "a string, or --key names another key",
                "label": f"a number from 0 on, or a name of {NAMES}; --label-key names another key",
            },
        ),
    )

    def __call__(self, entry: Any, name: str) -> Document:
        document = TextReader(self.text_key)(entry, name)
        number = self._number(entry.get(self.label_key), name)
        unread = tuple(key for key in document.unread if key != self.label_key)
        whole = ((0, len(document.content)),)
        return document._replace(completions=whole, is_complete=True, members=(number,), unread=unread)

    def _number(self, label: Any, name: str) -> int:
        if isinstance(label, str) and label in self.names:
            return self.names.index(label)
        most = len(self.names) or INT32
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < most:
            return label
        expected = "a number from 0 on, or a name that --label-names lists"
        if self.names:
            expected = f"one of {', '.join(self.names)}, or its number from 0 on"
        raise UserError(f'{name}: expected {expected}, under "{self.label_key}"; it is {shown(label)}')
