"""The only place that calls `jax.pmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from zero.partition.collectives.ordering import in_order


def pmap(fn: Callable[..., Any], axis_name: str, devices: Sequence[Any] | None = None, **options: Any) -> Any:
    """`jax.pmap` of a per-device function, on CPU with its collectives `in_order`."""
    is_cpu = (devices or jax.devices())[0].platform == "cpu"
    return jax.pmap(in_order(fn) if is_cpu else fn, axis_name=axis_name, devices=devices, **options)
