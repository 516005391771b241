"""Fixtures of the tests of runs."""

from typing import Any

import jax
import pytest


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What has been read from the devices so far."""
    read: list[Any] = []
    device_get = jax.device_get

    def counted(tree: Any) -> Any:
        read.append(tree)
        return device_get(tree)

    monkeypatch.setattr(jax, "device_get", counted)
    return read
