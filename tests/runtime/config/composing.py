"""`compose` makes a configuration from conf/config.yaml and overrides, as the command line does; `CONF` is conf/."""

import hydra
from omegaconf import DictConfig

import zero.runtime.config.schema  # noqa: F401  declares the keys
from zero.runtime.config.files import conf_directory

CONF = conf_directory()


def compose(*overrides: str) -> DictConfig:
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", list(overrides))
