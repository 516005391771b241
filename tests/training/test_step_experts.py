"""Whole steps of mixtures of experts: every stage against one device, and expert groups against none."""

import dataclasses
from functools import cache
from typing import Any

import jax
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
    assert_first_weights,
    batch,
    first_params,
    reference,
    run_on,
    setup,
    shapes_of,
    tokens,
)
from zero.costs.hlo import bytes_by_kind, collectives
from zero.models.config import GPTConfig
from zero.models.experts import capacity_of
from zero.models.families import FAMILIES
from zero.models.gpt import GPT, parameter_axes
from zero.training.optimizers.optimizer import NAMES, make_optimizer
from zero.training.parts import TrainState

DROPLESS = dataclasses.replace(
    CONFIG, dropout=0.0, mlp_dim=61, mlp_bias=False, experts=8, experts_per_token=2, normalize_router=True,
    balance_loss=0.1, router_z_loss=0.05,
)  # fmt: skip
CAPPED = dataclasses.replace(DROPLESS, expert_capacity=1.0)
SWITCH = dataclasses.replace(CAPPED, experts_per_token=1, normalize_router=False, N=4, experts_every=2)
GROUPED: dict[str, Any] = {"num_head": 6, "head_dim": 10, "kv_heads": 3, "embedding_norm": False}
QWEN3 = dataclasses.replace(CONFIG, **{**FAMILIES["qwen3_moe"], **GROUPED, "mlp_dim": 13, "experts": 16})
_GPT_OSS: dict[str, Any] = {**FAMILIES["gpt_oss"], **GROUPED, "windows": (5, 0), "mlp_dim": 13}
GPT_OSS = dataclasses.replace(CONFIG, **_GPT_OSS | {"experts": 8, "experts_per_token": 2, "expert_capacity": 1.0})
CONFIGS = {"gpt_oss": GPT_OSS, "dropless": DROPLESS, "capped": CAPPED, "switch": SWITCH, "qwen3_moe": QWEN3}
ROUTING = ("expert_share_max", "expert_share_min", "dropped_share", "router_entropy")


@cache
def trained(name: str, devices: int, stage: int, experts: int = 1, **options: Any) -> Run:
    axis = zero.Axis.with_expert_groups("zero", devices, experts) if experts > 1 else None
    return run_on(setup(devices, stage, config=CONFIGS[name], axis=axis, **options))


def assert_same_training(got: Run, expected: Run, rtol: float = 1e-5, names: tuple[str, ...] = ROUTING) -> None:
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=rtol)
    np.testing.assert_allclose(got.metrics["gradient_norm"], expected.metrics["gradient_norm"], rtol=100 * rtol)
    for name in names:
        np.testing.assert_allclose(got.metrics[name], expected.metrics[name], rtol=1e-5, atol=1e-7, err_msg=name)


ALL = [(name, devices, stage) for name in CONFIGS for devices in (1, 3, 8) for stage in range(4)]
# By default tests/models/test_experts.py has the model, and test_scoring_drops_nothing its groups on shards.
WIDE = [("switch", 8, 3), ("switch", 3, 3)]


@pytest.mark.parametrize(
    ("name", "devices", "stage"),
    [
        *(pytest.param(*case, marks=pytest.mark.wide) for case in WIDE),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in WIDE),
    ],
)
def test_every_stage_trains_as_one_device(name: str, devices: int, stage: int) -> None:
    got = trained(name, devices, stage)
    assert_close(got, reference(CONFIGS[name]), rtol=1e-5, config=CONFIGS[name])
    assert (np.asarray(got.metrics["dropped_share"]) > 0).all() == (CONFIGS[name].expert_capacity is not None)


@pytest.mark.wide
def test_routing_metrics() -> None:
    """Metrics of routing are those of the rows of all devices."""
    assert_same_training(trained("switch", 3, 3), trained("switch", 8, 3))


IN_GROUPS = [("gpt_oss", 3, 4)] + [
    (name, stage, experts) for name in ("capped", "switch") for stage in range(4) for experts in (2, 4, 8)
]
WIDE_GROUPS = [("switch", 0, 4)]  # the short form is test_copies_train_alike


@pytest.mark.parametrize(
    ("name", "stage", "experts"),
    [pytest.param(*case, marks=pytest.mark.wide if case in WIDE_GROUPS else pytest.mark.slow) for case in IN_GROUPS],
)
def test_expert_groups_train_as_devices_alone(name: str, stage: int, experts: int) -> None:
    got = trained(name, 8, stage, experts)
    assert_same_training(got, trained(name, 8, 3))
    assert_close(got, reference(CONFIGS[name]), rtol=1e-5, config=CONFIGS[name])


@pytest.mark.wide
def test_state_moves_between_expert_groups() -> None:
    """Two steps with one kind of group and stage, then two with another, are four steps of either."""
    config, expected = SWITCH, trained("switch", 8, 3)
    first = setup(8, 0, config=config, axis=zero.Axis.with_expert_groups("zero", 8, 4))
    state, early = advance(first, first.start(), range(2))
    second = setup(8, 3, config=config)
    moved = moved_to(second, first, state)
    _, late = advance(second, moved, range(2, 4))
    losses = [m["loss"] for m in early + late]
    np.testing.assert_allclose(losses, expected.metrics["loss"], rtol=1e-5)


def moved_to(to: Setup, of: Setup, state: TrainState) -> TrainState:
    """The same logical arrays, as shards of another layout."""
    whole = of.whole(state, of.layout)

    def shard(leaf: zero.groups.LeafLayout) -> np.ndarray:
        padded = np.zeros(leaf.padded_shape, leaf.dtype)
        padded[tuple(slice(size) for size in leaf.shape)] = whole[leaf.name]
        return np.stack(np.split(padded, 8, leaf.splits[0].dim) if leaf.splits else [padded] * 8)

    # On the devices as a state is, else the step would be compiled again.
    moved: TrainState = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), to.layout.map(shard), to.start())
    return moved


@pytest.mark.wide
def test_copies_train_alike() -> None:
    """Copies of the state train the same, in micro-batches too."""
    axis = zero.Axis.with_expert_groups("zero", 8, 2, replicas=2)
    assert_same_training(run_on(setup(8, 3, 3, config=SWITCH, axis=axis)), trained("switch", 8, 3))


@pytest.mark.parametrize("experts", [pytest.param(1, marks=pytest.mark.wide), 4])
def test_scoring_drops_nothing(experts: int) -> None:
    """Validation losses are those of the model without a capacity, also in several rounds of places."""
    config = dataclasses.replace(CAPPED, expert_capacity=0.5)
    axis = zero.Axis.with_expert_groups("zero", 8, experts) if experts > 1 else None
    on = setup(8, 3, config=config, axis=axis)
    params = jax.tree.map(lambda x: 8 * x, first_params(config))  # large enough for uneven choices
    shards = zero.to_devices(params, on.model.layout, on.model.axis, on.devices)
    rows = batch(on, 0).tokens
    losses, scored, _ = on.programs.evaluate(shards, rows)
    flat = tokens(0)
    targets = np.concatenate([flat[:, 1:], np.full((ROWS, 1), -1)], axis=1)
    for capacity, is_same in ((None, True), (0.5, False)):
        each = applied(dataclasses.replace(config, expert_capacity=capacity))
        each = each({"params": params}, np.where(flat < 0, ~flat, flat), targets)
        mean = np.mean(np.asarray(each)[targets >= 0])
        assert np.isclose(losses / scored, mean, rtol=1e-5) == is_same


@cache
def applied(config: GPTConfig) -> Any:
    return jax.jit(GPT(config).apply)


@pytest.mark.wide
def test_first_weights_in_groups() -> None:
    """First weights in expert groups equal those of the model on one device."""
    assert_first_weights(setup(8, 3, config=SWITCH, axis=zero.Axis.with_expert_groups("zero", 8, 4)))


OPTIONS: dict[str, dict[str, Any]] = {
    "micro-batches": {"micro_batches": 3},
    "fused": {"fused_update": True, "max_norm": None, "skip_bad_steps": False},
    "nested": {"remat": "nested"},
    "unrolled": {"remat": "none"},
}


@pytest.mark.slow  # test_copies_train_alike is a short form
@pytest.mark.parametrize("experts", [1, 2, 4])
@pytest.mark.parametrize("options", OPTIONS)
def test_all_layer_loops_train_alike(options: str, experts: int) -> None:
    """Every way to run the layers trains the same."""
    expected = trained("switch", 8, 3, **({} if options != "fused" else {"max_norm": None, "skip_bad_steps": False}))
    assert_same_training(trained("switch", 8, 3, experts, **OPTIONS[options]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", ["dropless", "capped"])
def test_tensor_groups_split_experts(name: str, stage: int) -> None:
    """Tensor groups split the width of experts."""
    config = dataclasses.replace(CONFIGS[name], embedding_dim=48, num_head=8, mlp_dim=64)
    replicas = 1 if stage else 4
    axis = zero.Axis.with_tensor_groups("zero", 8, 2, replicas)
    assert_same_training(run_on(setup(8, stage, config=config, axis=axis)), run_on(setup(8, 3, config=config)))


@pytest.mark.slow  # test_optimizer.py moves experts on shards, without a model
@pytest.mark.parametrize("name", NAMES)
def test_optimizers_train_in_expert_groups(name: str) -> None:
    """Every optimizer trains in expert groups as on one device, which has all experts."""
    hyperparameters: dict[str, Any] = {"factored_from": 8} if name == "adafactor" else {}
    tx = make_optimizer(name, 0.1, axes=parameter_axes(CAPPED), **hyperparameters)

    def losses(on: Setup) -> list[float]:
        return [line["loss"] for line in advance(on, on.start(), range(STEPS))[1]]

    axis = zero.Axis.with_expert_groups("zero", 8, 4)
    in_groups = losses(setup(8, 3, config=CAPPED, axis=axis, tx=tx))
    np.testing.assert_allclose(in_groups, losses(setup(1, 0, config=CAPPED, tx=tx)), rtol=1e-5)


@pytest.mark.parametrize("experts", [pytest.param(2, marks=pytest.mark.wide), pytest.param(8, marks=pytest.mark.slow)])
def test_bytes_sent_by_expert_groups(experts: int) -> None:
    """Expert groups send the bytes of the formula.

    Bytes of the compiled program per device and step, stage 3, full rematerialization (docs/explanation/groups.md).
    """
    config = dataclasses.replace(
        DROPLESS, embedding_dim=64, num_head=4, mlp_dim=256, N=2, expert_capacity=1.0, vocab_size=104, vocab_chunks=1
    )
    on = setup(8, 3, config=config, axis=zero.Axis.with_expert_groups("zero", 8, experts))
    leaves = on.model.layout.leaves
    of_experts = sum(np.prod(leaf.shape) for leaf in leaves if on.model.axes[leaf.name].has_experts)
    others = sum(np.prod(leaf.shape) for leaf in leaves) - of_experts
    rows, capacity = ROWS // 8, capacity_of(config, 12)
    weights = 3 * others * 7 / 8 + 3 * of_experts / experts * (1 - experts / 8)
    exchanged = 3 * of_experts / 8 * (1 - 1 / experts)
    tokens_sent = 6 * config.N * rows * 8 * capacity * 64 * (1 - 1 / experts)
    text = on.programs.step.lower(shapes_of(on), batch_shapes(on)).compile().as_text()
    sent = sum(bytes_by_kind(collectives(text)).values())
    assert sent == pytest.approx(4 * (weights + exchanged + tokens_sent), rel=0.06)


def batch_shapes(on: Setup) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(on, 0))


def test_misfits_are_refused() -> None:
    """Layouts and axes that do not fit are refused."""
    tree = {"w": jax.ShapeDtypeStruct((6, 16), np.float32)}
    with pytest.raises(ValueError, match="leaf w: 6 experts do not divide into 4 parts"):
        zero.groups.make_grouped_layout(tree, 8, expert=4, is_expert=lambda name: True)
    with pytest.raises(ValueError, match="do not divide into expert groups of 3"):
        zero.groups.make_grouped_layout(tree, 8, expert=3)
    with pytest.raises(ValueError, match="8 devices do not make 1 copies of groups of 3"):
        zero.Axis.with_expert_groups("zero", 8, 3)
    with pytest.raises(ValueError, match="the last phase"):
        zero.Axis("zero", (1, 2, 4), expert=2)
    whole = {"w": np.zeros((8, 16), np.float32)}
    layout = zero.groups.make_grouped_layout(whole, 8, expert=4, is_expert=lambda name: True)
    assert layout.leaves[0].gathered_shape == (2, 16) and layout.leaves[0].shard_shape == (8, 2)
    axis = zero.Axis.with_expert_groups("zero", 8, 4)
    with pytest.raises(ValueError, match="does not travel as int8"):
        jax.pmap(lambda w: zero.gather({"w": w}, layout, axis, wire_dtype=np.int8), "zero")(np.zeros((8, 8, 2)))
