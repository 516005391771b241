"""Log-probabilities of rows by a reference model, which some objectives read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zero.partition.layout import PyTree
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import neutral_shards


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
