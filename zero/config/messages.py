"""Error messages: suggestions for misspelled names, and the findings of Hydra and OmegaConf (hydra, omegaconf)."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType

from hydra.errors import MissingConfigException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

_NUMBER = re.compile(r"(\d+)")
_ESCAPED = re.compile(r"^While dereferencing interpolation '.*': (?=Value )")  # a literal text of the wrong type


def unknown_field(name: str, names: Sequence[str]) -> str:
    """A line for a key of a record, such as a model, that has no such key.

    >>> unknown_field("num_kv_head", ["num_head", "kv_heads", "windows"])
    'num_kv_head: no such key; did you mean num_head or kv_heads?'
    >>> unknown_field("x", ["num_head", "windows"])
    'x: no such key; expected one of num_head, windows'
    """
    similar = difflib.get_close_matches(name, names, n=2)
    if similar:
        return f"{name}: no such key; did you mean {' or '.join(similar)}?"
    return f"{name}: no such key; expected one of {', '.join(names)}"


def did_you_mean(value: object, options: Sequence[str]) -> str:
    """A "did you mean" question for a misspelled option; "" if no option is similar.

    >>> did_you_mean("v3-9", ["v3-8", "v3-32"]), did_you_mean("qwen", ["v3-8"])
    ('did you mean v3-8?', '')
    """
    similar = difflib.get_close_matches(str(value), options, n=2, cutoff=0.7)
    if not similar:
        return ""
    return f"did you mean {' or '.join(similar)}?"


def in_order(options: Iterable[str]) -> list[str]:
    """Names in the order of their letters and numbers.

    >>> in_order(["v3-32", "v3-8", "v3-8-host", "v10"])
    ['v3-8', 'v3-8-host', 'v3-32', 'v10']
    """
    return sorted(options, key=lambda name: [int(part) if part.isdigit() else part for part in _NUMBER.split(name)])


def similar_key(name: str, names: Iterable[str]) -> str:
    """A line for a key that no name of a configuration is: the one that was probably meant, else all.

    >>> similar_key("stage", ["zero.stage", "plan.grid.stage", "seed"])
    'stage: no such key; did you mean zero.stage or plan.grid.stage?'
    """
    known = list(names)
    without_section = [key for key in known if key.rpartition(".")[2] == name]
    if without_section:
        return f"{name}: no such key; did you mean {' or '.join(without_section)}?"
    sections = {key.partition(".")[0] for key in known}
    similar = difflib.get_close_matches(name, [*known, *sections], n=1, cutoff=0.75)
    if similar:
        return f"{name}: no such key; did you mean {similar[0]}?"
    prefix = name.rpartition(".")[0]
    siblings = [key.removeprefix(f"{prefix}.") for key in known if prefix and key.startswith(f"{prefix}.")]
    shown = dict.fromkeys(key.partition(".")[0] for key in siblings or known)
    return f"{name}: no such key; expected one of {', '.join(shown)}"


def chosen_instead(name: str, groups: Container[str], value: str = "...") -> str | None:
    """The replacement for the name of a choice used as a key; None for any other name.

    >>> chosen_instead("optimizer.name", ["optimizer"], "lion")
    'optimizer.name: use optimizer=lion'
    """
    group, _, last = name.partition(".")
    if group in groups and last == "name":
        return f"{name}: use {group}={value}"
    return None


def unknown_key(name: str, owners: Mapping[str, Sequence[str]], groups: Container[str]) -> str:
    """A line for a key that a run does not have: who has it, else the one that was probably meant, else all.

    Args:
      owners: every key with the choices or the mode that have it, such as optimizer=lion.
      groups: the names of the groups.

    >>> unknown_key("sample", {"sample.top_p": ("mode=sample",), "seed": ()}, [])
    'sample: only applies to mode=sample'
    """
    if (instead := chosen_instead(name, groups)) is not None:
        return instead
    of_mode = f"mode={name}"
    if any(of_mode in of_key for of_key in owners.values()):
        return f"{name}: only applies to {of_mode}"
    if owners.get(name):
        return f"{name}: only applies to {' and '.join(owners[name])}"
    return similar_key(name, owners)


def no_such_key(name: str) -> str:
    return f"{name}: no such key"


def describe(
    error: Exception,
    unknown: Callable[[str], str] = no_such_key,
    choices: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """One line for a mistake that Hydra or OmegaConf found: the key, why, and the possible keys.

    Args:
      unknown: a line for a key that no configuration has.
      choices: of groups; the choices of other groups are files.
    """
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    lines = str(error).splitlines()
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key and cause.object_type is dict:
        override = re.match(r"Could not override '([^']+)'", lines[0])
        return unknown(str(cause.full_key) if override is None else override[1])
    merged = re.match("Error merging override (.+)", lines[0])
    if merged is not None and "Cannot merge DictConfig with ListConfig" in str(cause):
        return f"{merged[1]}: expected a section of keys"
    parts = [line for line in lines[:2] if line.strip(" ^")]  # not the mark below the place of an error
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and dataclasses.is_dataclass(cause.object_type):
        return unknown_field(str(cause.full_key), [field.name for field in dataclasses.fields(cause.object_type)])
    if isinstance(cause, OmegaConfBaseException):
        subject = str(cause.full_key) if cause is error else lines[0]
        parts = [part for part in (subject, _ESCAPED.sub("", str(cause).splitlines()[0])) if part]
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).partition("/")
        options = choices.get(group) or in_order(set(error.options) - {"common"})
        expected = f"expected one of {', '.join(options)}"
        return f"{group}={name}: {' '.join(filter(None, (did_you_mean(name, options), expected)))}"
    return ": ".join(part.rstrip(".") for part in parts)
