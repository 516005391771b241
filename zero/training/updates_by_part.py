"""Updates on parts of rows: a wrapper of an update, as `optax.MultiSteps` wraps an optimizer.

A model with memory takes each row in parts, and remembers earlier parts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from zero.models.config import GPTConfig
from zero.partition.layout import PyTree
from zero.training.batch import Batch, RowPart
from zero.training.parts import StepOptions, TrainState
from zero.training.sharded_gpt import ShardedGPT
from zero.training.step import Step, make_update

PART_KEY = "update_tokens"  # of a model: the positions of a part


def parts_of_row(config: GPTConfig, context: int) -> int | None:
    """The parts, each an update, of rows of this many positions; None if an update takes whole rows.

    Raises:
      ValueError: the parts do not divide the rows.
    """
    tokens = config.update_tokens
    if tokens is None:
        return None
    if context % tokens:
        raise ValueError(f"{context} positions are no multiple of {PART_KEY}={tokens}")
    return context // tokens


def updates_by_part(model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions) -> Step:
    """A step that makes one update after the other on the parts of each row; its metrics are `(parts,)`.

    Source: `train_op` of Transformer-VQ (`ops/train.py`, branch main).

    Args:
      options: with the number of `parts`.

    Raises:
      ValueError: the model remembers nothing, or an option needs whole rows.
    """
    if not model.config.has_memory or options.fused_update:
        raise ValueError("updates on parts of rows need a model with memory, without fused_update")
    # Every part has one token more than positions: the first of the next part is the target of its last position.
    of_parts = dataclasses.replace(model, last_target=True)
    update = make_update(of_parts, tx, options)

    def step(state: TrainState, batch: Batch, frozen: PyTree = None) -> tuple[TrainState, dict[str, jax.Array]]:
        tokens = jnp.asarray(batch.tokens)
        if not model.last_target:
            tokens = jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=-1)
        length = of_parts.positions_in(tokens) // options.parts
        columns = np.arange(options.parts)[:, None] * length + np.arange(length + 1)[None]
        tokens_of_parts = jnp.moveaxis(tokens[:, columns], 1, 0)
        empty = model.empty_memory(len(tokens) // options.micro_batches)
        memory = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (options.micro_batches, *x.shape)), empty)

        def update_on_part(carry: tuple[TrainState, PyTree], xs: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
            state, memory = carry
            tokens, number = xs
            part = batch._replace(tokens=tokens, part=RowPart(number, memory))
            state, metrics, memory = update(state, part, frozen)
            return (state, memory), metrics

        (state, _), metrics = lax.scan(update_on_part, (state, memory), (tokens_of_parts, jnp.arange(options.parts)))
        return state, metrics

    return step
