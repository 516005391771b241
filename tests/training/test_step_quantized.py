"""Whole steps with moments of a byte and bfloat16 weights: the same at any stage and on any number of devices."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from benchmarks import quantized as benchmark
from tests.helpers import cli
from tests.training.small_gpt import (
    PLAIN,
    UNCLIPPED,
    Run,
    Setup,
    advance,
    assert_equal,
    assert_first_weights,
    batch,
    first_params,
    named,
    reference,
    run_on,
    setup,
    shapes_of,
)
from zero.models.gpt import parameter_axes
from zero.training.ema import EMA
from zero.training.optimizers.optimizer import adamw, convert_state, decayed

INT8 = adamw(0.1, axes=parameter_axes(PLAIN), state_dtype=jnp.int8)
FORMS: dict[str, dict[str, Any]] = {
    "int8 moments": {"tx": INT8},
    "and bfloat16 weights": {"tx": INT8, "master_dtype": jnp.bfloat16, "gradient_dtype": jnp.bfloat16},
}
AVERAGED: dict[str, Any] = {"ema_decay": 0.999}


def quantized(form: str, devices: int, stage: int, **options: Any) -> Setup:
    return setup(devices, stage, max_norm=None, config=PLAIN, **FORMS[form], **options)


def test_losses_of_some_steps() -> None:
    """They are near those of float32."""
    got = run_on(quantized("and bfloat16 weights", 8, 3, **AVERAGED)).metrics["loss"]
    np.testing.assert_allclose(got, reference(PLAIN, UNCLIPPED).metrics["loss"], rtol=2e-4)


@pytest.mark.wide  # tests/partition/test_quantized.py has slices of the same bits
def test_stages_2_and_3_agree() -> None:
    """Stages 2 and 3 agree bit for bit; other random bits would part them in the first step."""
    low, high = (run_on(quantized("and bfloat16 weights", 8, stage, **AVERAGED)) for stage in (2, 3))
    assert_equal(low, high)


@pytest.mark.parametrize("form", [pytest.param("int8 moments", marks=pytest.mark.wide), "and bfloat16 weights"])
def test_bytes_per_device(form: str) -> None:
    """Devices hold as many bytes as the layout says."""
    on = quantized(form, 8, 3, **(AVERAGED if "bfloat16" in form else {}))
    state, _ = advance(on, on.start(), range(1))
    held = [sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))]
    assert held == [on.layout.bytes_per_device()]
    by_leaf = {leaf.name: leaf.dtype for leaf in on.layout.leaves}
    is_matrix = named(decayed(on.model.axes)(on.model.layout.shapes()))
    for name, matrix in is_matrix.items():
        weights: Any = jnp.bfloat16 if "bfloat16" in form else np.float32
        wanted: Any = (weights, np.int8, np.uint8) if matrix else (np.float32,) * 3
        kinds = [by_leaf[f"{prefix}/{name}"] for prefix in ("params", "opt_state/0/mu", "opt_state/0/nu")]
        assert kinds == [np.dtype(dtype) for dtype in wanted], name


def test_fused_update_holds_same_bytes() -> None:
    """An update inside the backward pass holds the same bytes.

    Random bits of a layer are those of its place in the stack.
    """
    plain, fused = (quantized("and bfloat16 weights", 8, 3, fused_update=fused, **AVERAGED) for fused in (False, True))
    states = [advance(on, on.start(), range(1))[0].opt_state[0] for on in (plain, fused)]
    for name in ("mu", "nu"):
        for x, y in zip(*(jax.tree.leaves(getattr(state, name)) for state in states), strict=True):
            if x.dtype in (np.int8, np.uint8):
                # XLA may fuse the two programs differently: a sum of other rounding ends on the next level at times.
                assert np.mean(np.asarray(x) != np.asarray(y)) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8 moments", "and bfloat16 weights"])
def test_stages_and_devices_agree(form: str) -> None:
    runs = [run_on(quantized(form, 8, stage)) for stage in range(4)]
    assert_equal(runs[1], runs[0])
    assert_equal(runs[3], runs[2])
    for other in (runs[1], run_on(quantized(form, 3, 3)), run_on(quantized(form, 1, 3))):
        assert_other_devices_agree(other, runs[3])
    np.testing.assert_allclose(runs[3].metrics["loss"], setup_losses(), rtol=2e-3)


def assert_other_devices_agree(got: Run, expected: Run) -> None:
    """Gradients are summed in another order; few of them end on the other side of a random number."""
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=1e-4)
    for name, x in expected.params.items():
        moved = np.linalg.norm((x - named(first_params())[name]).astype(np.float32))
        if name != "blocks/key/bias":
            assert np.linalg.norm((got.params[name] - x).astype(np.float32)) < 0.05 * moved, name


def setup_losses() -> list[float]:
    """Of the same training with a float32 state."""
    return run_on(setup(8, 3, max_norm=None, config=PLAIN)).metrics["loss"]


@pytest.mark.slow
def test_fused_update_of_bfloat16_weights() -> None:
    """An update inside the backward pass works with bfloat16 weights."""
    plain, fused = (
        quantized("and bfloat16 weights", 8, 3, fused_update=f, skip_bad_steps=False) for f in (False, True)
    )
    np.testing.assert_allclose(run_on(fused).metrics["loss"], run_on(plain).metrics["loss"], rtol=1e-5)


@pytest.mark.parametrize(
    ("devices", "stage"),
    [(8, 3), pytest.param(3, 1, marks=pytest.mark.wide), pytest.param(8, 0, marks=pytest.mark.slow)],
)
def test_first_weights_are_rounded(devices: int, stage: int) -> None:
    """First weights are the float32 ones, rounded."""
    on = quantized("and bfloat16 weights", devices, stage)
    assert_first_weights(on)
    assert on.model.layout.map(lambda leaf: leaf.dtype)["vocabulary"]["table"] == jnp.bfloat16


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.wide), 3])
def test_weights_travel_as_they_are_held(stage: int) -> None:
    """In two bytes also where the model computes in float32; gradients in four."""
    on = setup(8, stage, max_norm=None, config=PLAIN, tx=INT8, master_dtype=jnp.bfloat16)
    text = on.programs.step.lower(shapes_of(on), batch(on, 0)).as_text()
    sizes: dict[str, int] = {}
    for shape, dtype in re.findall(r"all_gather.*-> tensor<([\dx]+)x(\w+)>", text):
        sizes[dtype] = sizes.get(dtype, 0) + int(np.prod([int(size) for size in shape.split("x")]))
    assert sizes["bf16"] > 20 * sizes["f32"]  # norms and biases


@pytest.mark.slow
def test_float32_gradients_of_bfloat16_weights() -> None:
    """Gradients of bfloat16 weights are float32 where the configuration asks for it.

    A gradient would otherwise have the dtype of its weight.
    """
    on = setup(8, 3, max_norm=None, config=PLAIN, tx=INT8, master_dtype=jnp.bfloat16)
    rounded = quantized("and bfloat16 weights", 8, 3)
    exact, narrow = (advance(s, s.start(), range(1))[1][0]["gradient_norm"] for s in (on, rounded))
    stage1 = setup(8, 1, max_norm=None, config=PLAIN, tx=INT8, master_dtype=jnp.bfloat16)
    expected = advance(stage1, stage1.start(), range(1))[1][0]["gradient_norm"]
    assert abs(exact - expected) < 1e-6 * expected < abs(narrow - expected)


@pytest.mark.wide  # tests/run/test_resume.py restores a run in another dtype
def test_a_state_is_converted_and_back() -> None:
    """From float32 to bytes and to float32: what is trained on goes on as it would have."""
    plain, small = setup(8, 3, max_norm=None, config=PLAIN), quantized("and bfloat16 weights", 8, 3)
    state, _ = advance(plain, plain.start(), range(2))
    kept = jax.tree.map(np.asarray, state)
    converted = jax.pmap(lambda state: convert_state(state, small.layout), "zero")(state)
    assert [x.dtype for x in jax.tree.leaves(converted)] == [leaf.dtype for leaf in small.layout.leaves]
    back = jax.pmap(lambda state: convert_state(state, plain.layout), "zero")(converted)
    for leaf, x, y in zip(plain.layout.leaves, jax.tree.leaves(back), jax.tree.leaves(kept), strict=True):
        assert x.dtype == y.dtype
        if x.dtype == np.float32:
            rtol = {"nu": 0.3, "mu": 0.15}.get(leaf.path[2] if len(leaf.path) > 2 else "", 0.01)
            np.testing.assert_allclose(x, y, rtol=rtol, atol=0.02 * np.abs(y).max(), err_msg=leaf.name)
    _, (metrics,) = advance(plain, back, range(2, 3))
    np.testing.assert_allclose(metrics["loss"], setup_losses()[2], rtol=1e-3)


def test_average_of_bfloat16_weights() -> None:
    """The average of bfloat16 weights is float32."""
    on = quantized("and bfloat16 weights", 8, 3, **AVERAGED)
    state, _ = advance(on, on.start(), range(3))
    assert {x.dtype for x in jax.tree.leaves(state.averages[EMA])} == {np.dtype(np.float32)}
    table = np.asarray(state.averages[EMA]["vocabulary"]["table"])
    assert (table != table.astype(jnp.bfloat16).astype(np.float32)).mean() > 0.5
    zero.check_replicated(state.clock, "zero", on.devices)


NAIVE = "int8 per tensor, linear, nearest"


@pytest.mark.slow  # test_losses_of_some_steps is near float32 over fewer steps
def test_losses_near_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are near those of float32, while a scale per tensor diverges.

    The short form of benchmarks/quantized.py.
    """
    bounds = {"int8": 3e-3, "int8, bfloat16 weights": 1e-2, NAIVE: None}
    workplace = cli.make_workplace(tmp_path)
    monkeypatch.setattr(benchmark, "INDEX", [str(workplace / index) for index in cli.INDICES])
    monkeypatch.setattr(benchmark, "ROW_TOKENS", cli.CONTEXT)
    size = dataclasses.replace(benchmark.SMALL, embedding_dim=32, block_size=cli.CONTEXT)
    trained = {
        name: benchmark.train(benchmark.forms()[name](), size, steps=60, seed=0, factor=1)
        for name in ("float32", *bounds)
    }
    float32 = trained["float32"]["loss"]
    assert float32 < 0.5 * trained["float32"]["curve"][0][1]
    for name, bound in bounds.items():
        loss = trained[name]["loss"]
        assert loss == pytest.approx(float32, rel=bound) if bound else not loss < 2 * float32
