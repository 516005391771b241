"""What the forward pass stores lies in the host's memory until the backward pass needs it, and the update is the same.

XLA for CPU keeps all arrays in one memory. So the traced program is asked where each array lies, the compiler for TPU
what that saves, and the CPU whether the results are equal to the bit.
"""

import dataclasses
import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests.training.divisible_models import DIVISIBLE
from tests.training.small_gpt import CONFIG, EXPERTS, STEPS, VQ, advance, assert_equal, batch, run_on, setup, shapes_of
from zero.costs.topology import find_devices
from zero.models.gpt import GPT, variable_shapes
from zero.models.stack import (
    ATTENTION_OUTPUT,
    KINDS,
    LAYER_INPUT,
    MLP_GATE,
    MLP_IN,
    REMAT,
    Nested,
    Scanned,
    policy_of,
    run_forward,
    run_layers,
    to_device,
)
from zero.partition.pmapped import pmap
from zero.training.activations import host_bytes, stored_bytes
from zero.training.sharded_gpt import ShardedGPT

DEEP = dataclasses.replace(CONFIG, N=4, gated=True)
ROWS, CONTEXT = 2, 12
HOST = jax.memory.Space.Host
SLOW = pytest.mark.slow
NAMED = [remat for remat in REMAT if remat != "none"]


@cache
def residuals(remat: str, offload: tuple[str, ...]) -> dict[Any, list[Any]]:
    """What the backward pass is given, by the memory in which it lies."""
    gpt, tokens = GPT(DEEP, remat=remat, offload=offload, blockwise_from=2), jnp.zeros((ROWS, CONTEXT), jnp.int32)
    keys = jax.random.split(jax.random.key(0), ROWS)

    def backward(variables: Any) -> Any:
        return jax.vjp(lambda variables: jnp.sum(jnp.asarray(gpt.apply(variables, tokens, tokens, keys))), variables)[1]

    by_space: dict[Any, list[Any]] = {}
    for aval in jax.make_jaxpr(backward)(variable_shapes(DEEP)).out_avals:
        by_space.setdefault(getattr(aval, "memory_space", None), []).append(aval)
    return by_space


def stacks_on_device(by_space: dict[Any, list[Any]]) -> list[tuple[int, ...]]:
    """Shapes of the stacks of activations that are on the device."""
    shapes = [aval.shape for aval in by_space[jax.memory.Space.Device] if len(aval.shape) >= 4]
    return [shape for shape in shapes if ROWS in shape[1:-2] and CONTEXT in shape]


def bytes_of(avals: list[Any]) -> int:
    return sum(aval.size * aval.dtype.itemsize for aval in avals)


# Arrays that each part of a policy stores on the host: the output of attention, whose log-sum-exp stays on the device;
# queries, keys, values and the output projection beside it; the products that begin an MLP, and, as there are no
# experts, no more with them.
ARRAYS = {"full": 0, "nested": 0, "attention": 1, "projections": 5, "mlp_in": 1, "mlp": 2, "experts": 2, "dots": 7}
WITH_SUMS = ("attention", "projections", "dots")


EACH = ("nested", "dots", "mlp_in+attention", "projections")  # all the others are parts of these


@pytest.mark.parametrize(
    "remat", [remat if remat in EACH else pytest.param(remat, marks=pytest.mark.wide) for remat in NAMED]
)
def test_stored_values_lie_on_the_host(remat: str) -> None:
    """All that a policy stores between layers but log-sum-exps, and the inputs of layers, and nothing else."""
    moved = residuals(remat, KINDS)
    plain = residuals(remat, ())
    assert HOST not in plain and {aval.shape[0] for aval in moved[HOST]} == {DEEP.N if remat != "nested" else 2}
    assert len(moved[HOST]) == 1 + sum(ARRAYS[part] for part in remat.split("+"))
    has_sums = any(part in WITH_SUMS for part in remat.split("+"))
    assert [math.prod(shape) for shape in stacks_on_device(moved)] == [SUMS] * has_sums
    inputs = 4 * ROWS * CONTEXT * DEEP.embedding_dim * (2 if remat == "nested" else DEEP.N)
    assert bytes_of(moved[HOST]) >= inputs


SUMS = DEEP.N * ROWS * CONTEXT * DEEP.num_head
WIDTHS = {LAYER_INPUT: DEEP.embedding_dim, MLP_IN: DEEP.mlp_width, MLP_GATE: DEEP.mlp_width}


@pytest.mark.parametrize(
    "kinds",
    [
        (LAYER_INPUT,),
        (ATTENTION_OUTPUT, MLP_GATE),
        pytest.param((LAYER_INPUT, MLP_IN), marks=pytest.mark.wide),
        pytest.param((MLP_IN, MLP_GATE), marks=pytest.mark.wide),
        pytest.param((LAYER_INPUT, ATTENTION_OUTPUT, MLP_IN, MLP_GATE), marks=pytest.mark.wide),
    ],
    ids="+".join,
)
def test_kinds_lie_where_they_are_placed(kinds: tuple[str, ...]) -> None:
    """Of all that a policy stores the named kinds lie in the host's memory, the rest on the device, nothing in both."""
    remat = "mlp+attention"
    whole, placed = residuals(remat, KINDS), residuals(remat, kinds)
    model = ShardedGPT(DEEP, zero.Axis("zero", (1, 1)), 3, remat=remat, offload=kinds, blockwise_from=2)
    assert bytes_of(placed[HOST]) == pytest.approx(host_bytes(model, ROWS, CONTEXT), rel=0.06)
    shapes = [aval.shape for aval in placed[HOST]]
    assert len(shapes) == len(kinds)
    products = [(DEEP.N, ROWS, CONTEXT, WIDTHS[kind]) for kind in kinds if kind in WIDTHS]
    assert sorted(shape for shape in shapes if shape[1:3] == (ROWS, CONTEXT)) == sorted(products)
    of_all = [*(aval.shape for aval in whole[HOST]), *stacks_on_device(whole)]
    assert sorted([*shapes, *stacks_on_device(placed)]) == sorted(of_all)


@pytest.mark.parametrize("remat", ["full", "mlp_in+attention"])
def test_bytes_on_the_host(remat: str) -> None:
    """The estimate is what jax puts there."""
    model = ShardedGPT(DEEP, zero.Axis("zero", (1, 1)), 3, remat=remat, offload=KINDS, blockwise_from=2)
    found = bytes_of(residuals(remat, KINDS)[HOST])
    sums = 2 * 4 * SUMS * ("attention" in remat)  # float32, which counts as two numbers of the compute dtype
    assert host_bytes(model, ROWS, CONTEXT) == stored_bytes(model, ROWS, CONTEXT) - sums
    assert host_bytes(model, ROWS, CONTEXT) == pytest.approx(found, rel=0.06)


FUSED: dict[str, Any] = {"fused_update": True, "max_norm": None, "skip_bad_steps": False}
TENSOR = zero.Axis.with_tensor_groups("zero", 8, 2)
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "stage 3": (8, 3, {}),
    "stage 2 on three devices": (3, 2, {"remat": "mlp_in+projections", "micro_batches": 2}),
    "stage 1 on one device": (1, 1, {"remat": "dots"}),
    "in part": (3, 3, {"remat": "mlp+attention", "blockwise_from": 2, "offload": (LAYER_INPUT, MLP_IN)}),
    "attention only": (8, 3, {"remat": "mlp_in+attention", "offload": (ATTENTION_OUTPUT,)}),
    "fused": (8, 3, {**FUSED, "config": DEEP, "remat": "nested"}),
    "stage 0": (8, 0, {"remat": "mlp+attention", "blockwise_from": 2}),
    "nested": (3, 3, {"config": DEEP, "remat": "nested"}),
    "one layer at a time": (3, 3, FUSED),
    "exchanges": (8, 3, {"axis": zero.Axis("zero", (1, 8), exchanges=True)}),
    "copies": (8, 3, {"axis": zero.Axis("zero", (2, 4)), "remat": "mlp"}),
    "experts": (8, 3, {"config": EXPERTS}),
    "expert groups": (8, 3, {"config": EXPERTS, "axis": zero.Axis.with_expert_groups("zero", 8, 2, 1)}),
    "tensor groups": (8, 3, {"config": DIVISIBLE, "axis": TENSOR, "remat": "mlp_in"}),
    "context groups": (8, 3, {"axis": zero.Axis("zero", (1, 8), context=2), "blockwise_from": 2, "remat": "attention"}),
    "gated units": (8, 3, {"config": VQ}),
    "bfloat16": (8, 3, {"dtype": jnp.bfloat16, "remat": "mlp"}),
    "products in 8 bits": (8, 3, {"product_dtype": "int8", "remat": "mlp"}),
}
# A run continues with its activations on the host, bit for bit, at stage 3 (tests/run/test_resume.py); a fused update
# is in test_fused_update.py.
WIDE = ("in part", "stage 2 on three devices", "stage 1 on one device", "fused", "one layer at a time")


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(name, marks=pytest.mark.wide) for name in WIDE),
        *(pytest.param(name, marks=SLOW) for name in CASES if name not in WIDE),
    ],
)
def test_same_update(case: str) -> None:
    """Losses, metrics and weights are equal to the bit, with dropout."""
    devices, stage, options = CASES[case]
    kept = setup(devices, stage, **{**options, "offload": ()})
    moved = setup(devices, stage, **{"offload": KINDS, **options})
    assert_equal(run_on(moved), run_on(kept))


@pytest.mark.wide
def test_a_run_continues_with_another_placement() -> None:
    """Two steps with some kinds on the host, then two with all on the device."""
    devices, stage, options = CASES["in part"]
    kept, moved = setup(devices, stage, **{**options, "offload": ()}), setup(devices, stage, **options)
    expected = run_on(kept)
    state, _ = advance(moved, moved.start(), range(STEPS // 2))
    state, metrics = advance(kept, state, range(STEPS // 2, STEPS))
    assert [now["loss"] for now in metrics] == expected.metrics["loss"][STEPS // 2 :]
    whole = kept.whole(state, kept.layout)
    for name, x in expected.params.items():
        np.testing.assert_array_equal(whole[f"params/{name}"], x, err_msg=name)


@pytest.mark.slow
def test_same_updates_on_parts_of_rows() -> None:
    """The memory of gated units between parts stays on the device."""
    kept, moved = (setup(2, 3, config=VQ, parts=2, offload=offload) for offload in ((), KINDS))
    expected, got = (on.programs.step(on.start(), batch(on, 0)) for on in (kept, moved))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def traced(**options: Any) -> str:
    """The step as it is traced, with the memory of each array that is not on the device."""
    on = setup(8, 3, **options)
    return str(jax.make_jaxpr(on.programs.step)(shapes_of(on), batch(on, 0)))


@pytest.mark.parametrize("options", [{}, FUSED], ids=["whole gradient", "fused"])
def test_layers_of_a_step_lie_on_the_host(options: dict[str, Any]) -> None:
    """The inputs of both layers, three rows of each on a device, laid out alike on both ways."""
    inputs = f"f32<host>[{CONFIG.N},3,12,{CONFIG.embedding_dim}]"
    plain, moved = traced(**options), traced(offload=KINDS, **options)
    assert inputs in moved
    assert "<host>" not in plain and "layout_constraint" not in plain
    assert moved.count("= layout_constraint") >= 2


def test_all_that_is_computed_is_refused() -> None:
    """A layer without a policy stores values that have no name."""
    with pytest.raises(ValueError, match="remat none stores all"):
        policy_of("none", 4, KINDS)


LAYERS, SIZE, POSITIONS = 8, 512, 16384
STACK_BYTES = LAYERS * POSITIONS * SIZE * 2  # 128 MiB, which no other memory of a chip holds


def temporaries(program: Any) -> tuple[int, int]:
    """Bytes of a TPU program's temporaries: on a device, and in the memory of its host."""
    devices = find_devices("v5e-4")
    weights = jax.ShapeDtypeStruct((len(devices), LAYERS, SIZE, SIZE), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((len(devices), 1, POSITIONS, SIZE), jnp.bfloat16)
    analysis = pmap(program, "zero", devices).lower(weights, x).compile().memory_analysis()
    return analysis.temp_size_in_bytes, analysis.host_temp_size_in_bytes


def layer(weights: jax.Array, x: jax.Array, number: jax.Array) -> jax.Array:
    return jnp.sin(x @ weights) + x


def by_layers(policy: Scanned | Nested) -> Any:
    """The gradient of a stack of layers, by `run_layers`."""
    return jax.grad(lambda weights, x: jnp.sum(run_layers([layer], weights, x, policy)).astype(jnp.float32))


def by_own_backward(weights: jax.Array, x: jax.Array) -> jax.Array:
    """The same by a backward pass of its own, as in a fused update."""
    x, kept = run_forward(layer, weights, x, 1, on_host=True)

    def layer_backward(dx: jax.Array, xs: Any) -> Any:
        weights, x, number = xs
        grads, dx = jax.vjp(lambda w, x: layer(w, x, number), weights, to_device(x))[1](dx)
        return dx, grads

    xs = weights, kept, jnp.arange(LAYERS)
    return jax.lax.scan(layer_backward, jnp.ones_like(x), xs, reverse=True)[1]


@pytest.mark.parametrize(
    ("program", "share"),
    [
        pytest.param(by_layers(Scanned(on_host=(LAYER_INPUT,))), 1, marks=pytest.mark.wide),
        pytest.param(by_layers(Nested(2, on_host=(LAYER_INPUT,))), 2, marks=SLOW),
        pytest.param(by_own_backward, 1, marks=SLOW),
    ],
    ids=["layers", "spans of two", "own backward pass"],
)
def test_memory_by_the_compiler_for_tpu(program: Any, share: int) -> None:
    """The stack of inputs is in the host's memory, and the device holds less than half of it."""
    pytest.importorskip("libtpu")
    on_device, on_host = temporaries(program)
    assert on_host == STACK_BYTES // share
    assert on_device < (0.5 if share == 1 else 0.75) * STACK_BYTES
