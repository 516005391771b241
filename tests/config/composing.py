"""`compose` makes a configuration from conf/config.yaml and overrides, as the command line does; `CONF` is conf/.

`Only` stands for the sizes in conf/model_config.yaml where a test has a model of its own.
"""

import copy
from functools import cache
from typing import Any, NamedTuple

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import zero.commands.modes  # noqa: F401  tells Hydra the keys
from zero.config.files import conf_directory
from zero.models.config import GPTConfig
from zero.run.config import GROUPS

CONF = conf_directory()
ABSENT = object()  # of a key that no file has; one that is null is there


@cache
def _composed(*overrides: str) -> DictConfig:
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", list(overrides))


def compose(*overrides: str) -> DictConfig:
    """Hydra composes anew where other files are chosen, keys are new or types wrong; else a copy is changed."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    files = [text for text, one in zip(overrides, parsed, strict=True) if one.key_or_group in {*GROUPS, "mode"}]
    plain = {
        one.key_or_group: one.value()
        for text, one in zip(overrides, parsed, strict=True)
        if one.type == OverrideType.CHANGE and text not in files
    }
    if len(files) + len(plain) < len(overrides):
        return copy.deepcopy(_composed(*overrides))
    config = copy.deepcopy(_composed(*files))
    if any(OmegaConf.select(config, key, default=ABSENT) is ABSENT for key in plain):
        return copy.deepcopy(_composed(*overrides))
    try:
        for key, value in plain.items():
            OmegaConf.update(config, key, value, merge=True)
    except OmegaConfBaseException:
        return copy.deepcopy(_composed(*overrides))
    return config


class Only(NamedTuple):
    """One model, whatever `model.size` names."""

    size: GPTConfig

    def chosen(self, model: Any) -> GPTConfig:
        return self.size
