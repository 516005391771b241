"""Parameter-efficient tuning: a partition of a model's parameters into adapters, which are trained, and a frozen base.

The adapters are the parameters of the training state, at any stage as any others. The base has no gradient and no
state: it is an argument of the programs beside the state, sharded as parameters are, and gathered as it is held. A part
of the model gets it as the collection "frozen", next to "params" (docs/decisions/tuning.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from zero.models.adapters import PRODUCTS, Adapters, combine, merged
from zero.models.config import STACK
from zero.partition.collectives.axis import Axis
from zero.partition.layout import Layout, PyTree
from zero.partition.stages import gather, shard

FROZEN = "frozen"  # the collection of variables that are not differentiated


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What is trained of a model, and how the rest is held.

    Attributes:
      adapters: the parameters that are trained.
      base_dtype: dtype in which matrices of the base are held; the others are float32.
    """

    adapters: Adapters
    base_dtype: str = "float32"


def make_tuning(keys: Mapping[str, Any]) -> Tuning | None:
    """What the keys of the section `tuning` describe; None for the method "all"."""
    if keys["method"] == "all":
        return None
    targets = PRODUCTS if keys["targets"] is None else tuple(keys["targets"])
    return Tuning(Adapters(keys["rank"], keys["alpha"], keys["dropout"], targets), keys["base_dtype"])


def with_frozen(module_class: type[nn.Module], thaw: Callable[[PyTree], PyTree]) -> type[nn.Module]:
    """The module class with the parameters that `thaw` makes of its collection "frozen", beside those of "params"."""

    def use(variables: PyTree) -> PyTree:
        frozen = lax.stop_gradient(thaw(variables.get(FROZEN, {})))
        return {"params": combine(frozen, variables.get("params", {}))}

    lifted: type[nn.Module] = nn.map_variables(module_class, ["params", FROZEN], use, mutable=False)
    return lifted


def merge_shards(base: PyTree, adapters: PyTree, *, layout: Layout, low: Layout, axis: Axis, scale: float) -> PyTree:
    """Shards of the parameters of the model without adapters that computes the same, in float32.

    Per device: float32 shards of the base and of the adapters in, with their layouts; one layer's products of adapters
    are whole at a time. Call inside pmap.
    """
    stack, own_layout, low_layout = base[STACK], layout.at(STACK), low.at(STACK)

    def one(own: PyTree, adapters: PyTree) -> PyTree:
        zeros = own_layout.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32))
        change = merged(zeros, gather(adapters, low_layout, axis), scale)
        return jax.tree.map(jnp.add, own, shard(change, own_layout, axis))

    return {**base, STACK: lax.map(lambda xs: one(*xs), (stack, adapters[STACK]))}
