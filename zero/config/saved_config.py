"""The default configuration, and those of saved runs (omegaconf)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zero.base.errors import UserError
from zero.config.check import describe
from zero.config.constraints import shown
from zero.config.files import Sizes, conf_directory, load_sizes
from zero.config.keys import members_of
from zero.config.names import MOVED, unknown
from zero.config.schema import EMA, GROUPS, MODE_SECTIONS, default_section

log = logging.getLogger(__name__)

# Keys that a resume may not change: the model, the seed, the order of the data, what is trained and by what.
# Not the paths of data and tokenizer, nor of a file of model sizes, which may move: a resume compares their contents
# (docs/decisions/data-order.md).
FIXED_KEYS = (
    "seed",
    "model.size",
    "model.override",
    "training.ema",
    "objective.name",
    "data.max_context",
    "data.last_target",
    "data.shuffle_shards",
    "data.crop",
)
FIXED_GROUPS = ("optimizer", "tuning")
CONVERTED = {"adamw": ("state_dtype",)}  # keys of an optimizer that a resume may change


@cache
def _defaults_of_file() -> DictConfig:
    config = OmegaConf.load(conf_directory() / "config.yaml")
    assert isinstance(config, DictConfig)
    del config["defaults"], config["hydra"]
    return config


def default_config(**choices: str) -> DictConfig:
    """The configuration of a training run without overrides, as the run saves it: checked and typed.

    Args:
      choices: of groups, such as optimizer="lion".
    """
    config = _defaults(choices)
    size = load_sizes()[config.model.size]
    config.data.max_context = size.block_size  # as `check` makes it
    return config


def _defaults(choices: Mapping[str, str]) -> DictConfig:
    config = copy.deepcopy(_defaults_of_file())
    config.mode = "train"
    for group in GROUPS.values():
        kind = group.choices.get(choices.get(group.name, ""), group.default)
        config[group.name] = default_section(kind)
    return config


def upgraded(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved configuration of a run in today's keys.

    Runs that were started before groups existed have the keys of all choices in one section, null where they do not
    apply, and sections of modes.
    """
    new = copy.deepcopy(dict(saved))
    training = new.get("training", {})
    tuning = new.get("tuning", {})
    if training.pop("harness_frequency", None) is not None:
        new["harness"] = {"tasks": new.get("evaluate", {}).get("harness", [])}
    new.get("harness", {}).pop("every", None)
    for mode in MODE_SECTIONS:
        new.pop(mode, None)
    for old_name, new_name in MOVED.items():
        place, _, last = old_name.partition(".")
        if last in new.get(place, {}):
            new_place, _, new_last = new_name.partition(".")
            new.setdefault(new_place, {})[new_last] = new[place].pop(last)
    if training.pop("skip_bad_steps", True) is False:
        training["max_skipped_in_a_row"] = 0
    model = new.get("model", {})
    sizes = model.pop("sizes", None)
    if sizes is not None:
        model["size"] = _with_its_file(model["size"], sizes)
    if model.pop("ema", False) is True and model.get("warm_start") is True:
        model["warm_start"] = EMA
    data = new.get("data", {})
    data.pop("cache_bytes", None)
    hours = data.pop("keep_every_hours", None)
    if hours is not None and data.get("keep_every") is None:
        data["keep_every"] = _in_hours(hours)
    beta = training.pop("dpo_beta", None)
    if "objective" in training:
        name = training.pop("objective")
        new["objective"] = {"name": name} | ({"beta": beta} if name == "dpo" else {})
    if "method" in tuning:
        method = tuning.pop("method")
        tuning["name"] = "none" if method == "all" else method
    new.get("zero", {}).pop("replicate", None)
    for group in GROUPS.values():
        section = new.get(group.name)
        if isinstance(section, dict) and section.get("name") in group.choices:
            new[group.name] = _of_choice(section, group.choices[section["name"]])
    return new


def _with_its_file(size: str, path: str) -> str:
    """An entry of a file by both names; as it is if it was one of conf, which the file does not have."""
    file = Path(path)
    is_of_conf = size in load_sizes() and file.is_file() and size not in Sizes(file)
    return size if is_of_conf else f"{path}:{size}"


def _in_hours(hours: float) -> str:
    """The text of a number of hours.

    >>> _in_hours(2.0), _in_hours(0.5), _in_hours(1e-9)
    ('2h', '0.5h', '1e-09h')
    """
    return f"{str(hours).removesuffix('.0')}h"


def _of_choice(section: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The keys that this choice has. A null that it does not allow stood for its default."""
    members = {member.name: member for member in members_of(kind)}
    return {
        name: value
        for name, value in section.items()
        if name in members and not (value is None and not getattr(members[name], "is_optional", False))
    }


def groups_of(saved: Mapping[str, Any]) -> dict[str, str]:
    """The choice of each group in a saved configuration; an earlier version had its default only."""
    new = upgraded(saved)
    return {name: new[name]["name"] for name in GROUPS if "name" in (new.get(name) or {})}


def with_groups(overrides: Sequence[str], saved: Mapping[str, Any]) -> list[str]:
    """The overrides of a resume with the choices of its run, whose keys they may set."""
    named = {override.lstrip("+~").partition("=")[0] for override in overrides}
    return [*overrides, *(f"{name}={choice}" for name, choice in groups_of(saved).items() if name not in named)]


def merge_resumed(saved: DictConfig, config: DictConfig, overrides: list[str]) -> DictConfig:
    """The saved configuration of a run to resume or to use, with the current overrides.

    A preset among them changes nothing, because it is for a fresh start; a warning names the values that differ.

    Raises:
      UserError: overrides that would change one of `FIXED_KEYS`, a line for each; or a resume that would delete
        checkpoints, as the run keeps some by two rules.
    """
    given = [override.lstrip("+~").split("=", 1)[0] for override in overrides]
    try:
        values: dict[str, Any] = OmegaConf.to_container(saved)  # type: ignore[assignment]  # a mapping, as saved is
        earlier = _with_saved(values)
        merged = copy.deepcopy(earlier)
        merged.mode = config.mode
        for mode in MODE_SECTIONS:
            if mode == config.mode:
                merged[mode] = config[mode]
        merged.data.resume_step = None  # it was meant for that start
        for key in ("coordinator_address", "num_processes", "process_id"):  # they belong to the machines of that start
            merged.distributed[key] = config.distributed[key]
        for key in given:
            if key in GROUPS and merged[key].name != config[key].name:
                merged[key] = config[key]
            elif key not in GROUPS and key.partition(".")[0] in config:  # others are Hydra's own, or name a preset
                OmegaConf.update(merged, key, OmegaConf.select(config, key), merge=False, force_add=True)
    except OmegaConfBaseException as error:
        raise UserError(f"configuration of the run: {describe(error)}") from error
    changed = list(_changes(earlier, merged))
    if config.mode == "train" and "data.keep_every" not in given:
        changed += _kept_by_two_rules(values.get("data", {}))
    if changed:
        raise UserError("\n".join(changed))
    kept = [key for key in preset_keys(overrides) if _differs(key, merged, config)]
    if kept:
        values_kept = ", ".join(f"{key}={shown(OmegaConf.select(merged, key))}" for key in kept)
        log.warning("a preset is for a fresh start; the run keeps its own values: %s", values_kept)
    merged.resume = config.resume
    return merged


def _differs(key: str, merged: DictConfig, config: DictConfig) -> bool:
    if key.partition(".")[0] in MODE_SECTIONS:
        return False
    return bool(OmegaConf.select(merged, key) != OmegaConf.select(config, key))


def _with_saved(saved: Mapping[str, Any]) -> DictConfig:
    """The configuration of a run, with the defaults of keys that came after its version.

    Raises:
      UserError: it has a key that does not exist.
    """
    merged = _defaults(groups_of(saved))
    mistakes = []
    for section, values in upgraded(saved).items():
        if section not in merged:
            mistakes.append(unknown(section))
        elif not isinstance(merged[section], DictConfig):
            merged[section] = values
        elif not isinstance(values, dict):
            mistakes.append(f"{section}={shown(values)}: expected a section of keys")
        else:
            for name, value in values.items():
                if name in merged[section]:
                    merged[section][name] = value
                else:
                    mistakes.append(unknown(f"{section}.{name}"))
    if mistakes:
        raise UserError("\n".join(f"configuration of the run: {mistake}" for mistake in mistakes))
    return merged


def _changes(earlier: DictConfig, merged: DictConfig) -> Iterator[str]:
    """A line for each key whose value may not change at a resume."""
    for group in FIXED_GROUPS:
        before = earlier[group]
        now = merged[group]
        if before.name != now.name:
            yield f"{group}={now.name}: expected {before.name}, the value of the run"
            continue
        for name in before:
            if before[name] != now[name] and name not in CONVERTED.get(before.name, ()):
                yield f"{group}.{name}={shown(now[name])}: expected {shown(before[name])}, the value of the run"
    for key in FIXED_KEYS:
        before = OmegaConf.select(earlier, key)
        now = OmegaConf.select(merged, key)
        is_moved = key == "model.size" and _entry(before) == _entry(now)
        if before != now and not is_moved:
            yield f"{key.removesuffix('.name')}={shown(now)}: expected {shown(before)}, the value of the run"


def _entry(size: str) -> tuple[bool, str]:
    """Whether a model is of a file, wherever it lies, and the name of its entry.

    >>> _entry("my.yaml:mine"), _entry("bytes"), _entry("hf:a/b@c")
    ((True, 'mine'), (False, 'bytes'), (False, 'hf:a/b@c'))
    """
    path, _, name = size.rpartition(":")
    return (False, size) if path == "hf" else (bool(path), name)


def _kept_by_two_rules(data: Mapping[str, Any]) -> Iterator[str]:
    """A line for a run of an earlier version that keeps checkpoints by steps and by hours: a resume names one rule."""
    steps = data.get("keep_every")
    hours = data.get("keep_every_hours")
    if steps is not None and hours is not None:
        yield (
            f"data.keep_every={steps}: expected data.keep_every={steps} or data.keep_every={_in_hours(hours)} at this "
            f"resume, as the run has data.keep_every_hours={hours} too, and checkpoints are kept by one of them now"
        )


def preset_keys(overrides: list[str]) -> list[str]:
    """The keys that the presets, slices and memory recipes among the overrides set."""
    pairs = [override.lstrip("+").split("=", 1) for override in overrides if "=" in override]
    groups = {path.name for path in conf_directory().iterdir() if path.is_dir()}
    keys: list[str] = []
    for group, name in pairs:
        if group in groups:
            keys += _file_keys(group, name)
    return list(dict.fromkeys(keys))


def _file_keys(group: str, name: str) -> Iterator[str]:
    """The keys of a file of a config group, and those of the files in its defaults list."""
    config = OmegaConf.load(conf_directory() / group / f"{name}.yaml")
    assert isinstance(config, DictConfig)
    for default in config.pop("defaults", []):
        if isinstance(default, DictConfig):  # /group: name, or override /group: name
            for entry, included in default.items():
                included_group = str(entry).removeprefix("override ").lstrip("/")
                if included_group in GROUPS:
                    yield f"{included_group}.name"
                else:
                    yield from _file_keys(included_group, included)
        elif default != "_self_":
            yield from _file_keys(group, default)
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
