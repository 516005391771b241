"""A decoder-only transformer, without sharding.

Its layers are a stack, scanned and rematerialized. The vocabulary is a stack of chunks of rows, so that float32 logits
exist for one chunk at a time. `lift` is applied to the class of every part that owns parameters, before it is
rematerialized and stacked: a caller can change there how parameters are stored.

Shapes are named by suffix:
  B rows, T positions of a row, D embedding, C vocabulary rows of a chunk
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from zero.models.adapters import Adapters
from zero.models.config import FIRST, HEAD, STACK, VOCABULARY, GPTConfig
from zero.models.elements import Lift, Product, contraction, dropout, fold_keys, keys_from
from zero.models.experts import ResidualStream, Routing, no_routing
from zero.models.gated_layer import RecurrentState
from zero.models.gated_unit import Memory
from zero.models.layer import Layer
from zero.models.layers import AnyCache
from zero.models.norms import make_norm
from zero.models.parametrization import table_stddev
from zero.models.part import PREDICTOR
from zero.models.predictor import JOIN, PREDICTOR_NORM, Ahead, Join
from zero.models.stack import Nested, Scanned, policy_of, run_layers, run_with_outputs
from zero.models.vocabulary import HEAD_BIAS, LOG_SUM_EXP, Candidates, Chunk, HeadBias, TopTokens, VocabularyChunk
from zero.partition.model_parallel import ALONE, WHOLE, ExpertParallel, ModelParallel


class Scores(NamedTuple):
    """Scores of each target, and routing statistics.

    Attributes:
      losses_BT: negative log-likelihoods in nats, float32.
      is_greedy_BT: whether the target is the most likely token.
      routing: None without experts.
      penalty_BT: zeros with the gradients of penalties, which are part of `losses_BT` too; None without penalties.
      candidates_BTK: log-probabilities in nats of the candidates of each position; None without candidates.
      ahead_BT: negative log-likelihoods in nats of the tokens after the targets; None where they are not wanted.
    """

    losses_BT: jax.Array
    is_greedy_BT: jax.Array
    routing: Routing | None
    penalty_BT: jax.Array | None = None
    candidates_BTK: jax.Array | None = None
    ahead_BT: jax.Array | None = None


class GPT(nn.Module):
    """Tokens in, negative log-likelihoods out.

    Attributes:
      config, dtype, blockwise_from, cut, group, kernel, drops, adapters, product, query_block: as for `Layer`.
        Parameters are float32, and whole after `init`.
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
    cut: ModelParallel = WHOLE
    group: ExpertParallel = ALONE
    kernel: str | None = None
    drops: bool = True
    adapters: Adapters | None = None
    product: Product = contraction
    query_block: int | None = None
    chunks_at_once: int = 1

    def setup(self) -> None:
        config = self.config
        self._cut = WHOLE if self.is_initializing() else self.cut
        self.vocabulary = self._chunks(VOCABULARY)
        self.head = self.vocabulary if config.tied else self._chunks(HEAD)
        if config.kind_of_positions.added is not None:
            self.positions = self.lift(config.kind_of_positions.added, "positions")(config)
        if config.embedding_norm:
            self.embedding_norm = make_norm(config, self.dtype, "embedding_norm", self.lift)
        self.blocks = self._stack(STACK)
        if config.first_dense:
            self.first_blocks = self._stack(FIRST)
        self.norm = make_norm(config, self.dtype, "norm", self.lift) if config.final_norm else lambda x: x
        if config.head_bias:
            self.head_bias = self.lift(HeadBias, HEAD_BIAS)(config)
        if config.predictor:
            self.predictor_join = self.lift(Join, JOIN)(config, self.dtype)
            self.predictor_blocks = self._stack(PREDICTOR)
            self.predictor_norm = make_norm(config, self.dtype, PREDICTOR_NORM, self.lift)

    def _length(self, stack: str) -> int:
        """Entries of a stack of layers."""
        return {STACK: self.config.scanned_layers, FIRST: self.config.first_dense, PREDICTOR: 1}[stack]

    def _stack(self, name: str) -> Any:
        """A stack of layers, which makes their parameters; layers differ only in their windows."""
        config = self.config
        return nn.scan(
            self.lift(config.kind_of_layers.of_stack(name, config), name),
            variable_axes={True: 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=self._length(name),
        )(config, self.dtype, self.blockwise_from)

    def _chunks(self, name: str) -> Any:
        stored = jax.checkpoint_policies.save_only_these_names(LOG_SUM_EXP)
        return nn.scan(
            nn.remat(self.lift(VocabularyChunk, name), prevent_cse=False, policy=stored),
            variable_axes={True: 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            unroll=self.chunks_at_once,
        )(self.config, self.dtype, table_stddev(self.config, name), self._cut)

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
        cache: AnyCache | None = None,
        position: jax.Array | int = 0,
        candidates_BTK: jax.Array | None = None,
        ahead: Ahead | None = None,
    ) -> tuple[Scores, AnyCache | None]:
        """Scores of each target, and the cache with these positions added.

        Args:
          tokens_BT: rows of tokens, int32.
          targets_BT: the target of each position, int32.
          keys_B: one dropout key per row, or None for no dropout.
          starts_BT: the column where the segment of each position starts, int32. A position attends only to its
            own segment, and its number is counted from there; None for one segment per row.
          cache: cache of the positions before, if any.
          position: position of the first column.
          candidates_BTK: tokens of each position whose log-probabilities are also computed, int32.
          ahead: the tokens after the targets, if they are to be scored as well.
        """
        cut = self._cut.for_positions(tokens_BT.shape[1]) if cache is None else self._cut.with_all_positions()
        stream, cache = self._entered(tokens_BT, keys_B, starts_BT, cache, position, cut)
        stream, cache = self._layers(STACK, stream, cache, keys_B, position, starts_BT, cut)
        ahead_BT = None
        if ahead is not None:
            ahead_BT, routing = self._scored_ahead(stream, ahead, keys_B, starts_BT, position, cut)
            stream = stream[0], routing
        return self.score(stream, targets_BT, candidates_BTK)._replace(ahead_BT=ahead_BT), cache

    def _scored_ahead(
        self,
        stream: ResidualStream,
        ahead: Ahead,
        keys_B: jax.Array | None,
        starts_BT: jax.Array | None,
        position: jax.Array | int,
        cut: ModelParallel,
    ) -> tuple[jax.Array, Routing | None]:
        """Losses of the further layer, from the output of the last one, and the routing with its own."""
        x_BTD, routing = stream
        next_BTD, _ = self._embedded(ahead.tokens_BT, None, starts_BT, position, cut)
        stream = self.predictor_join(next_BTD, self.norm(x_BTD)), routing
        (x_BTD, routing), _ = self._layers(PREDICTOR, stream, None, keys_B, position, starts_BT, cut)
        _, lse_BT, target_BT, _ = self._of_head(self.predictor_norm(x_BTD), ahead.targets_BT, None)
        return lse_BT - target_BT, routing

    def scores_in_part(
        self,
        tokens_BT: jax.Array,
        targets_BT: jax.Array,
        keys_B: jax.Array | None,
        memory: Memory,
        position: jax.Array,
    ) -> tuple[Scores, Memory]:
        """`scores` of the part of each row that begins at `position`, and what gated units then remember.

        Gradients flow to no memory.

        Args:
          tokens_BT, targets_BT: of the part.
          keys_B: one dropout key per row, the same for all of its parts; None for no dropout.
          memory: of all units, `(L, U, B, ...)`.
          position: of the first column; it begins a block.
        """
        cut = self._cut.for_positions(tokens_BT.shape[1])
        stream = self.embed(tokens_BT, keys_B, None, position, cut)
        layer = self.layer(cut)

        def remembering(own: Any, stream: ResidualStream, number: jax.Array) -> tuple[ResidualStream, Memory]:
            variables, memory = own
            state = RecurrentState(memory, None)
            stream, state = layer.apply(variables, (stream, state), number, keys_B, position)[0]
            return stream, lax.stop_gradient(state.memory)

        stacks = (self.blocks.variables, lax.stop_gradient(memory))
        policy = policy_of(self.remat, self.config.scanned_layers, self.offload)
        stream, memory = run_with_outputs(remembering, stacks, stream, policy)
        return self.score(stream, targets_BT), memory

    def score(self, stream: ResidualStream, targets_BT: jax.Array, candidates_BTK: jax.Array | None = None) -> Scores:
        """`scores` from the output of the last layer."""
        x_BTD, routing = stream
        cut = self._cut.for_positions(targets_BT.shape[1])
        candidates, lse_BT, target_BT, max_logit_BT = self._of_head(self.norm(x_BTD), targets_BT, candidates_BTK)
        losses_BT = lse_BT - target_BT
        penalty_BT = self.config.z_loss * lse_BT**2
        if routing is not None:  # the penalty of a row counts for each of its scored tokens
            penalty_BT = penalty_BT + routing.penalty_B[:, None]
        no_penalty_BT = None
        if self.config.z_loss or routing is not None:
            no_penalty_BT = penalty_BT - lax.stop_gradient(penalty_BT)  # affects only the gradient
            losses_BT = losses_BT + no_penalty_BT
        found_BTK = None
        if candidates is not None:
            found_BTK = cut.stack(candidates.logits_BTK).sum(0) - lse_BT[..., None]
        return Scores(losses_BT, target_BT >= max_logit_BT, routing, no_penalty_BT, found_BTK)

    def _of_head(
        self, x_BTD: jax.Array, targets_BT: jax.Array, candidates_BTK: jax.Array | None
    ) -> tuple[Candidates | None, jax.Array, jax.Array, jax.Array]:
        """From normalized positions: candidates; log-sum-exp, the target's and the greatest of the logits, `(B, T)`."""
        cut = self._cut.for_positions(targets_BT.shape[1])
        # In float32, because every chunk adds to the gradient of x.
        x_BTD = cut.gather_positions(x_BTD).astype(jnp.float32)
        candidates = None if candidates_BTK is None else Candidates.of(candidates_BTK)
        candidates, scored = self.head(candidates, self._head_chunks(), targets_BT, x_BTD)
        lse_CBT, target_CBT, max_logit_CBT = (lax.collapse(cut.stack(x_CBT), 0, 2) for x_CBT in scored)
        return candidates, jax.nn.logsumexp(lse_CBT, axis=0), target_CBT.sum(0), max_logit_CBT.max(0)

    def top_tokens(self, tokens_BT: jax.Array, starts_BT: jax.Array | None, count: int) -> tuple[jax.Array, jax.Array]:
        """The `count` most likely next tokens of each position, int32 `(B, T, K)`, and their log-probabilities."""
        cut = self._cut.for_positions(tokens_BT.shape[1])
        stream, _ = self._entered(tokens_BT, None, starts_BT, None, 0, cut)
        (x_BTD, _), _ = self._layers(STACK, stream, None, None, 0, starts_BT, cut)
        x_BTD = cut.gather_positions(self.norm(x_BTD)).astype(jnp.float32)
        top, scored = self.head(TopTokens.none((*tokens_BT.shape, count)), self._head_chunks(), tokens_BT, x_BTD)
        lse_BT = jax.nn.logsumexp(lax.collapse(cut.stack(scored[0]), 0, 2), axis=0)
        tops = jax.tree.map(cut.stack, top)
        top = TopTokens.none(top.logits_BTK.shape)
        for logits_BTK, tokens_BTK in zip(*tops, strict=True):  # of the devices that share the vocabulary
            top = top.merged(logits_BTK, tokens_BTK)
        return top.tokens_BTK, top.logits_BTK - lse_BT[..., None]

    def logits(
        self,
        tokens_BT: jax.Array,
        cache: AnyCache | None = None,
        position: jax.Array | int = 0,
        last: jax.Array | int = -1,
    ) -> tuple[jax.Array, AnyCache | None]:
        """Logits after column `last`, float32 `(B, V)`, and the cache with the positions of `tokens_BT` added."""
        x_BTD, cache = self.hidden(tokens_BT, None, cache, position)
        last_B1D = lax.dynamic_slice_in_dim(x_BTD, last % x_BTD.shape[1], 1, axis=1)
        _, logits_CB1C = self.head(None, self._head_chunks(), None, last_B1D)
        parts_NCBC = self._cut.stack(logits_CB1C[:, :, 0])
        logits_BCV = lax.collapse(jnp.moveaxis(parts_NCBC, (2, 1, 0), (0, 1, 2)), 2, 4)[..., : self.config.chunk_rows]
        return lax.collapse(logits_BCV, 1)[:, : self.config.vocab_size], cache

    def hidden(
        self,
        tokens_BT: jax.Array,
        keys_B: jax.Array | None,
        cache: AnyCache | None = None,
        position: jax.Array | int = 0,
    ) -> tuple[jax.Array, AnyCache | None]:
        """The normalized residual stream after the last layer, `(B, T, D)`, and the cache with these positions."""
        cut = self._cut.with_all_positions()
        stream, cache = self._entered(tokens_BT, keys_B, None, cache, position, cut)
        (x_BTD, _), cache = self._layers(STACK, stream, cache, keys_B, position, None, cut)
        x_BTD = self.norm(x_BTD)
        if self.is_initializing():  # makes the parameters of the head
            chunks = self._head_chunks()
            if not self.config.tied:
                self.head(None, chunks, None, x_BTD)
            if self.config.predictor:
                stream = self.predictor_join(x_BTD, x_BTD), no_routing(self.config, len(tokens_BT))
                self.predictor_norm(self._layers(PREDICTOR, stream, None, keys_B, position, None, cut)[0][0])
        return x_BTD, cache

    def _entered(
        self,
        tokens_BT: jax.Array,
        keys_B: jax.Array | None,
        starts_BT: jax.Array | None,
        cache: AnyCache | None,
        position: jax.Array | int,
        cut: ModelParallel,
    ) -> tuple[ResidualStream, AnyCache | None]:
        """The input of the first entry of the stack, and the cache with the layers before it."""
        stream = self._embedded(tokens_BT, keys_B, starts_BT, position, cut)
        if not self.config.first_dense:
            return stream, cache
        return self._layers(FIRST, stream, cache, keys_B, position, starts_BT, cut)

    def _layers(
        self,
        name: str,
        stream: ResidualStream,
        cache: AnyCache | None,
        keys_B: jax.Array | None,
        position: jax.Array | int,
        starts_BT: jax.Array | None,
        cut: ModelParallel,
    ) -> tuple[ResidualStream, AnyCache | None]:
        """Runs a stack with the policy `remat`; a cache needs no backward pass, so `Nested` becomes one loop."""
        stack = getattr(self, name)
        count = self._length(name)
        if self.is_initializing():
            return stack((stream, cache), jnp.arange(count), keys_B, position)[0]
        policy = policy_of(self.remat, count, self.offload if cache is None else ())
        if cache is not None and isinstance(policy, Nested):
            policy = Scanned()

        def layer_of(window: int | None) -> Callable[..., Any]:
            layer = self.layer(cut, window, name)
            return lambda own, carry, number: layer.apply(own, carry, number, keys_B, position, starts_BT)[0]

        pattern = [None] if isinstance(policy, Nested) else self.config.window_pattern
        layers = [layer_of(window) for window in pattern]
        return run_layers(layers, stack.variables, (stream, cache), policy)

    @nn.nowrap
    def layer(self, cut: ModelParallel, window: int | None = None, stack: str = STACK) -> Layer:
        """The module of one entry of a stack of layers, to apply to its own variables."""
        lifted: Any = self.lift(self.config.kind_of_layers.of_stack(stack, self.config), stack)
        names = ("group", "kernel", "drops", "adapters", "product", "query_block")
        options: Any = {name: getattr(self, name) for name in names}
        # The embedding folds the number N into its dropout keys.
        options["first"] = {STACK: self.config.first_dense, FIRST: 0, PREDICTOR: self.config.N + 1}[stack]
        return lifted(self.config, self.dtype, self.blockwise_from, window, cut, **options, parent=None)

    def embed(
        self,
        tokens_BT: jax.Array,
        keys_B: jax.Array | None = None,
        starts_BT: jax.Array | None = None,
        position: jax.Array | int = 0,
        cut: ModelParallel | None = None,
    ) -> ResidualStream:
        """The input of the stack of layers: `(B, T, D)`, this device's positions of it, and zero routing."""
        cut = self._cut.for_positions(tokens_BT.shape[1]) if cut is None else cut
        return self._entered(tokens_BT, keys_B, starts_BT, None, position, cut)[0]

    def _embedded(
        self,
        tokens_BT: jax.Array,
        keys_B: jax.Array | None,
        starts_BT: jax.Array | None,
        position: jax.Array | int,
        cut: ModelParallel,
    ) -> ResidualStream:
        """The embeddings."""
        x_BTD = jnp.zeros((*tokens_BT.shape, self.config.embedding_dim), jnp.float32)
        x_BTD, _ = self.vocabulary(x_BTD, self._chunks_of_table(), tokens_BT, None)
        x_BTD = cut.sum_positions(x_BTD)
        if self.config.scale_embedding:
            x_BTD = x_BTD * math.sqrt(self.config.embedding_dim)
        x_BTD = x_BTD * self.config.embedding_multiplier
        if self.config.kind_of_positions.added is not None:
            own_starts_BT = None if starts_BT is None else cut.stream_positions(starts_BT)
            x_BTD = self.positions(x_BTD, cut.stream_numbers(position, x_BTD.shape[1]), own_starts_BT)
        if self.config.embedding_norm:
            x_BTD = self.embedding_norm(x_BTD)
        keys_B = keys_from(fold_keys(keys_B, self.config.N), position)  # layers fold in the numbers below N
        x_BTD = dropout(x_BTD, self.config.embedding_dropout, keys_B, cut.of_positions).astype(self.dtype)
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
    cut: ModelParallel = WHOLE,
    known: jax.Array | int = 0,
) -> AnyCache:
    """An empty cache for `rows` rows of up to `positions` positions, of this device's heads.

    The cache of gated units has a constant size; only the first `known` positions of a prefill enter it.
    """
    return config.kind_of_layers.cache(config, rows, positions, dtype, cut, known)


@lru_cache(maxsize=64)  # the trace takes a tenth of a second
def variable_shapes(config: GPTConfig) -> Any:
    """Shapes of the variables of `GPT(config)`, as `jax.ShapeDtypeStruct`s."""
    tokens_BT = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    key = jax.eval_shape(jax.random.key, 0)  # made, it would be two programs
    return jax.eval_shape(partial(GPT(config).init, method="hidden"), key, tokens_BT, None)
