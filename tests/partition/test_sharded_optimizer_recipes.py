"""The recipes of docs/how-to/pmap-programs.md, run as they are, against unsharded programs."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax import lax

import zero
from tests.partition.exact_training import replicate

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "pmap-programs.md"
SECTION = PAGE.read_text().partition("## Recipes\n")[2].partition("\n## ")[0]
RECIPES = dict(re.findall(r"^### ([^\n]*)\n.*?^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE))
STEPS = 4


def make_params(dtype: Any = np.float32) -> Any:
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(16, 5)).astype(dtype), "b": rng.normal(size=5).astype(dtype)}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"]) + params["b"][None]))


BATCHES = np.random.default_rng(1).normal(size=(STEPS, 8, 4, 16)).astype(np.float32)


gradient = jax.grad(loss_fn)


def run(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": lax, "optax": optax, "zero": zero}
    names |= {"partial": partial, "loss_fn": loss_fn}
    exec(RECIPES[name], names)
    return names


def unsharded(tx: Any, grad: Callable[..., Any] = gradient) -> Any:
    """Parameters after the steps, on one device."""
    params = make_params()
    state = tx.init(params)
    step = jax.jit(lambda g, s, p: tx.update(g, s, p))
    for batch in BATCHES:
        updates, state = step(grad(params, batch.reshape(-1, 16)), state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_close(found: Any, expected: Any) -> None:
    zero.check_replicated(found, "batch")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[0], y, rtol=1e-4, atol=1e-5), found, expected)


SIMPLE: dict[str, Any] = {
    "Accumulated gradients: `MultiSteps` inside": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "Accumulated gradients: `MultiSteps` around": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "Frozen parameters": lambda: optax.partition(
        {"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, {"w": "trained", "b": "frozen"}
    ),
    "Noise": lambda: optax.chain(optax.add_noise(0.01, 0.55, key=jax.random.key(0)), optax.adam(1e-2)),
    "SAM, and other methods that take a second gradient": lambda: optax.adam(1e-2),
}


def sam_grad(params: Any, batch: Any) -> Any:
    first = gradient(params, batch)
    there = jax.tree.map(lambda p, g: p + 0.05 * g / optax.tree.norm(first), params, first)
    return gradient(there, batch)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.wide if name == "Noise" else ()) for name in SIMPLE]
)  # test_on_mesh.py has noise
def test_recipe(name: str) -> None:
    recipe = run(name)
    params = replicate(make_params())
    state = jax.pmap(recipe["tx"].init, "batch")(params)
    step = jax.pmap(recipe["train_step"], "batch")
    for batch in BATCHES:
        params, state = step(params, state, batch)
    assert_close(params, unsharded(SIMPLE[name](), sam_grad if "SAM" in name else gradient))


def test_dynamic_scale() -> None:
    recipe = run("Loss scaling by flax's `DynamicScale`")
    params = replicate(make_params())
    state = jax.pmap(recipe["tx"].init, "batch")(params)
    scale = jax.tree.map(lambda x: jnp.stack([x] * 8), DynamicScale(scale=jnp.float32(4.0)))
    step = jax.pmap(recipe["train_step"], "batch")
    for batch in BATCHES:
        held = params
        overflows = batch.copy()
        overflows[3, 0, 0] = np.inf  # on one device
        params, state, scale = step(params, state, scale, overflows)
        jax.tree.map(np.testing.assert_array_equal, params, held)
        params, state, scale = step(params, state, scale, batch)
    assert_close(params, unsharded(optax.adam(1e-2)))


def test_a_rate_between_steps() -> None:
    recipe = run("A learning rate that is set between steps")
    params = replicate(make_params())
    state = jax.pmap(recipe["tx"].init, "batch")(params)
    step = jax.pmap(recipe["train_step"], "batch")
    for number, batch in enumerate(BATCHES):
        params, state = step(params, state, batch, jnp.full(8, 0.01 * number, jnp.float32))
    assert_close(params, unsharded(optax.adam(lambda count: 0.01 * count)))


def test_an_average_in_another_dtype() -> None:
    recipe = run("An average in another dtype")
    first = make_params(jnp.bfloat16)
    params, ema = replicate(first), zero.to_devices(recipe["averages"].init(jax.tree.map(np.float32, first)))
    state = jax.pmap(recipe["tx"].init, "batch")(params)
    step = jax.pmap(recipe["train_step"], "batch")
    expected = jax.tree.map(np.float32, first)
    for batch in BATCHES:
        params, state, ema = step(params, state, ema, batch)
        expected = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * np.float32(p[0]), expected, params)
    # XLA may leave out the rounding of parameters that it makes wide again.
    saved = zero.to_host(ema)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2**-8), saved, expected)
    assert saved["w"].dtype == np.float32


def test_loop_of_steps() -> None:
    """A loop of steps runs in one call."""
    recipe = run("A loop of steps in one call")
    params = replicate(make_params())
    state = jax.pmap(recipe["tx"].init, "batch")(params)
    found, _ = jax.pmap(recipe["train_step"], "batch")(params, state, BATCHES.swapaxes(0, 1))
    assert_close(found, unsharded(optax.adam(1e-2)))


def test_loop_under_jit() -> None:
    """A loop under jit runs a pmapped step."""
    recipe = run("A loop of your own under `jax.jit`")
    params = replicate(make_params())
    state = jax.pmap(recipe["tx"].init, "batch")(params)
    found, state = recipe["train"](params, state, BATCHES)
    assert_close(found, unsharded(optax.adam(1e-2)))
    saved = zero.to_host(jax.pmap(lambda x: x, "batch")(state))
    assert saved[0].count == STEPS and saved[0].mu["w"].shape == (16, 5)


def test_every_recipe_is_tested() -> None:
    rest = {name for name in RECIPES if not any(word in name for word in ("Dynamic", "rate", "average", "loop"))}
    assert rest == set(SIMPLE) and len(RECIPES) == SECTION.count("\n### ") == 10
