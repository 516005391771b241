"""The default configuration, and those of saved runs (omegaconf)."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zero.config.check import check, describe
from zero.config.constraints import shown
from zero.config.files import conf_directory, load_sizes
from zero.config.schema import Optimizer, Tuning
from zero.errors import UserError

log = logging.getLogger(__name__)

# Keys that a resume may not change: the model, the seed, the order of the data, and the optimizer.
# Not the paths of data and tokenizer, which may move: a resume compares their contents (docs/decisions/identity.md).
FIXED_KEYS = (
    "seed",
    "model.size",
    "model.sizes",
    "model.override",
    "training.ema",
    "training.objective",
    "data.max_context",
    "data.last_target",
    "data.shuffle_shards",
    "data.crop",
    *(f"optimizer.{field.name}" for field in dataclasses.fields(Optimizer) if field.name != "state_dtype"),
    *(f"tuning.{field.name}" for field in dataclasses.fields(Tuning)),
)


@cache
def _default() -> DictConfig:
    config = OmegaConf.load(conf_directory() / "config.yaml")
    assert isinstance(config, DictConfig)
    del config["defaults"], config["hydra"]
    return OmegaConf.create(dataclasses.asdict(check(config, load_sizes())))


def default_config() -> DictConfig:
    """The configuration of a run without overrides, as the run saves it: checked and typed."""
    return copy.deepcopy(_default())


def merge_resumed(saved: DictConfig, config: DictConfig, overrides: list[str]) -> DictConfig:
    """The saved configuration of a run to resume or to use, with the current overrides.

    A preset among them changes nothing, because it is for a fresh start; a warning names the values that differ.

    Raises:
      UserError: overrides that would change one of `FIXED_KEYS`, a line for each.
    """
    try:
        earlier = OmegaConf.merge(default_config(), saved)  # a run of an earlier version lacks the keys that came later
        # Only mode=plan reads the section plan, and it reads no saved configuration: earlier versions had other keys.
        current = config.copy()
        current.data.index_path_validation = None  # else sets that are named now would be joined by those of the run
        merged = OmegaConf.merge(current, OmegaConf.masked_copy(saved, [str(key) for key in saved if key != "plan"]))
        merged.model.ema = False  # it was chosen for that start
        merged.data.resume_step = None  # it was meant for that start
        for key in ("coordinator_address", "num_processes", "process_id"):  # they belong to the machines of that start
            merged.distributed[key] = config.distributed[key]
        for key in [override.lstrip("+~").split("=", 1)[0] for override in overrides]:
            if key.partition(".")[0] in merged:  # others are Hydra's own, or the name of a config group
                OmegaConf.update(merged, key, OmegaConf.select(config, key), merge=False)
    except OmegaConfBaseException as error:
        raise UserError(f"configuration of the run: {describe(error)}") from error
    fixed = (*FIXED_KEYS, "optimizer.state_dtype") if merged.optimizer.name == "lion" else FIXED_KEYS
    pairs = {key: (OmegaConf.select(earlier, key), OmegaConf.select(merged, key)) for key in fixed}
    changed = [
        f"{key}={shown(now)}: expected {shown(before)}, the value of the run"
        for key, (before, now) in pairs.items()
        if now != before
    ]
    if changed:
        raise UserError("\n".join(changed))
    if kept := [
        key for key in preset_keys(overrides) if OmegaConf.select(merged, key) != OmegaConf.select(config, key)
    ]:
        values = ", ".join(f"{key}={shown(OmegaConf.select(merged, key))}" for key in kept)
        log.warning("a preset is for a fresh start; the run keeps its own values: %s", values)
    merged.resume = config.resume
    assert isinstance(merged, DictConfig)
    return merged


def preset_keys(overrides: list[str]) -> list[str]:
    """The keys that the presets, slices and memory recipes among the overrides set."""
    pairs = [override.lstrip("+").split("=", 1) for override in overrides if "=" in override]
    groups = {path.name for path in conf_directory().iterdir() if path.is_dir()}
    return list(dict.fromkeys(key for group, name in pairs if group in groups for key in _file_keys(group, name)))


def _file_keys(group: str, name: str) -> Iterator[str]:
    """The keys of a file of a config group, and those of the files in its defaults list."""
    config = OmegaConf.load(conf_directory() / group / f"{name}.yaml")
    assert isinstance(config, DictConfig)
    for default in config.pop("defaults", []):
        if isinstance(default, DictConfig):  # /group: name
            for other, included in default.items():
                yield from _file_keys(str(other).lstrip("/"), included)
        elif default != "_self_":
            yield from _file_keys(group, default)
    yield from flat_config(config)


def flat_config(config: Any) -> dict[str, str]:
    """`section.key` to the value as the command line takes it."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, DictConfig):
            flat |= {f"{key}.{name}": one for name, one in flat_config(value).items()}
        else:
            flat[str(key)] = shown(value)
    return flat
