"""Parts of a model that a warm start makes anew: those whose parameters say `fresh`, where its source holds none."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from zero.models.adapters import combine
from zero.models.config import STACK
from zero.models.score_head import replaced_by_scores
from zero.partition.layout import Layout, LeafLayout, PyTree
from zero.partition.pmapped import pmap
from zero.training.sharded_gpt import ShardedGPT

log = logging.getLogger(__name__)


class HeldParts(NamedTuple):
    """What a warm start reads from a source, and what it makes anew.

    Attributes:
      layouts: the layout of each tree that it reads. The parameters have the name "", a collection has its own.
      new: the names of the leaves that it makes anew. The name of a collection precedes those of its leaves.
    """

    layouts: dict[str, Layout]
    new: frozenset[str]

    def completed(self, origin: str, read: dict[str, PyTree], model: ShardedGPT, seed: int | None) -> PyTree:
        """Weights in shards for a pmap, from those of `layouts`; one line names the new parts."""
        weights = {**read[""], **{name: tree for name, tree in read.items() if name}}
        if not self.new:
            return weights
        parts = {name.partition("/")[0] for name in self.new} - {*model.collection_layouts}
        if used := sorted(part for part in parts if not replaced_by_scores(part, model.config)):
            log.info("%s: holds no %s, which starts with random weights", origin, ", ".join(used))
        return combine(weights, _new_values(model, self.new, seed or 0))


def held_parts(model: ShardedGPT, holds: Callable[[LeafLayout], bool], seed: int | None) -> HeldParts:
    """What is read from a source of which `holds` says whether it holds a parameter.

    Fresh parameters of a part are new if the source holds none of them; one that misses alone is an error of its
    reader. Without a seed for new values all parts are read, but for those that a head of scores replaces.
    """
    layouts = {"": model.layout, **model.collection_layouts}
    fresh: defaultdict[str, list[LeafLayout]] = defaultdict(list)
    for leaf in model.layout.leaves:
        is_fresh = seed is not None and model.axes[leaf.name].fresh
        if is_fresh or replaced_by_scores(leaf.path[0], model.config):
            fresh[leaf.path[0]].append(leaf)
    missing = {part: leaves for part, leaves in fresh.items() if not any(map(holds, leaves))}
    new = {"": {leaf.name for leaves in missing.values() for leaf in leaves}}
    for collection, layout in model.collection_layouts.items():
        new[collection] = {leaf.name for leaf in layout.leaves if leaf.path[0] in missing and leaf.path[0] != STACK}
    names = {f"{collection}/{name}".lstrip("/") for collection, own in new.items() for name in own}
    return HeldParts({name: layout.without(new[name]) for name, layout in layouts.items()}, frozenset(names))


def _new_values(model: ShardedGPT, names: frozenset[str], seed: int) -> PyTree:
    """Shards of these parameters of a new model; XLA computes no others."""

    def chosen(seed: jax.Array) -> PyTree:
        values = flatten_dict(model.init(jax.random.key(seed)), sep="/")
        return unflatten_dict({name: values[name] for name in names}, sep="/")

    return pmap(chosen, model.axis.name)(np.full(jax.local_device_count(), seed, np.uint32))
