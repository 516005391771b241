"""What a reader does with each key of a record: it reads it, refuses it, or names it as not read."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from zero.base.errors import UserError
from zero.corpus.preparing.documents import shown

NOT_TEXT = "zero learns text alone: leave such lines out, or write what they show as text"
_UNITED = "a batch weighs all documents alike: leave the line out, or repeat it"
IMAGES = dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), NOT_TEXT)
WEIGHT = {"weight": _UNITED, "sample_weight": _UNITED}  # of a whole record
_ONE: tuple[Any, ...] = (1, "1")  # a weight that changes nothing


@dataclass(frozen=True)
class RecordKeys:
    """The keys of one kind of records.

    Attributes:
      form: how such a record looks, for the reference.
      read: keys that the text is made of, and what each holds.
      refused: keys that change what is learned and that zero cannot follow, with the remedy.
    """

    form: str
    read: Mapping[str, str]
    refused: Mapping[str, str] = field(default_factory=dict)

    def unread(self, entry: Mapping[str, Any], place: str = "", also: Container[str] = ()) -> tuple[str, ...]:
        """The names of the keys that are not read; `also` are read in this record, and `place` begins each name.

        Raises:
          UserError: a refused key has a value.

        >>> keys = RecordKeys("", {"messages": ""}, IMAGES)
        >>> keys.unread({"messages": [], "images": [], "url": "http://a.b"})
        ('url',)
        >>> keys.unread({"messages": [], "images": ["a.png"]})
        Traceback (most recent call last):
        zero.base.errors.UserError: "images" is ["a.png"]: zero learns text alone: leave such lines out, or ...
        """
        names = []
        for key, value in entry.items():
            if key in self.refused:
                if not is_empty(value) and not (key in WEIGHT and value in _ONE):
                    raise UserError(f'"{place}{key}" is {shown(value)}: {self.refused[key]}')
            elif key not in self.read and key not in also:
                names.append(f"{place}{key}")
        return tuple(names)


def is_empty(value: Any) -> bool:
    """Whether a key says nothing: tables give each row all keys.

    >>> [is_empty(value) for value in (None, "", [], {}, 0, False)]
    [True, True, True, True, False, False]
    """
    return value is None or (isinstance(value, str | list | dict) and not value)
