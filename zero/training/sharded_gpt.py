"""A GPT whose parameters are held as shards, and gathered and differentiated as one stage of ZeRO says.

All of this is called inside pmap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from zero.model_parallel import ALONE, WHOLE, ExpertParallel, ModelParallel
from zero.models.block import scanned_layer
from zero.models.config import BLOCKS, GPTConfig
from zero.models.experts import ResidualStream, Routing
from zero.models.gated_unit import CODEBOOK
from zero.models.gpt import GPT, variable_shapes
from zero.partition.collectives.axis import Axis
from zero.partition.collectives.context_group import ContextGroup
from zero.partition.collectives.expert_group import ExpertGroup
from zero.partition.collectives.tensor_group import TensorGroup
from zero.partition.layout import Layout, PyTree, derive_layout, make_layout
from zero.partition.stages import fully_shard, gather, scatter_sum, sum_copies
from zero.training.batch import document_starts, next_tokens, token_ids
from zero.training.optimizer import decayed
from zero.training.placements import is_expert_leaf, tensor_dim
from zero.training.running_averages import init_codebook


@dataclasses.dataclass(frozen=True)
class ShardedGPT:
    """A GPT whose parameters are held, gathered and differentiated as one stage says.

    Attributes:
      config: the model.
      axis: the pmap axis.
      stage: 0 to 3.
      compute_dtype: of whole parameters and of matrix products.
      wire_dtype: of gradients on the wire; int8 in blocks with a scale, as `zero.scatter_sum` sends them.
      reduce_dtype: in which gradients are summed over devices.
      gradient_dtype: in which the sums are held until the update; micro-batches add up in float32 all the same.
      remat: what the backward pass computes again, as for `GPT`; "nested" keeps the inputs of groups of layers alone.
      blockwise_from: the number of query positions from which attention is blockwise, as for `GPT`.
      master_dtype: of the parameters that are held, where weight decay applies to them; the others are float32.
      end_of_text: the token that separates documents, to keep attention and positions within a document; None for rows
        that are one segment each.
      gather_dtype: int8 for parameters that travel in blocks with a scale, as `zero.gather` sends them; None for
        parameters that travel in `compute_dtype`, or as they are held if that is narrower.
      sums_copies: whether stages 2 and 3 sum gradients over copies of the state layer by layer, which a fused update
        needs, and not once per step.
      kernel: for attention, as for `GPT`.
    """

    config: GPTConfig
    axis: Axis
    stage: int
    compute_dtype: DTypeLike = jnp.float32
    wire_dtype: DTypeLike = jnp.float32
    reduce_dtype: DTypeLike = jnp.float32
    gradient_dtype: DTypeLike = jnp.float32
    remat: str = "full"
    blockwise_from: int | None = None
    master_dtype: DTypeLike = jnp.float32
    end_of_text: int | None = None
    gather_dtype: DTypeLike | None = None
    sums_copies: bool = False
    kernel: str | None = None

    @property
    def cut(self) -> ModelParallel:
        """What of a model this device computes."""
        if self.axis.context > 1:
            return ContextGroup(self.axis)
        return TensorGroup(self.axis) if self.axis.tensor > 1 else WHOLE

    @property
    def group(self) -> ExpertParallel:
        """The devices among which experts are divided."""
        return ExpertGroup(self.axis) if self.axis.expert > 1 else ALONE

    @cached_property
    def _sharded_by_parts(self) -> Layout:
        params = variable_shapes(self.config)["params"]
        held = jax.tree.map(
            lambda p, is_matrix: jax.ShapeDtypeStruct(p.shape, self.master_dtype if is_matrix else p.dtype),
            params,
            decayed(params),
        )
        return make_layout(held, self.axis.shards, **self.layout_options)

    @property
    def layout_options(self) -> dict[str, Any]:
        """What `zero.make_layout` and `zero.memory` have to know of this model."""
        tensor = {"tensor": self.axis.tensor, "tensor_dim": tensor_dim}
        return {"stacked": self.config.stacked, **tensor, "expert": self.axis.expert, "is_expert": is_expert_leaf}

    @cached_property
    def layout_by_parts(self) -> Layout:
        """`layout`, in which what tensor groups and expert groups compute in parts is gathered in parts."""
        return self._sharded_by_parts if self.stage else self._sharded_by_parts.whole()

    @property
    def sharded_layout(self) -> Layout:
        """How stages 1 to 3 split the parameters."""
        return self._sharded_by_parts.without_parts()

    @cached_property
    def layout(self) -> Layout:
        """How this stage splits them."""
        return self.layout_by_parts.without_parts()

    @cached_property
    def _plain(self) -> GPT:
        return self._gpt()

    def _lift(self, module_class: type[nn.Module], name: str) -> type[nn.Module]:
        dtypes: Any = {"dtype": self.compute_dtype, "wire_dtype": self.wire_dtype, "reduce_dtype": self.reduce_dtype}
        axis = dataclasses.replace(self.axis, sums_copies=self.sums_copies)
        return fully_shard(module_class, self.layout_by_parts.at(name), axis, gather_dtype=self.gather_dtype, **dtypes)

    @cached_property
    def _lifted(self) -> GPT:
        return self._gpt(lift=self._lift)

    def _gpt(self, **lift: Any) -> GPT:
        options: Any = {"cut": self.cut, "group": self.group, "kernel": self.kernel, **lift}
        return GPT(self.config, self.compute_dtype, remat=self.remat, blockwise_from=self.blockwise_from, **options)

    def block(
        self,
        variables: dict[str, PyTree],
        stream: ResidualStream,
        layer: jax.Array,
        keys: jax.Array | None,
        starts: jax.Array | None,
    ) -> ResidualStream:
        """One entry of the stack of layers, from its own part of the variables."""
        module_class = scanned_layer(self.config)
        lifted: Any = self._lift(module_class, BLOCKS) if self.stage >= 2 else module_class
        options: Any = {"cut": self.cut, "group": self.group, "kernel": self.kernel}
        module = lifted(self.config, self.compute_dtype, self.blockwise_from, None, **options)
        (stream, _), _ = module.apply(variables, (stream, None), layer, keys, 0, starts)
        return stream

    def init(self, key: jax.Array) -> PyTree:
        """New weights, made layer by layer; their values do not depend on the number of devices."""
        params = self._lifted.init(key, jnp.zeros((1, 2), jnp.int32), None, method="hidden")["params"]
        return self.join(params, self.new_codebook(key))

    def new_codebook(self, key: jax.Array) -> PyTree | None:
        """The codebook of vector-quantised keys, whole on every device; None for a model that has none."""
        return init_codebook(self.config, jax.random.fold_in(key, 1)) if self.config.has_codebook else None

    @cached_property
    def codebook_layout(self) -> Layout:
        """Of the codebook, which no stage splits."""
        return derive_layout(lambda _: self.new_codebook(jax.random.key(0)), self.layout)

    def weight_shapes(self) -> PyTree:
        """What one device holds of the weights, as `jax.ShapeDtypeStruct`s."""
        codebook = self.codebook_layout.shard_shapes() if self.config.has_codebook else None
        return self.join(self.layout.shard_shapes(), codebook)

    @staticmethod
    def join(params: PyTree, codebook: PyTree | None) -> PyTree:
        """Weights, which are all that inference needs: shards of parameters, with the codebook beside them if any."""
        return params if codebook is None else {**params, CODEBOOK: codebook}

    @staticmethod
    def split(weights: PyTree) -> tuple[PyTree, PyTree | None]:
        """Parameters and codebook of `join`."""
        return {name: tree for name, tree in weights.items() if name != CODEBOOK}, weights.get(CODEBOOK)

    @property
    def differentiated(self) -> str:
        """The collection of variables that gradients are taken of.

        A gradient has the dtype of what it is the gradient of: to be held in another than the shards' own, it flows to
        "gradients", which has that dtype and no other use.
        """
        is_own = all(leaf.dtype == self.gradient_dtype for leaf in self.layout.leaves)
        return "params" if self.stage < 2 or is_own else "gradients"

    def enter(self, weights: PyTree) -> dict[str, PyTree]:
        """Flax variables for a step, from shards."""
        params, codebook = self.split(weights)
        variables = {"params": params} if codebook is None else {"params": params, CODEBOOK: codebook}
        if self.stage < 3:
            full = gather(params, self.layout_by_parts, self.axis, self.compute_dtype, wire_dtype=self.gather_dtype)
            variables["gathered" if self.stage == 2 else "params"] = full
        if self.differentiated == "gradients":
            variables["gradients"] = jax.tree.map(lambda p: jnp.zeros(p.shape, self.gradient_dtype), params)
        return variables

    def leave(self, grads: PyTree) -> PyTree:
        """Shards of the gradient summed over devices, from the gradients of what is differentiated."""
        if self.stage >= 2:
            return grads if self.sums_copies else sum_copies(grads, self.layout, self.axis)
        dtypes: Any = {"wire_dtype": self.wire_dtype, "reduce_dtype": self.reduce_dtype}
        grads = scatter_sum(grads, self.layout_by_parts, self.axis, **dtypes)
        return jax.tree.map(lambda g: g.astype(self.gradient_dtype), grads)

    def apply(self, variables: dict[str, PyTree], *args: Any, **kwargs: Any) -> Any:
        model = self._lifted if self.stage >= 2 else self._plain
        return model.apply(variables, *args, **kwargs)

    def losses(
        self, variables: dict[str, PyTree], tokens: jax.Array, keys: jax.Array | None
    ) -> tuple[jax.Array, Routing | None]:
        """Summed negative log-likelihoods in nats of `(rows, context)`, and what routers of experts have decided.

        In a tensor group or a context group each device has its share of the first; of the second it has all.
        """
        tokens_in, targets, starts = self.inputs(tokens)
        if self.remat == "nested":
            stacked = {name: tree[BLOCKS] for name, tree in variables.items()}
            stream = self.apply(variables, tokens_in, keys, starts, method="embed")
            stream = nested_layers(partial(self.block, keys=keys, starts=starts), stacked, stream)
            losses, _, routing = self.apply(variables, stream, targets, method="score")
        else:
            losses, _, routing = self.apply(variables, tokens_in, targets, keys, starts, method="routed_scores")
        return self.sum_scored(losses, tokens), routing

    def inputs(self, tokens: jax.Array | np.ndarray) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """What the model takes of whole rows: tokens, targets, and where documents start; in a context group its part.

        Targets and starts are found in whole rows, across the borders of the parts.
        """
        tokens_in, own = token_ids(tokens), self.cut.input_positions
        starts = document_starts(tokens_in, self.end_of_text)
        return own(tokens_in), own(next_tokens(tokens)), None if starts is None else own(starts)

    def sum_scored(self, losses: jax.Array, tokens: jax.Array | np.ndarray) -> jax.Array:
        """NaN, and so are its gradients, where a token is past the vocabulary."""
        is_known = jnp.all(token_ids(tokens) < self.config.vocab_size)
        is_scored = self.cut.input_positions(next_tokens(tokens)) >= 0
        scored = self.cut.counted_once(jnp.where(is_scored, losses, 0))
        return jnp.sum(scored) * jnp.where(is_known, 1.0, jnp.nan)

    def count_scored(self, tokens: jax.Array | np.ndarray) -> jax.Array:
        """Tokens that have something to predict them, int32."""
        return jnp.sum(self.cut.counted_once(self.cut.input_positions(next_tokens(tokens)) >= 0))


def group_size(layers: int) -> int:
    """Layers of a group such that the inputs kept, one per group and those of one group, are fewest.

    >>> group_size(136), group_size(36), group_size(7)
    (8, 6, 1)
    """
    return min((size for size in range(1, layers + 1) if layers % size == 0), key=lambda size: layers // size + size)


def in_groups(tree: PyTree, size: int) -> PyTree:
    """Leaves of `(layers, ...)` as `(groups, size, ...)`."""
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), tree)


def nested_layers(block: Callable[[PyTree, PyTree, jax.Array], PyTree], stacked: PyTree, x: PyTree) -> PyTree:
    """`block(a layer's part of stacked, x, its number)` for one layer after the other, in groups.

    For the backward pass only what enters a group is kept, and the rest is computed again. Of L layers in groups of
    sqrt(L) it then needs 2 sqrt(L) layer inputs instead of L, and runs one more forward pass. Source: Chen et al.,
    Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174, section 4.

    >>> weights = jnp.arange(6.0)
    >>> loss = lambda weights: nested_layers(lambda w, x, layer: jnp.sin(w * x), weights, jnp.float32(1))
    >>> plain = lambda weights: lax.scan(lambda x, w: (jnp.sin(w * x), None), jnp.float32(1), weights)[0]
    >>> bool(jnp.allclose(jax.grad(loss)(weights), jax.grad(plain)(weights)))
    True
    """
    count = jax.tree.leaves(stacked)[0].shape[0]
    one = jax.checkpoint(lambda x, layer: (block(layer[0], x, layer[1]), None), prevent_cse=False)
    group = jax.checkpoint(lambda x, layers: lax.scan(one, x, layers), prevent_cse=False)
    return lax.scan(group, x, in_groups((stacked, jnp.arange(count)), group_size(count)))[0]
