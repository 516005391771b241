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


def declared_by_features() -> dict[str, type[Keys]]:
    """The keys of each feature by its name, for another process to declare."""
    return dict(_OF_FEATURES)


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
                attributes: Any = {"in_steps": member.in_steps, "in_scores": member.in_scores}
                field = key(member.default, member.check, *member.lines, **attributes)
                fields[place].append((last, member.kind | None if member.is_optional else member.kind, field))
    sections = {member.name: member for member in members_of(kind) if isinstance(member, Section)}
    whole: list[tuple[str, Any, Any]] = []
    for name, added in fields.items():
        comment = sections[name].comment if name in sections else ""
        bases = (sections[name].kind,) if name in sections else ()
        made = dataclasses.make_dataclass(name.title(), added, bases=bases, namespace=_copied_by_name(mode, name))
        whole.append((name, made, section(made, comment)))
    namespace = {"__doc__": kind.__doc__, **_copied_by_name(mode, "")}
    return dataclasses.make_dataclass(kind.__name__, whole, bases=(kind,), namespace=namespace)


def _copied_by_name(mode: str, name: str) -> dict[str, Any]:
    """What a class that no module holds needs for its instances to be copied into other processes."""

    def reduce(self: Any) -> tuple[Any, ...]:
        return _copy, (mode, name, vars(self))

    return {"__reduce__": reduce}


def _copy(mode: str, name: str, values: dict[str, Any]) -> Any:
    """A whole configuration, or its section of this name, with these values."""
    kind: Any = whole_kind(mode)
    if name:
        (kind,) = (member.kind for member in members_of(kind) if isinstance(member, Section) and member.name == name)
    made = object.__new__(kind)
    vars(made).update(values)
    return made


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
