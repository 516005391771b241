"""`compose` makes a configuration from conf/config.yaml and overrides, as the command line does; `CONF` is conf/.

`Only` stands for the sizes in conf/model_config.yaml where a test has a model of its own.
"""

from typing import NamedTuple

import hydra
from omegaconf import DictConfig

import zero.runtime.config.schema  # noqa: F401  declares the keys
from zero.models.config import GPTConfig
from zero.runtime.config.files import conf_directory
from zero.runtime.config.schema import Model

CONF = conf_directory()


def compose(*overrides: str) -> DictConfig:
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", list(overrides))


class Only(NamedTuple):
    """One model, whatever `model.size` names."""

    size: GPTConfig

    def chosen(self, model: Model) -> GPTConfig:
        return self.size
