"""Evaluation and sampling: losses of held-out rows and text drawn from the model, on state sharded as in training.

Shapes: R rows of one device, T tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zero.models.gpt import init_cache
from zero.models.mixers import Caches
from zero.partition.layout import PyTree
from zero.training.batch import Batch, document_starts, token_ids
from zero.training.objectives.objective import LIKELIHOOD, Objective
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import neutral_shards


def evaluate_step(
    params: PyTree,
    tokens: jax.Array,
    extra: Mapping[str, jax.Array] = {},
    *,
    model: ShardedGPT,
    objective: Objective = LIKELIHOOD,
    micro_batches: int = 1,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Sums over all devices' rows, the same on every device: of the objective's terms, their number, its metrics.

    For the likelihood: the losses in nats, the number of scored tokens, and no metrics. Per device: shards of
    parameters, int32 tokens `(R, T)` and the entries `(R, ...)` as in `Batch`. Call inside pmap.

    Args:
      micro_batches: parts that the rows are split into, one forward pass each, so that evaluation needs no more
        activations than training; divides R.
    """
    variables = model.gather_params(params)

    def add(sums: PyTree, rows: tuple[jax.Array, Mapping[str, jax.Array]]) -> tuple[PyTree, None]:
        tokens, extra = rows
        batch = Batch(tokens, jnp.int32(0), extra)
        scores = model.scores(variables, tokens, None, objective.inputs(model, batch))
        total, more = objective.sum_losses(model, scores, batch)
        return jax.tree.map(jnp.add, sums, (total, objective.count_terms(model, tokens), more)), None

    parts = jax.tree.map(lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), (tokens, extra))
    zeros = jnp.float32(0), jnp.int32(0), objective.zeros()
    total, terms, sums = lax.scan(add, zeros, parts)[0]
    name = model.axis.name
    return lax.psum(total, name), lax.psum(terms, name), {key: lax.psum(x, name) for key, x in sums.items()}


def reference_step(weights: PyTree, tokens: jax.Array, *, model: ShardedGPT, micro_batches: int = 1) -> jax.Array:
    """The log-probability in nats of the scored tokens of each row, by a reference model.

    Per device: int32 tokens `(R, T)` as in `Batch`; float32 `(R,)` out, the same on all devices of a group. The
    reference of adapters is the model without them, and `weights` are its frozen parameters, as they are held;
    otherwise it is the model with these weights. Call inside pmap.

    Args:
      micro_batches: parts that the rows are split into, one forward pass each; divides R.
    """
    if model.tuning is not None:  # x W + s (x A) B with zeros for A and B
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model.layout.shard_shapes())
        layouts: Any = {"layout": model.base.layout, "quantized": model.frozen_layout, "low": model.layout}
        adapters = neutral_shards(weights, zeros, **layouts, axis=model.axis, tuning=model.tuning)
        weights = model.weights(adapters, {}, weights)
    variables = model.gather_params(weights)

    def of_rows(rows: jax.Array) -> jax.Array:
        losses = model.scores(variables, rows, None).losses_BT
        return model.sum_over_group(-model.sum_rows(losses, rows))

    return lax.map(of_rows, tokens.reshape(micro_batches, -1, tokens.shape[-1])).reshape(-1)


def score(params: PyTree, tokens: jax.Array, *, model: ShardedGPT) -> tuple[jax.Array, jax.Array]:
    """The loss in nats of every token after the first of a row, and whether it was the most likely token.

    Per device: shards of parameters and int32 tokens `(R, T)` as in `Batch`. Out: float32 and bool
    `(N R, T - 1)`, the rows of all devices in order, the same on every device. Call inside pmap.
    """
    full = model.gather_params(params)
    tokens = token_ids(tokens)
    starts = document_starts(tokens[:, :-1], model.separators)
    scores, _ = model.apply(full, tokens[:, :-1], tokens[:, 1:], None, starts, method="scores")
    return of_all_rows(scores.losses_BT, model), of_all_rows(scores.is_greedy_BT, model)


def score_on(
    params: PyTree, tokens: jax.Array, cache: Caches, position: jax.Array, *, model: ShardedGPT
) -> tuple[jax.Array, jax.Array, Caches]:
    """`score` of rows that continue a cache at `position`, and the cache with all tokens but the last added.

    Of models with memory, whose cache has a constant size, long rows are scored in parts, with the same result.
    """
    tokens = token_ids(tokens)
    variables = model.gather_params(params)
    following = {"cache": cache, "position": position}
    scores, cache = model.apply(variables, tokens[:, :-1], tokens[:, 1:], method="scores", **following)
    return of_all_rows(scores.losses_BT, model), of_all_rows(scores.is_greedy_BT, model), cache


def of_all_rows(x: jax.Array, model: ShardedGPT) -> jax.Array:
    """Gathers the rows of all N tensor groups, or devices: `(R, ...)` in, `(N R, ...)` out. Call inside pmap."""
    of_devices = lax.all_gather(x, model.axis.name)
    if model.axis.tensor > 1:
        of_devices = of_devices[np.asarray([group[0] for group in model.axis.row_groups()])]
    return lax.collapse(of_devices, 0, 2)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Filters are applied in the order of the attributes.

    Attributes:
      repetition_penalty: logits of tokens in the text so far are divided by it, negative ones multiplied; 1 is none
        (CTRL, arXiv 1909.05858, section 4.1).
      temperature: logits are divided by it; 0 takes the most likely token.
      top_k: only this many of the most likely tokens.
      top_p: only the most likely tokens that together reach this probability (arXiv 1904.09751, section 3.1).
      typical_p: only the tokens nearest to the expected information with this mass (arXiv 2202.00666, section 4).
      eta: only tokens with a probability of at least `min(eta, sqrt(eta) exp(-entropy))`, and always the most likely
        one (arXiv 2210.15191, section 4).
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    eta: float | None = None


class DecodeState(NamedTuple):
    """Unfinished texts of one device, and the state of their decoding.

    Attributes:
      tokens: int32 `(R, S)`: prompts and drawn tokens; -1 where nothing is drawn yet.
      position: int32, the number of positions in the cache.
      cache: keys and values of these positions.
      logits: float32 `(R, V)`, after the last of them.
    """

    tokens: jax.Array
    position: jax.Array
    cache: Caches
    logits: jax.Array


def prefill(params: PyTree, tokens: jax.Array, length: jax.Array, *, model: ShardedGPT, width: int) -> DecodeState:
    """Reads the first `length` tokens of each row in one pass: at most the shortest prompt.

    Per device: shards of parameters, int32 tokens `(R, S)`, prompts followed by -1, and the length, int32. Call
    inside pmap.

    Args:
      length: at most `width`; it does not change the compiled program.
      width: positions to compute, the same for a range of lengths. Results from `length` on are unused: no
        later position attends to them before they are overwritten.
    """
    if model.config.has_learned_positions:
        width = min(width, model.config.block_size)
    cache = init_cache(model.config, tokens.shape[0], tokens.shape[1], model.compute_dtype, model.row_group, length)
    read = jnp.maximum(tokens[:, :width], 0)
    logits, cache = model.apply(model.gather_params(params), read, cache, 0, last=length - 1, method="logits")
    return DecodeState(tokens, length, cache, logits)


def extend(
    params: PyTree, state: DecodeState, keys: jax.Array, *, model: ShardedGPT, sampling: Sampling, count: int
) -> tuple[DecodeState, jax.Array]:
    """Appends `count` tokens with a key-value cache; the tokens of longer prompts are kept.

    Per device: shards of parameters, a decode state, the data of one random key per row. Out: the decode state, and the
    tokens `(N R, S)` of all devices, the same on every device. Call inside pmap.
    """
    variables = model.gather_params(params)
    keys = jax.random.wrap_key_data(keys)
    rows = jnp.arange(state.tokens.shape[0])

    def one_token(state: DecodeState, _: None) -> tuple[DecodeState, None]:
        logits = penalised(state.logits, state.tokens, sampling.repetition_penalty)
        drawn = draw(logits, jax.vmap(jax.random.fold_in, (0, None))(keys, state.position), sampling)
        of_prompt = state.tokens[rows, state.position]
        token = jnp.where(of_prompt >= 0, of_prompt, drawn)
        logits, cache = model.apply(variables, token[:, None], state.cache, state.position, method="logits")
        return DecodeState(state.tokens.at[rows, state.position].set(token), state.position + 1, cache, logits), None

    state, _ = lax.scan(one_token, state, None, length=count)
    return state, of_all_rows(state.tokens, model)


def penalised(logits: jax.Array, tokens: jax.Array, penalty: float) -> jax.Array:
    """Logits `(R, V)`, penalized for the tokens in `tokens` `(R, S)`; -1 is not a token."""
    if penalty == 1:
        return logits
    rows = jnp.arange(len(tokens))[:, None]
    none = jnp.zeros(logits.shape, bool)
    seen = none.at[rows, jnp.where(tokens >= 0, tokens, logits.shape[1])].set(True, mode="drop")
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def draw(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> jax.Array:
    """One token per row from logits `(R, V)`, with one key per row."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    return jax.vmap(jax.random.categorical)(keys, filtered(logits, sampling))


def filtered(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits `(R, V)` divided by the temperature, minus infinity for tokens that are filtered out."""
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits = _without_tail(logits, 1 - sampling.top_p)
    if sampling.typical_p is not None and sampling.typical_p < 1:
        information = -jax.nn.log_softmax(logits)
        terms = jnp.where(jnp.isfinite(information), jnp.exp(-information) * information, 0)
        expected = jnp.sum(terms, -1, keepdims=True)
        logits = _nucleus(logits, jnp.abs(information - expected), sampling.typical_p)
    if sampling.eta is not None:
        probability = jax.nn.softmax(logits)
        entropy = -jnp.sum(jax.scipy.special.xlogy(probability, probability), -1, keepdims=True)
        least = jnp.minimum(sampling.eta, jnp.sqrt(sampling.eta) * jnp.exp(-entropy))
        is_kept = (probability >= least) | (probability == probability.max(-1, keepdims=True))
        logits = jnp.where(is_kept, logits, -jnp.inf)
    return logits


def _without_tail(logits: jax.Array, mass: float) -> jax.Array:
    """Leaves out the least likely tokens whose probability together is at most `mass`, never the most likely one.

    Summed from the least likely one, as in transformers, because sums from the other end lose terms below 1e-7.
    """
    order = jnp.argsort(logits, axis=-1)
    tail = jnp.cumsum(jnp.take_along_axis(jax.nn.softmax(logits), order, axis=-1), axis=-1)
    is_kept = (tail > mass).at[..., -1].set(True)
    return jnp.where(jnp.take_along_axis(is_kept, jnp.argsort(order, axis=-1), axis=-1), logits, -jnp.inf)


def _nucleus(logits: jax.Array, cost: jax.Array, mass: float) -> jax.Array:
    """Keeps the cheapest tokens up to the one with which their probability reaches `mass`."""
    order = jnp.argsort(cost, axis=-1)
    probability = jnp.take_along_axis(jax.nn.softmax(logits), order, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    kept = jnp.take_along_axis(before < mass, jnp.argsort(order, axis=-1), axis=-1)
    return jnp.where(kept, logits, -jnp.inf)
