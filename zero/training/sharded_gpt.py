"""A GPT with sharded parameters, at any stage of ZeRO. Call inside pmap."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from zero.base.errors import UserError
from zero.models.adapters import combine, split_adapters
from zero.models.axes import Axes, axes_of
from zero.models.collections import Collection, collections_of
from zero.models.config import STACKS, GPTConfig
from zero.models.experts import Routing, routing_metrics
from zero.models.gpt import GPT, Scores, empty_memory, parameter_axes, variable_shapes
from zero.models.mixers import Caches
from zero.models.parametrization import multipliers_of
from zero.models.products import FORMS, PRODUCTS
from zero.models.stack import Policy, kinds_of, policy_of
from zero.partition.collectives.axis import Axis
from zero.partition.collectives.context_group import ContextGroup
from zero.partition.collectives.expert_group import ExpertGroup
from zero.partition.collectives.tensor_group import TensorGroup
from zero.partition.layout import Layout, LeafLayout, PyTree, make_grouped_layout, make_layout
from zero.partition.model_parallel import ALONE, WHOLE, ExpertParallel, ModelParallel, Rounding
from zero.partition.sharded_optimizer import global_norm
from zero.partition.stages import fully_shard, gather, pinned, scatter_wide_sum, shard, sum_copies
from zero.training.batch import (
    UNDIVIDED,
    Batch,
    RowPart,
    Rows,
    Separators,
    document_starts,
    follows_end,
    next_tokens,
    row_keys,
    token_ids,
)
from zero.training.block_codes import dequantize, quantize
from zero.training.optimizers.weight_decay import decayed
from zero.training.tuning import FROZEN, Tuning, with_frozen


@dataclasses.dataclass(frozen=True)
class ShardedGPT:
    """A GPT with sharded parameters. The stage determines when they are gathered and gradients are scattered.

    Attributes:
      config: the model.
      axis: the pmap axis.
      stage: 0 to 3.
      compute_dtype: dtype of gathered parameters and of matrix products.
      wire_dtype: dtype of gradients on the wire, int8 as in `zero.scatter_sum`; None: `compute_dtype` where devices
        exchange gradients, float32 where they sum them (`sent_dtype`).
      reduce_dtype: dtype of sums of gradients over devices.
      gradient_dtype: dtype of the sums until the update; micro-batches always add up in float32.
      remat, offload, chunks_at_once: what the backward pass recomputes, which kinds of activations lie in the host's
        memory, and how many chunks of the vocabulary an iteration has, as for `GPT`.
      blockwise_from: the number of query positions from which attention is blockwise, as for `GPT`.
      master_dtype: dtype of the shards of parameters with weight decay; the others are float32.
      separators: where documents start in a row, to keep attention and positions within a document; none for rows
        that are one segment each.
      gather_dtype: int8 for gathers as in `zero.gather`; None for `compute_dtype`, or the shards' dtype if narrower.
      sums_copies: whether stages 2 and 3 sum gradients over copies of the state layer by layer, as a fused update
        needs and as a single micro-batch does, instead of once after all micro-batches.
      kernel: for attention, as for `GPT`.
      query_block: of dense attention, as for `GPT`.
      drops: whether the capacity of experts applies, as in training.
      tuning: adapters, which are trained, beside the frozen parameters of `base`; None if all parameters are
        trained. `layout` and `init` are for the trained parameters.
      product_dtype: of the products with weights in a layer, an entry of `zero.models.products.PRODUCTS`.
      gathers_rounded: whether stage 3 gathers the weights of these products in 8 bits, rounded as they multiply them.
      last_target: whether rows have one token more than positions, the target of the last one.
    """

    config: GPTConfig
    axis: Axis
    stage: int
    compute_dtype: DTypeLike = jnp.float32
    _: dataclasses.KW_ONLY
    wire_dtype: DTypeLike | None = None
    reduce_dtype: DTypeLike = jnp.float32
    gradient_dtype: DTypeLike = jnp.float32
    remat: str = "full"
    offload: tuple[str, ...] = ()
    chunks_at_once: int = 1
    blockwise_from: int | None = None
    master_dtype: DTypeLike = jnp.float32
    separators: Separators = UNDIVIDED
    gather_dtype: DTypeLike | None = None
    sums_copies: bool = False
    kernel: str | None = None
    query_block: int | None = None
    drops: bool = True
    tuning: Tuning | None = None
    product_dtype: str = "auto"
    gathers_rounded: bool = False
    last_target: bool = False

    @property
    def arithmetic(self) -> dict[str, Any]:
        """The automatic choices on these devices that scores of a text depend on, as JSON."""
        return {
            "platform": jax.default_backend(),
            "compute_dtype": jnp.dtype(self.compute_dtype).name,
            "stage": self.stage,
            "kernel": self.kernel,
            "shards": None if self.gather_dtype is None else self.axis.shards,  # the blocks of a scale end with a shard
        }

    @property
    def stored_kinds(self) -> tuple[str, ...]:
        """The kinds of activations that the forward pass stores, in either memory."""
        return kinds_of(self.remat)

    @property
    def policy(self) -> Policy:
        """How its layers run, and what they store.

        Raises:
          ValueError: nothing has a name by which the host's memory could take a part.
        """
        return policy_of(self.remat, self.config.scanned_layers, self.offload)

    @property
    def sent_dtype(self) -> DTypeLike:
        """The dtype of gradients on the wire."""
        if self.wire_dtype is not None:
            return self.wire_dtype
        return self.compute_dtype if self.axis.exchanges and self.stage >= 2 else "float32"

    @property
    def row_group(self) -> ModelParallel:
        """The group that divides the computation of this device's rows."""
        if self.axis.context > 1:
            return ContextGroup(self.axis)
        if self.axis.tensor > 1:
            return TensorGroup(self.axis)
        return WHOLE

    @property
    def expert_group(self) -> ExpertParallel:
        """The devices among which experts are divided."""
        if self.axis.expert > 1:
            return ExpertGroup(self.axis)
        return ALONE

    @cached_property
    def base(self) -> ShardedGPT:
        """The model without adapters, whose parameters are frozen."""
        if self.tuning is None:
            return self
        # Before it is coded; the vocabulary stays so.
        dtype = "bfloat16" if self.tuning.is_quantized else self.tuning.base_dtype
        return dataclasses.replace(self, tuning=None, master_dtype=dtype)

    @cached_property
    def frozen_by_parts(self) -> Layout:
        """How the frozen parameters are held and gathered."""
        if self.tuning is None or not self.tuning.is_quantized:
            return self.base.layout_by_parts
        shapes = self.base.layout_by_parts.shapes()
        stacks = {name: shapes[name] for name in STACKS if name in shapes}
        quantized = jax.eval_shape(partial(quantize, codec=self.tuning.base_dtype), stacks)
        layout = make_grouped_layout({**shapes, **quantized}, self.axis.shards, **self.base.layout_options)
        if self.stage:
            return layout
        return layout.whole()

    @property
    def frozen_layout(self) -> Layout:
        """How the frozen parameters are held."""
        return self.frozen_by_parts.without_parts()

    @cached_property
    def _trained_shapes(self) -> PyTree:
        params = variable_shapes(self.config)["params"]
        if self.tuning is None:
            return params
        return self.tuning.adapters.shapes(params, parameter_axes(self.config))

    @cached_property
    def axes(self) -> Mapping[str, Axes]:
        """The axes of the trained parameters, by name."""
        axes = parameter_axes(self.config)
        if self.tuning is None:
            return axes
        return self.tuning.adapters.axes(axes)

    @property
    def rate_multipliers(self) -> Callable[[PyTree], PyTree] | None:
        """Factors of the learning rates of the trained parameters, by muP; None if all are 1."""
        return multipliers_of(self.config, self.axes)

    @cached_property
    def _sharded_by_parts(self) -> Layout:
        def held(p: Any, is_matrix: bool) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(p.shape, self.master_dtype if is_matrix else p.dtype)

        shapes = jax.tree.map(held, self._trained_shapes, decayed(self.axes)(self._trained_shapes))
        return make_grouped_layout(shapes, self.axis.shards, **self.layout_options)

    @property
    def layout_options(self) -> dict[str, Any]:
        """Arguments of `make_grouped_layout` for this model."""
        stacked = [name for name in self.config.stacked if name in self._trained_shapes]
        return {
            "stacked": stacked,
            "tensor": self.axis.tensor,
            "tensor_dim": lambda name: axes_of(self.axes, name).cut,
            "expert": self.axis.expert,
            "is_expert": lambda name: axes_of(self.axes, name).has_experts,
        }

    @cached_property
    def layout_by_parts(self) -> Layout:
        """`layout`, in which tensor groups and expert groups gather only the parts that they compute with.

        Raises:
          UserError: the devices do not divide a size of a layer that tensor groups cut.
        """
        layout = self._sharded_by_parts if self.stage else self._sharded_by_parts.whole()
        for leaf in layout.leaves:
            if leaf.is_cut and leaf.path[0] in STACKS and leaf.splits[0].padding:
                split = leaf.splits[0]
                raise UserError(
                    f"zero.tensor_shards={self.axis.tensor}: {split.size}, the size of {leaf.name} along which it is "
                    f"cut, does not divide over {split.shards} devices"
                )
        return layout

    @property
    def sharded_layout(self) -> Layout:
        """How stages 1 to 3 split the parameters."""
        return self._sharded_by_parts.without_parts()

    @cached_property
    def layout(self) -> Layout:
        """How this stage splits them."""
        return self.layout_by_parts.without_parts()

    def _lift_shards(self, module_class: type[nn.Module], name: str) -> type[nn.Module]:
        dtypes: Any = {"dtype": self.compute_dtype, "wire_dtype": self.sent_dtype, "reduce_dtype": self.reduce_dtype}
        axis = dataclasses.replace(self.axis, sums_copies=self.sums_copies)
        rounding = self._rounding if self.gathers_rounded and name in STACKS else None
        layout = self.layout_by_parts.at(name)
        return fully_shard(module_class, layout, axis, gather_dtype=self.gather_dtype, rounding=rounding, **dtypes)

    def _rounding(self, leaf: LeafLayout) -> Rounding | None:
        """How a leaf of a layer is rounded before it is gathered; None for what no product multiplies."""
        return FORMS[self.product_dtype].values if leaf.path[-1] == "kernel" else None

    def _lift(self, module_class: type[nn.Module], name: str) -> type[nn.Module]:
        """The class as a step uses it: on shards at stages 2 and 3, and with its frozen parameters."""
        if self.tuning is not None:
            module_class = with_frozen(module_class, partial(self._whole_frozen, name=name))
        has_shards = self.stage >= 2 and name in self._trained_shapes
        if not has_shards:
            return module_class
        return self._lift_shards(module_class, name)

    def _whole_frozen(self, frozen: PyTree, name: str) -> PyTree:
        """The whole parameters of a part of the base; stages 0 to 2 have gathered it already, as it is held."""
        assert self.tuning is not None
        if self.stage == 3:
            frozen = self.gather_frozen(frozen, name)
        codec = self.tuning.base_dtype
        dtype = self.compute_dtype
        return self.base.layout_by_parts.at(name).map(
            lambda leaf, x: dequantize(leaf.gathered_shape, x, codec, dtype), frozen
        )

    def gather_frozen(self, frozen: PyTree, name: str | None = None) -> PyTree:
        """The frozen parameters whole, as they are held or in `compute_dtype` if that is narrower."""
        layout = self.frozen_by_parts if name is None else self.frozen_by_parts.at(name)
        is_quantized = self.tuning is not None and self.tuning.is_quantized
        dtype, wire_dtype = (None, None) if is_quantized else (self.compute_dtype, self.gather_dtype)
        frozen = frozen if name is None else pinned(frozen, dtype)
        return gather(frozen, layout, self.axis, dtype, wire_dtype=wire_dtype)

    @cached_property
    def gpt(self) -> GPT:
        """The model, on shards at stages 2 and 3, on whole parameters at stages 0 and 1."""
        return self._gpt(self._lift)

    def _gpt(self, lift: Any) -> GPT:
        options: Any = {
            "row_group": self.row_group,
            "expert_group": self.expert_group,
            "kernel": self.kernel,
            "drops": self.drops,
            "lift": lift,
        }
        options["query_block"] = self.query_block
        options["product"] = PRODUCTS[self.product_dtype]
        options["adapters"] = None if self.tuning is None else self.tuning.adapters
        options |= {"remat": self.remat, "offload": self.offload, "chunks_at_once": self.chunks_at_once}
        return GPT(self.config, self.compute_dtype, blockwise_from=self.blockwise_from, **options)

    def init(self, key: jax.Array) -> PyTree:
        """New weights, made layer by layer; their values do not depend on the number of devices."""
        if self.tuning is None:
            gpt = self._gpt(self._lift_shards)
            variables = gpt.init(key, jnp.zeros((1, 2), jnp.int32), None, method="hidden")
            return {**variables["params"], **self.new_collections(key)}
        new = self.tuning.adapters.init(key, self._trained_shapes)
        return shard(self.layout.map(lambda leaf, x: x.astype(leaf.dtype), new), self.layout, self.axis)

    @cached_property
    def collections(self) -> dict[str, Collection]:
        """The model's variables other than parameters, which no stage splits; with adapters they are frozen too."""
        if self.tuning is not None:
            return {}
        return collections_of(self.config)

    def new_collections(self, key: jax.Array) -> dict[str, PyTree]:
        """The collections of a new model, whole on every device."""
        return {name: collection.init(jax.random.fold_in(key, 1)) for name, collection in self.collections.items()}

    @cached_property
    def collection_layouts(self) -> dict[str, Layout]:
        """The layout of each collection: whole on every device."""
        shapes = jax.eval_shape(self.new_collections, jax.eval_shape(jax.random.key, 0))
        return {name: make_layout(tree, self.axis.shards).whole() for name, tree in shapes.items()}

    def weight_shapes(self) -> PyTree:
        """Shapes of the weights on one device, as `jax.ShapeDtypeStruct`s."""
        collections = {name: layout.shard_shapes() for name, layout in self.collection_layouts.items()}
        return {**combine(self.frozen_shapes(), self.layout.shard_shapes()), **collections}

    def frozen_shapes(self) -> PyTree:
        """Shapes of the frozen parameters on one device; empty if all parameters are trained."""
        if self.tuning is None:
            return {}
        collections = {name: layout.shard_shapes() for name, layout in self.base.collection_layouts.items()}
        return {**self.frozen_layout.shard_shapes(), **collections}

    def weights(self, params: PyTree, averages: Mapping[str, PyTree], frozen: PyTree | None = None) -> PyTree:
        """The input of inference: shards of trained and frozen parameters, and the model's collections."""
        return {**combine(frozen or {}, params), **{name: averages[name] for name in self.collections}}

    def split(self, weights: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
        """Parameters and collections of `weights`."""
        collections = {name: weights[name] for name in self.collections}
        return {name: tree for name, tree in weights.items() if name not in collections}, collections

    @property
    def differentiated(self) -> str:
        """The collection of variables to differentiate.

        A gradient has the dtype of its variable. If `gradient_dtype` is not the shards' dtype, gradients are taken with
        respect to "gradients" instead: zeros of that dtype.
        """
        is_own = all(leaf.dtype == self.gradient_dtype for leaf in self.layout.leaves)
        return "params" if self.stage < 2 or is_own else "gradients"

    def gather_params(self, weights: PyTree) -> dict[str, PyTree]:
        """Flax variables for a step, from `weights`: shards of the parameters and the model's collections."""
        params, variables = self.split(weights)
        if self.tuning is not None:
            params, base = split_adapters(params)
            frozen, variables = self.base.split(base)
            variables[FROZEN] = frozen if self.stage == 3 else self.gather_frozen(frozen)
        variables["params"] = params
        if self.stage < 3:
            full = gather(params, self.layout_by_parts, self.axis, self.compute_dtype, wire_dtype=self.gather_dtype)
            variables["gathered" if self.stage == 2 else "params"] = full
        if self.differentiated == "gradients":
            variables["gradients"] = jax.tree.map(lambda p: jnp.zeros(p.shape, self.gradient_dtype), params)
        return variables

    def reduce_grads(self, grads: PyTree) -> PyTree:
        """Shards of the gradient summed over devices, from the gradients of `differentiated`."""
        if self.stage >= 2:
            if self.sums_copies:
                return grads
            return sum_copies(grads, self.layout, self.axis)
        dtypes: Any = {"wire_dtype": self.sent_dtype, "reduce_dtype": self.reduce_dtype}
        grads = scatter_wide_sum(grads, self.layout_by_parts, self.axis, **dtypes)
        return jax.tree.map(lambda g: g.astype(self.gradient_dtype), grads)

    def gradient_norm(self, grads: PyTree) -> jax.Array:
        """The norm of the gradient from its shards (whole at stage 0), float32, the same on every device."""
        if self.stage == 0 and self.axis.tensor == 1:
            # From slices too: sums in the same order as at the other stages, so equal bit for bit.
            return global_norm(shard(grads, self.sharded_layout, self.axis), self.sharded_layout, self.axis)
        return global_norm(grads, self.layout, self.axis)

    def apply(self, variables: dict[str, PyTree], *args: Any, **kwargs: Any) -> Any:
        return self.gpt.apply(variables, *args, **kwargs)

    def scores(
        self,
        variables: dict[str, PyTree],
        tokens: jax.Array,
        keys: jax.Array | None,
        inputs: Mapping[str, PyTree] = {},
    ) -> Scores:
        """The scores of all positions of whole rows; in a context group, of this device's positions.

        Args:
          inputs: of the entries of `Scores.extra` to compute, by name: arrays of whole rows, `(rows, positions, ...)`.
        """
        tokens_in, targets, starts = self.inputs(tokens)
        own = jax.tree.map(self.own_positions, dict(inputs))
        scores: Scores = self.apply(variables, tokens_in, targets, keys, starts, inputs=own, method="scores")[0]
        return scores

    def own_positions(self, x: Rows) -> jax.Array:
        """From whole rows `(rows, positions, ...)` to the positions of `scores` on this device."""
        return self.row_group.input_positions(jnp.asarray(x))

    def scores_and_memory(
        self,
        variables: dict[str, PyTree],
        tokens: jax.Array,
        keys: jax.Array | None,
        part: RowPart | None,
        inputs: Mapping[str, PyTree] = {},
    ) -> tuple[Scores, Caches | None]:
        """Like `scores`, with the model's memory after a part of each row; None for whole rows."""
        if part is None:
            return self.scores(variables, tokens, keys, inputs), None
        tokens_in, targets, _ = self.inputs(tokens)
        position = part.number * self.positions_in(tokens)
        arguments = (tokens_in, targets, keys, part.memory, position)
        scores: tuple[Scores, Caches] = self.apply(variables, *arguments, method="scores_in_part")
        return scores

    def empty_memory(self, rows: int) -> Caches:
        """What a model with memory remembers before the first position of rows."""
        return empty_memory(self.config, rows, self.compute_dtype, self.row_group)

    def inputs(self, tokens: Rows) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The model's inputs from whole rows: tokens, targets, document starts, cut by a context group.

        Targets and starts are computed from whole rows, before they are cut.
        """
        own = self.row_group.input_positions
        tokens_in = token_ids(tokens)
        if self.last_target:
            tokens_in = tokens_in[:, :-1]
        starts = document_starts(tokens_in, self.separators)
        return own(tokens_in), own(self.targets(tokens)), None if starts is None else own(starts)

    def positions_in(self, tokens: Rows) -> int:
        """The positions of each row."""
        return int(tokens.shape[1]) - self.last_target

    def targets(self, tokens: Rows) -> jax.Array:
        """The target of each position of whole rows; negative where nothing is scored."""
        tokens = jnp.asarray(tokens)
        if self.separators.ends:
            is_first = follows_end(token_ids(tokens), self.separators)
            tokens = jnp.where(is_first & (tokens >= 0), ~tokens, tokens)
        return tokens[:, 1:] if self.last_target else next_tokens(tokens)

    def sum_scored(self, losses: jax.Array, tokens: Rows) -> jax.Array:
        """The sum of losses of scored positions; NaN, as are its gradients, if a token is past the vocabulary."""
        scored, known = self._scored(losses, tokens)
        return jnp.sum(scored) * known

    def sum_rows(self, losses: jax.Array, tokens: Rows) -> jax.Array:
        """Like `sum_scored`, of each row: `(rows,)`. In a tensor or context group a device has its share of each."""
        scored, known = self._scored(losses, tokens)
        return jnp.sum(scored, axis=1) * known

    def sum_where(self, values: jax.Array, is_counted: jax.Array, tokens: Rows) -> jax.Array:
        """The sum of values `(rows, own positions, ...)` over the positions of each row that are counted.

        Like `sum_rows`, this device's share, and NaN for a token past the vocabulary.

        Args:
          is_counted: of whole rows, `(rows, positions)`.
        """
        is_own = self.row_group.zero_if_duplicate(self.own_positions(is_counted))
        is_known = jnp.all(token_ids(tokens) < self.config.vocab_size)
        is_own = is_own.reshape(*is_own.shape, *(1,) * (values.ndim - 2))
        return jnp.sum(jnp.where(is_own, values, 0), axis=1) * jnp.where(is_known, 1.0, jnp.nan)

    def _scored(self, losses: jax.Array, tokens: Rows) -> tuple[jax.Array, jax.Array]:
        """This device's losses of scored positions, zeros elsewhere; and 1, or NaN for a token past the vocabulary."""
        is_known = jnp.all(token_ids(tokens) < self.config.vocab_size)
        is_scored = self.row_group.input_positions(self.targets(tokens)) >= 0
        return self.row_group.zero_if_duplicate(jnp.where(is_scored, losses, 0)), jnp.where(is_known, 1.0, jnp.nan)

    def sum_over_group(self, x: jax.Array) -> jax.Array:
        """The sum over the devices that take the same rows. It is not to be differentiated."""
        if self.axis.row_group == 1:
            return x
        return lax.psum(x, self.axis.name, axis_index_groups=self.axis.row_groups())

    def is_first_of_group(self) -> jax.Array:
        """Whether this is the first of the devices that take the same rows."""
        is_first = np.zeros(self.axis.size, bool)
        is_first[[group[0] for group in self.axis.row_groups()]] = True
        return jnp.asarray(is_first)[lax.axis_index(self.axis.name)]

    def count_scored(self, tokens: Rows) -> jax.Array:
        """The number of positions with a target, int32."""
        return jnp.sum(self.row_group.zero_if_duplicate(self.row_group.input_positions(self.targets(tokens)) >= 0))

    def dropout_keys(self, key: jax.Array, batch: Batch) -> jax.Array | None:
        """One key per row from the step's key, or None for a model without dropout."""
        drops = self.config.has_dropout or (self.tuning is not None and self.tuning.adapters.dropout > 0)
        if not drops:
            return None
        return row_keys(key, batch)

    def metrics(self, observed: Routing | None, batch: Batch) -> dict[str, jax.Array]:
        """Routing metrics over the rows of all devices; empty without experts.

        Each device of a tensor group counts all its tokens.
        """
        if observed is None:
            return {}
        penalty_B, *sums = observed
        summed = Routing(penalty_B, *lax.psum(sums, self.axis.name))
        positions = len(batch.tokens) * self.positions_in(batch.tokens)
        return routing_metrics(summed, positions * self.axis.size)
