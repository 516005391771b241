"""Checks a configuration before anything starts, and lists every mistake in it (hydra, omegaconf)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol, get_args, get_type_hints

from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from zero.config import rules_between_keys
from zero.config.constraints import shown
from zero.config.schema import Config, Model
from zero.errors import UserError
from zero.models.config import GPTConfig


class Sizes(Protocol):
    """The entries of model_config.yaml."""

    def chosen(self, model: Model) -> GPTConfig:
        """The entry that the section `model` names, with its overrides; raises UserError where there is none."""


def check(config: DictConfig, sizes: Sizes) -> Config:
    """The configuration as plain typed values, if it can be run at all.

    Raises:
      UserError: a line for each key that is unknown or missing, or whose value is wrong by itself or beside others:
        the key, its value and the expected one.
    """
    typed = OmegaConf.structured(Config)
    mistakes = list(_assign(typed, config))
    missing = OmegaConf.missing_keys(typed)
    named = [line.partition("=")[0] for line in mistakes]
    mistakes += [f"{key}: missing" for key in sorted(missing) if not any(f"{key}.".startswith(f"{x}.") for x in named)]
    wrong = dict(_wrong_values(typed))
    size: GPTConfig | None = None
    if not any(key.startswith("model.") for key in (*missing, *wrong)):
        try:
            size = sizes.chosen(OmegaConf.to_object(typed.model))  # type: ignore[arg-type]  # a Model
        except UserError as error:
            mistakes += str(error).splitlines()
    if size is not None and not missing and not wrong:  # each key is right by itself, so that a rule may use any
        checked: Config = OmegaConf.to_object(typed)  # type: ignore[assignment]  # what a structured config becomes
        if checked.data.max_context is None:
            checked.data.max_context = size.block_size
        for key, expected in rules_between_keys.mistakes(checked, size):
            wrong.setdefault(key, expected)
    mistakes += [f"{key}={shown(OmegaConf.select(typed, key))}: expected {expected}" for key, expected in wrong.items()]
    if mistakes:
        raise UserError("\n".join(mistakes))
    return checked


def _assign(section: DictConfig, values: DictConfig, prefix: str = "") -> Iterator[str]:
    """Sets the values of a section key by key; a line for each unknown key, wrong type or wrong interpolation."""
    written: dict[Any, Any] = OmegaConf.to_container(values)  # type: ignore[assignment]  # a mapping, as values is
    names = [field.name for field in dataclasses.fields(OmegaConf.get_type(section))]  # type: ignore[arg-type]
    for key, text in written.items():
        if key in names and dataclasses.is_dataclass(OmegaConf.get_type(section, key)):
            if isinstance(text, dict):
                yield from _assign(section[key], values[key], f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}={shown(text)}: expected a section of keys"
            continue
        try:
            value = text if OmegaConf.is_missing(values, key) else values[key]
            section[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (ConfigKeyError, ConfigAttributeError) as error:
            yield describe(error)
        except OmegaConfBaseException as error:
            yield f"{prefix}{key}={shown(text)}: {str(error).splitlines()[0]}"


def _wrong_values(section: DictConfig, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys whose value does not pass the check of their field, and the expected value."""
    kind: Any = OmegaConf.get_type(section)
    types = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        key, is_optional = f"{prefix}{field.name}", type(None) in get_args(types[field.name])
        if dataclasses.is_dataclass(types[field.name]):
            yield from _wrong_values(section[field.name], f"{key}.")
        elif "check" in field.metadata and not OmegaConf.is_missing(section, field.name):
            value, (holds, expected) = section[field.name], field.metadata["check"]
            value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            if not (value is None and is_optional) and not holds(value):
                yield key, expected + (", or null" if is_optional else "")


def describe(error: Exception) -> str:
    """One line for a mistake that Hydra or OmegaConf found: the key, why, and the possible keys."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    lines = str(error).splitlines()
    parts = [line for line in lines[:2] if line.strip(" ^")]  # not the mark below the place of an error
    if isinstance(cause, OmegaConfBaseException):
        subject = str(cause.full_key) if cause is error else lines[0]
        parts = [part for part in (subject, str(cause).splitlines()[0]) if part]
        if isinstance(cause, ConfigKeyError | ConfigAttributeError) and dataclasses.is_dataclass(cause.object_type):
            parts.append("expected one of " + ", ".join(field.name for field in dataclasses.fields(cause.object_type)))
    if isinstance(error, MissingConfigException) and error.options:
        parts = [lines[0].rstrip(": "), "expected one of " + ", ".join(sorted(error.options))]
    return ": ".join(part.rstrip(".") for part in parts)
