"""Inputs of attention tests: `EVERYTHING`, a form with every option, and `starts_of`, segments of `ROWS` rows."""

import jax
import jax.numpy as jnp
import numpy as np

from zero.models.attention.scores import Form

ROWS = 2
EVERYTHING = Form(window=11, divisor=3.0, cap=2.0, has_extra_logit=True, dropout_rate=0.3)


def starts_of(segments: int, positions: int) -> jax.Array | None:
    """Where the segment of each position starts, `(ROWS, positions)`, for random segments of another kind per row."""
    if segments == 0:
        return None
    rng = np.random.default_rng(segments)
    is_start = rng.random((ROWS, positions)) < np.linspace(0.05, 0.5, ROWS)[:, None]
    return jnp.asarray(np.maximum.accumulate(np.where(is_start, np.arange(positions), 0), axis=1), jnp.int32)
