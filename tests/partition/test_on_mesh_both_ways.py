"""One table of programs, each run under `jax.pmap` and under `jax.shard_map`: as the unsharded program, both ways.

A row is the step of one device, `(state, batch) -> (state, value)`, on a train state whose whole form is that of the
unsharded program. It also goes to the host and back between two steps.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zero

DEVICES = 8
SHAPES = {"w": (13, 8), "b": (8,)}
LAYOUT = zero.make_layout({name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in SHAPES.items()}, DEVICES)


class Row(NamedTuple):
    """A program.

    Attributes:
      plain: the optimizer of the unsharded program.
      sharded: the same, sharded.
      step: the step of one device, from an optimizer and whether it is sharded.
      layout: of a state that consists of slices, which do not know theirs.
    """

    plain: Any
    sharded: Any
    step: Callable[[Any, bool], Callable[[Any, Any], Any]]
    layout: zero.Layout | None = None


def make_params() -> Any:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.square(jnp.tanh(x @ params["w"] + params["b"][None]) - x[:, :8]).mean()


def reduced(grads: Any, is_sharded: bool) -> Any:
    return zero.local(grads) if is_sharded else lax.pmean(grads, "batch")


def simple(tx: Any, is_sharded: bool) -> Any:
    def step(state: Any, x: jax.Array) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, opt_state = tx.update(reduced(grads, is_sharded), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), lax.pmean(loss, "batch")

    return step


def clipped_by_hand(tx: Any, is_sharded: bool) -> Any:
    def step(state: Any, x: jax.Array) -> Any:
        params, opt_state = state
        grads = jax.grad(loss_fn)(params, x)
        if is_sharded:
            grads = zero.scatter_mean(grads, LAYOUT, "batch")
            norm = zero.global_norm(grads, LAYOUT, "batch")
        else:
            grads = lax.pmean(grads, "batch")
            norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / norm), grads)
        updates, opt_state = tx.update(zero.local(grads) if is_sharded else grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), norm

    return step


def reduced_before(tx: Any, is_sharded: bool) -> Any:
    def step(state: Any, x: jax.Array) -> Any:
        params, opt_state = state
        updates, opt_state = tx.update(lax.pmean(jax.grad(loss_fn)(params, x), "batch"), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jnp.float32(0)

    return step


def evaluated(tx: Any, is_sharded: bool) -> Any:
    def step(state: Any, x: jax.Array) -> Any:
        (params, opt_state), _ = simple(tx, is_sharded)(state, x)
        whole = zero.gather(opt_state) if is_sharded else opt_state
        return (params, opt_state), lax.pmean(
            loss_fn(optax.contrib.schedule_free_eval_params(whole, params), x), "batch"
        )

    return step


def in_a_scan(tx: Any, is_sharded: bool) -> Any:
    def step(state: Any, x: jax.Array) -> Any:
        state, losses = lax.scan(simple(tx, is_sharded), state, jnp.stack([x, x[::-1]]))
        return state, losses.mean()

    return zero.in_order(step) if is_sharded else step


def fully_sharded(tx: Any, is_sharded: bool) -> Any:
    """Stage 3: parameters are slices between steps, and whole within the lifted function."""
    if not is_sharded:
        return simple(tx, is_sharded)
    lifted = zero.fully_shard(loss_fn, LAYOUT, "batch")

    def step(state: Any, x: jax.Array) -> Any:
        shards, opt_state = state
        loss, sums = jax.value_and_grad(lifted)(shards, x)
        updates, opt_state = tx.update(jax.tree.map(lambda g: g / DEVICES, sums), opt_state, shards)
        return (optax.apply_updates(shards, updates), opt_state), lax.pmean(loss, "batch")

    return step


def fully_sharded_row(tx: Any) -> Row:
    layout = zero.derive_layout(lambda params: (params, tx.init(params)), LAYOUT)
    return Row(tx, zero.on_shards(tx, LAYOUT, "batch"), fully_sharded, layout)


def row(make: Callable[[Callable[[Any], Any]], Any], step: Any = simple, reduction: Any = "mean") -> Row:
    """The row of an optimizer that is made of a function which wraps what is not element-wise."""
    return Row(make(lambda tx: tx), zero.shard_optimizer(make(zero.across_shards), "batch", reduction=reduction), step)


ROWS = {
    "adamw, clipped": row(lambda across: optax.chain(across(optax.clip_by_global_norm(0.1)), optax.adamw(0.1))),
    "adafactor": row(lambda across: across(optax.adafactor(0.1, min_dim_size_to_factor=3))),
    "muon": row(lambda across: across(optax.contrib.muon(0.1))),
    "MultiSteps": row(lambda across: optax.MultiSteps(optax.adam(0.1), 2)),
    "hyperparameters": row(lambda across: optax.inject_hyperparams(optax.lion)(0.1)),
    "a Python value in the state": row(lambda across: optax.optimistic_gradient_descent(0.1)),
    "clipped by hand": row(lambda across: optax.adam(0.1), clipped_by_hand, "scattered"),
    "reduced before": row(lambda across: optax.adam(0.1), reduced_before, None),
    "schedule-free, evaluated": row(lambda across: optax.contrib.schedule_free_adamw(0.1), evaluated),
    "steps in a scan": row(lambda across: optax.adam(0.1), in_a_scan),
    "fully_shard": fully_sharded_row(optax.adamw(0.1)),
}


class Way(NamedTuple):
    """How programs are mapped over devices.

    Attributes:
      mesh: of the arrays, or None under pmap.
      program: a step, from the step of one device and the `zero.specs` of its state.
    """

    mesh: Mesh | None
    program: Callable[[Callable[[Any, Any], Any], Any], Callable[[Any, Any], Any]]


def by_pmap() -> Way:
    def program(step: Callable[[Any, Any], Any], _: Any) -> Any:
        mapped = jax.pmap(step, "batch")

        def run(state: Any, x: Any) -> Any:
            state, value = mapped(state, x)
            return state, value[0]

        return run

    return Way(None, program)


def by_shard_map() -> Way:
    mesh = Mesh(np.asarray(jax.devices()), "batch")

    def program(step: Callable[[Any, Any], Any], specs: Any) -> Any:
        on_each = partial(jax.shard_map, mesh=mesh, check_vma=False)
        mapped = on_each(lambda s, x: step(s, x[0]), in_specs=(specs, P("batch")), out_specs=(specs, P()))
        compiled = jax.jit(mapped)
        return lambda state, x: compiled(state, jax.device_put(x, NamedSharding(mesh, P("batch"))))

    return Way(mesh, program)


def specs_of(whole: Any, layout: zero.Layout | None, mesh: Mesh) -> Any:
    if layout is None:
        return zero.specs(whole, mesh)
    return jax.tree.map(lambda x: x.sharding.spec, zero.global_shapes(layout, "batch", mesh))


WAYS = {"pmap": by_pmap, "shard_map": by_shard_map}
QUICK = (
    "a Python value in the state",
    "clipped by hand",
    "fully_shard",
)  # the others are compared elsewhere under one of the two


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.wide) for n in ROWS])
def test_program(name: str, way: str) -> None:
    plain, sharded, step, layout = ROWS[name]
    mesh, program = WAYS[way]()
    params, rng = make_params(), np.random.default_rng(1)
    whole = (params, (sharded if layout is None else plain).init(params))
    slices: Any = {} if layout is None else {"layout": layout, "axis": "batch"}
    state = zero.to_devices(whole, devices=mesh, **slices)
    run = program(step(sharded, True), None if mesh is None else specs_of(whole, layout, mesh))
    right = jax.tree.map(lambda x: jnp.stack([x] * DEVICES), (params, plain.init(params)))
    run_plain = jax.pmap(step(plain, False), "batch")
    for _ in range(3):
        x = rng.normal(size=(DEVICES, 4, 13)).astype(np.float32)
        state, value = run(state, x)
        right, expected = run_plain(right, x)
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        saved = zero.to_host(state) if layout is None else zero.to_host(state, layout, "batch", mesh)
        pairs = zip(jax.tree.leaves(saved), jax.tree.leaves(right), strict=True)
        structure: Any = jax.tree.structure(saved)
        assert structure == jax.tree.structure(right)
        for found, wanted in pairs:
            assert found.dtype == wanted.dtype
            np.testing.assert_allclose(found, wanted[0], rtol=1e-4, atol=1e-5)
        state = zero.to_devices(saved, devices=mesh, **({"like": whole} if layout is None else slices))
