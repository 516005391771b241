"""A run composes its configuration once.

Hydra composes it a first time to read `hydra.mode`, a sixth of a short run, and no command of the tests sets that key.
"""

from typing import Any


def default_mode(hydra: Any, config_name: str | None, overrides: list[str]) -> None:
    """In place of `hydra._internal.hydra.Hydra.get_mode`: the mode is what `--multirun` says."""
    assert not any("hydra.mode" in override for override in overrides)
