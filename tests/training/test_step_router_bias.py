"""Whole steps with a bias of the router, layers before those with experts, and an MLP beside experts."""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests.training.small_gpt import (
    CONFIG,
    ROWS,
    STEPS,
    Run,
    Setup,
    advance,
    assert_close,
    batch,
    first_collections,
    first_params,
    named,
    run_on,
    setup,
    tokens,
)
from zero.exchange.warm_start import merged_weights
from zero.models.adapters import Adapters, merged
from zero.models.config import GPTConfig
from zero.models.gpt import GPT, parameter_axes
from zero.models.router import ROUTER_BIAS
from zero.training.objectives.mtp import Mtp, mtp_inputs
from zero.training.optimizers.optimizer import adamw
from zero.training.parts import StepOptions
from zero.training.programs import make_programs
from zero.training.schedules import LearningRate
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import Tuning

RATE = 0.01
BALANCED = dataclasses.replace(
    CONFIG, dropout=0.0, N=3, mlp_dim=13, mlp_bias=False, experts=8, experts_per_token=2, normalize_router=True,
    router="sigmoid", router_scale=2.5, router_groups=4, router_groups_per_token=2, router_bias_rate=RATE,
    first_dense=1, dense_dim=61, shared_dim=21, expert_capacity=1.5,
)  # fmt: skip


WITH_MTP = dataclasses.replace(BALANCED, predictor=True)
MTP = Mtp().objective()
OBJECTIVES: dict[GPTConfig, dict[str, Any]] = {BALANCED: {}, WITH_MTP: {"objective": MTP}}


def bias_of(state: Any) -> np.ndarray:
    """Of the first device, in the order of layers; all must have the same."""
    held = state.averages[ROUTER_BIAS]
    zero.check_replicated(held, "zero", devices=jax.devices()[: len(jax.tree.leaves(held)[0])])
    stacks = [held[name] for name in ("blocks", "predictor_blocks") if name in held]
    return np.concatenate([np.asarray(stack["experts"]["bias"])[0] for stack in stacks])


def setup_of(devices: int, stage: int, micro_batches: int = 1, config: GPTConfig = BALANCED, **options: Any) -> Setup:
    return setup(devices, stage, micro_batches, config=config, **OBJECTIVES[config], **options)


@cache
def on_one_device(config: GPTConfig = BALANCED) -> Run:
    return run_on(setup_of(1, 0, config=config))


def test_bias_moves_by_the_load_of_all_rows() -> None:
    """By hand from the choices of the first step: a constant step up where an expert has fewer tokens than the mean.

    The router of the further layer is the last one.
    """
    variables = {"params": first_params(WITH_MTP), **first_collections(WITH_MTP)}
    rows = tokens(0)
    inputs = np.where(rows < 0, ~rows, rows)
    apply: Any = jax.jit(partial(GPT(WITH_MTP).apply, method="scores"))
    targets = np.concatenate([rows[:, 1:], np.full((ROWS, 1), -1)], axis=1)
    on = setup_of(8, 3, config=WITH_MTP)
    scores = apply(variables, inputs, targets, inputs={"predictor": mtp_inputs(on.model, rows)})[0]
    loss = np.asarray(scores.losses_BT)[targets >= 0].mean()
    counts = np.asarray(scores.routing.choices_LE)
    assert np.array_equal(counts.sum(-1), [2 * ROWS * inputs.shape[1]] * WITH_MTP.N)
    state, (metrics,) = advance(on, on.start(), range(1))
    assert metrics["next_loss"] == pytest.approx(loss, rel=1e-5)
    share_max = (counts / counts.sum(-1, keepdims=True)).max(-1).mean()
    assert metrics["expert_share_max"] == pytest.approx(share_max, rel=1e-5)
    expected = RATE * np.sign(counts.mean(-1, keepdims=True) - counts)
    np.testing.assert_array_equal(bias_of(state), expected.astype(np.float32))
    assert len(np.unique(expected)) > 1


ALL: list[tuple[int, int, int]] = [
    *((devices, stage, 1) for devices in (1, 3, 8) for stage in range(4)),
    *((8, stage, 3) for stage in range(4)),
]
WIDE = [(8, 3, 1), (3, 2, 4)]


WITH_PREDICTOR = [(1, 3, 1), (3, 0, 1), (3, 3, 2), (8, 0, 1), (8, 3, 1)]


@pytest.mark.parametrize(
    ("devices", "stage", "micro_batches", "config"),
    [
        *(pytest.param(*case, BALANCED, marks=pytest.mark.wide) for case in WIDE),
        *(pytest.param(*case, WITH_MTP, marks=pytest.mark.wide) for case in WITH_PREDICTOR),
        *(pytest.param(*case, BALANCED, marks=pytest.mark.slow) for case in ALL if case not in WIDE),
    ],
    ids=lambda x: None if isinstance(x, int) else "predictor" if x.predictor else "layers",
)
def test_every_stage_trains_as_one_device(devices: int, stage: int, micro_batches: int, config: GPTConfig) -> None:
    got = run_on(setup_of(devices, stage, micro_batches, config))
    assert_close(got, on_one_device(config), rtol=1e-5, config=config)
    np.testing.assert_array_equal(bias_of(got.state), bias_of(on_one_device(config).state))
    assert np.abs(bias_of(got.state)).max() <= np.float32(STEPS * RATE) * 1.001


AXES = {
    "copies": zero.Axis("zero", (2, 4)),
    "expert groups": zero.Axis.with_expert_groups("zero", 8, 4),
}


@pytest.mark.parametrize(
    "name", [pytest.param("copies", marks=pytest.mark.slow), pytest.param("expert groups", marks=pytest.mark.wide)]
)
def test_groups_train_as_one_device(name: str) -> None:
    got = run_on(setup_of(8, 3, config=WITH_MTP, axis=AXES[name]))
    assert_close(got, on_one_device(WITH_MTP), rtol=1e-5, config=WITH_MTP)
    np.testing.assert_array_equal(bias_of(got.state), bias_of(on_one_device(WITH_MTP).state))


@pytest.mark.wide
def test_tensor_groups_count_each_token_once() -> None:
    sizes: dict[str, Any] = {"embedding_dim": 48, "num_head": 8, "mlp_dim": 16, "dense_dim": 64, "shared_dim": 24}
    cut = dataclasses.replace(BALANCED, **sizes, shared_gate=True)
    axis = zero.Axis.with_tensor_groups("zero", 8, 2)
    got, expected = run_on(setup(8, 3, config=cut, axis=axis)), run_on(setup(8, 3, config=cut))
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=1e-5)
    np.testing.assert_array_equal(bias_of(got.state), bias_of(expected.state))


def test_skipped_updates_leave_the_bias() -> None:
    on = setup_of(8, 3, config=WITH_MTP)
    state = on.start()
    poisoned = jax.tree.map(lambda x: x * jnp.nan, state.params["norm"])
    skipped, _ = advance(on, state._replace(params={**state.params, "norm": poisoned}), range(1))
    np.testing.assert_array_equal(bias_of(skipped), 0)


def test_fused_update_is_refused() -> None:
    with pytest.raises(ValueError, match="fused_update does not sum what router_bias needs"):
        setup(8, 3, config=BALANCED, fused_update=True, max_norm=None).start()


@pytest.mark.wide
def test_fused_update_with_first_layers() -> None:
    """Layers before the stack are updated with what is outside it."""
    config = dataclasses.replace(BALANCED, router_bias_rate=None)
    options: dict[str, Any] = {"max_norm": None, "skip_bad_steps": False}
    fused = run_on(setup(8, 3, config=config, fused_update=True, **options))
    assert_close(fused, run_on(setup(8, 3, config=config, **options)), rtol=1e-5, config=config)


@pytest.mark.wide  # a pair
def test_adapters_beside_a_frozen_bias() -> None:
    """The loss of a model with adapters is that of the merged one with this bias, on 8 devices and on one."""
    adapters = Adapters(rank=2, alpha=4.0)
    axis = zero.Axis("zero", (1, 8))
    model = ShardedGPT(BALANCED, axis, 3, jnp.float32, tuning=Tuning(adapters))
    rng = np.random.default_rng(0)
    params = first_params(BALANCED)
    shapes = adapters.shapes(params, parameter_axes(BALANCED))
    own = jax.tree.map(lambda leaf: rng.normal(0, 0.1, leaf.shape).astype(np.float32), shapes)
    assert {"mlp_in", "mlp_gate"} & {*own["blocks"]} and "mlp_in" in own["first_blocks"]
    bias = jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), first_collections(BALANCED))
    layouts = model.base.collection_layouts
    frozen = {
        **zero.to_devices(params, model.base.layout, axis),
        **{name: zero.to_devices(bias[name], layout, axis) for name, layout in layouts.items()},
    }
    programs = make_programs(model, adamw(0.1, axes=model.axes), StepOptions(LearningRate(0.1, 0.1, 1, 2)))
    state = programs.start(zero.to_devices(own, model.layout, axis))
    rows = batch(setup(8, 3, config=BALANCED), 0)
    state, metrics = programs.step(state, rows, frozen)
    assert state.averages == {}
    tokens_BT = tokens(0)
    targets = np.concatenate([tokens_BT[:, 1:], np.full((ROWS, 1), -1)], axis=1)
    apply: Any = jax.jit(GPT(BALANCED).apply)
    whole = {"params": merged(params, own, adapters), **bias}
    losses = np.asarray(apply(whole, np.where(tokens_BT < 0, ~tokens_BT, tokens_BT), targets))
    np.testing.assert_allclose(metrics["loss"], losses[targets >= 0].mean(), rtol=1e-5)
    shards = merged_weights(frozen, zero.to_devices(own, model.layout, axis), model, model.base)
    for name, x in named(bias).items():
        np.testing.assert_array_equal(np.asarray(named(shards)[name])[0], x)
