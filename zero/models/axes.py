"""Logical axes: every parameter names its dimensions, and its role, where it is made.

    self.param("kernel", named(init, EMBED, MLP), shape)

Tensor and expert groups, initial weights, weight decay, optimizers of matrices, adapters and warm starts read these
names (`zero.models.gpt.parameter_axes`) and know no module. As in t5x, MaxText and `flax.linen.with_partitioning`,
except that the names are no part of the parameters: these are plain arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

# Axes along which a leaf is a stack of parameters, one of each layer, chunk of the vocabulary, or expert.
LAYERS, CHUNKS, EXPERT = "layers", "chunks", "expert"
STACKED = (LAYERS, CHUNKS, EXPERT)
# Axes that the devices of a tensor group divide: the outputs of all heads of queries, or of keys and values; the hidden
# values of an MLP; the values of a gated unit; the tokens of a table.
HEADS, KV_HEADS, MLP, VALUES, VOCAB = "heads", "kv_heads", "mlp", "values", "vocab"
CUT = (HEADS, KV_HEADS, MLP, VALUES, VOCAB)
# Axes that each device has whole: the residual stream; one small number per head; an adapter's inner dimension; the
# outputs of a head of scores.
EMBED, PER_HEAD, RANK, SCORES = "embed", "per_head", "rank", "scores"
TAPS = "taps"  # the positions that a convolution sees


class Role(enum.Enum):
    """What a parameter is for, where its axes do not say it. Without one it is the matrix of a product, or a vector."""

    QUERY = "query"  # a product that makes queries, whose initial weights may carry the scale of attention
    RESIDUAL_OUT = "residual_out"  # a product whose outputs are added to the residual stream
    EMBEDDING = "embedding"  # the table that embeds tokens, and makes the logits if it is tied
    HEAD = "head"  # the table that makes the logits
    POSITIONS = "positions"  # of the positions that are added to embeddings
    LAST_NORM = "last_norm"  # of the norm before the head
    COEFFICIENTS = "coefficients"  # of no product: biases by distance, taps of a convolution


_NO_MATRICES = (Role.POSITIONS, Role.COEFFICIENTS)
_TABLES = (Role.EMBEDDING, Role.HEAD)


@dataclasses.dataclass(frozen=True)
class Axes:
    """What a parameter is.

    Attributes:
      names: of its dimensions.
      role: what it is for; None: the matrix of a product if two of its axes are no stack, else a vector.
      fresh: a warm start makes new values where its source holds none, and adapters train it whole.
      adaptable: a low-rank adapter can be beside it.
    """

    names: tuple[str, ...]
    role: Role | None = None
    fresh: bool = False
    adaptable: bool = False

    @property
    def own(self) -> tuple[str, ...]:
        """The axes of one parameter of the stack."""
        return tuple(name for name in self.names if name not in STACKED)

    @property
    def is_matrix(self) -> bool:
        """Whether it is one, or a stack of them: it decays, and its moments may be in fewer bits."""
        return len(self.own) > 1 and self.role not in _NO_MATRICES

    @property
    def is_table(self) -> bool:
        """Whether its rows are tokens."""
        return self.role in _TABLES

    @property
    def is_product(self) -> bool:
        """Whether it multiplies activations, `(inputs, outputs)`."""
        return self.is_matrix and not self.is_table

    @property
    def decays_in_gpt_neo(self) -> bool:
        """Whether it decays in GPT-Neo: also positions and the last norm, but no other norms and biases."""
        return self.is_matrix or self.role in (Role.POSITIONS, Role.LAST_NORM)

    @property
    def is_of_layers(self) -> bool:
        """Whether it is a stack of layers."""
        return LAYERS in self.names

    @property
    def has_experts(self) -> bool:
        """Whether each expert has one, in the dimension after that of layers."""
        return EXPERT in self.names

    @property
    def is_convolution(self) -> bool:
        """Whether it is the taps of a convolution over positions, `(taps, channels)`."""
        return TAPS in self.names

    @property
    def cut(self) -> int | None:
        """The dimension that tensor groups divide, counted from the last one; None for none.

        >>> Axes((LAYERS, EMBED, HEADS)).cut, Axes((LAYERS, HEADS, EMBED)).cut, Axes((LAYERS, EMBED)).cut
        (-1, -2, None)
        """
        cut = [number for number, name in enumerate(self.names) if name in CUT]
        return cut[0] - len(self.names) if cut else None

    def stacked(self, name: str) -> Axes:
        """The same for a stack, with this axis before the others."""
        return dataclasses.replace(self, names=(name, *self.names))


class _Named(struct.PyTreeNode, nn.meta.AxisMetadata[Any]):
    """A parameter with its axes, to which stacks add theirs."""

    value: Any
    axes: Axes = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> Any:
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> Any:
        return self.replace(axes=self.axes.stacked(params[_AXIS]))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Any:
        return self.replace(axes=dataclasses.replace(self.axes, names=self.axes.names[1:]))


_AXIS = "axis"
_collects: ContextVar[bool] = ContextVar("collects", default=False)


def along(name: str) -> dict[str, str]:
    """The `metadata_params` of `nn.scan` for a stack along this axis."""
    return {_AXIS: name}


def named(
    init: Callable[..., Any], *axes: str, role: Role | None = None, fresh: bool = False
) -> nn.initializers.Initializer:
    """The initializer of a parameter with these axes, for `self.param` and for modules that take initializers.

    >>> named(nn.initializers.ones, EMBED)(jax.random.key(0), (2,)).tolist()
    [1.0, 1.0]
    """
    return of_axes(init, Axes(axes, role, fresh))


def of_axes(init: Callable[..., Any], axes: Axes) -> nn.initializers.Initializer:
    """`named` with the axes in one record."""

    def named_init(key: jax.Array, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None) -> Any:
        x = init(key, shape, dtype)
        return _Named(x, axes) if _collects.get() else x

    return named_init


@contextlib.contextmanager
def _collecting() -> Iterator[None]:
    token = _collects.set(True)
    try:
        yield
    finally:
        _collects.reset(token)


def shapes_and_axes(init: Callable[..., Any], *arguments: Any) -> tuple[Any, dict[str, Axes]]:
    """The shapes of the variables that `init` makes, and the axes of each parameter by name ("blocks/query/kernel").

    Raises:
      ValueError: a parameter without axes, or with axes of another number of dimensions; the message names it.

    >>> model = nn.Dense(3, use_bias=False, kernel_init=named(nn.initializers.zeros, EMBED, MLP))
    >>> shapes, axes = shapes_and_axes(model.init, jax.random.key(0), jnp.ones((1, 2)))
    >>> shapes["params"]["kernel"].shape, axes["kernel"].names
    ((2, 3), ('embed', 'mlp'))
    """
    with _collecting():
        boxed = jax.eval_shape(init, *arguments)
    leaves = jax.tree_util.tree_leaves_with_path(boxed["params"], is_leaf=lambda x: isinstance(x, _Named))
    axes = {}
    for path, leaf in leaves:
        name = leaf_name(path)
        if not isinstance(leaf, _Named):
            raise ValueError(f"parameter {name} has no axes: expected zero.models.axes.named around its initializer")
        if len(leaf.axes.names) != len(leaf.value.shape):
            raise ValueError(f"parameter {name} of {leaf.value.shape}: expected an axis each, got {leaf.axes.names}")
        axes[name] = leaf.axes
    return nn.meta.unbox(boxed), axes


def leaf_name(path: Any) -> str:
    """The name of a leaf in a tree of parameters: "blocks/query/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def axes_of(axes: Mapping[str, Axes], name: str) -> Axes:
    """The axes of a leaf, or of the parameter whose codes or scales it is ("blocks/query/kernel/codes").

    >>> axes_of({"head/table": Axes((VOCAB, EMBED))}, "head/table/codes").names
    ('vocab', 'embed')
    """
    while name not in axes:
        name, is_within, _ = name.rpartition("/")
        if not is_within:
            raise KeyError(name)
    return axes[name]


def map_axes(fn: Callable[[Axes], Any], axes: Mapping[str, Axes], params: Any) -> Any:
    """A tree like `params`, of whole parameters or shards, with `fn` of the axes of each leaf.

    >>> axes = {"head/table": Axes((VOCAB, EMBED)), "norm/scale": Axes((EMBED,))}
    >>> map_axes(lambda own: own.is_matrix, axes, {"head": {"table": jnp.ones((3, 2))}, "norm": {"scale": jnp.ones(2)}})
    {'head': {'table': True}, 'norm': {'scale': False}}
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: fn(axes[leaf_name(path)]), params)
