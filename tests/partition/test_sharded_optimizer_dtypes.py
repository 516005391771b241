"""Dtypes of parameters, gradients and state in every combination: as the unsharded program."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zero

DEVICES = 8
SHAPES = {"w": (13, 5), "s": ()}
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
EXACT: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.25),
    "momentum": lambda: optax.sgd(0.25, momentum=0.5),
    "momentum in float32": lambda: optax.sgd(0.25, momentum=0.5, accumulator_dtype=jnp.float32),
    "MultiSteps": lambda: optax.MultiSteps(optax.sgd(0.25, momentum=0.5), 2),
}
ROUNDED: dict[str, Callable[[], Any]] = {  # sums in another order
    "first moment in bfloat16": lambda: optax.adam(0.25, mu_dtype=jnp.bfloat16),
    "clipping": lambda: optax.chain(zero.across_shards(optax.clip_by_global_norm(0.5)), optax.sgd(0.25)),
}
OPTIMIZERS = EXACT | ROUNDED


def params_of(dtype: Any) -> Any:
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}


def grads_of(dtype: Any, step: int) -> Any:
    """Zeros on all devices but one, so that sums are exact in any dtype and order."""
    rng = np.random.default_rng(step)
    of_one = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}
    return {name: jnp.stack([8 * x if i == 3 else 0 * x for i in range(DEVICES)]) for name, x in of_one.items()}


def train(tx: Any, params: Any, grads: list[Any], reduce: Callable[[Any], Any]) -> Any:
    """Two steps on each device; the updates of both, the parameters and the whole state."""
    state, made = tx.init(params), []
    for one in grads:
        updates, state = tx.update(reduce(one), state, params)
        params = optax.apply_updates(params, updates)
        made.append(updates)
    return made, params, zero.gather(state) if isinstance(state, zero.ShardedState) else state


def reduced(reduction: str | None, params: Any, grads: Any) -> Any:
    """The gradients as a program hands them to the sharded optimizer."""
    if reduction is None:
        return lax.pmean(grads, "batch")
    if reduction == "scattered":
        grads = zero.scatter_mean(grads, zero.make_layout(params, DEVICES), "batch")
    return zero.local(grads)


QUICK = ("scattered", "momentum")  # rounded to another dtype, the state shows it


EVERY = [*itertools.product(FLOATS, FLOATS)]
OTHERS = [*zip(FLOATS, [*FLOATS[1:], FLOATS[0]], strict=True)]  # each dtype of parameters beside one of gradients


@pytest.mark.parametrize(
    ("reduction", "name", "dtypes"),
    [
        (*QUICK, OTHERS),
        *(
            pytest.param(reduction, name, EVERY, marks=pytest.mark.wide)
            for reduction in ("mean", "sum", "scattered", None)
            for name in OPTIMIZERS
        ),
    ],
    ids=lambda x: "others" if x is OTHERS else "every" if x is EVERY else str(x),
)
def test_gradients_keep_their_dtype(reduction: str | None, name: str, dtypes: list[Any]) -> None:
    """Gradients reach the optimizer in their own dtype, whatever the parameters have."""
    plain = OPTIMIZERS[name]()
    sharded = zero.shard_optimizer(plain, "batch", reduction=reduction)  # type: ignore[arg-type]  # any of the four
    mapped = partial(jax.vmap, axis_name="batch", axis_size=DEVICES, in_axes=(None, 0))
    plain_reduction = partial(lax.psum if reduction == "sum" else lax.pmean, axis_name="batch")
    for params_dtype, grads_dtype in dtypes:
        params, grads = params_of(params_dtype), [grads_of(grads_dtype, step) for step in range(2)]
        expected = mapped(lambda p, g: train(plain, p, g, plain_reduction))(params, grads)
        found = mapped(lambda p, g: train(sharded, p, g, partial(reduced, reduction, p)))(params, grads)
        for (path, x), (_, y) in zip(*map(jax.tree_util.tree_leaves_with_path, (found, expected)), strict=True):
            what = f"{params_dtype.__name__}, {grads_dtype.__name__}: {jax.tree_util.keystr(path)}"
            assert x.dtype == y.dtype, f"{what}: {x.dtype}, expected {y.dtype}"
            rounding = 4 * float(jnp.finfo(x.dtype).eps) if name in ROUNDED and x.dtype != jnp.int32 else 0
            x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
            np.testing.assert_allclose(x, y, rtol=rounding, atol=rounding, err_msg=what)
