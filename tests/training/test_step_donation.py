"""Whole steps update donated state in its own buffers: a copy would be twice the state for a moment."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from zero.models.config import GPTConfig
from zero.partition.collectives.axis import Axis
from zero.training.batch import Batch
from zero.training.optimizers.optimizer import adamw
from zero.training.parts import StepOptions, TrainState
from zero.training.programs import make_programs
from zero.training.sharded_gpt import ShardedGPT
from zero.training.step import state_layout

CONFIG = GPTConfig(embedding_dim=32, vocab_size=97, num_head=2, block_size=8, dropout=0.0, N=2)


def buffers(tree: Any) -> set[int]:
    """Where arrays of more than a few bytes lie: smaller ones XLA may keep elsewhere."""
    large = [x for x in jax.tree.leaves(tree) if x.nbytes >= 8 * 1024]
    return {part.data.unsafe_buffer_pointer() for x in large for part in x.addressable_shards}


@pytest.mark.parametrize(
    "stage",
    [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1)), pytest.param(3, marks=pytest.mark.wide)],
)
def test_state_is_donated(stage: int) -> None:
    """Steps reuse the buffers of the state."""
    axis = Axis("batch", (1, 8))
    model = ShardedGPT(CONFIG, axis, stage)
    options = StepOptions(learning_rate=lambda step: jnp.float32(0.1), max_gradient_norm=1.0)
    programs = make_programs(model, adamw(0.1, axes=model.axes), options)
    key = jax.random.key_data(jax.random.key(0))
    params = programs.init(np.stack([key] * 8))
    held = buffers(params)
    state: TrainState = programs.start(params)
    assert held <= buffers(state)
    layout, batch = state_layout(model, adamw(0.1, axes=model.axes)), Batch(np.ones((8, 1, 8), np.int32), np.arange(8))
    held = buffers(state)
    assert held
    for _ in range(2):
        before = state
        state, _ = programs.step(state, batch)
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
        assert buffers(state) == held
        stored = zero.to_global(state, layout, axis, donate=True)  # as for a checkpoint
        state = zero.from_global(stored, layout, axis, donate=True)
        assert buffers(state) == held
