"""Training steps of mixtures of experts: every stage against one device, and expert groups against devices alone."""

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest

import zero
from tests.training.small_gpt import (
    CONFIG,
    Run,
    assert_close,
    reference,
    run_on,
    setup,
)
from zero.models.config import FAMILIES

DROPLESS = dataclasses.replace(
    CONFIG, mlp_dim=61, mlp_bias=False, experts=8, experts_per_token=2, normalise_router=True, balance_loss=0.1,
    router_z_loss=0.05,
)  # fmt: skip
CAPPED = dataclasses.replace(DROPLESS, expert_capacity=1.0)
SWITCH = dataclasses.replace(CAPPED, experts_per_token=1, normalise_router=False, N=4, experts_every=2)
GROUPED: dict[str, Any] = {"num_head": 6, "head_dim": 10, "kv_heads": 3, "embedding_norm": False}
QWEN3 = dataclasses.replace(CONFIG, **{**FAMILIES["qwen3_moe"], **GROUPED, "mlp_dim": 13, "experts": 16})
CONFIGS = {"dropless": DROPLESS, "capped": CAPPED, "switch": SWITCH, "qwen3_moe": QWEN3}
ROUTING = ("expert_share_max", "expert_share_min", "dropped_share", "router_entropy")


pytestmark = pytest.mark.usefixtures("quick_compilation")


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
QUICK = [("dropless", 8, 3), ("capped", 3, 3), ("switch", 8, 3), ("switch", 8, 0)]


@pytest.mark.parametrize(
    ("name", "devices", "stage"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in ALL],
)
def test_every_stage_trains_as_one_device(name: str, devices: int, stage: int) -> None:
    got = trained(name, devices, stage)
    assert_close(got, reference(CONFIGS[name]), rtol=1e-5, config=CONFIGS[name])
    assert (np.asarray(got.metrics["dropped_share"]) > 0).all() == (CONFIGS[name].expert_capacity is not None)


IN_GROUPS = [(name, stage, experts) for name in ("capped", "switch") for stage in range(4) for experts in (2, 4, 8)]
QUICK_GROUPS = [("switch", 3, 4), ("capped", 3, 8), ("capped", 1, 2), ("capped", 0, 4)]


@pytest.mark.parametrize(
    ("name", "stage", "experts"),
    [case if case in QUICK_GROUPS else pytest.param(*case, marks=pytest.mark.slow) for case in IN_GROUPS],
)
def test_expert_groups_train_as_devices_alone(name: str, stage: int, experts: int) -> None:
    got = trained(name, 8, stage, experts)
    assert_same_training(got, trained(name, 8, 3))
    assert_close(got, reference(CONFIGS[name]), rtol=1e-5, config=CONFIGS[name])
