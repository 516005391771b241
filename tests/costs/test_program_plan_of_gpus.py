"""What a plan says of GPUs, for which there is no compiler here."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import zero
from zero.base.errors import UnknownTopology
from zero.costs.absent_devices import NotPlannable
from zero.hosts.speeds import SPEEDS

ROWS, WIDTH, LAYERS, GPUS = 32, 64, 5, 8
PRODUCT = 2 * ROWS * WIDTH * WIDTH


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    """Of a chain of layers, as one loop."""
    y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
    return jnp.square(y).mean()


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - jax.lax.pmean(jax.grad(loss)(w, x), "batch")


def of_all(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def test_a_pmapped_program() -> None:
    """Products of each iteration count, sums are those of a ring, and the page says that seconds are a bound."""
    shapes = of_all(GPUS, LAYERS, WIDTH, WIDTH), of_all(GPUS, ROWS, WIDTH)
    plan = zero.plan(jax.pmap(step, "batch"), *shapes, topology=f"gpu:h100x{GPUS}")
    assert plan.flops == 3 * LAYERS * PRODUCT
    weights = LAYERS * WIDTH * WIDTH * 4
    (sums,) = plan.collectives
    assert (sums.kind, sums.runs, sums.bytes) == ("all-reduce", 1, 2 * weights * (GPUS - 1) // GPUS)
    speed = SPEEDS[plan.device_kind]
    assert plan.seconds == max(plan.flops / speed.flops, sums.bytes / speed.network)
    assert 2 * weights < plan.peak_bytes < 10 * weights and plan.fits
    assert f"step      at least {plan.seconds:#.4g} s" in str(plan)
    assert "compiler for GPUs" in str(plan) and "exposed" not in str(plan)


def test_products_of_any_form() -> None:
    """Batched products and convolutions count, in bfloat16 too, which XLA for CPUs multiplies in float32."""

    def attend(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.einsum("bqhd,bkhd->bhqk", q, k)

    def blur(images: jax.Array, kernels: jax.Array) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(images, kernels, (1, 1), "VALID", dimension_numbers=layout)

    heads = jax.ShapeDtypeStruct((GPUS, 4, 256, 8, 64), "bfloat16")
    plan = zero.plan(jax.pmap(attend), heads, heads, topology=f"gpu:h100x{GPUS}")
    assert plan.flops == 2 * 4 * 8 * 256 * 256 * 64
    plan = zero.plan(
        jax.pmap(blur), of_all(GPUS, 2, 34, 34, 32), of_all(GPUS, 3, 3, 32, 64), topology=f"gpu:h100x{GPUS}"
    )
    assert plan.flops == 2 * 2 * 32 * 32 * 64 * 9 * 32


def test_a_jitted_program_and_its_page(tmp_path: Path) -> None:
    """XLA's own collectives are found, and the sum of two plans is of both."""
    mesh = jax.sharding.Mesh(jax.devices()[:GPUS], "batch")
    place = partial(jax.sharding.NamedSharding, mesh)
    rows, whole = place(jax.sharding.PartitionSpec("batch")), place(jax.sharding.PartitionSpec())
    gradients = jax.jit(jax.grad(loss), in_shardings=(whole, rows), out_shardings=whole)
    shapes = of_all(LAYERS, WIDTH, WIDTH), of_all(GPUS * ROWS, WIDTH)
    plan = zero.plan(gradients, *shapes, topology=f"gpu:h100x{GPUS}")
    assert plan.flops == 3 * LAYERS * PRODUCT
    assert sum(cost.bytes for cost in plan.collectives) == 2 * LAYERS * WIDTH * WIDTH * 4 * (GPUS - 1) // GPUS
    assert plan.seconds is not None and (2 * plan).seconds == 2 * plan.seconds
    plan.save(tmp_path / "plan.html")
    assert "at least" in (tmp_path / "plan.html").read_text()


def test_what_is_refused() -> None:
    shapes = of_all(GPUS, LAYERS, WIDTH, WIDTH), of_all(GPUS, ROWS, WIDTH)
    pmapped = jax.pmap(step, "batch")
    with pytest.raises(UnknownTopology, match="JAX_NUM_CPU_DEVICES=1024"):
        zero.plan(pmapped, *shapes, topology="gpu:h100x1024")
    with pytest.raises(UnknownTopology, match="a KIND of a100, "):
        zero.plan(pmapped, *shapes, topology="gpu:h900x8")
    with pytest.raises(UnknownTopology, match="GPUs as gpu:h100x8"):
        zero.plan(pmapped, *shapes, topology="h100-8")
    with pytest.raises(NotPlannable, match="4"):
        zero.plan(pmapped, *shapes, topology="gpu:h100x4")
    with pytest.raises(NotPlannable, match="4 devices"):
        zero.plan(jax.jit(loss), of_all(LAYERS, WIDTH, WIDTH), of_all(ROWS, WIDTH), topology="gpu:h100x4")
