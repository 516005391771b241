"""Checks a configuration before anything starts, and lists every mistake in it (omegaconf)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol, TypeVar, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zero.base.errors import UserError
from zero.base.keys import Group, Key, Section, all_keys, members_of, shown
from zero.config.messages import did_you_mean
from zero.config.modes import Configuration, Modes

AnySection = TypeVar("AnySection")
TYPES = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
WRONG = object()  # in place of a value that has not the type of its key


class Sizes(Protocol):
    """The sizes of models."""

    def chosen(self, model: Any) -> Any:
        """The size that the section `model` names, with its overrides; raises UserError if there is none."""


def check(config: DictConfig, modes: Modes, sizes: Sizes, given: Collection[str] = ()) -> Any:
    """The configuration of its mode as plain typed values, if it can be run at all.

    Args:
      given: the keys that were set for this start. Those that it has no use for are refused unless they have their
        defaults, while a preset or a saved configuration may have them.

    Raises:
      UserError: a line for each key that is unknown or missing, or whose value is invalid, alone or in combination:
        the key, its value and the expected one.
    """
    mistakes: list[str] = []
    checked, unread = _read(config, modes, given, mistakes)
    size: Any = None
    if not any(line.startswith("model.") for line in mistakes):
        try:
            size = sizes.chosen(checked.model)
        except UserError as error:
            mistakes += str(error).splitlines()
    if size is not None and not mistakes:  # each key alone is valid, so that a rule may use any
        checked = checked.fitted(size)
        mistakes += _contradictions(checked, size, given)
    mistakes += unread
    if mistakes:
        raise UserError("\n".join(mistakes))
    return checked


def typed(config: DictConfig, modes: Modes) -> Any:
    """The configuration of its mode as plain typed values; rules between its keys are not checked.

    Raises:
      UserError: a line for each key that is unknown or missing, or whose value is invalid.
    """
    mistakes: list[str] = []
    read, _ = _read(config, modes, (), mistakes)
    if mistakes:
        raise UserError("\n".join(mistakes))
    return read


def value_mistakes(config: DictConfig, modes: Modes) -> list[str]:
    """A line for each key that is unknown or missing, or whose value is invalid."""
    mistakes: list[str] = []
    _read(config, modes, (), mistakes)
    return mistakes


def _read(config: DictConfig, modes: Modes, given: Collection[str], mistakes: list[str]) -> tuple[Any, list[str]]:
    """The configuration of its mode, with defaults in place of what `mistakes` then has a line for.

    Returns also a line for each key that is given and that the mode does not read.
    """
    values, wrong = _resolved(config)
    mistakes += wrong.values()
    mode = values.get("mode")
    kind = modes.kinds.get(str(mode), modes.first)
    if "mode" in values and mode not in modes.kinds:
        mistakes.append(f"mode={mode}: expected one of {', '.join(modes.kinds)}")
    for name in modes.own_sections.keys() - {mode}:  # a slice has keys of mode=plan
        if values.pop(name, None) is not None:
            mistakes += [modes.unknown(key) for key in given if key.startswith(f"{name}.")]
    unread = [] if kind is modes.first else [*_take_unread(values, kind, modes, str(mode), given)]
    lines: list[str] = []
    read = read_section(kind, values, "", lines, modes.unknown)
    mistakes += [line for line in lines if re.split("[=:]", line, maxsplit=1)[0] not in wrong]
    return read, unread


def _take_unread(
    values: dict[str, Any], kind: type[Configuration], modes: Modes, mode: str, given: Collection[str]
) -> Iterator[str]:
    """Removes the keys of a saved run that this mode does not read; returns a line for each one that was given."""
    read = {member.name: member for member in members_of(kind)}
    defaults = flat(vars(modes.first())) | {name: next(iter(group.choices)) for name, group in modes.groups.items()}
    for member in members_of(modes.first):
        unread: dict[str, Any] = {}
        if member.name in values and member.name not in read:
            value_of_member = values.pop(member.name)
            if isinstance(value_of_member, dict):
                unread = {f"{member.name}.{name}": x for name, x in value_of_member.items()}
            else:
                unread = {member.name: value_of_member}
            if isinstance(member, Group):
                unread[member.name] = unread.pop(f"{member.name}.name", None)
        elif isinstance(member, Section) and isinstance(values.get(member.name), dict):
            section = values[member.name]
            names = _names(member) - _names(read[member.name])
            unread = {f"{member.name}.{name}": section.pop(name) for name in names & section.keys()}
        for key, value in unread.items():
            if key in given and not (key in defaults and defaults[key] == value):
                yield f"{key}={shown(value)}: it has no effect, as mode={mode} does not read it"


def _names(member: Any) -> set[str]:
    """The names of the keys of a section, without the section's name."""
    return {each.name for each in members_of(member.kind)}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by the full names of their keys, from a configuration by section."""
    by_name: dict[str, Any] = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            by_name |= flat(vars(value), f"{prefix}{name}.")
        else:
            by_name[f"{prefix}{name}"] = value
    return by_name


def _contradictions(config: Configuration, size: Any, given: Collection[str]) -> Iterator[str]:
    values = flat(vars(config))
    groups = {member.name for member in members_of(type(config)) if isinstance(member, Group)}
    values |= {name: values[f"{name}.name"] for name in groups}
    expected_values: dict[str, str] = {}
    for key, expected in config.mistakes(size):
        expected_values.setdefault(key, expected)
    for key, expected in expected_values.items():
        yield f"{key}={shown(values[key])}: expected {expected}"
    defaults = _defaults(config, size)
    for key, reason in config.without_effect():
        is_given = any(name == key or name.startswith(f"{key}.") for name in given)
        if key not in expected_values and is_given and values[key] != defaults[key]:
            yield f"{key}={shown(values[key])}: it has no effect, as {reason}"


def _defaults(config: Configuration, size: Any) -> dict[str, Any]:
    """The defaults of all keys for these choices of groups, and of the groups."""
    groups = [member for member in members_of(type(config)) if isinstance(member, Group)]
    chosen = {group.name: type(getattr(config, group.name))() for group in groups}
    mode_config = type(config)(**chosen)
    return flat(vars(mode_config.fitted(size))) | {group.name: next(iter(group.choices)) for group in groups}


def _resolved(config: DictConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """The values, interpolations resolved, and a line for each key whose interpolation cannot be."""
    try:
        return OmegaConf.to_container(config, resolve=True), {}  # type: ignore[return-value]  # a mapping, as config is
    except OmegaConfBaseException:
        pass
    values: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    return values, dict(_wrong_interpolations(config, ""))


def _wrong_interpolations(section: DictConfig, prefix: str) -> Iterator[tuple[str, str]]:
    texts: dict[str, Any] = OmegaConf.to_container(section)  # type: ignore[assignment]  # a mapping, as section is
    for name, text in texts.items():
        key = f"{prefix}{name}"
        try:
            value = section[name]
            if isinstance(value, DictConfig):
                yield from _wrong_interpolations(value, f"{key}.")
            elif OmegaConf.is_config(value):
                OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            yield key, f"{key}={shown(text)}: {str(error).splitlines()[0]}"


def read_section(
    kind: type[AnySection],
    values: dict[str, Any],
    prefix: str,
    mistakes: list[str],
    unknown: Callable[[str], str],
) -> AnySection:
    """The section with these values, and with its defaults for keys that are missing or wrong.

    Args:
      prefix: of the names of its keys, such as "training.".
      mistakes: takes a line for each unknown, missing or wrong key.
      unknown: a line for an unknown key.
    """
    members = members_of(kind, prefix)
    names = [member.name.rpartition(".")[2] for member in members]
    mistakes += [unknown(f"{prefix}{name}") for name in values if name not in names]
    read: dict[str, Any] = {}
    for name, member in zip(names, members, strict=True):
        if not isinstance(member, Key):
            inner = values.get(name, {})
            if not isinstance(inner, dict):
                mistakes.append(f"{member.name}={shown(inner)}: expected a section of keys")
                continue
            if isinstance(member, Group):
                chosen = member.choices.get(str(inner.get("name")), member.default)
            else:
                assert isinstance(member, Section)
                chosen = member.kind
            read[name] = read_section(chosen, inner, f"{member.name}.", mistakes, unknown)
        elif name not in values or values[name] == "???":
            mistakes.append(f"{member.name}: missing")
        else:
            value = converted(values[name], member)
            mistake = mistake_in(value, member)
            if mistake is None:
                read[name] = value
            else:
                meant = did_you_mean(values[name], mistake.removeprefix("one of ").split(", "))
                question = f"{meant} " if meant and mistake.startswith("one of ") else ""
                mistakes.append(f"{member.name}={shown(values[name])}: {question}expected {mistake}")
    return kind(**read)


def converted(value: Any, key: Key) -> Any:
    """The value in the type of its key, or WRONG."""
    if value is None and key.is_optional:
        return None
    return _as_type(value, key.kind)


def _as_type(value: Any, kind: Any) -> Any:
    """The value as this type; integers are numbers, 30e9 is an integer, and numbers are texts.

    >>> _as_type(30e9, int), _as_type(2.5, int) is WRONG
    (30000000000, True)
    """
    if kind is Any:
        return value
    if get_origin(kind) is dict:
        return value if isinstance(value, dict) else WRONG
    if get_origin(kind) is list:
        if not isinstance(value, list):
            return WRONG
        elements = [_as_type(element, get_args(kind)[0]) for element in value]
        return WRONG if WRONG in elements else elements
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and type(value) is float and value.is_integer() and abs(value) < 2**53:  # exact in a float
        return int(value)
    if kind is str and type(value) in (int, float):
        return str(value)
    return value if type(value) is kind else WRONG


def mistake_in(value: Any, key: Key) -> str | None:
    """What was expected in place of this value; None if it is right."""
    is_null = value is None and key.is_optional
    if value is not WRONG and (is_null or key.check is None or key.check.holds(value)):
        return None
    parts = [TYPES[key.kind]] if value is WRONG and key.kind in (int, float, bool) else []
    if key.check is not None:
        parts.append(key.check.expected)
    elif key.kind is str:
        parts.append("a text")
    elif key.kind not in TYPES:
        parts.append("keys and values" if get_origin(key.kind) is dict else "a list")
    return ", ".join([*parts, *(["or null"] if key.is_optional else [])])


def values_on_all_hosts(config: Configuration) -> dict[str, Any]:
    """The values of the keys that do not name something of one host."""
    values = flat(vars(config))
    host_keys = {key.name for key in all_keys(type(config)) if key.per_host}
    return {name: value for name, value in values.items() if name not in host_keys}
