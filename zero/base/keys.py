"""`key` declares a key of a run or of a model: its default, its check and its meaning, each written once.

An owner declares its keys in a frozen dataclass beside its code. A section of the configuration is a class that
inherits the keys of its owners, and so an instance of each of them; a model inherits the keys of its parts
(`zero.models.part`). Checks, conf/config.yaml, the head of conf/model_config.yaml, `--help` and the page of all keys
come from these declarations.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_type_hints

import numpy as np

T = TypeVar("T")

# Programs compute in float32: values that round to 0, 1 or infinity there would divide by zero.
SMALLEST = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)
ONE = 1 - 2.0**-25

DTYPES = ("float32", "bfloat16")
INT32 = 2**31 - 1  # the largest number of a step, a row of a batch or a token on a device
INT64 = 2**63 - 1


class Check(NamedTuple):
    """A condition on a value that is not null and has the type of its key, and how a message says what it expects."""

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
      per_host: whether it names something of one host.
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
    per_host: bool = False


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
REQUIRED = dataclasses.MISSING  # in place of the default of a key without one
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
    per_host: bool = False,
    none: str = "null",
) -> Any:
    """A field of a section or of a part of a model: a key with its default, its check and its meaning.

    The type of the field determines whether the key may be null; null is not checked. A check of None: any value of its
    type. A default of `REQUIRED`: there is none.

    Args:
      in_steps: whether it says at which steps something happens; with steps of parts of rows a multiple of them.
      in_scores: whether the scores of a text under given weights depend on it. Stored scores are known by these keys
        (`values_in_scores`), and by the contents that other keys name: weights, model, tokenizer and shards.
      fixed: whether a resume must not change it, as for the model, the seed, the order of the data and the optimizer.
        Paths may move, as a resume compares what they name (docs/decisions/data-order.md). A function of both values
        says whether they are the same one.
      anew: whether a resume does not take it from its run, as it belongs to one start.
      per_host: whether it names something of one host, so that hosts may have different values.
      none: the meaning of a default of None, of a key of a model.
    """
    value: Any = {"default": default}
    if isinstance(default, list | dict):
        value = {"default_factory": lambda: copy.deepcopy(default)}  # not shared
    return dataclasses.field(
        **value,
        metadata={
            "default": default,
            "check": check,
            "lines": (sentence, *more),
            "in_steps": in_steps,
            "in_scores": in_scores,
            "fixed": fixed,
            "anew": anew,
            "per_host": per_host,
            "none": none,
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
    own_values: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        first, _, rest = name.partition(".")
        if rest:
            below.setdefault(first, {})[rest] = value
        else:
            own_values[first] = value
    parts = {name: with_values(getattr(section, name), part_values) for name, part_values in below.items()}
    changed: T = dataclasses.replace(cast(Any, section), **own_values, **parts)
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


def at_least(minimum: int, maximum: int = INT32) -> Check:
    return Check(lambda value: minimum <= value <= maximum, f"at least {minimum}, at most {maximum}")


def zero_or_more() -> Check:
    return Check(lambda value: 0 <= value <= LARGEST, "zero or more, finite in float32")


def positive() -> Check:
    return Check(lambda value: SMALLEST <= value <= LARGEST, "more than 0, as a float32 (1.2e-38 to 3.4e38)")


def fraction() -> Check:
    return Check(lambda value: 0 < value <= 1, "more than 0, at most 1")


def fraction_below_one() -> Check:
    return Check(lambda value: 0 <= value < ONE, "at least 0, less than 1 in float32")


def not_empty() -> Check:
    return Check(lambda value: bool(value.strip()), "a non-empty string")


def random_seed() -> Check:
    return Check(lambda value: 0 <= value < 2**32, "0 to 4294967295")


def one_of(*choices: Any) -> Check:
    return Check(lambda value: value in choices, f"one of {', '.join(map(str, choices))}")


def list_of(check: Check) -> Check:
    """A list with at least one element, each of which satisfies `check`."""
    return Check(
        lambda values: bool(values) and all(map(check.holds, values)), f"a list, each element {check.expected}"
    )


def map_of(check: Check) -> Check:
    """A mapping from names to values that are numbers and satisfy `check`."""

    def holds(values: dict[Any, Any]) -> bool:
        numbers = [value for value in values.values() if type(value) in (int, float)]
        return len(numbers) == len(values) and all(map(check.holds, numbers))

    return Check(holds, f"{{NAME: number, ...}}, each {check.expected}")


def whole_number(check: Check) -> Check:
    """An integer that satisfies `check`."""
    return Check(lambda value: type(value) is int and check.holds(value), f"a whole number, {check.expected}")


def shown(value: Any) -> str:
    """A value as the command line takes it.

    >>> shown(None), shown(True), shown(0.5), shown([1, [2, None]])
    ('null', 'true', '0.5', '[1, [2, null]]')
    """
    if value is None:
        return "null"
    if isinstance(value, list) and not any(isinstance(element, str | dict) for element in value):
        return f"[{', '.join(map(shown, value))}]"  # a text keeps its quotes, and what is in a mapping its form
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_stages(value: Any) -> bool:
    """Whether a value is a list of pairs of whole numbers above 0, steps and a size."""
    return isinstance(value, list) and all(
        isinstance(stage, list) and len(stage) == 2 and all(type(x) is int and 1 <= x <= INT32 for x in stage)
        for stage in value
    )
