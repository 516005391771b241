"""Collectives wait for loops that hold collectives, and nothing else changes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import zero
from tests.helpers import cli
from tests.helpers.ordering import unordered, unordered_when_compiled

REPRODUCTION = Path(__file__).parents[3] / "benchmarks" / "collective_order.py"


def gathers_in_scan(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, w: (c + lax.all_gather(w, "batch").sum(0), None), jnp.zeros(x.shape[1:]), x)[0]


def loop_then_mean(x: jax.Array) -> Any:
    return gathers_in_scan(x), lax.pmean(x, "batch")


def mean_then_loop(x: jax.Array) -> Any:
    return lax.pmean(x, "batch"), gathers_in_scan(x)


def two_loops(x: jax.Array) -> Any:
    return gathers_in_scan(x), gathers_in_scan(x + 1)


def while_and_branch(x: jax.Array) -> Any:
    total = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, lax.psum(c[1], "batch") / 8), (0, x))[1]
    return total, lax.cond(lax.pmax(x[0, 0], "batch") > 0, lambda x: lax.psum(x, "batch"), lambda x: x, x)


def gradient_through_remat(x: jax.Array) -> Any:
    def loss(x: jax.Array) -> jax.Array:
        inner = jax.checkpoint(lambda c, w: (jnp.sin(c + lax.all_gather(w, "batch").sum(0)), None))
        return lax.scan(inner, jnp.zeros(x.shape[1:]), x)[0].sum()

    value, grads = jax.value_and_grad(loss)(x)
    return lax.pmean(value, "batch"), lax.psum_scatter(jnp.tile(x, (8, 1)), "batch", tiled=True), grads


def loop_in_a_loop(x: jax.Array) -> Any:
    def body(c: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return c + gathers_in_scan(w[None]), lax.pmean(w, "batch")

    return lax.scan(body, jnp.zeros(x.shape[1:]), x)


def remat_with_a_constant(x: jax.Array) -> Any:
    shift = jax.jit(lambda x: x + np.arange(5, dtype=np.float32))  # whose program holds the array

    def part(x: jax.Array) -> jax.Array:
        return shift(jnp.sin(lax.pmean(gathers_in_scan(x), "batch")))

    return jax.checkpoint(part)(x), jax.grad(lambda x: jax.checkpoint(part)(x).sum())(x), lax.pmean(x, "batch")


def loop_then_unrolled_loop(x: jax.Array) -> Any:
    """As a model of few layers whose vocabulary is cut into chunks: jax unrolls the second loop."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.sin(x + lax.all_gather(w, "batch").sum(0)), None

    return lax.scan(layer, gathers_in_scan(x), x, unroll=len(x))[0]


def unrolled_while(x: jax.Array) -> Any:
    """XLA removes a loop of one iteration."""
    total = gathers_in_scan(x)
    return lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1] + lax.pmean(x[0], "batch")), (0, total))


def mean_of_loop_and_of_input(x: jax.Array) -> Any:
    return lax.pmean((gathers_in_scan(x), x), "batch")


PROGRAMS = [
    loop_then_mean,
    mean_of_loop_and_of_input,
    mean_then_loop,
    two_loops,
    while_and_branch,
    gradient_through_remat,
    remat_with_a_constant,
    loop_in_a_loop,
    loop_then_unrolled_loop,
    unrolled_while,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_same_results_in_order(program):
    """With in_order a program has the same results, and its collectives wait for each other."""
    x = np.random.default_rng(0).normal(size=(8, 3, 5)).astype(np.float32)
    ordered = zero.in_order(program)
    compiled = jax.pmap(ordered, axis_name="batch").lower(x).compile()
    got = compiled(x)
    # Arrays this small are not split over threads, so that the loops end before they return and the order is right.
    expected = jax.pmap(program, axis_name="batch")(x)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    assert unordered(jax.make_jaxpr(ordered, axis_env=[("batch", 8)])(x[0]).jaxpr) == []
    assert unordered_when_compiled(compiled.as_text()) == []


@pytest.mark.parametrize("program", [loop_then_mean, mean_of_loop_and_of_input])
def test_checker_sees_unordered_collective(program: Any) -> None:
    """The check of this file sees a collective that does not wait."""
    x = np.ones((3, 5), np.float32)
    assert ("scan", "psum") in unordered(jax.make_jaxpr(program, axis_env=[("batch", 8)])(x).jaxpr)


def test_checker_sees_unordered_unrolled_loop() -> None:
    """The check of compiled programs sees layers that do not wait for the loop before them."""
    compiled = jax.pmap(loop_then_unrolled_loop, axis_name="batch").lower(np.ones((8, 3, 5), np.float32)).compile()
    assert unordered_when_compiled(compiled.as_text())


def test_flat_programs_are_left_alone():
    def program(x: jax.Array) -> Any:
        return lax.pmean(x, "batch"), lax.all_gather(x, "batch")

    x = np.ones((3, 5), np.float32)
    plain, ordered = (str(jax.make_jaxpr(f, axis_env=[("batch", 8)])(x)) for f in (program, zero.in_order(program)))
    assert plain == ordered


def test_a_wait_touches_one_number() -> None:
    """Arrays that wait are not read as a whole."""
    ordered = jax.make_jaxpr(zero.in_order(loop_then_mean), axis_env=[("batch", 8)])(np.ones((3, 5), np.float32))
    changed = [eqn.outvars[0].aval.size for eqn in ordered.eqns if eqn.primitive.name == "bitcast_convert_type"]
    assert changed and set(changed) == {1}


@pytest.mark.wide  # test_same_results_in_order looks at the order itself
def test_reproduction_of_the_abort():
    """The program that aborts without in_order is right with it."""
    with cli.spinning(os.cpu_count() or 1, seconds=60):
        done = subprocess.run([sys.executable, REPRODUCTION, "--rounds", "20"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "20 rounds, 0 wrong" in done.stdout
