"""Devices that compute the same rows have the same checksums, and one that does not is named."""

import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests.helpers.faulty_device import install
from tests.training.small_gpt import (
    CONFIG,
    EXPERTS,
    VQ,
    Setup,
    batch,
    setup,
    tokens,
)
from zero.base.errors import Unavailable, UserError
from zero.models.gpt import GPT
from zero.partition import pmapped
from zero.run.features.verify import Verify
from zero.training.batch import Batch
from zero.training.verification import compared_groups, suspects, verify

GROUPS = dataclasses.replace(CONFIG, embedding_dim=48, num_head=8, block_size=16)


def verifier(program: Any, axis: zero.Axis, every: int | None = 5) -> Verify:
    """The feature on a run with this program."""
    run: Any = SimpleNamespace(axis=axis, job=SimpleNamespace(programs=SimpleNamespace(verify=program)))
    return Verify(Verify.Keys(every), run)


def program_of(on: Setup) -> Any:
    """`Programs.verify` of a setup, traced anew."""
    bound = partial(verify, model=on.model, micro_batches=1)
    return pmapped.pmap(bound, "zero", devices=on.devices, out_axes=None)


def rows_of(on: Setup) -> np.ndarray:
    context = on.model.config.block_size
    return np.asarray(batch(on, 0, partial(tokens, context=context)).tokens)


def check(on: Setup, program: Any, weights: Any) -> None:
    count = len(on.devices)

    def on_devices(weights: Any, rows: np.ndarray, firsts: np.ndarray) -> jax.Array:
        return program(weights, rows, firsts[:count])  # a run uses all local devices

    verifier(on_devices, on.model.axis).check(5, weights, rows_of(on))


def results(on: Setup) -> np.ndarray:
    weights = on.weights(on.start())
    firsts = np.zeros(len(on.devices), np.int32)
    return np.asarray(on.programs.verify(weights, rows_of(on), firsts))


@pytest.mark.parametrize(
    ("devices", "stages"),
    [
        pytest.param(3, (0, 3), marks=pytest.mark.wide),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, (3,)), (3, (0, 1, 2, 3)), (8, (3,)))),
    ],
)
def test_stages_raise_no_alarm(devices: int, stages: tuple[int, ...]) -> None:
    """Stages have the same results and raise no alarm."""
    found = [results(setup(devices, stage)) for stage in stages]
    for one in found:
        np.testing.assert_array_equal(one, found[0])
        np.testing.assert_array_equal(one[1], np.roll(one[0], -1))
    assert len(np.unique(found[0])) == devices


NARROW: dict[str, Any] = {
    "dtype": jnp.bfloat16,
    "gradient_dtype": jnp.bfloat16,
    "gather_dtype": jnp.int8,
    "remat": "none",
}


@pytest.mark.parametrize(
    "on",
    [
        pytest.param(  # test_group_of_failing_device names one group, and so no other
            partial(setup, 8, 3, config=GROUPS, axis=zero.Axis.with_tensor_groups("zero", 8, 2)),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            partial(setup, 8, 3, config=GROUPS, axis=zero.Axis("zero", (2, 4), context=2), blockwise_from=4, **NARROW),
            marks=pytest.mark.wide,
        ),
        pytest.param(
            partial(setup, 8, 3, config=EXPERTS, axis=zero.Axis.with_expert_groups("zero", 8, 4)),
            marks=pytest.mark.wide,
        ),
        pytest.param(partial(setup, 3, 2, config=VQ), marks=pytest.mark.wide),
        pytest.param(partial(setup, 3, 3, product_dtype="int8", gathers_rounded=True), marks=pytest.mark.wide),
    ],
    ids=["tensor", "narrow context", "expert", "vq", "gathers of rounded weights"],
)
def test_groups_and_dtypes_raise_no_alarm(on: Callable[[], Setup]) -> None:
    made = on()
    found, axis = results(made), made.model.axis
    assert suspects({0: found}, axis) == ([], False)
    size = axis.row_group * axis.expert
    np.testing.assert_array_equal(found[1], np.roll(found[0], -size))
    assert len(np.unique(found[0])) == axis.size


@pytest.fixture
def faulty_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes one device err in the backward pass."""
    monkeypatch.setattr(GPT, "score", GPT.score)  # restored at the end
    return install


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.wide)])
def test_failing_device_is_named(stage: int, faulty_device: Callable[[int], None]) -> None:
    """A device that errs in the backward pass is named."""
    on = setup(3, stage)
    weights = on.weights(on.start())
    faulty_device(2)
    with pytest.raises(
        Unavailable,
        match=r"^step 5: cpu:2 of host 0 computed a different result from other devices\. "
        r"",
    ):
        check(on, program_of(on), weights)


@pytest.mark.parametrize(
    ("axis", "size"),
    [
        (zero.Axis("zero", (1, 8)), 1),
        (zero.Axis.with_tensor_groups("zero", 8, 4), 4),
        (zero.Axis("zero", (2, 4), context=2), 2),
        (zero.Axis.with_expert_groups("zero", 8, 4), 4),
    ],
    ids=["alone", "tensor", "context", "expert"],
)
def test_groups_compute_together(axis: zero.Axis, size: int) -> None:
    assert compared_groups(axis) == np.arange(8).reshape(-1, size).tolist()


def test_group_of_failing_device(faulty_device: Callable[[int], None]) -> None:
    """The group of a device that errs is named."""
    on = setup(8, 3, config=GROUPS, axis=zero.Axis.with_tensor_groups("zero", 8, 2))
    weights = on.weights(on.start())
    faulty_device(3)
    names = "cpu:2 of host 0 and cpu:3 of host 0"
    with pytest.raises(Unavailable, match=f"^step 5: {names} computed a different result from other devices"):
        check(on, program_of(on), weights)


def test_differing_copy_of_weights() -> None:
    """A copy of the weights that differs is named."""
    on = setup(3, 0)
    weights = jax.tree.map(np.asarray, on.weights(on.start()))  # all on the host: one program for all that is damaged
    for name in weights:
        changed = jax.tree.map(np.array, weights[name])
        jax.tree.leaves(changed)[0][1].flat[0] += 0.5
        damaged = weights | {name: changed}
        with pytest.raises(Unavailable, match=r"^step 5: cpu:1 of host 0 computed"):
            check(on, on.programs.verify, damaged)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # one result of device 1 is wrong, and then right: others agree on the rows
        ([[5, 6, 7], [6, 0, 5]], [[6, 7, 5], [7, 5, 6]], ([[1]], True)),
        # always on its own rows, 1
        ([[5, 0, 7], [6, 7, 5]], [[6, 7, 5], [7, 5, 6]], ([[1]], True)),
        # always on the rows of the next device
        ([[5, 6, 7], [6, 0, 5]], [[6, 0, 5], [7, 5, 6]], ([[1]], True)),
        # two devices, each of which repeats its own
        ([[5, 6], [0, 5]], [[0, 5], [5, 6]], ([[0], [1]], False)),
        # two devices: the second one does not
        ([[5, 0], [6, 5]], [[6, 5], [5, 6]], ([[1]], True)),
        # one device
        ([[5], [0]], [[5], [5]], ([[0]], True)),
    ],
)
def test_who_is_wrong(first: list[list[int]], second: list[list[int]], expected: tuple[list[list[int]], bool]) -> None:
    axis = zero.Axis("zero", (1, len(first[0])))
    assert suspects({0: np.asarray(first), 1: np.asarray(second)}, axis) == expected


def test_messages_say_what_could_be_told() -> None:
    def raised(first: list[list[int]], second: list[list[int]]) -> str:
        answers = iter([first, second])
        axis = zero.Axis("zero", (1, len(first[0])))
        with pytest.raises(Unavailable) as caught:
            verifier(lambda *_: np.asarray(next(answers)), axis).check(5, None, np.zeros(()))
        assert caught.value.status == 1
        return str(caught.value)

    assert "cpu:0 of host 0 did not repeat its own result." in raised([[5], [0]], [[5], [5]])
    either = "cpu:0 of host 0 or cpu:1 of host 0 is faulty, and it cannot be determined which"
    assert either in raised([[5, 6], [0, 5]], [[0, 5], [5, 6]])


@pytest.mark.parametrize(("every", "step", "is_checked"), [(5, 10, True), (5, 11, False), (None, 10, False)])
def test_steps_that_are_verified(every: int | None, step: int, is_checked: bool) -> None:
    """Devices are compared after every so many steps, or never."""
    checked: list[int] = []
    feature = verifier(None, zero.Axis("zero", (1, 8)), every)
    feature.check = lambda step, weights, tokens: checked.append(step)  # type: ignore[method-assign]
    run: Any = SimpleNamespace(weights=None)
    feature.after_step(run, step, Batch(np.zeros(()), np.zeros(())))
    assert checked == [step] * is_checked


def test_gpus_have_to_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    axis = zero.Axis("zero", (1, 8))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(UserError, match=r"^verify\.every=5 on GPU needs XLA_FLAGS=--xla_gpu_deterministic_ops=true"):
        verifier(None, axis)
    verifier(None, axis, None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    verifier(None, axis)
