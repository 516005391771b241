"""The whole configuration: the sections of schema.py, with the keys that the features of a run declare.

A feature lies in a room above this one. So its table (`zero.run.features`) declares its keys here when it is imported,
which each command does; who asks for the configuration before that is told so.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

from zero.config.keys import Key, Section, Shared, key, members_of, section
from zero.config.schema import MODES, Config
from zero.models.config import GPTConfig


@dataclasses.dataclass
class Keys:
    """The keys that a feature reads: those that it declares by `key`, and those of others by `shared`."""

    def mistakes(self, config: Config, size: GPTConfig) -> Iterator[tuple[str, str]]:
        """The contradictions between its keys, or beside others: a key, and what was expected."""
        yield from ()


AnyKeys = TypeVar("AnyKeys", bound=Keys)
_OF_FEATURES: dict[str, type[Keys]] = {}


def declare(name: str, kind: type[Keys]) -> None:
    """Adds the keys of a feature to the section of its name, or to those that they name."""
    _OF_FEATURES[name] = kind


@cache
def whole_kind(mode: str = "train") -> type[Config]:
    """The class of the configuration of a mode: the keys of features come after the others of their section.

    Raises:
      RuntimeError: the features have not declared their keys yet.
    """
    if not _OF_FEATURES:
        raise RuntimeError("the keys of features are not declared: import zero.run.features first")
    kind = MODES[mode]
    fields: dict[str, list[tuple[str, Any, Any]]] = defaultdict(list)
    for name, keys in _OF_FEATURES.items():
        for member in members_of(keys, f"{name}."):
            if isinstance(member, Key):
                place, _, last = member.name.partition(".")
                field = key(member.default, member.check, *member.lines)
                fields[place].append((last, member.kind | None if member.is_optional else member.kind, field))
    sections = {member.name: member for member in members_of(kind) if isinstance(member, Section)}
    whole: list[tuple[str, Any, Any]] = []
    for name, added in fields.items():
        comment = sections[name].comment if name in sections else ""
        bases = (sections[name].kind,) if name in sections else ()
        made = dataclasses.make_dataclass(name.title(), added, bases=bases)
        whole.append((name, made, section(made, comment)))
    return dataclasses.make_dataclass(kind.__name__, whole, bases=(kind,), namespace={"__doc__": kind.__doc__})


def keys_of(config: Config, name: str, kind: type[AnyKeys]) -> AnyKeys:
    """The values of the keys that a feature reads."""
    members = members_of(kind, f"{name}.")
    names = [member.name for member in members if isinstance(member, Key | Shared)]
    fields = [field.name for field in dataclasses.fields(kind)]
    return kind(**{field: value_of(config, full) for field, full in zip(fields, names, strict=True)})


def value_of(config: Config, name: str) -> Any:
    """The value of a key by its whole name, such as training.batch_size."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def keys_of_features(config: Config) -> Iterator[Keys]:
    """The keys of each feature, in the order of their table."""
    for name, kind in _OF_FEATURES.items():
        yield keys_of(config, name, kind)
