"""Names that were public: each answers for one release, with a warning that says what to write now."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from zero import groups
from zero.partition import quantised_optimizers, sharded_optimizer
from zero.partition.layout import PyTree
from zero.partition.sharded_optimizer import ShardedOptimizer
from zero.partition.sharded_state import Origin, ShardedState, WholeState, origin_of, require_sharded
from zero.partition.stages import gather
from zero.partition.train_state import to_devices, to_host

Devices = Sequence[jax.Device] | Mesh | None


def _origin(tx: ShardedOptimizer, params: PyTree) -> Origin:
    if not isinstance(tx, ShardedOptimizer):
        raise TypeError(f"tx must be what zero.shard_optimizer returned, got a {type(tx).__name__}")
    return origin_of(tx.unsharded.init, params, tx.axis)


def whole_state(
    opt_state: ShardedState, tx: ShardedOptimizer, params: PyTree, devices: Devices = None, *, timeout: float = 300
) -> PyTree:
    """`zero.to_host(opt_state)`, inside pmap `zero.gather(opt_state)`."""
    state = replace(require_sharded(opt_state), origin=_origin(tx, params))
    if isinstance(state.shard, jax.core.Tracer):
        return gather(state)
    return to_host(state, devices=devices, timeout=timeout)


def shard_state(opt_state: PyTree, tx: ShardedOptimizer, params: PyTree, devices: Devices = None) -> ShardedState:
    """`zero.to_devices(opt_state, like=tx.init(params))`."""
    return to_devices(opt_state, devices=devices, like=WholeState(None, _origin(tx, params)))


# Old name: its value, and what to write now.
OLD: dict[str, tuple[Callable[..., Any], str]] = {
    "ExpertGroup": (groups.ExpertGroup, "zero.groups.ExpertGroup"),
    "LeafLayout": (groups.LeafLayout, "zero.groups.LeafLayout"),
    "Split": (groups.Split, "zero.groups.Split"),
    "TensorGroup": (groups.TensorGroup, "zero.groups.TensorGroup"),
    "adafactor": (sharded_optimizer.adafactor, "zero.across_shards(optax.adafactor(...))"),
    "clip_by_global_norm": (
        sharded_optimizer.clip_by_global_norm,
        "zero.across_shards(optax.clip_by_global_norm(...))",
    ),
    "from_host": (to_devices, "zero.to_devices(tree, layout, axis)"),
    "lamb": (sharded_optimizer.lamb, "zero.across_shards(optax.lamb(...))"),
    "lars": (sharded_optimizer.lars, "zero.across_shards(optax.lars(...))"),
    "muon": (sharded_optimizer.muon, "zero.across_shards(optax.contrib.muon(...))"),
    "quantised_adamw": (quantised_optimizers.quantised_adamw, "zero.quantised.adamw"),
    "quantised_lion": (quantised_optimizers.quantised_lion, "zero.quantised.lion"),
    "round_stochastically": (quantised_optimizers.round_stochastically, "zero.quantised.round_stochastically"),
    "shard_state": (shard_state, "zero.to_devices(state), or zero.to_devices(opt_state, like=tx.init(params))"),
    "whole_state": (whole_state, "zero.to_host(state), or inside pmap zero.gather(opt_state)"),
}


def old_name(name: str) -> Any:
    """The value of a name that was public.

    Raises:
      AttributeError: it never was.
    """
    if name not in OLD:
        raise AttributeError(f"module 'zero' has no attribute {name!r}")
    value, new = OLD[name]
    warnings.warn(f"zero.{name} goes with the next release: write {new}", DeprecationWarning, stacklevel=3)
    return value
