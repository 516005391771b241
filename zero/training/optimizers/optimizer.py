"""Optimizers by name: optax's, exact on shards, without a learning rate; and the dtypes of their state.

Optimizers that are not element-wise see the arrays of one layer, not stacks of all layers: LAMB's norms, Adafactor's
factors and root mean squares and Muon's matrices are per layer. And they see one table of tokens, not its chunks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.typing import DTypeLike

from zero.base.keys import at_least, choice_name, fraction_below_one, key, named, one_of, positive
from zero.models.axes import Axes, map_axes
from zero.models.config import HEAD, STACK, STACKS, VOCABULARY
from zero.partition.layout import Layout, PyTree
from zero.partition.quantized import convert_adam, rounded_updates, scale_by_adam, scale_by_lion
from zero.partition.rewrite.entry_points import across_shards
from zero.training.optimizers import optimizer_keys as keys
from zero.training.optimizers.ademamix import AdEMAMix, ademamix
from zero.training.optimizers.optimizer_keys import Optimizer
from zero.training.optimizers.weight_decay import DECAYED, Multipliers, by_leaf, decayed, decoupled

B1, B2, EPS = 0.9, 0.95, 1e-8  # AdamW; b2 as in GPT-3, arXiv 2005.14165, appendix B


@dataclass(frozen=True)
class AdamW(Optimizer):
    """AdamW (arXiv 1711.05101)."""

    name: str = named("adamw")
    state_dtype: str = keys.state_dtype("The two moments, 8, 4 or 2 bytes per parameter,", fixed=False)  # type: ignore[misc]
    b1: float = keys.b1(0.9)
    b2: float = keys.b2(0.95)
    eps: float = keys.eps(1e-8)
    decay: str = keys.decay()  # type: ignore[misc]
    decay_on: str = key(
        "matrices",
        one_of(*DECAYED),
        "Which parameters decay: matrices, those of layers, vocabulary and head; gpt_neo, also positions and the last "
        "norm.",
        fixed=True,
    )
    bias_correction: bool = key(True, None, "Divide the moments by 1 - b^step.", fixed=True)
    scaled_eps: bool = key(
        False, None, "In muP, scale eps by the same factor as the learning rate of each array.", fixed=True
    )


def adamw(
    weight_decay: float,
    b1: float = B1,
    b2: float = B2,
    eps: float = EPS,
    decay: str = "rate",
    scaled_eps: bool = False,
    bias_correction: bool = True,
    decay_on: str = "matrices",
    *,
    axes: Mapping[str, Axes],
    state_dtype: DTypeLike = jnp.float32,
    multipliers: Multipliers | None = None,
) -> optax.GradientTransformation:
    """AdamW without a learning rate, element-wise and so right on shards; moments of matrices in `state_dtype`.

    With `scaled_eps`, epsilon is multiplied like the learning rate, leaf by leaf: gradients are divided instead.

    Source: Loshchilov and Hutter, arXiv 1711.05101.
    """
    is_matrix = decayed(axes)
    adam = scale_by_adam(b1, b2, eps, state_dtype=state_dtype, mask=is_matrix, bias_correction=bias_correction)
    if scaled_eps and multipliers is not None:
        adam = optax.chain(by_leaf(jnp.divide, multipliers), adam)
    return decoupled(adam, weight_decay, decayed(axes, decay_on), decay, multipliers)


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion (arXiv 2302.06675)."""

    name: str = named("lion")
    state_dtype: str = keys.state_dtype("The moment, 4, 2 or 1 bytes per parameter,")  # type: ignore[misc]
    b1: float = keys.b1(0.9)
    b2: float = key(0.99, fraction_below_one(), "Decay of the momentum.", fixed=True)
    decay: str = keys.decay()  # type: ignore[misc]


def _lion(
    weight_decay: float,
    b1: float = 0.9,
    b2: float = 0.99,
    decay: str = "rate",
    *,
    axes: Mapping[str, Axes],
    state_dtype: DTypeLike = jnp.float32,
    multipliers: Multipliers | None = None,
) -> optax.GradientTransformation:
    lion = scale_by_lion(b1, b2, state_dtype=state_dtype, mask=decayed(axes))
    return decoupled(lion, weight_decay, decayed(axes), decay, multipliers)


@dataclass(frozen=True)
class Sgd(Optimizer):
    """SGD with momentum; weight decay is added to the gradient."""

    name: str = named("sgd")
    b1: float = keys.b1(0.9, "Momentum.")
    nesterov: bool = key(False, None, "Nesterov momentum.", fixed=True)


def _sgd(weight_decay: float, b1: float = 0.9, nesterov: bool = False, *, axes: Mapping[str, Axes]) -> Any:
    return optax.chain(optax.add_decayed_weights(weight_decay, decayed(axes)), optax.trace(b1, nesterov))


@dataclass(frozen=True)
class Lamb(Optimizer):
    """LAMB (arXiv 1904.00962)."""

    name: str = named("lamb")
    b1: float = keys.b1(0.9)
    b2: float = keys.b2(0.999)
    eps: float = keys.eps(1e-6)


def _lamb(
    weight_decay: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-6, *, axes: Mapping[str, Axes]
) -> Any:
    return _ascending(optax.lamb(1.0, b1, b2, eps, weight_decay=weight_decay, mask=decayed(axes)))


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Adafactor (arXiv 1804.04235)."""

    name: str = named("adafactor")
    b1: float | None = keys.b1(None, "Decay of the mean of updates; null: no mean.")
    eps: float = keys.eps(1e-30, "Added to the square of the gradient.")
    decay_rate: float = key(0.8, positive(), "The mean square of step t decays by 1 - t^-decay_rate.", fixed=True)
    factored_from: int = key(
        128,
        at_least(2),
        "Matrices with both dimensions at least this long keep only means of rows and columns.",
        fixed=True,
    )
    max_update_rms: float = key(1.0, positive(), "Updates are scaled down to this root mean square.", fixed=True)
    scale_by_parameter: bool = key(
        True, None, "Updates are multiplied by the root mean square of their array.", fixed=True
    )
    min_scale: float = key(1e-3, positive(), "Lower bound of this factor.", fixed=True)


def _adafactor(
    weight_decay: float,
    b1: float | None = None,
    eps: float = 1e-30,
    decay_rate: float = 0.8,
    factored_from: int = 128,
    max_update_rms: float = 1.0,
    min_scale: float = 1e-3,
    scale_by_parameter: bool = True,
    *,
    axes: Mapping[str, Axes],
) -> Any:
    """`optax.adafactor`, which fixes the least scale, with its parts and so its state."""
    parts = [
        optax.scale_by_factored_rms(min_dim_size_to_factor=factored_from, decay_rate=decay_rate, epsilon=eps),
        optax.clip_by_block_rms(max_update_rms),
    ]
    if scale_by_parameter:
        parts.append(optax.scale_by_param_block_rms(min_scale))
    if b1 is not None:
        parts.append(optax.ema(b1, debias=False))
    return _ascending(optax.chain(*parts, optax.add_decayed_weights(weight_decay, decayed(axes)), optax.scale(-1)))


@dataclass(frozen=True)
class Muon(Optimizer):
    """Muon for the matrices of layers, Adam for the rest (https://kellerjordan.github.io/posts/muon/)."""

    name: str = named("muon")
    b1: float = keys.b1(0.95)
    newton_schulz_steps: int = key(5, at_least(1), "Iterations that orthogonalize an update.", fixed=True)
    update_rms: float = key(
        0.2,
        positive(),
        "Root mean square of an update before the learning rate, for rates like AdamW's (arXiv 2502.16982).",
        fixed=True,
    )
    adam_b1: float = keys.b1(0.9, "b1 for vectors and the vocabulary.")
    adam_b2: float = key(0.95, fraction_below_one(), "b2 for vectors and the vocabulary.", fixed=True)
    eps: float = keys.eps(1e-8)


def _muon(
    weight_decay: float,
    b1: float = 0.95,
    newton_schulz_steps: int = 5,
    update_rms: float = 0.2,
    adam_b1: float = 0.9,
    adam_b2: float = 0.95,
    eps: float = 1e-8,
    *,
    axes: Mapping[str, Axes],
) -> Any:
    muon = optax.contrib.muon(
        1.0,
        ns_steps=newton_schulz_steps,
        beta=b1,
        eps=eps,
        weight_decay=weight_decay,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_weight_decay=weight_decay,
        weight_decay_mask=decayed(axes),
        consistent_rms=update_rms,
        muon_weight_dimension_numbers=partial(map_axes, _matrix_of_layers, axes),
    )
    return _ascending(muon)


def _matrix_of_layers(axes: Axes) -> optax.contrib.MuonDimensionNumbers | None:
    """Muon's dimension numbers for a matrix of a layer, or those of experts; None leaves all others to Adam."""
    if not (axes.is_product and axes.is_of_layers):
        return None
    if axes.has_experts:
        return optax.contrib.MuonDimensionNumbers(1, 2)
    return optax.contrib.MuonDimensionNumbers()


def _ascending(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` with negated updates, because the step multiplies by minus the learning rate."""
    return optax.chain(tx, optax.scale(-1))


# The function of each optimizer. A change of an element by one of the first depends on that element alone.
_OF_ELEMENTS: Mapping[type[Optimizer], Callable[..., optax.GradientTransformation]] = MappingProxyType(
    {AdamW: adamw, AdEMAMix: ademamix, Lion: _lion, Sgd: _sgd}
)
_OF_LAYERS: Mapping[type[Optimizer], Callable[..., optax.GradientTransformation]] = MappingProxyType(
    {Adafactor: _adafactor, Lamb: _lamb, Muon: _muon}
)
OPTIMIZERS = (*_OF_ELEMENTS, *_OF_LAYERS)  # the choices of the group `optimizer`, the default first
ELEMENTWISE = MappingProxyType({choice_name(kind): function for kind, function in _OF_ELEMENTS.items()})
PER_LAYER = MappingProxyType({choice_name(kind): function for kind, function in _OF_LAYERS.items()})
NAMES = (*ELEMENTWISE, *PER_LAYER)
QUANTIZABLE = ("adamw", "lion")  # take `state_dtype`
MULTIPLIABLE = ("adamw", "lion")  # take `multipliers`


def make_optimizer(
    name: str,
    weight_decay: float,
    *,
    axes: Mapping[str, Axes],
    state_dtype: DTypeLike = jnp.float32,
    multipliers: Multipliers | None = None,
    vocab_size: int | None = None,
    **hyperparameters: Any,
) -> optax.GradientTransformation:
    """An optimizer whose updates the step multiplies by minus the learning rate.

    Args:
      name: one of NAMES. Sources: adamw arXiv 1711.05101, ademamix 2409.03137, lion 2302.06675, adafactor 1804.04235,
        lamb 1904.00962, muon https://kellerjordan.github.io/posts/muon/ with the scale of 2502.16982, section 2.2.
      weight_decay: for matrices and the vocabulary, multiplied by the learning rate; sgd adds it to the gradient.
      axes: of the parameters, by name (`zero.models.gpt.parameter_axes`, `ShardedGPT.axes`).
      state_dtype: dtype of the moments of adamw and lion.
      multipliers: factors of each leaf's learning rate, without weight decay; for adamw and lion.
      vocab_size: the number of tokens; rows of a table past it are padding. None for tables without padding.
      hyperparameters: as `hyperparameters(name)` lists them.

    Raises:
      ValueError: `multipliers` for another optimizer.
    """
    if multipliers is not None and name not in MULTIPLIABLE:
        raise ValueError(f"learning rates by leaf are for {' and '.join(MULTIPLIABLE)}, not for {name}")
    if name in QUANTIZABLE:
        return ELEMENTWISE[name](
            weight_decay, axes=axes, state_dtype=state_dtype, multipliers=multipliers, **hyperparameters
        )
    if name in ELEMENTWISE:
        return _in_float32(ELEMENTWISE[name](weight_decay, axes=axes, **hyperparameters))
    of_table = one_table(_in_float32(PER_LAYER[name](weight_decay, axes=axes, **hyperparameters)), vocab_size)
    of_layer = per_layer(of_table)
    return across_shards(of_layer)


def _in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transform with weights in float32, and so its state, which optax would begin in the dtype of the weights."""

    def init(params: Any) -> Any:
        return tx.init(_cast(params))

    def update(updates: Any, state: Any, params: Any | None = None) -> Any:
        return tx.update(updates, state, None if params is None else _cast(params))

    return optax.GradientTransformation(init, update)


def _cast(params: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


_NOT_CHOSEN = ("weight_decay", "axes", "state_dtype", "multipliers")  # arguments that follow from other keys


def hyperparameters(name: str) -> dict[str, Any]:
    """The hyperparameters of an optimizer with their defaults.

    >>> hyperparameters("lion")
    {'b1': 0.9, 'b2': 0.99, 'decay': 'rate'}
    """
    arguments = inspect.signature({**ELEMENTWISE, **PER_LAYER}[name]).parameters.values()
    return {a.name: a.default for a in arguments if a.name not in _NOT_CHOSEN}


def per_layer(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`tx` applied to each layer of the stacks in `params` (STACKS) separately, and to the other leaves.

    >>> lamb = per_layer(optax.scale_by_trust_ratio())
    >>> params = {STACK: {"w": jnp.array([[3.0, 4.0], [30.0, 40.0]])}}  # two layers, with norms 5 and 50
    >>> lamb.update({STACK: {"w": jnp.ones((2, 2))}}, lamb.init(params), params)[0][STACK]["w"].tolist()
    [[3.535..., 3.535...], [35.35..., 35.35...]]
    """
    inner = optax.with_extra_args_support(tx)

    def parts_of(tree: PyTree) -> dict[str, PyTree]:
        """Each stack, by its name in the state, and the rest."""
        rest = {name: subtree for name, subtree in tree.items() if name not in STACKS}
        stacks = {name.replace("blocks", "layers"): {name: tree[name]} for name in STACKS if name in tree}
        return {**stacks, "rest": rest}

    def init(params: PyTree) -> dict[str, PyTree]:
        parts = parts_of(params)
        return {name: (inner.init if name == "rest" else jax.vmap(inner.init))(part) for name, part in parts.items()}

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        update_part = partial(inner.update, **extra)
        parts = parts_of(updates)
        of_params = dict.fromkeys(parts) if params is None else parts_of(params)
        updates, new_state = {}, {}
        for name, part in parts.items():
            apply = update_part if name == "rest" else jax.vmap(update_part)
            updated, new_state[name] = apply(part, state[name], of_params[name])
            updates |= updated
        return updates, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def one_table(tx: optax.GradientTransformation, vocab_size: int | None) -> optax.GradientTransformationExtraArgs:
    """`tx`, to which each table `(chunks, rows, D)` is one leaf `(vocab_size, D)`; its state is in chunks again.

    So `vocab_chunks` changes no update: norms, factors and root mean squares are the table's, without the rows
    of padding in its last chunk. A single chunk without padding is left as it is.

    >>> norm = one_table(optax.scale_by_trust_ratio(), 3)
    >>> params = {VOCABULARY: {"table": jnp.array([[[3.0], [4.0]], [[0.0], [9.0]]])}}  # norm 5, and a row of padding
    >>> grads = jax.tree.map(jnp.ones_like, params)
    >>> norm.update(grads, norm.init(params), params)[0][VOCABULARY]["table"].ravel().tolist()
    [2.88..., 2.88..., 2.88..., 0.0]
    """
    inner = optax.with_extra_args_support(tx)

    def chunks_of(tree: PyTree) -> dict[str, tuple[int, int]]:
        """Numbers of chunks and rows of each chunked table."""
        tables = [(name, jax.tree.leaves(tree.get(name, ()))) for name in (VOCABULARY, HEAD)]
        shapes = {
            name: (leaves[0].shape[0], leaves[0].shape[1]) for name, leaves in tables if leaves and leaves[0].ndim == 3
        }
        return {name: shape for name, shape in shapes.items() if shape[0] > 1 or vocab_size not in (None, shape[1])}

    def change(tree: PyTree, shapes: dict[str, tuple[int, int]], joins: bool) -> PyTree:
        def one(path: Any, x: Any) -> Any:
            name = next((key.key for key in path if getattr(key, "key", None) in shapes), None)
            if name is None:
                return x
            chunks, rows = shapes[name]
            tokens = vocab_size or chunks * rows
            if joins:
                if x.shape[:2] != (chunks, rows):
                    return x
                return x.reshape(-1, *x.shape[2:])[:tokens]
            if x.shape[:1] != (tokens,):
                return x
            padded = jnp.pad(x, [(0, chunks * rows - tokens), *[(0, 0)] * (x.ndim - 1)])
            return padded.reshape(chunks, rows, *x.shape[1:])

        return jax.tree_util.tree_map_with_path(one, tree)

    def init(params: PyTree) -> PyTree:
        shapes = chunks_of(params)
        return change(inner.init(change(params, shapes, True)), shapes, False)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        shapes = chunks_of(updates)
        joined = [change(tree, shapes, True) for tree in (updates, state, params)]
        updates, state = inner.update(*joined, **extra)
        return change(updates, shapes, False), change(state, shapes, False)

    return optax.GradientTransformationExtraArgs(init, update)


def stack_and_rest(tree: PyTree) -> tuple[PyTree, PyTree]:
    """The stack of layers that a fused update takes one by one, and the other subtrees."""
    if tree is None:
        return None, None
    return {STACK: tree[STACK]}, {name: subtree for name, subtree in tree.items() if name != STACK}


def clip_values(grads: PyTree, most: float) -> PyTree:
    """Gradients, or shards of them, whose elements have at most this absolute value (`optax.clip`)."""
    return jax.tree.map(lambda g: jnp.clip(g, -most, most), grads)


def scaled(tx: optax.GradientTransformation, rate: jax.Array, step: jax.Array) -> optax.GradientTransformationExtraArgs:
    """`tx` followed by the learning rate and by stochastic rounding of bfloat16 parameters."""
    inner = optax.with_extra_args_support(tx)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        updates, state = inner.update(updates, state, params, rate=rate, **extra)
        return rounded_updates(jax.tree.map(lambda u: -rate * u, updates), params, step), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def convert_state(state: PyTree, layout: Layout, b1: float = B1, b2: float = B2, eps: float = EPS) -> PyTree:
    """Casts weights and AdamW moments to the dtypes of this layout; element-wise."""
    dtypes = layout.map(lambda leaf: leaf.dtype)

    def convert(x: Any, dtype: Any) -> Any:
        if isinstance(x, optax.ScaleByAdamState):
            return convert_adam(x, dtype, b1, b2, eps)
        return x.astype(dtype)

    return jax.tree.map(convert, state, dtypes, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState))
