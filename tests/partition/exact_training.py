"""Data-parallel training whose sums over devices are exact, and the same without shards.

- `make_params`, `local_grads`, `replicate`: parameters and small integer gradients; `AXES`: the axes to train on.
- `train`, `train_unsharded`, `assert_close`: both programs and their comparison; `lower`: traces without compiling.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero

AXES = {
    "flat": zero.Axis("batch", (1, 8)),
    "phases": zero.Axis("batch", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7)),
    "hybrid": zero.Axis("batch", (2, 4)),
    "both": zero.Axis("batch", (2, 2, 2), (0, 4, 1, 5, 2, 6, 3, 7)),
}


def make_params() -> Any:
    rng = np.random.default_rng(0)
    shapes = {"w": (13, 24), "b": (24,), "s": (), "t": (3,)}
    return {name: rng.integers(-8, 9, shape).astype(np.float32) / 8 for name, shape in shapes.items()}


def local_grads(step: int) -> Any:
    """Per leaf `(8, ...)`; sums over devices are exact."""
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: rng.integers(-8, 9, (8, *p.shape)).astype(np.float32) / 8, make_params())


def replicate(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.stack([x] * 8), tree)


def train(
    tx: optax.GradientTransformationExtraArgs,
    params: Any,
    steps: int = 3,
    mark: Callable[[Any], Any] = zero.local,
    **extra: Any,
) -> tuple[Any, Any]:
    """A data-parallel program; parameters and state of all devices out."""
    params = replicate(params)
    state = jax.pmap(tx.init, "batch")(params)

    @partial(jax.pmap, axis_name="batch")
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(mark(grads), state, params, **extra)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        params, state = step(params, state, local_grads(i))
    zero.check_replicated(params, "batch")
    return params, state


def train_unsharded(
    tx: optax.GradientTransformation, params: Any, reduce: Callable[..., Any] = jnp.mean, steps: int = 3
) -> Any:
    state = tx.init(params)
    for i in range(steps):
        grads = jax.tree.map(lambda g: reduce(g, 0), local_grads(i))
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def lower(fn: Callable[..., Any], *args: Any) -> Any:
    """Traces in a real pmap; nothing is computed."""
    return jax.pmap(fn, "batch").lower(*args)


def assert_close(got: Any, expected: Any) -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x[0], y, rtol=0, atol=1e-6 * np.max(np.abs(y)), err_msg=str(path))
