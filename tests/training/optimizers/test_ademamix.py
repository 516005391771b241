"""AdEMAMix against its paper, written out in numpy."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.toy_axes import toy_axes
from zero.training.optimizers.optimizer import make_optimizer

B1, B2, B3, ALPHA, EPS = 0.9, 0.99, 0.999, 4.0, 1e-8


def of_paper(gradients: list[np.ndarray], warmup: int | None) -> list[np.ndarray]:
    """Algorithm 1 with the warm-ups of section 3, in float64."""
    fast, slow, squares = (np.zeros_like(gradients[0]) for _ in range(3))
    updates = []
    for step, gradient in enumerate(gradients, 1):
        alpha, b3 = ALPHA, B3
        if warmup is not None:
            alpha = min(step * ALPHA / warmup, ALPHA)
            rest = 1 - step / warmup
            grown = np.exp(np.log(B1) * np.log(B3) / (rest * np.log(B3) + step / warmup * np.log(B1)))
            b3 = B3 if step >= warmup else min(grown, B3)
        fast = B1 * fast + (1 - B1) * gradient
        slow = b3 * slow + (1 - b3) * gradient
        squares = B2 * squares + (1 - B2) * gradient**2
        mean, square = fast / (1 - B1**step), squares / (1 - B2**step)
        updates.append((mean + alpha * slow) / (np.sqrt(square) + EPS))
    return updates


@pytest.mark.parametrize("warmup", [None, 4])
def test_updates_of_the_paper(warmup: int | None) -> None:
    """Through the warm-up and beyond its end."""
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=7) for _ in range(8)]
    params = {"w": jnp.zeros(7)}
    options: dict[str, Any] = {"b1": B1, "b2": B2, "b3": B3, "alpha": ALPHA, "eps": EPS, "slow_warmup": warmup}
    tx = make_optimizer("ademamix", 0.0, axes=toy_axes(params), **options)
    state = tx.init(params)
    for gradient, expected in zip(gradients, of_paper(gradients, warmup), strict=True):
        updates, state = tx.update({"w": jnp.asarray(gradient, jnp.float32)}, state, params)
        np.testing.assert_allclose(updates["w"], expected, rtol=2e-5, atol=1e-6)
