"""`key` declares a key of the configuration: its default, its check and its meaning, each written once.

Checks (check.py), conf/config.yaml, `--help` and the page of all keys (printed.py) come from these declarations.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints


class Check(NamedTuple):
    """A condition on a value that is not null and has the type of its key, and its text in messages."""

    holds: Callable[[Any], bool]
    expected: str


class Key(NamedTuple):
    """A declared key.

    Attributes:
      name: with its sections, such as training.batch_size.
      kind: the type of its values, without null.
      lines: what it means: a sentence, and lines that explain its values.
      in_steps: whether it says at which steps something happens.
      in_scores: whether scores of a text under given weights depend on it.
    """

    name: str
    kind: Any
    is_optional: bool
    default: Any
    check: Check | None
    lines: tuple[str, ...]
    in_steps: bool = False
    in_scores: bool = False


class Shared(NamedTuple):
    """A key that another owner declares, and that this one reads.

    Attributes:
      name: with its sections, such as training.loss_on.
    """

    name: str


class Section(NamedTuple):
    """Keys below a name."""

    name: str
    comment: str
    kind: type


class Group(NamedTuple):
    """Sections of which one is chosen, by name."""

    name: str
    comment: str
    choices: dict[str, type]

    @property
    def default(self) -> type:
        return next(iter(self.choices.values()))


NAME = "The choice."  # the sentence of the key `name` of a choice


def key(
    default: Any,
    check: Check | None,
    sentence: str,
    *more: str,
    at: str | None = None,
    in_steps: bool = False,
    in_scores: bool = False,
) -> Any:
    """A field of a section: a key with its default, its check (None: the type says all) and its meaning.

    The type of the field determines whether the key may be null; null is not checked.

    Args:
      at: the section of the key, such as training, where it is not that of its owner.
      in_steps: whether it says at which steps something happens; with steps of parts of rows a multiple of them.
      in_scores: whether the scores of a text under given weights depend on it. Stored scores are known by these keys
        (`values_in_scores`), and by the contents that other keys name: weights, model, tokenizer and shards.
    """
    return dataclasses.field(
        default_factory=lambda: copy.deepcopy(default),  # a list or a dictionary is not shared
        metadata={
            "default": default,
            "check": check,
            "lines": (sentence, *more),
            "at": at,
            "in_steps": in_steps,
            "in_scores": in_scores,
        },
    )


def shared(name: str) -> Any:
    """A field of a feature's section: the value of a key that is declared elsewhere, by its whole name."""
    return dataclasses.field(metadata={"shared": name})


def named(name: str) -> Any:
    """The field `name` of a choice: its name in the configuration. It is chosen as a group, and not set as a key."""
    return key(name, Check(lambda value: value == name, name), NAME)


def section(kind: type, comment: str = "") -> Any:
    """A field of a section that is a section itself."""
    return dataclasses.field(default_factory=kind, metadata={"section": (comment, kind)})


def choice_name(kind: type) -> str:
    """The name of a choice in the configuration."""
    return str(next(field.metadata["default"] for field in dataclasses.fields(kind) if field.name == "name"))


def choice(kinds: tuple[type, ...], comment: str) -> Any:
    """A field that is one of these sections, by the default of its key `name`; the first is the default."""
    choices = {choice_name(kind): kind for kind in kinds}
    return dataclasses.field(default_factory=kinds[0], metadata={"choice": (comment, choices)})


def members_of(kind: type, prefix: str = "") -> tuple[Key | Shared | Section | Group, ...]:
    """What a section declares, in order."""
    return _members_of(kind, prefix)


@cache
def _members_of(kind: type, prefix: str) -> tuple[Key | Shared | Section | Group, ...]:
    types = get_type_hints(kind)
    return tuple(_member(field, prefix + field.name, types[field.name]) for field in dataclasses.fields(kind))


def _member(field: dataclasses.Field[Any], name: str, annotated: Any) -> Key | Shared | Section | Group:
    meta = field.metadata
    if "shared" in meta:
        return Shared(meta["shared"])
    if "section" in meta:
        return Section(name, *meta["section"])
    if "choice" in meta:
        return Group(name, *meta["choice"])
    choices = get_args(annotated)
    is_optional = NoneType in choices
    value_type = next(kind for kind in choices if kind is not NoneType) if is_optional else annotated
    if meta["at"] is not None:
        name = f"{meta['at']}.{field.name}"
    attributes = (meta["default"], meta["check"], meta["lines"], meta["in_steps"], meta["in_scores"])
    return Key(name, value_type, is_optional, *attributes)


def all_keys(kind: type, prefix: str = "") -> Iterator[Key]:
    """The keys of a section and of all sections in it, in order; of a group those of its default."""
    for member in members_of(kind, prefix):
        if isinstance(member, Key):
            if member.lines[0] != NAME:
                yield member
        elif isinstance(member, Section):
            yield from all_keys(member.kind, f"{member.name}.")
        elif isinstance(member, Group):
            yield from all_keys(member.default, f"{member.name}.")


def values_in_scores(section: Any, prefix: str = "") -> dict[str, Any]:
    """The values of the keys on which scores of a text under given weights depend, by name, in a section."""
    values: dict[str, Any] = {}
    for member in members_of(type(section), prefix):
        value = getattr(section, member.name.rpartition(".")[2])
        if isinstance(member, Section | Group):
            values |= values_in_scores(value, f"{member.name}.")
        elif isinstance(member, Key) and member.in_scores:
            values[member.name] = value
    return values
