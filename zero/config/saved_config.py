"""The default configuration, and the configurations of saved runs (omegaconf)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zero.base.errors import UserError
from zero.base.keys import Group, Key, all_keys, defaults_of, shown
from zero.config.check import value_mistakes
from zero.config.files import conf_directory, literal
from zero.config.messages import describe
from zero.config.modes import Modes

log = logging.getLogger(__name__)


def defaults(modes: Modes, choices: Mapping[str, str]) -> DictConfig:
    """The configuration of a training run without overrides.

    Args:
      choices: of groups, such as optimizer="lion".
    """
    values = defaults_of(modes.first)
    for group in modes.groups.values():
        values[group.name] = defaults_of(group.choices.get(choices.get(group.name, ""), group.default))
    return OmegaConf.create(values)


def groups_of(saved: Mapping[str, Any]) -> dict[str, str]:
    """The choice of each group in a saved configuration, in which only the section of a choice has a name.

    >>> groups_of({"seed": 0, "training": {"ema": None}, "optimizer": {"name": "lion", "b1": 0.9}})
    {'optimizer': 'lion'}
    """
    return {
        group: section["name"] for group, section in saved.items() if isinstance(section, dict) and "name" in section
    }


def with_groups(overrides: Sequence[str], saved: Mapping[str, Any]) -> list[str]:
    """The overrides of a resume with the choices of its run, whose keys they may set."""
    named = {override.lstrip("+~").partition("=")[0] for override in overrides}
    choices = groups_of(saved)
    return [*overrides, *(f"{name}={choice}" for name, choice in choices.items() if name not in named)]


def merge_resumed(saved: DictConfig, config: DictConfig, overrides: list[str], modes: Modes) -> DictConfig:
    """The saved configuration of a run to resume or to use, with the current overrides.

    A preset among them changes nothing, because it is for a fresh start; a warning names the values that differ.

    Raises:
      UserError: overrides that would change what is fixed for a run, a line for each, beside those for values that
        are invalid.
    """
    given = [override.lstrip("+~").split("=", 1)[0] for override in overrides]
    try:
        values: dict[str, Any] = OmegaConf.to_container(saved)  # type: ignore[assignment]  # a mapping, as saved is
        earlier = _with_saved(values, modes)
        merged = copy.deepcopy(earlier)
        merged.mode = config.mode
        if config.mode in modes.own_sections:
            merged[config.mode] = config[config.mode]
        for key in all_keys(modes.first):
            if key.anew:
                OmegaConf.update(merged, key.name, literal(OmegaConf.select(config, key.name)))
        for name in given:
            if name in modes.groups and merged[name].name != config[name].name:
                merged[name] = config[name]
            elif name not in modes.groups and name.partition(".")[0] in config:  # others are Hydra's, or name a preset
                OmegaConf.update(merged, name, literal(OmegaConf.select(config, name)), merge=False, force_add=True)
    except OmegaConfBaseException as error:
        raise UserError(f"configuration of the run: {describe(error, modes.unknown)}") from error
    if changed := list(_changes(earlier, merged, modes)):
        changed_keys = {line.partition("=")[0] for line in changed}
        invalid = [line for line in value_mistakes(merged, modes) if line.partition("=")[0] not in changed_keys]
        raise UserError("\n".join([*invalid, *changed]))
    kept = [key for key in preset_keys(overrides, modes.groups) if _differs(key, merged, config, modes)]
    if kept:
        values_kept = ", ".join(f"{key}={shown(OmegaConf.select(merged, key))}" for key in kept)
        log.warning("a preset only applies to a fresh start; the run keeps its own values: %s", values_kept)
    merged.resume = config.resume
    return merged


def _differs(key: str, merged: DictConfig, config: DictConfig, modes: Modes) -> bool:
    if key.partition(".")[0] in modes.own_sections:
        return False
    return bool(OmegaConf.select(merged, key) != OmegaConf.select(config, key))


def _with_saved(saved: Mapping[str, Any], modes: Modes) -> DictConfig:
    """The configuration of a run, with the defaults of keys that it lacks.

    Raises:
      UserError: it has a key that does not exist.
    """
    merged = defaults(modes, groups_of(saved))
    mistakes = []
    for section, values in saved.items():
        if section in modes.own_sections:
            continue
        if section not in merged:
            mistakes.append(modes.unknown(section))
        elif not isinstance(merged[section], DictConfig):
            merged[section] = values
        elif not isinstance(values, dict):
            mistakes.append(f"{section}={shown(values)}: expected a section of keys")
        else:
            for name, value in values.items():
                if name in merged[section]:
                    merged[section][name] = value
                else:
                    mistakes.append(modes.unknown(f"{section}.{name}"))
    if mistakes:
        raise UserError("\n".join(f"configuration of the run: {mistake}" for mistake in mistakes))
    return merged


def _changes(earlier: DictConfig, merged: DictConfig, modes: Modes) -> Iterator[str]:
    """A line for each key or choice whose value may not change at a resume."""
    fixed = [key for key in all_keys(modes.first) if key.fixed and key.name.partition(".")[0] not in modes.groups]
    for group in modes.groups.values():
        before = earlier[group.name].name
        now = merged[group.name].name
        if before == now:
            fixed += fixed_keys(group, now)
        elif group.fixed:
            yield f"{group.name}={now}: expected {before}, the value of the run"
    for key in fixed:
        before = OmegaConf.select(earlier, key.name)
        now = OmegaConf.select(merged, key.name)
        is_same = before == now or (callable(key.fixed) and key.fixed(before, now))
        if not is_same:
            yield f"{key.name}={shown(now)}: expected {shown(before)}, the value of the run"


def fixed_keys(group: Group, choice: str) -> list[Key]:
    """The keys of a choice that a resume must not change."""
    kind = group.choices.get(choice)
    if kind is None:
        return []
    return [key for key in all_keys(kind, f"{group.name}.") if key.fixed]


def preset_keys(overrides: list[str], groups: Collection[str]) -> list[str]:
    """The keys that the presets, slices and memory recipes among the overrides set."""
    pairs = [override.lstrip("+").split("=", 1) for override in overrides if "=" in override]
    folders = {path.name for path in conf_directory().iterdir() if path.is_dir()}
    keys: list[str] = []
    for group, name in pairs:
        if group in folders:
            keys += _file_keys(group, name, groups)
    return list(dict.fromkeys(keys))


def _file_keys(group: str, name: str, groups: Collection[str]) -> Iterator[str]:
    """The keys of a file of a config group, and the keys of the files in its defaults list."""
    config = OmegaConf.load(conf_directory() / group / f"{name}.yaml")
    assert isinstance(config, DictConfig)
    for default in config.pop("defaults", []):
        if isinstance(default, DictConfig):  # /group: name, or override /group: name
            for entry, included in default.items():
                included_group = str(entry).removeprefix("override ").lstrip("/")
                if included_group in groups:
                    yield f"{included_group}.name"
                else:
                    yield from _file_keys(included_group, included, groups)
        elif default != "_self_":
            yield from _file_keys(group, default, groups)
    yield from flat_config(config)


def flat_config(config: Any) -> dict[str, str]:
    """`section.key` to the value as the command line takes it."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, DictConfig):
            flat |= {f"{key}.{name}": text for name, text in flat_config(value).items()}
        else:
            flat[str(key)] = shown(value)
    return flat
