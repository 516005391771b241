"""A decoder-only transformer, without sharding.

Its layers are a stack, scanned and rematerialized. The vocabulary is a stack of chunks of rows, so that float32 logits
exist for one chunk at a time. `lift` is applied to the class of every part that owns parameters, before it is
rematerialized and stacked: a caller can change there how parameters are stored.

Shapes are named by suffix:
  B rows, T positions of a row, D embedding, C vocabulary rows of a chunk
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from zero.models.adapters import Adapters
from zero.models.axes import CHUNKS, EMBED, LAYERS, Axes, Role, along, shapes_and_axes
from zero.models.branch import Place
from zero.models.branches import BRANCHES, branches_of
from zero.models.config import FIRST, HEAD, STACK, VOCABULARY, GPTConfig
from zero.models.elements import Lift, Product, contraction, dropout, fold_keys, keys_from
from zero.models.experts import ResidualStream, Routing, no_routing
from zero.models.layer import Layer
from zero.models.layers import empty_caches, layer_of_stack
from zero.models.mixers import MIXERS, Caches
from zero.models.norms import make_norm
from zero.models.parametrization import check_zero_init, table_stddev
from zero.models.stack import Nested, Scanned, policy_of, run_layers, run_with_outputs
from zero.models.vocabulary import HEAD_BIAS, LOG_SUM_EXP, Candidates, Chunk, HeadBias, TopTokens, VocabularyChunk
from zero.partition.model_parallel import ALONE, WHOLE, ExpertParallel, ModelParallel

CANDIDATES = "candidates"  # an entry of `Scores.extra`: log-probabilities in nats of given tokens, `(B, T, K)`


class Scores(NamedTuple):
    """Scores of each target, and routing statistics.

    Attributes:
      losses_BT: negative log-likelihoods in nats, float32.
      is_greedy_BT: whether the target is the most likely token.
      routing: None without experts.
      penalty_BT: zeros with the gradients of penalties, which are part of `losses_BT` too; None without penalties.
      extra: what was asked for beside: `CANDIDATES`, and the outputs of branches by their keys.
    """

    losses_BT: jax.Array
    is_greedy_BT: jax.Array
    routing: Routing | None
    penalty_BT: jax.Array | None = None
    extra: Mapping[str, jax.Array] = {}


class GPT(nn.Module):
    """Tokens in, negative log-likelihoods out.

    Attributes:
      config, dtype, blockwise_from, row_group, expert_group, kernel, drops, adapters, product, query_block: as for
        `Layer`. Parameters are float32, and whole after `init`.
      lift: `lift(module_class, name)` returns the class to use in its place; by default the class itself.
      remat: what the backward pass recomputes, an entry of `zero.models.stack.REMAT`.
      offload: the kinds of `zero.models.stack.KINDS` that go to host memory if they are stored.
      chunks_at_once: chunks of the vocabulary in one iteration of the loop over them, so that what one sends travels
        beside the products of another; results are bit for bit the same.
    """

    config: GPTConfig
    dtype: DTypeLike = jnp.float32
    lift: Lift = lambda module_class, name: module_class
    remat: str = "full"
    offload: tuple[str, ...] = ()
    blockwise_from: int | None = None
    row_group: ModelParallel = WHOLE
    expert_group: ExpertParallel = ALONE
    kernel: str | None = None
    drops: bool = True
    adapters: Adapters | None = None
    product: Product = contraction
    query_block: int | None = None
    chunks_at_once: int = 1

    def setup(self) -> None:
        config = self.config
        self._row_group = WHOLE if self.is_initializing() else self.row_group
        self.vocabulary = self._chunks(VOCABULARY)
        self.head = self.vocabulary if config.tied else self._chunks(HEAD)
        if config.kind_of_positions.added is not None:
            self.positions = self.lift(config.kind_of_positions.added, "positions")(config)
        if config.embedding_norm:
            self.embedding_norm = make_norm(config, self.dtype, "embedding_norm", self.lift)
        self.blocks = self.stack_of(STACK)
        if config.first_dense:
            self.first_blocks = self.stack_of(FIRST)
        self.norm = lambda x: x
        if config.final_norm:
            self.norm = make_norm(config, self.dtype, "norm", self.lift, axes=Axes((EMBED,), Role.LAST_NORM))
        if config.head_bias:
            self.head_bias = self.lift(HeadBias, HEAD_BIAS)(config)
        for branch in branches_of(config):
            for name, module in branch.modules(self).items():
                setattr(self, name, module)

    def _length(self, stack: str) -> int:
        """Entries of a stack of layers."""
        return {STACK: self.config.scanned_layers, FIRST: self.config.first_dense}.get(stack, 1)

    def stack_of(self, name: str) -> Any:
        """A stack of layers, which makes their parameters; layers differ only in their windows."""
        config = self.config
        return nn.scan(
            self.lift(layer_of_stack(config, name), name),
            variable_axes={True: 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=self._length(name),
            metadata_params=along(LAYERS),
        )(config, self.dtype, self.blockwise_from)

    def _chunks(self, name: str) -> Any:
        stored = jax.checkpoint_policies.save_only_these_names(LOG_SUM_EXP)
        role = Role.HEAD if name == HEAD else Role.EMBEDDING
        return nn.scan(
            nn.remat(self.lift(VocabularyChunk, name), prevent_cse=False, policy=stored),
            variable_axes={True: 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            unroll=self.chunks_at_once,
            metadata_params=along(CHUNKS),
        )(self.config, self.dtype, table_stddev(self.config, name), role, self._row_group)

    def __call__(
        self,
        tokens_BT: jax.Array,
        targets_BT: jax.Array,
        keys_B: jax.Array | None = None,
        starts_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Negative log-likelihood of each target in nats, float32 `(B, T)`; arguments as for `scores`."""
        return self.scores(tokens_BT, targets_BT, keys_B, starts_BT)[0].losses_BT

    def scores(
        self,
        tokens_BT: jax.Array,
        targets_BT: jax.Array,
        keys_B: jax.Array | None = None,
        starts_BT: jax.Array | None = None,
        cache: Caches | None = None,
        position: jax.Array | int = 0,
        inputs: Mapping[str, Any] = {},
    ) -> tuple[Scores, Caches | None]:
        """Scores of each target, and the cache with these positions added.

        Args:
          tokens_BT: rows of tokens, int32.
          targets_BT: the target of each position, int32.
          keys_B: one dropout key per row, or None for no dropout.
          starts_BT: the column where the segment of each position starts, int32. A position attends only to its
            own segment, and its number is counted from there; None for one segment per row.
          cache: cache of the positions before, if any.
          position: position of the first column.
          inputs: the names of the entries of `Scores.extra` to compute, each with its inputs: of `CANDIDATES` tokens of
            each position, int32 `(B, T, K)`; of a branch as it says.
        """
        row_group = (
            self._row_group.for_positions(tokens_BT.shape[1]) if cache is None else self._row_group.with_all_positions()
        )
        place = Place(keys_B, starts_BT, position, row_group)
        stream, cache = self._entered(tokens_BT, cache, place)
        stream, cache = self.run_stack(STACK, stream, cache, place)
        extra = dict[str, jax.Array]()
        for branch in BRANCHES:
            if branch.key in inputs:
                extra[branch.key], stream = branch.output(self, stream, inputs[branch.key], place)
        scores = self.score(stream, targets_BT, inputs)
        return scores._replace(extra={**scores.extra, **extra}), cache

    def scores_in_part(
        self,
        tokens_BT: jax.Array,
        targets_BT: jax.Array,
        keys_B: jax.Array | None,
        memory: Caches,
        position: jax.Array,
    ) -> tuple[Scores, Caches]:
        """`scores` of the part of each row that begins at `position`, and what its mixers then remember.

        Gradients flow to no memory.

        Args:
          tokens_BT, targets_BT: of the part.
          keys_B: one dropout key per row, the same for all of its parts; None for no dropout.
          memory: `empty_memory`, or the result for the part before.
          position: of the first column; it begins a block.
        """
        row_group = self._row_group.for_positions(tokens_BT.shape[1])
        stream = self.embed(tokens_BT, keys_B, None, position, row_group)
        layer = self.layer(row_group)

        def remembering(own: Any, stream: ResidualStream, number: jax.Array) -> tuple[ResidualStream, Caches]:
            variables, memory = own
            stream, memory = layer.apply(variables, (stream, memory), number, keys_B, position)[0]
            return stream, lax.stop_gradient(memory)

        stacks = (self.blocks.variables, lax.stop_gradient(memory))
        policy = policy_of(self.remat, self.config.scanned_layers, self.offload)
        stream, memory = run_with_outputs(remembering, stacks, stream, policy)
        return self.score(stream, targets_BT), memory

    def score(self, stream: ResidualStream, targets_BT: jax.Array, inputs: Mapping[str, Any] = {}) -> Scores:
        """`scores` from the output of the last layer, without branches."""
        x_BTD, routing = stream
        row_group = self._row_group.for_positions(targets_BT.shape[1])
        candidates, lse_BT, target_BT, max_logit_BT = self.of_head(self.norm(x_BTD), targets_BT, inputs.get(CANDIDATES))
        losses_BT = lse_BT - target_BT
        penalty_BT = self.config.z_loss * lse_BT**2
        if routing is not None:  # the penalty of a row counts for each of its scored tokens
            penalty_BT = penalty_BT + routing.penalty_B[:, None]
        no_penalty_BT = None
        if self.config.z_loss or routing is not None:
            no_penalty_BT = penalty_BT - lax.stop_gradient(penalty_BT)  # affects only the gradient
            losses_BT = losses_BT + no_penalty_BT
        extra = {}
        if candidates is not None:
            extra[CANDIDATES] = row_group.stack(candidates.logits_BTK).sum(0) - lse_BT[..., None]
        return Scores(losses_BT, target_BT >= max_logit_BT, routing, no_penalty_BT, extra)

    def of_head(
        self, x_BTD: jax.Array, targets_BT: jax.Array, candidates_BTK: jax.Array | None
    ) -> tuple[Candidates | None, jax.Array, jax.Array, jax.Array]:
        """From normalized positions: candidates; log-sum-exp, the target's and the greatest of the logits, `(B, T)`."""
        row_group = self._row_group.for_positions(targets_BT.shape[1])
        # In float32, because every chunk adds to the gradient of x.
        x_BTD = row_group.gather_positions(x_BTD).astype(jnp.float32)
        candidates = None if candidates_BTK is None else Candidates.of(candidates_BTK)
        candidates, scored = self.head(candidates, self._head_chunks(), targets_BT, x_BTD)
        lse_CBT, target_CBT, max_logit_CBT = (lax.collapse(row_group.stack(x_CBT), 0, 2) for x_CBT in scored)
        return candidates, jax.nn.logsumexp(lse_CBT, axis=0), target_CBT.sum(0), max_logit_CBT.max(0)

    def top_tokens(self, tokens_BT: jax.Array, starts_BT: jax.Array | None, count: int) -> tuple[jax.Array, jax.Array]:
        """The `count` most likely next tokens of each position, int32 `(B, T, K)`, and their log-probabilities."""
        row_group = self._row_group.for_positions(tokens_BT.shape[1])
        place = Place(None, starts_BT, 0, row_group)
        stream, _ = self._entered(tokens_BT, None, place)
        (x_BTD, _), _ = self.run_stack(STACK, stream, None, place)
        x_BTD = row_group.gather_positions(self.norm(x_BTD)).astype(jnp.float32)
        top, scored = self.head(TopTokens.none((*tokens_BT.shape, count)), self._head_chunks(), tokens_BT, x_BTD)
        lse_BT = jax.nn.logsumexp(lax.collapse(row_group.stack(scored[0]), 0, 2), axis=0)
        tops = jax.tree.map(row_group.stack, top)
        top = TopTokens.none(top.logits_BTK.shape)
        for logits_BTK, tokens_BTK in zip(*tops, strict=True):  # of the devices that share the vocabulary
            top = top.merged(logits_BTK, tokens_BTK)
        return top.tokens_BTK, top.logits_BTK - lse_BT[..., None]

    def logits(
        self,
        tokens_BT: jax.Array,
        cache: Caches | None = None,
        position: jax.Array | int = 0,
        last: jax.Array | int = -1,
    ) -> tuple[jax.Array, Caches | None]:
        """Logits after column `last`, float32 `(B, V)`, and the cache with the positions of `tokens_BT` added."""
        x_BTD, cache = self.hidden(tokens_BT, None, cache, position)
        last_B1D = lax.dynamic_slice_in_dim(x_BTD, last % x_BTD.shape[1], 1, axis=1)
        _, logits_CB1C = self.head(None, self._head_chunks(), None, last_B1D)
        parts_NCBC = self._row_group.stack(logits_CB1C[:, :, 0])
        logits_BCV = lax.collapse(jnp.moveaxis(parts_NCBC, (2, 1, 0), (0, 1, 2)), 2, 4)[..., : self.config.chunk_rows]
        return lax.collapse(logits_BCV, 1)[:, : self.config.vocab_size], cache

    def hidden(
        self,
        tokens_BT: jax.Array,
        keys_B: jax.Array | None,
        cache: Caches | None = None,
        position: jax.Array | int = 0,
    ) -> tuple[jax.Array, Caches | None]:
        """The normalized residual stream after the last layer, `(B, T, D)`, and the cache with these positions."""
        row_group = self._row_group.with_all_positions()
        place = Place(keys_B, None, position, row_group)
        stream, cache = self._entered(tokens_BT, cache, place)
        (x_BTD, _), cache = self.run_stack(STACK, stream, cache, place)
        x_BTD = self.norm(x_BTD)
        if self.is_initializing():  # makes the parameters of the head
            chunks = self._head_chunks()
            if not self.config.tied:
                self.head(None, chunks, None, x_BTD)
            for branch in branches_of(self.config):
                branch.init(self, x_BTD, place)
        return x_BTD, cache

    def _entered(
        self, tokens_BT: jax.Array, cache: Caches | None, place: Place
    ) -> tuple[ResidualStream, Caches | None]:
        """The input of the first entry of the stack, and the cache with the layers before it."""
        stream = self.embedded(tokens_BT, place)
        if not self.config.first_dense:
            return stream, cache
        return self.run_stack(FIRST, stream, cache, place)

    def run_stack(
        self, name: str, stream: ResidualStream, cache: Caches | None, place: Place
    ) -> tuple[ResidualStream, Caches | None]:
        """Runs a stack with the policy `remat`; a cache needs no backward pass, so `Nested` becomes one loop."""
        keys_B, starts_BT, position, row_group = place
        stack = getattr(self, name)
        count = self._length(name)
        if self.is_initializing():
            return stack((stream, cache), jnp.arange(count), keys_B, position)[0]
        policy = policy_of(self.remat, count, self.offload if cache is None else ())
        if cache is not None and isinstance(policy, Nested):
            policy = Scanned()

        def layer_of(window: int | None) -> Callable[..., Any]:
            layer = self.layer(row_group, window, name)
            return lambda own, carry, number: layer.apply(own, carry, number, keys_B, position, starts_BT)[0]

        pattern = [None] if isinstance(policy, Nested) else self.config.window_pattern
        layers = [layer_of(window) for window in pattern]
        return run_layers(layers, stack.variables, (stream, cache), policy)

    @nn.nowrap
    def layer(self, row_group: ModelParallel, window: int | None = None, stack: str = STACK) -> Layer:
        """The module of one entry of a stack of layers, to apply to its own variables."""
        lifted: Any = self.lift(layer_of_stack(self.config, stack), stack)
        names = ("expert_group", "kernel", "drops", "adapters", "product", "query_block")
        options: Any = {name: getattr(self, name) for name in names}
        # The embedding folds the number N into its dropout keys.
        options["first"] = {STACK: self.config.first_dense, FIRST: 0}.get(stack, self.config.N + 1)
        return lifted(self.config, self.dtype, self.blockwise_from, window, row_group, **options, parent=None)

    def embed(
        self,
        tokens_BT: jax.Array,
        keys_B: jax.Array | None = None,
        starts_BT: jax.Array | None = None,
        position: jax.Array | int = 0,
        row_group: ModelParallel | None = None,
    ) -> ResidualStream:
        """The input of the stack of layers: `(B, T, D)`, this device's positions of it, and zero routing."""
        row_group = self._row_group.for_positions(tokens_BT.shape[1]) if row_group is None else row_group
        return self._entered(tokens_BT, None, Place(keys_B, starts_BT, position, row_group))[0]

    def embedded(self, tokens_BT: jax.Array, place: Place) -> ResidualStream:
        """The embeddings, and zero routing."""
        keys_B, starts_BT, position, row_group = place
        x_BTD = jnp.zeros((*tokens_BT.shape, self.config.embedding_dim), jnp.float32)
        x_BTD, _ = self.vocabulary(x_BTD, self._chunks_of_table(), tokens_BT, None)
        x_BTD = row_group.sum_positions(x_BTD)
        if self.config.scale_embedding:
            x_BTD = x_BTD * math.sqrt(self.config.embedding_dim)
        x_BTD = x_BTD * self.config.embedding_multiplier
        if self.config.kind_of_positions.added is not None:
            own_starts_BT = None if starts_BT is None else row_group.stream_positions(starts_BT)
            x_BTD = self.positions(x_BTD, row_group.stream_numbers(position, x_BTD.shape[1]), own_starts_BT)
        if self.config.embedding_norm:
            x_BTD = self.embedding_norm(x_BTD)
        keys_B = keys_from(fold_keys(keys_B, self.config.N), position)  # layers fold in the numbers below N
        x_BTD = dropout(x_BTD, self.config.embedding_dropout, keys_B, row_group.of_positions).astype(self.dtype)
        return x_BTD, no_routing(self.config, len(tokens_BT))

    def _chunks_of_table(self) -> Chunk:
        return Chunk(jnp.arange(self.config.vocab_chunks) * self.config.chunk_rows)

    def _head_chunks(self) -> Chunk:
        return self._chunks_of_table()._replace(bias_C=self.head_bias() if self.config.head_bias else None)


def init_cache(
    config: GPTConfig,
    rows: int,
    positions: int,
    dtype: DTypeLike,
    row_group: ModelParallel = WHOLE,
    known: jax.Array | int = 0,
) -> Caches:
    """An empty cache for `rows` rows of up to `positions` positions, of this device's heads.

    Where it has a constant size, only the first `known` positions of a prefill enter it.
    """
    return empty_caches(config, rows, positions, dtype, row_group, known)


def empty_memory(config: GPTConfig, rows: int, dtype: DTypeLike, row_group: ModelParallel = WHOLE) -> Caches:
    """What a model that `has_memory` remembers before the first part of rows, of all layers."""
    of_mixers = {name: MIXERS[name].memory for name in config.mixer_pattern}
    return {name: memory(config, rows, dtype, row_group) for name, memory in of_mixers.items() if memory is not None}


def variable_shapes(config: GPTConfig) -> Any:
    """Shapes of the variables of `GPT(config)`, as `jax.ShapeDtypeStruct`s."""
    return _shapes_and_axes(config)[0]


def parameter_axes(config: GPTConfig) -> Mapping[str, Axes]:
    """The axes of each parameter of `GPT(config)`, by name. Those of its branches are fresh.

    Raises:
      ValueError: `zero_init` names a matrix that the model does not have.

    >>> parameter_axes(GPTConfig(8, 16, 2, 4, 0.0, N=2))["blocks/query/kernel"].names
    ('layers', 'embed', 'heads')
    """
    return _shapes_and_axes(config)[1]


@lru_cache(maxsize=64)  # the trace takes a tenth of a second
def _shapes_and_axes(config: GPTConfig) -> tuple[Any, Mapping[str, Axes]]:
    tokens_BT = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    key = jax.eval_shape(jax.random.key, 0)  # made, it would be two programs
    shapes, axes = shapes_and_axes(partial(GPT(config).init, method="hidden"), key, tokens_BT, None)
    check_zero_init(config, axes)
    branches = {subtree for branch in branches_of(config) for subtree in branch.subtrees}
    fresh = {name: replace(own, fresh=True) for name, own in axes.items() if name.partition("/")[0] in branches}
    return shapes, {**axes, **fresh}
