"""Low-rank adapters: trained products beside the frozen products of a model.

A product x W becomes x W + alpha / rank (x A) B. W is frozen, A and B are trained; B starts at zero, so the model
starts as it was. They are leaves beside the kernel, `lora_a` and `lora_b`.

Source: LoRA (Hu et al., arXiv 2106.09685), section 4.1. Initial values are those of PEFT.

Shapes are named by suffix:
  B rows, I inputs and O outputs of a product, R rank, L layers
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from zero.models.elements import dropout

LORA_A, LORA_B = "lora_a", "lora_b"
MATRICES = ("kernel", LORA_A, LORA_B)  # names of leaves that are matrices of products
# The products of a layer, in the order of their numbers for dropout.
PRODUCTS = ("query", "key", "value", "attention_out", "mlp_in", "mlp_gate", "mlp_out")


@dataclasses.dataclass(frozen=True)
class Adapters:
    """The products of a model that have adapters, and the rank, scale and dropout of these.

    Attributes:
      rank: the inner dimension R.
      alpha: the products of adapters are multiplied by alpha / rank.
      dropout: dropout rate of the input of an adapter.
      targets: names of products, of `PRODUCTS`; those that a model does not have, and those of experts, are left out.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = PRODUCTS

    @property
    def scale(self) -> float:
        """The factor of the product (x A) B."""
        return self.alpha / self.rank

    def shapes(self, params: Any) -> Any:
        """The tree of adapters for a tree of whole parameters or shapes, as float32 `jax.ShapeDtypeStruct`s.

        >>> kernel = jax.ShapeDtypeStruct((2, 6, 8), jnp.float32)
        >>> shapes = Adapters(rank=3, alpha=3).shapes({"blocks": {"query": {"kernel": kernel}, "norm": {}}})
        >>> jax.tree.map(lambda leaf: leaf.shape, shapes)
        {'blocks': {'query': {'lora_a': (2, 6, 3), 'lora_b': (2, 3, 8)}}}
        """

        def below(tree: Any, name: str) -> Any:
            if name in self.targets and "kernel" in tree:
                *layers, inputs, outputs = tree["kernel"].shape
                return {
                    LORA_A: jax.ShapeDtypeStruct((*layers, inputs, self.rank), jnp.float32),
                    LORA_B: jax.ShapeDtypeStruct((*layers, self.rank, outputs), jnp.float32),
                }
            subtrees = {key: below(one, key) for key, one in tree.items() if isinstance(one, dict) and key != "experts"}
            return {key: one for key, one in subtrees.items() if one}

        return below(params, "")

    def init(self, key: jax.Array, shapes: Any) -> Any:
        """Whole new adapters of these shapes: A uniform within 1 / sqrt(I), B zero."""
        numbers = itertools.count()

        def new(path: Any, leaf: Any) -> jax.Array:
            own = jax.random.fold_in(key, next(numbers))
            if path[-1].key == LORA_B:
                return jnp.zeros(leaf.shape)
            bound = 1 / math.sqrt(leaf.shape[-2])
            return jax.random.uniform(own, leaf.shape, minval=-bound, maxval=bound)

        return jax.tree_util.tree_map_with_path(new, shapes)


class AdaptedDense(nn.Module):
    """`nn.Dense` with an adapter.

    Attributes:
      features, use_bias, dtype, kernel_init: as of `nn.Dense`.
      adapters: the rank, the scale and the dropout rate.
      keys_B: one dropout key per row, or None for no dropout.
      total: sums partial products over devices that each have a part of the inputs; None where they have all.
    """

    features: int
    use_bias: bool
    dtype: DTypeLike
    kernel_init: Any
    adapters: Adapters
    keys_B: jax.Array | None = None
    total: Callable[[jax.Array], jax.Array] | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inputs, rank = x.shape[-1], self.adapters.rank
        kernel_IO = self.param("kernel", self.kernel_init, (inputs, self.features)).astype(self.dtype)
        a_IR = self.param(LORA_A, nn.initializers.zeros, (inputs, rank)).astype(self.dtype)
        b_RO = self.param(LORA_B, nn.initializers.zeros, (rank, self.features)).astype(self.dtype)
        keys_B = self.keys_B
        if keys_B is not None:
            keys_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, PRODUCTS.index(str(self.name)))
        x = x.astype(self.dtype)
        low = _times(_times(dropout(x, self.adapters.dropout, keys_B), a_IR), b_RO)
        y = _times(x, kernel_IO) + self.adapters.scale * low
        y = y if self.total is None else self.total(y)
        if self.use_bias:
            bias_O = self.param("bias", nn.initializers.zeros, (self.features,)).astype(self.dtype)
            y = y + bias_O.reshape((1,) * (y.ndim - 1) + (-1,))
        return y


def _times(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


def split_adapters(params: Any) -> tuple[Any, Any]:
    """The adapters of a tree of parameters, and the tree without them; neither has empty subtrees.

    >>> split_adapters({"query": {"kernel": 1, "lora_a": 2}, "norm": {"scale": 3}})
    ({'query': {'lora_a': 2}}, {'query': {'kernel': 1}, 'norm': {'scale': 3}})
    """
    found: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, one in params.items():
        parts = split_adapters(one) if isinstance(one, dict) else ((one, {}) if name in (LORA_A, LORA_B) else ({}, one))
        for tree, part in zip(found, parts, strict=True):
            if not isinstance(part, dict) or part:
                tree[name] = part
    return found


def combine(params: Any, others: Any) -> Any:
    """Both trees in one; the inverse of `split_adapters`.

    >>> combine({"query": {"kernel": 1}}, {"query": {"lora_a": 2}})
    {'query': {'kernel': 1, 'lora_a': 2}}
    """
    both = dict(params)
    for name, one in others.items():
        both[name] = combine(params[name], one) if name in params else one
    return both


def merged(params: Any, adapters: Any, scale: float) -> Any:
    """The parameters, whole, of a model without adapters that computes the same: W + scale A B, in float32.

    >>> adapters = {"query": {"lora_a": jnp.ones((1, 2)), "lora_b": jnp.ones((2, 1))}}
    >>> merged({"query": {"kernel": jnp.ones((1, 1))}}, adapters, 0.5)["query"]["kernel"].tolist()
    [[2.0]]
    """
    if LORA_A in adapters:
        low = jnp.matmul(adapters[LORA_A], adapters[LORA_B], precision=lax.Precision.HIGHEST)
        return {**params, "kernel": params["kernel"] + scale * low.astype(jnp.float32)}
    return {name: merged(one, adapters[name], scale) if name in adapters else one for name, one in params.items()}
