"""Names that were public: each answers for one release, with a warning that says what to write now."""

import warnings
from importlib import import_module
from typing import Any, NamedTuple


class OldName(NamedTuple):
    module: str  # imported when the name is used, because most need jax
    name: str  # in that module
    now: str  # what to write instead


OLD = {
    "ExpertGroup": OldName("zero.groups", "ExpertGroup", "zero.groups.ExpertGroup"),
    "LeafLayout": OldName("zero.groups", "LeafLayout", "zero.groups.LeafLayout"),
    "Split": OldName("zero.groups", "Split", "zero.groups.Split"),
    "TensorGroup": OldName("zero.groups", "TensorGroup", "zero.groups.TensorGroup"),
    "adafactor": OldName("zero.partition.sharded_optimizer", "adafactor", "zero.across_shards(optax.adafactor(...))"),
    "clip_by_global_norm": OldName(
        "zero.partition.sharded_optimizer",
        "clip_by_global_norm",
        "zero.across_shards(optax.clip_by_global_norm(...))",
    ),
    "from_host": OldName("zero.partition.train_state", "to_devices", "zero.to_devices(tree, layout, axis)"),
    "lamb": OldName("zero.partition.sharded_optimizer", "lamb", "zero.across_shards(optax.lamb(...))"),
    "lars": OldName("zero.partition.sharded_optimizer", "lars", "zero.across_shards(optax.lars(...))"),
    "muon": OldName("zero.partition.sharded_optimizer", "muon", "zero.across_shards(optax.contrib.muon(...))"),
    "quantised_adamw": OldName("zero.quantised", "adamw", "zero.quantised.adamw"),
    "quantised_lion": OldName("zero.quantised", "lion", "zero.quantised.lion"),
    "round_stochastically": OldName("zero.quantised", "round_stochastically", "zero.quantised.round_stochastically"),
    "shard_state": OldName(
        "zero.partition.old_functions",
        "shard_state",
        "zero.to_devices(state), or zero.to_devices(opt_state, like=tx.init(params))",
    ),
    "whole_state": OldName(
        "zero.partition.old_functions", "whole_state", "zero.to_host(state), or inside pmap zero.gather(opt_state)"
    ),
}


def old_name(name: str) -> Any:
    """The value of a name that was public.

    Raises:
      AttributeError: it never was.
    """
    if name not in OLD:
        raise AttributeError(f"module 'zero' has no attribute {name!r}")
    old = OLD[name]
    warnings.warn(f"zero.{name} goes with the next release: write {old.now}", DeprecationWarning, stacklevel=3)
    return getattr(import_module(old.module), old.name)
