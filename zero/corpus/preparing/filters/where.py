"""Values of the fields beside a text: `--where language=en,source=web`."""

from __future__ import annotations

from dataclasses import dataclass

from zero.base.errors import UserError
from zero.corpus.preparing.documents import Document, field_of


@dataclass(frozen=True)
class FieldValues:
    """Leaves out documents of objects with another value of one of these fields.

    >>> judge = FieldValues((("language", "en"),))
    >>> [judge(Document("text", fields={"language": value})) for value in ("en", "de")]
    [False, True]
    """

    values: tuple[tuple[str, str], ...]

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(key for key, _ in self.values)

    def __call__(self, document: Document) -> bool:
        return any(field_of(document, key) != value for key, value in self.values)


def field_values(value: str) -> FieldValues:
    pairs = [pair.partition("=") for pair in value.split(",")]
    if not all(key and equals for key, equals, _ in pairs):
        raise UserError("expected KEY=VALUE, such as language=en")
    return FieldValues(tuple((key, text) for key, _, text in pairs))
