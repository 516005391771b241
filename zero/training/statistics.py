"""Statistics per tensor: mean magnitudes of activations per layer, and for each leaf the statistics of `OF_LEAVES`.

They show which part of a model diverges, vanishes or does not learn, and match a coordinate check (Yang et al.,
arXiv 2203.03466, appendix D.1), as mu_transformer logs them. A program of its own computes them after a step, from the
weights before and after it, so that the step is the same with and without.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from zero.models.adapters import AdaptedDense
from zero.models.config import STACK
from zero.models.elements import Dense
from zero.models.experts import Experts
from zero.models.norms import BiasedRMSNorm, OffsetRMSNorm, ProjectionNorm
from zero.partition.collectives.arrays import fill_padding
from zero.partition.collectives.axis import Axis
from zero.partition.layout import LeafLayout, PyTree
from zero.training.batch import Batch
from zero.training.leaf_statistics import OF_LEAVES
from zero.training.parts import StepOptions, TrainState
from zero.training.sharded_gpt import ShardedGPT
from zero.training.whole_gradient import loss_and_gradients

ACTIVATION = "activation"  # of each module: the mean of |output|, float32 (layers,)
_NORMS = (nn.LayerNorm, nn.RMSNorm, BiasedRMSNorm, OffsetRMSNorm, ProjectionNorm)
_RECORDED = (Dense, nn.Dense, AdaptedDense, *_NORMS, Experts)
_WITH_INPUT = ("attention_out", "mlp_out")  # modules whose inputs are no other module's output

Statistics = dict[str, dict[str, jax.Array]]


def statistics(
    before: PyTree, state: TrainState, batch: Batch, frozen: PyTree = None, *, model: ShardedGPT, options: StepOptions
) -> Statistics:
    """Statistics of the newest update, the same on every device: scalars per leaf, `(layers,)` per activation.

    Per device: the weights before the update (shards of trained parameters, and the model's collections), the state
    after it, its rows, and the shards of the frozen parameters of `model.tuning`, by default none. Activations are
    those of all rows without dropout; of a model with experts every so many layers, an entry is one of the repeating
    groups of layers. The gradient is computed again, as the update has computed it, and needs memory for its shards.
    Devices add up their parts in one `psum`. Call inside pmap.
    """
    clock = state.clock - 1
    axis = model.axis
    params, collections = model.split(before)
    key = jax.random.fold_in(jax.random.key(options.seed), clock)
    old = state._replace(params=params, averages={**state.averages, **collections})
    _, grads, *_ = loss_and_gradients(model, old, frozen, batch, key, options)
    leaves = model.layout.leaves
    weights = model.weights(params, collections, frozen)
    of_leaves = [model.layout.shards_of(tree) for tree in (params, state.params, grads)]
    activations = _activations(model, weights, batch, options.micro_batches)
    # Parts of the mean over devices, which all have equal numbers of rows, positions and heads.
    sums: Statistics = {ACTIVATION: {name: x / axis.size for name, x in activations.items()}}
    totals: dict[str, dict[str, tuple[jax.Array, ...]]] = {kind: {} for kind in OF_LEAVES}
    for leaf, *values in zip(leaves, *of_leaves, strict=True):
        arrays = [x.astype(jnp.float32) for x in values]
        for kind, statistic in OF_LEAVES.items():
            count = math.prod(leaf.shape) if statistic.is_mean else 1
            terms = statistic.terms(*arrays)
            totals[kind][leaf.name] = tuple(_partial_sum(term, leaf, axis) / count for term in terms)
    parts, unravel = ravel_pytree((sums, totals))
    means, totals = unravel(lax.psum(parts, axis.name))
    rate = options.learning_rate(clock)
    for kind, statistic in OF_LEAVES.items():
        means[kind] = {name: statistic.value(*of_leaf, rate) for name, of_leaf in totals[kind].items()}
    return means


def _partial_sum(x: jax.Array, leaf: LeafLayout, axis: Axis) -> jax.Array:
    """This device's part of the sum over a leaf: of its slice, which every copy has, or of the whole leaf."""
    return jnp.sum(fill_padding(x, leaf, axis, 0)) / (axis.replicas if leaf.splits else axis.size)


def _activations(model: ShardedGPT, weights: PyTree, batch: Batch, micro_batches: int) -> dict[str, jax.Array]:
    """The mean sizes of the activations in this device's rows, float32 `(layers,)`, by module."""
    variables = model.gather_params(weights)
    stacks = {kind: tree[STACK] for kind, tree in variables.items() if STACK in tree}

    def of_rows(rows: jax.Array) -> dict[str, jax.Array]:
        tokens, _, starts = model.inputs(rows)
        layer: Any = model.gpt.layer(model.row_group.for_positions(tokens.shape[1]))

        def through(stream: Any, xs: tuple[PyTree, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
            sizes: dict[str, jax.Array] = {}
            with nn.intercept_methods(_recorder(sizes)):
                (stream, _), _ = layer.apply(xs[0], (stream, None), xs[1], None, 0, starts)
            return stream, sizes | {"stream": _mean_size(stream[0])}

        stream = model.apply(variables, tokens, None, starts, method="embed")
        _, sizes = lax.scan(through, stream, (stacks, jnp.arange(model.config.scanned_layers)))
        return {"embedding": _mean_size(stream[0])[None], **sizes}

    rows = batch.tokens.reshape(micro_batches, -1, *batch.tokens.shape[1:])
    return jax.tree.map(lambda x: x.mean(0), lax.map(of_rows, rows))


def _recorder(sizes: dict[str, jax.Array]) -> Callable[..., Any]:
    """A Flax interceptor that records the mean absolute output of each module in `sizes`, by its path in the layer."""

    def record(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        out = call(*args, **kwargs)
        module = context.module
        is_part = module.name is None or module.name.startswith(type(module).__name__)  # of a module with a name
        if context.method_name == "__call__" and isinstance(module, _RECORDED) and not is_part:
            name = "/".join(module.path)
            sizes[name] = _mean_size(out[0] if isinstance(module, Experts) else out)
            if module.name in _WITH_INPUT:
                sizes[f"{name}/input"] = _mean_size(args[0])
        return out

    return record


def _mean_size(x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.abs(x.astype(jnp.float32)))
