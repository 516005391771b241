"""Checks a configuration before anything starts, and lists every mistake in it (hydra, omegaconf)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any, Protocol, TypeVar, get_args, get_origin

from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from zero.base.errors import UserError
from zero.config import rules_between_keys
from zero.config.constraints import shown
from zero.config.declared import keys_of_features, value_of, whole_kind
from zero.config.keys import Group, Key, Section, members_of
from zero.config.names import did_you_mean, in_order, unknown, unknown_field
from zero.config.no_effect import without_effect
from zero.config.schema import GROUPS, MODE_SECTIONS, MODES, Config, Model
from zero.models.config import GPTConfig

AnySection = TypeVar("AnySection")
TYPES = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
WRONG = object()  # in place of a value that has not the type of its key


class Sizes(Protocol):
    """The entries of model_config.yaml."""

    def chosen(self, model: Model) -> GPTConfig:
        """The entry that the section `model` names, with its overrides; raises UserError where there is none."""


def check(config: DictConfig, sizes: Sizes, given: Collection[str] = ()) -> Config:
    """The configuration as plain typed values, if it can be run at all.

    Args:
      given: the keys that were set for this start. Those that it has no use for are refused, while a preset or a
        saved configuration may have them.

    Raises:
      UserError: a line for each key that is unknown or missing, or whose value is wrong by itself or beside others:
        the key, its value and the expected one.
    """
    mistakes: list[str] = []
    checked = _read(config, given, mistakes)
    size: GPTConfig | None = None
    if not any(line.startswith("model.") for line in mistakes):
        try:
            size = sizes.chosen(checked.model)
        except UserError as error:
            mistakes += str(error).splitlines()
    if size is not None and not mistakes:  # each key is right by itself, so that a rule may use any
        if checked.data.max_context is None:
            checked.data.max_context = size.block_size
        mistakes += _contradictions(checked, size, given)
    if mistakes:
        raise UserError("\n".join(mistakes))
    return checked


def typed(config: DictConfig) -> Config:
    """The configuration as plain typed values; rules between its keys are not checked.

    Raises:
      UserError: a line for each key that is unknown or missing, or whose value is wrong by itself.
    """
    mistakes: list[str] = []
    read = _read(config, (), mistakes)
    if mistakes:
        raise UserError("\n".join(mistakes))
    return read


def _read(config: DictConfig, given: Collection[str], mistakes: list[str]) -> Config:
    """The configuration of its mode, with defaults in place of what `mistakes` then has a line for."""
    values, wrong = _resolved(config)
    mistakes += wrong.values()
    mode = values.get("mode")
    kind = whole_kind(mode if mode in MODES else "train")
    for section in MODE_SECTIONS.keys() - {mode}:  # a slice has keys of mode=plan
        if values.pop(section, None) is not None:
            mistakes += [unknown(key) for key in given if key.startswith(f"{section}.")]
    lines: list[str] = []
    read = read_section(kind, values, "", lines)
    mistakes += [line for line in lines if re.split("[=:]", line, maxsplit=1)[0] not in wrong]
    return read


def _contradictions(config: Config, size: GPTConfig, given: Collection[str]) -> Iterator[str]:
    expected_values: dict[str, str] = {}
    of_features = chain.from_iterable(keys.mistakes(config, size) for keys in keys_of_features(config))
    for key, expected in chain(rules_between_keys.mistakes(config, size), of_features):
        expected_values.setdefault(key, expected)
    for key, expected in expected_values.items():
        if key in GROUPS:
            yield f"{key}={getattr(config, key).name}: expected {expected}"
        else:
            yield f"{key}={shown(value_of(config, key))}: expected {expected}"
    for key, reason in without_effect(config):
        if key in expected_values or not any(name == key or name.startswith(f"{key}.") for name in given):
            continue
        value = getattr(config, key).name if key in GROUPS else shown(value_of(config, key))
        yield f"{key}={value}: it has no effect, as {reason}"


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


def read_section(kind: type[AnySection], values: dict[str, Any], prefix: str, mistakes: list[str]) -> AnySection:
    """The section with these values, and with its defaults for keys that are missing or wrong.

    Args:
      prefix: of the names of its keys, such as "training.".
      mistakes: takes a line for each unknown, missing or wrong key.
    """
    members = members_of(kind, prefix)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # a dataclass
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
            read[name] = read_section(chosen, inner, f"{member.name}.", mistakes)
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
    return None if value is None and key.is_optional else _as_type(value, key.kind)


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


def describe(error: Exception) -> str:
    """One line for a mistake that Hydra or OmegaConf found: the key, why, and the possible keys."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    lines = str(error).splitlines()
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key and cause.object_type is dict:
        override = re.match(r"Could not override '([^']+)'", lines[0])
        return unknown(str(cause.full_key) if override is None else override[1])
    parts = [line for line in lines[:2] if line.strip(" ^")]  # not the mark below the place of an error
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and dataclasses.is_dataclass(cause.object_type):
        return unknown_field(str(cause.full_key), [field.name for field in dataclasses.fields(cause.object_type)])
    if isinstance(cause, OmegaConfBaseException):
        subject = str(cause.full_key) if cause is error else lines[0]
        parts = [part for part in (subject, str(cause).splitlines()[0]) if part]
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).partition("/")
        if group in GROUPS:
            options = list(GROUPS[group].choices)
        else:
            options = list(MODES) if group == "mode" else in_order(set(error.options) - {"common"})
        expected = f"expected one of {', '.join(options)}"
        return f"{group}={name}: {' '.join(filter(None, (did_you_mean(name, options), expected)))}"
    return ": ".join(part.rstrip(".") for part in parts)
