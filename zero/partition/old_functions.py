"""What `zero.whole_state` and `zero.shard_state` did: `zero.old_names` answers with them for one release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
from jax.sharding import Mesh

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
