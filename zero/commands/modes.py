"""The modes of the program: what each can be told, and how Hydra learns of it (hydra, omegaconf)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from zero.base.keys import defaults_of
from zero.config import check as checks
from zero.config import messages, saved_config
from zero.config.check import Sizes
from zero.config.modes import Modes
from zero.inference.config import EvaluateConfig, SampleConfig
from zero.planning.config import PlanConfig
from zero.run.config import TrainConfig, default_config

__all__ = ["MODES", "check", "default_config", "describe", "merge_resumed", "typed"]
MODES = Modes({"train": TrainConfig, "evaluate": EvaluateConfig, "sample": SampleConfig, "plan": PlanConfig})


def check(config: DictConfig, sizes: Sizes, given: Collection[str] = ()) -> Any:
    """The configuration of its mode as plain typed values, if it can be run at all: `zero.config.check.check`."""
    return checks.check(config, MODES, sizes, given)


def typed(config: DictConfig) -> Any:
    """The configuration of its mode as plain typed values: `zero.config.check.typed`."""
    return checks.typed(config, MODES)


def merge_resumed(saved: DictConfig, config: DictConfig, overrides: list[str]) -> DictConfig:
    """The saved configuration of a run with the current overrides: `zero.config.saved_config.merge_resumed`."""
    return saved_config.merge_resumed(saved, config, overrides, MODES)


def describe(error: Exception) -> str:
    """One line for a mistake that Hydra or OmegaConf found: `zero.config.messages.describe`."""
    return messages.describe(error, MODES.unknown, MODES.choices())


def _store() -> None:
    """Tells Hydra all keys, the groups and their choices, and that model.override takes any key.

    So a declared key can be composed before it is printed into conf/config.yaml.
    """
    store = ConfigStore.instance()
    keys = defaults_of(MODES.first)
    schema = OmegaConf.create({name: value for name, value in keys.items() if name not in (*MODES.groups, "mode")})
    OmegaConf.set_struct(schema.model.override, False)
    store.store(name="schema", node=schema)
    for group in MODES.groups.values():
        for name, kind in group.choices.items():
            store.store(group=group.name, name=name, node=defaults_of(kind))
    for mode in MODES.kinds:
        node: dict[str, Any] = {"mode": mode}
        if mode in MODES.own_sections:
            node[mode] = defaults_of(MODES.own_sections[mode])
        store.store(group="mode", name=mode, node=node, package="_global_")


_store()
