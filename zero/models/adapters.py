"""Low-rank adapters: trained products beside the frozen products of a model.

A product x W becomes x W + alpha / rank (x A) B. W is frozen, A and B are trained; B starts at zero, so the model
starts as it was. They are leaves beside the kernel, `lora_a` and `lora_b`.

With magnitudes m, also trained, the column of each output has the norm m: W' = m (W + alpha / rank A B) / its norm. The
norm is a constant to the gradient. A magnitude is a leaf `magnitude`; it starts as the norm of the column of W.

Tables of the vocabulary may be trained whole beside adapters: a leaf `trained_NAME` is a copy of the leaf `NAME` of the
base, and takes its place where the model computes.

Source: LoRA (Hu et al., arXiv 2106.09685), section 4.1; DoRA (Liu et al., arXiv 2402.09353), sections 4.1 and 4.3.
Initial values are the same as in PEFT.

Shapes are named by suffix:
  B rows, I inputs and O outputs of a product, R rank, L layers
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax import lax
from jax.typing import DTypeLike

from zero.models.axes import RANK, Axes, leaf_name
from zero.models.elements import dropout, fold_keys
from zero.models.part import HEAD, VOCABULARY

LORA_A, LORA_B, MAGNITUDE = "lora_a", "lora_b", "magnitude"
LEAVES = (LORA_A, LORA_B, MAGNITUDE)
COPY = "trained_"  # begins the name of a leaf that is trained in place of one of the base
TABLES = (VOCABULARY, HEAD)  # parts of a model that may be trained whole
# The number of a product for its dropout. It is a list of names because dropout keys are folded with these numbers, and
# saved runs with adapters continue bit for bit. Other products have numbers of their names.
_NUMBERED = (
    *("query", "key", "value", "attention_out", "mlp_in", "mlp_gate", "mlp_out", "query_latent", "latent", "key_value"),
    *("attention_gate", "shared_gate", "output_gate", "rate", "decay_input"),
)


def product_number(product: str) -> int:
    """The number of a product of a layer, by which the keys of its dropout differ from another's.

    >>> product_number("key"), product_number("mine")
    (1, 17204450)
    """
    if product in _NUMBERED:
        return _NUMBERED.index(product)
    return functools.reduce(lambda number, letter: (31 * number + letter) % 2**31, product.encode(), len(_NUMBERED))


@dataclasses.dataclass(frozen=True)
class Adapters:
    """The products of a model that have adapters, and the rank, scale and dropout of these.

    Attributes:
      rank: the inner dimension R.
      alpha: the products of adapters are multiplied by alpha / rank.
      dropout: dropout rate of the input of an adapter.
      targets: names of products; those that a model does not have are skipped. None: all that can have adapters.
      has_magnitudes: whether columns have trained norms (DoRA).
      ranks: of products with another rank.
      alphas: of products with another alpha.
      tables: of `TABLES`, those that are trained whole; one that a model does not have is left out.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None
    has_magnitudes: bool = False
    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()
    tables: tuple[str, ...] = ()

    def covers(self, product: str) -> bool:
        """Whether this product has an adapter."""
        return self.targets is None or product in self.targets

    def rank_of(self, product: str) -> int:
        """The inner dimension of the adapter of a product."""
        return dict(self.ranks).get(product, self.rank)

    def alpha_of(self, product: str) -> float:
        """The alpha of a product."""
        return dict(self.alphas).get(product, self.alpha)

    def scale_of(self, product: str) -> float:
        """The factor of (x A) B of a product.

        >>> adapters = Adapters(4, 8.0, ranks=(("query", 16),))
        >>> adapters.scale_of("key"), adapters.scale_of("query")
        (2.0, 0.5)
        """
        return self.alpha_of(product) / self.rank_of(product)

    def _beside(self, name: str, own: Axes) -> dict[str, Axes]:
        """The axes of the trained leaves beside a parameter, by name; none if it is frozen."""
        part, _, leaf = name.rpartition("/")
        if own.fresh or part in self.tables:
            return {f"{part}/{COPY}{leaf}": own}
        if not (own.adaptable and self.covers(part.rpartition("/")[2])):
            return {}
        *stack, inputs, outputs = own.names
        trained = {LORA_A: (*stack, inputs, RANK), LORA_B: (*stack, RANK, outputs)}
        trained |= {MAGNITUDE: (*stack, outputs)} if self.has_magnitudes else {}
        return {f"{part}/{leaf}": Axes(names) for leaf, names in trained.items()}

    def axes(self, axes: Mapping[str, Axes]) -> dict[str, Axes]:
        """The axes of the trained leaves, by name, for parameters of these axes.

        >>> Adapters(3, 3).axes({"blocks/query/kernel": Axes(("layers", "embed", "heads"), adaptable=True)}).keys()
        dict_keys(['blocks/query/lora_a', 'blocks/query/lora_b'])
        """
        return {
            name: own for whole, whole_axes in axes.items() for name, own in self._beside(whole, whole_axes).items()
        }

    def shapes(self, params: Any, axes: Mapping[str, Axes]) -> Any:
        """The tree of trained leaves for a tree of whole parameters or shapes, as float32 `jax.ShapeDtypeStruct`s.

        >>> params = {"query": {"kernel": jnp.zeros((6, 8))}, "head": {"table": jnp.zeros((9, 6))}}
        >>> axes = {"query/kernel": Axes(("embed", "heads"), adaptable=True), "head/table": Axes(("vocab", "embed"))}
        >>> jax.tree.map(lambda leaf: leaf.shape, Adapters(rank=3, alpha=3).shapes(params, axes))
        {'query': {'lora_a': (6, 3), 'lora_b': (3, 8)}}
        >>> Adapters(3, 3, targets=(), tables=("head",)).shapes(params, axes)
        {'head': {'trained_table': ShapeDtypeStruct(shape=(9, 6), dtype=float32)}}
        """
        shapes = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            name = leaf_name(path)
            product = name.split("/")[-2]
            sizes = {**dict(zip(axes[name].names, leaf.shape, strict=True)), RANK: self.rank_of(product)}
            for trained, own in self._beside(name, axes[name]).items():
                shape = tuple(sizes[axis] for axis in own.names)
                shapes[trained] = jax.ShapeDtypeStruct(shape, jnp.float32)
        return unflatten_dict(shapes, sep="/")

    def init(self, key: jax.Array, shapes: Any) -> Any:
        """Whole new adapters of these shapes: A uniform within 1 / sqrt(I), zeros for B and the base's copies."""
        numbers = itertools.count()

        def new(path: Any, leaf: Any) -> jax.Array:
            key_of_leaf = jax.random.fold_in(key, next(numbers))
            if path[-1].key != LORA_A:
                return jnp.zeros(leaf.shape)
            bound = 1 / math.sqrt(leaf.shape[-2])
            return jax.random.uniform(key_of_leaf, leaf.shape, minval=-bound, maxval=bound)

        return jax.tree_util.tree_map_with_path(new, shapes)


class AdaptedDense(nn.Module):
    """`nn.Dense` with an adapter.

    Attributes:
      features, use_bias, dtype, kernel_init, bias_init: as for `nn.Dense`.
      adapters: the rank, the scale and the dropout rate.
      keys_B: one dropout key per row, or None for no dropout.
      total: sums partial products over devices that each have a part of the inputs; None if they have all.
      stack: where they have a part, the arrays of all these devices in a new leading dimension.
    """

    features: int
    use_bias: bool
    dtype: DTypeLike
    kernel_init: Any
    adapters: Adapters
    keys_B: jax.Array | None = None
    total: Callable[[jax.Array], jax.Array] | None = None
    stack: Callable[[jax.Array], jax.Array] | None = None
    bias_init: Any = nn.initializers.zeros

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inputs = x.shape[-1]
        rank = self.adapters.rank_of(str(self.name))
        scale = self.adapters.scale_of(str(self.name))
        kernel_IO = self.param("kernel", self.kernel_init, (inputs, self.features)).astype(self.dtype)
        a_IR = self.param(LORA_A, nn.initializers.zeros, (inputs, rank)).astype(self.dtype)
        b_RO = self.param(LORA_B, nn.initializers.zeros, (rank, self.features)).astype(self.dtype)
        keys_B = fold_keys(self.keys_B, product_number(str(self.name)))
        x = x.astype(self.dtype)
        low = times_trained(times_trained(dropout(x, self.adapters.dropout, keys_B), a_IR), b_RO)
        y = _times(x, kernel_IO) + scale * low
        y = y if self.total is None else self.total(y)
        if self.adapters.has_magnitudes:
            magnitude_O = self.param(MAGNITUDE, nn.initializers.zeros, (self.features,)).astype(jnp.float32)
            squares_O = column_squares(kernel_IO, a_IR, b_RO, scale)
            squares_O = squares_O if self.stack is None else self.stack(squares_O).sum(0)
            ratio_O = magnitude_O / lax.stop_gradient(jnp.sqrt(squares_O))
            y = y * ratio_O.astype(self.dtype).reshape((1,) * (y.ndim - 1) + (-1,))
        if self.use_bias:
            bias_O = self.param("bias", self.bias_init, (self.features,)).astype(self.dtype)
            y = y + bias_O.reshape((1,) * (y.ndim - 1) + (-1,))
        return y


def _times(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


@jax.custom_vjp
def times_trained(x: jax.Array, w_IO: jax.Array) -> jax.Array:
    """`x @ w` of a matrix that is trained, whose gradient is fast on CPU too (docs/decisions/cpu-speed.md).

    On other platforms the gradient is jax's own. It does not use `zero.models.elements.product`, which would change the
    programs of adapters on TPU.

    >>> jax.grad(lambda w_IO: times_trained(jnp.ones((1, 3, 2)), w_IO).sum())(jnp.ones((2, 1))).tolist()
    [[3.0], [3.0]]
    """
    return _times(x, w_IO)


def _backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w_IO = saved

    def on_cpu(x: jax.Array, grad: jax.Array) -> jax.Array:
        # jax would make it the transpose of a product, which XLA's CPU library does not support.
        x_IN = lax.optimization_barrier(x.reshape(-1, x.shape[-1]).T)
        return x_IN @ grad.reshape(-1, grad.shape[-1])

    def elsewhere(x: jax.Array, grad: jax.Array) -> jax.Array:
        return jax.linear_transpose(lambda w_IO: _times(x, w_IO), w_IO)(grad)[0]

    w_grad_IO = lax.platform_dependent(x, grad, cpu=on_cpu, default=elsewhere)
    return jax.linear_transpose(lambda x: _times(x, w_IO), x)(grad)[0], w_grad_IO


times_trained.defvjp(lambda x, w_IO: (_times(x, w_IO), (x, w_IO)), _backward)


def column_squares(kernel_IO: jax.Array, a_IR: jax.Array, b_RO: jax.Array, scale: float) -> jax.Array:
    """The squared norm of each column of W + scale A B, float32; leading dimensions stay."""
    kernel_IO, a_IR, b_RO = (x.astype(jnp.float32) for x in (kernel_IO, a_IR, b_RO))
    return jnp.sum(jnp.square(kernel_IO + scale * jnp.matmul(a_IR, b_RO, precision=lax.Precision.HIGHEST)), axis=-2)


def split_adapters(params: Any) -> tuple[Any, Any]:
    """The adapters of a tree of parameters, and the tree without them; neither has empty subtrees.

    >>> split_adapters({"query": {"kernel": 1, "lora_a": 2}, "norm": {"scale": 3}})
    ({'query': {'lora_a': 2}}, {'query': {'kernel': 1}, 'norm': {'scale': 3}})
    """
    adapters: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, dict):
            adapters_within, others_within = split_adapters(value)
            if adapters_within:
                adapters[name] = adapters_within
            if others_within:
                others[name] = others_within
        elif name in LEAVES or name.startswith(COPY):
            adapters[name] = value
        else:
            others[name] = value
    return adapters, others


def combine(params: Any, others: Any) -> Any:
    """Both trees in one; the inverse of `split_adapters`.

    >>> combine({"query": {"kernel": 1}}, {"query": {"lora_a": 2}})
    {'query': {'kernel': 1, 'lora_a': 2}}
    """
    both = dict(params)
    for name, tree in others.items():
        both[name] = combine(params[name], tree) if name in params else tree
    return both


def resolved(params: Any) -> Any:
    """The tree in which trained copies have taken the places of their leaves.

    >>> resolved({"head": {"table": 1, "trained_table": 2}, "norm": {"scale": 3}})
    {'head': {'table': 2}, 'norm': {'scale': 3}}
    """
    inner = {name: resolved(value) if isinstance(value, dict) else value for name, value in params.items()}
    copies = {name.removeprefix(COPY): value for name, value in inner.items() if name.startswith(COPY)}
    return {name: copies.get(name, value) for name, value in inner.items() if not name.startswith(COPY)}


def with_copies(adapters: Any, base: Any) -> Any:
    """The adapters, with the leaves of the base as trained copies; whole, or shards of both.

    >>> with_copies({"head": {"trained_table": jnp.zeros(1)}}, {"head": {"table": jnp.ones(1)}})["head"]
    {'trained_table': Array([1.], dtype=float32)}
    """
    filled: dict[str, Any] = {}
    for name, value in adapters.items():
        if isinstance(value, dict):
            filled[name] = with_copies(value, base[name])
        else:
            is_copy = name.startswith(COPY)
            filled[name] = base[name.removeprefix(COPY)].astype(value.dtype) if is_copy else value
    return filled


def merged(params: Any, trained: Any, adapters: Adapters, name: str = "") -> Any:
    """The parameters, whole, of a model without adapters that computes the same, in float32.

    W + scale A B, or with magnitudes its columns of these norms; trained copies take the places of their leaves.

    Args:
      params: of the model, or of its part `name`.
      trained: the trained values of the same part.
      adapters: what these values are.
      name: of the part; "" for the whole model.

    >>> trained = {"query": {"lora_a": jnp.ones((1, 2)), "lora_b": jnp.ones((2, 1))}}
    >>> merged({"query": {"kernel": jnp.ones((1, 1))}}, trained, Adapters(2, 1.0))["query"]["kernel"].tolist()
    [[2.0]]
    """
    if LORA_A in trained:
        low = jnp.matmul(trained[LORA_A], trained[LORA_B], precision=lax.Precision.HIGHEST)
        kernel_IO = params["kernel"] + adapters.scale_of(name) * low.astype(jnp.float32)
        if MAGNITUDE in trained:
            norms_O = jnp.linalg.norm(kernel_IO, axis=-2)
            kernel_IO = kernel_IO * (trained[MAGNITUDE] / norms_O)[..., None, :]
        return {**params, "kernel": kernel_IO}
    both = {}
    for part, value in params.items():
        both[part] = merged(value, trained[part], adapters, part) if isinstance(trained.get(part), dict) else value
    return resolved({**both, **{leaf: value for leaf, value in trained.items() if leaf.startswith(COPY)}})


def measured(params: Any, trained: Any, adapters: Adapters, name: str = "") -> Any:
    """The trained values, whole, with the column norms of W + scale A B as magnitudes, which change nothing.

    Arguments as for `merged`.

    >>> trained = {"query": {"lora_a": jnp.zeros((2, 1)), "lora_b": jnp.zeros((1, 1)), "magnitude": jnp.zeros(1)}}
    >>> kernel = {"query": {"kernel": jnp.asarray([[3.0], [4.0]])}}
    >>> measured(kernel, trained, Adapters(1, 1.0))["query"]["magnitude"].tolist()
    [5.0]
    """
    if MAGNITUDE in trained:
        squares_O = column_squares(params["kernel"], trained[LORA_A], trained[LORA_B], adapters.scale_of(name))
        return {**trained, MAGNITUDE: jnp.sqrt(squares_O)}
    parts = [part for part, value in trained.items() if isinstance(value, dict)]
    return {**trained, **{part: measured(params[part], trained[part], adapters, part) for part in parts}}
