"""`key` declares a key of the configuration: its default, its check and its meaning, each written once.

An owner declares its keys in a frozen dataclass beside its code. A section of the configuration is a class that
inherits the keys of its owners, and is so an instance of each of them. Checks, conf/config.yaml, `--help` and the page
of all keys come from these declarations.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_type_hints

T = TypeVar("T")


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
      fixed: whether a resume must not change it; or which two values are the same one.
      anew: whether each start says it anew.
      of_host: whether it names something of one host.
    """

    name: str
    kind: Any
    is_optional: bool
    default: Any
    check: Check | None
    lines: tuple[str, ...]
    in_steps: bool = False
    in_scores: bool = False
    fixed: bool | Callable[[Any, Any], bool] = False
    anew: bool = False
    of_host: bool = False


class Section(NamedTuple):
    """Keys below a name."""

    name: str
    comment: str
    kind: type


class Group(NamedTuple):
    """Sections of which one is chosen, by name.

    Attributes:
      fixed: whether a resume must not choose another one.
    """

    name: str
    comment: str
    choices: dict[str, type]
    fixed: bool

    @property
    def default(self) -> type:
        return next(iter(self.choices.values()))


Mistakes = Iterator[tuple[str, str]]  # from rules between keys: the name of a key, and what was expected or why
NAME = "The choice."  # the sentence of the key `name` of a choice


def key(
    default: Any,
    check: Check | None,
    sentence: str,
    *more: str,
    in_steps: bool = False,
    in_scores: bool = False,
    fixed: bool | Callable[[Any, Any], bool] = False,
    anew: bool = False,
    of_host: bool = False,
) -> Any:
    """A field of a section: a key with its default, its check (None: the type says all) and its meaning.

    The type of the field determines whether the key may be null; null is not checked.

    Args:
      in_steps: whether it says at which steps something happens; with steps of parts of rows a multiple of them.
      in_scores: whether the scores of a text under given weights depend on it. Stored scores are known by these keys
        (`values_in_scores`), and by the contents that other keys name: weights, model, tokenizer and shards.
      fixed: whether a resume must not change it, as for the model, the seed, the order of the data and the optimizer.
        Paths may move, as a resume compares what they name (docs/decisions/data-order.md). A function of both values
        says whether they are the same one.
      anew: whether a resume does not take it from its run, as it belongs to one start.
      of_host: whether it names something of one host, so that hosts may have different values.
    """
    return dataclasses.field(
        default_factory=lambda: copy.deepcopy(default),  # a list or a dictionary is not shared
        metadata={
            "default": default,
            "check": check,
            "lines": (sentence, *more),
            "in_steps": in_steps,
            "in_scores": in_scores,
            "fixed": fixed,
            "anew": anew,
            "of_host": of_host,
        },
    )


def named(name: str) -> Any:
    """The field `name` of a choice: its name in the configuration. It is chosen as a group, and not set as a key."""
    return key(name, Check(lambda value: value == name, name), NAME)


def section(kind: type, comment: str = "") -> Any:
    """A field of a section that is a section itself."""
    return dataclasses.field(default_factory=kind, metadata={"section": (comment, kind)})


def choice_name(kind: type) -> str:
    """The name of a choice in the configuration."""
    return str(next(field.metadata["default"] for field in dataclasses.fields(kind) if field.name == "name"))


def choice(kinds: tuple[type, ...], comment: str, *, fixed: bool = False) -> Any:
    """A field that is one of these sections, by the default of its key `name`; the first is the default.

    Args:
      fixed: whether a resume must not choose another one.
    """
    choices = {choice_name(kind): kind for kind in kinds}
    return dataclasses.field(default_factory=kinds[0], metadata={"choice": (comment, choices, fixed)})


def members_of(kind: type, prefix: str = "") -> tuple[Key | Section | Group, ...]:
    """What a section declares, in the order of its owners, and then its own."""
    return _members_of(kind, prefix)


@cache
def _members_of(kind: type, prefix: str) -> tuple[Key | Section | Group, ...]:
    types = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    names = [name for name in dict.fromkeys(_in_order(kind)) if name in fields]
    return tuple(_member(fields[name], prefix + name, types[name]) for name in names)


def _in_order(kind: type) -> Iterator[str]:
    """The names that a class and its bases annotate; names of bases come first, from left to right."""
    for base in kind.__bases__:
        yield from _in_order(base)
    yield from vars(kind).get("__annotations__", {})


def _member(field: dataclasses.Field[Any], name: str, annotated: Any) -> Key | Section | Group:
    meta = field.metadata
    if "section" in meta:
        return Section(name, *meta["section"])
    if "choice" in meta:
        return Group(name, *meta["choice"])
    choices = get_args(annotated)
    is_optional = NoneType in choices
    value_type = next(kind for kind in choices if kind is not NoneType) if is_optional else annotated
    facts = {fact: meta[fact] for fact in Key._fields if fact in meta}
    return Key(name, value_type, is_optional, **facts)


def all_keys(kind: type, prefix: str = "") -> Iterator[Key]:
    """The keys of a section and of all sections in it, in order; of a group, its default's."""
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


def with_values(section: T, values: Mapping[str, Any]) -> T:
    """A copy of a section, or of a configuration, with other values of these keys.

    Args:
      values: by name below the section, such as `{"zero.stage": 2, "seed": 1}` of a configuration.
    """
    of_section: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        first, _, rest = name.partition(".")
        if rest:
            below.setdefault(first, {})[rest] = value
        else:
            of_section[first] = value
    parts = {name: with_values(getattr(section, name), of_part) for name, of_part in below.items()}
    changed: T = dataclasses.replace(cast(Any, section), **of_section, **parts)
    return changed


def defaults_of(kind: type) -> dict[str, Any]:
    """The defaults of the keys of a section, and of the sections and groups in it."""
    values: dict[str, Any] = {}
    for member in members_of(kind):
        if isinstance(member, Key):
            values[member.name] = copy.deepcopy(member.default)
        else:
            values[member.name] = defaults_of(member.kind if isinstance(member, Section) else member.default)
    return values
