"""The sharded step against one unsharded device: any stage, number of devices and micro-batches, dropout included."""

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero
from tests.training.small_gpt import (
    CLIP,
    CONFIG,
    MAX_NORM,
    RATE,
    ROWS,
    SEED,
    STEPS,
    advance,
    assert_close,
    assert_equal,
    assert_first_weights,
    batch,
    bits,
    reference,
    run,
    run_on,
    setup,
    shapes_of,
    tokens,
)
from zero.costs.hlo import computations, kind_of, runs_of
from zero.models.attention.blockwise import blockwise_attention
from zero.training.optimizers.optimizer import decayed
from zero.training.parts import TrainState
from zero.training.sharded_gpt import ShardedGPT
from zero.training.whole_gradient import _accumulate


def test_reference_clips_some_steps() -> None:
    """The reference clips some steps and not others."""
    norms = np.asarray(reference().metrics["gradient_norm"])
    assert (norms > MAX_NORM).any() and (norms < MAX_NORM).any()


def test_stages_agree() -> None:
    runs = [run(8, stage) for stage in range(4)]
    assert_equal(runs[1], runs[0])
    assert_equal(runs[3], runs[2])
    # Stages 2 and 3 reduce the gradient of the tied table in two parts, of the lookup and of the loss.
    assert_close(runs[2], runs[1], rtol=1e-6)


SOME = [(8, 0, 1), (8, 3, 1), (3, 2, 4)]
PARTS = {1: (1, 24), 2: (1, 3), 3: (1, 2, 4), 6: (2,), 8: (1, 3)}
ALL = [(n, stage, m) for n, micro_batches in PARTS.items() for stage in range(4) for m in micro_batches]


@pytest.mark.parametrize(
    ("devices", "stage", "micro_batches"),
    [
        *SOME,
        pytest.param(1, 3, 3, marks=pytest.mark.wide),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in [*SOME, (1, 3, 3)]),
    ],
)
def test_equals_one_device(devices: int, stage: int, micro_batches: int) -> None:
    """Many devices and micro-batches equal one device."""
    assert_close(run(devices, stage, micro_batches), reference(), rtol=1e-5)


@pytest.mark.wide  # test_bfloat16_on_the_wire has them
def test_two_chunks_of_the_vocabulary_at_once() -> None:
    """Two of the three chunks in one iteration and the third in another give the same run, bit for bit."""
    assert_equal(run_on(setup(8, 3, chunks_at_once=2)), run(8, 3))


@pytest.mark.parametrize(
    ("devices", "stage"),
    [(8, 3), *(pytest.param(*case, marks=pytest.mark.wide) for case in ((3, 1), (8, 0), (1, 3)))],
)
def test_first_parameters(devices: int, stage: int) -> None:
    """First parameters do not depend on the number of devices."""
    assert_first_weights(setup(devices, stage))


def test_fresh_state() -> None:
    """The state of a fresh start, which one program makes, is that of the two for its weights and the optimizer."""
    on = setup(8, 3)
    got, expected = on.programs.fresh(np.full(8, SEED, np.uint32)), on.programs.start(on.new_weights())
    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), got, expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_elementwise_optimizers_only(stage: int) -> None:
    """An optimizer that is not elementwise is refused.

    On slices it would clip by the norm of a slice.
    """
    on = setup(8, stage, max_norm=None, tx=optax.clip_by_global_norm(1.0))
    with pytest.raises(zero.NotElementwiseError, match=r"use zero\.across_shards\(optax\.clip_by_global_norm"):
        on.programs.step.lower(shapes_of(on), batch(on, 0))


@pytest.mark.slow  # Muon communicates at stages 0 and 3 in test_optimizer.py
def test_communicating_optimizer() -> None:
    """An optimizer that communicates equals one device.

    It clips the updates of AdamW, and masks leaves by their whole size.
    """

    def large(params: Any) -> Any:
        return jax.tree.map(lambda p: p.size > 600, params)

    clip = zero.across_shards(optax.clip_by_global_norm(0.5))
    tx = optax.chain(optax.scale_by_adam(), optax.masked(optax.scale(0.5), large), clip)
    on, plain = (setup(devices, stage, max_norm=None, tx=tx) for devices, stage in ((8, 3), (1, 0)))
    assert_close(run_on(on), run_on(plain), rtol=1e-5)


@pytest.mark.parametrize("place", [pytest.param((0, 0), marks=pytest.mark.wide), (ROWS - 1, 3)])
def test_token_past_the_vocabulary(place: tuple[int, int]) -> None:
    """A token past the vocabulary is not scored as one of its tokens.

    The step is skipped and counted.
    """
    on = setup(8, 3)
    rows = batch(on, 0)
    tokens = np.array(rows.tokens).reshape(ROWS, -1)
    tokens[place] = CONFIG.vocab_size
    _, metrics = on.programs.step(on.start(), rows._replace(tokens=tokens.reshape(rows.tokens.shape)))
    assert np.isnan(metrics["loss"]) and metrics["skipped_steps"] == 1


@pytest.mark.parametrize(
    ("devices", "stage", "micro_batches"),
    [
        (3, 2, 4),
        *(pytest.param(8, *case, marks=pytest.mark.slow) for case in ((1, 1), (2, 1), (3, 1), (3, 3))),
    ],
)
def test_bfloat16_gradients(devices: int, stage: int, micro_batches: int) -> None:
    """Gradients held in bfloat16 are rounded once."""
    on = setup(devices, stage, micro_batches, gradient_dtype=jnp.bfloat16)
    (got,), (expected,) = (advance(s, s.start(), range(1))[1] for s in (on, setup(devices, stage, micro_batches)))
    assert got["loss"] == expected["loss"]
    assert got["gradient_norm"] != expected["gradient_norm"]
    # Errors of 2^-9 of single elements, of either sign, all but cancel in the norm of thousands.
    np.testing.assert_allclose(got["gradient_norm"], expected["gradient_norm"], rtol=2**-10)


def test_micro_batches_are_summed_in_float32() -> None:
    """Gradients in bfloat16 are added in float32: in bfloat16, 256 + 1 is 256."""
    value_and_grad = jax.value_and_grad(lambda params, rows: jnp.sum(params["w"].astype(jnp.float32) * rows))
    rows = jnp.asarray([256.0, 1.0, 1.0, 1.0])
    params = {"w": jnp.zeros(1, jnp.bfloat16)}
    _, grads, _ = _accumulate(
        lambda params, memory, rows: (*value_and_grad(params, rows), memory), jnp.float32(0), params, None, (rows,), 4
    )
    assert grads["w"].dtype == jnp.float32 and grads["w"].tolist() == [259.0]


@pytest.mark.slow  # the test below has "dots", and test_step_families.py "none"
@pytest.mark.parametrize("remat", ["dots", "none"])
def test_rematerialization(remat: str) -> None:
    """Training does not depend on what the backward pass recomputes."""
    assert_close(run_on(setup(8, 3, remat=remat)), run(8, 3), rtol=1e-6)


@pytest.mark.parametrize(
    ("stage", "remat"),
    [
        pytest.param(3, "dots", marks=pytest.mark.wide),
        *(pytest.param(stage, "full", marks=pytest.mark.slow) for stage in range(4)),
    ],
)
def test_blockwise_attention(stage: int, remat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blockwise attention trains as dense attention does, whatever the backward pass recomputes.

    With the same dropout masks, in blocks of 5 positions of 12.
    """
    monkeypatch.setattr("zero.models.self_attention.blockwise_attention", partial(blockwise_attention, block=5))
    assert_close(run_on(setup(8, stage, blockwise_from=2, remat=remat)), run(8, 3), rtol=1e-6)


def held(tree: Any) -> list[int]:
    """Bytes that lie on each device."""
    total: dict[jax.Device, int] = {}
    for x in jax.tree.leaves(tree):
        for part in x.addressable_shards:
            total[part.device] = total.get(part.device, 0) + part.data.nbytes
    return list(total.values())


@pytest.mark.parametrize("stage", range(4))
def test_devices_hold_what_the_table_says(stage: int) -> None:
    on, state = setup(8, stage), run(8, stage).state
    assert held(state) == [on.layout.bytes_per_device()] * 8
    whole = setup(8, 0).layout.bytes_per_device()
    padding = sum(np.prod(leaf.padded_shape) - np.prod(leaf.shape) for leaf in on.layout.leaves) * 4
    left_whole = sum(np.prod(leaf.shape) for leaf in on.layout.leaves if not leaf.splits) * 4
    assert held(state)[0] == (whole if stage == 0 else (whole - left_whole + padding) / 8 + left_whole)
    if stage:
        assert held(state)[0] < 0.15 * whole
        assert left_whole == 4 * (5 + 6)  # of counters and running statistics alone


def test_step_deletes_former_state() -> None:
    """A step leaves no buffer of the state before it."""
    on = setup(8, 3)
    state = on.start()
    before = jax.tree.leaves(state)
    state, _ = advance(on, state, range(1))
    assert all(x.is_deleted() for x in before)


def test_state_is_the_same_everywhere() -> None:
    """The state is the same logical arrays at every stage and on any devices."""
    layouts = [setup(devices, stage).layout for devices in (1, 3, 8) for stage in range(4)]
    logical = {tuple((leaf.name, leaf.shape, leaf.dtype) for leaf in layout.leaves) for layout in layouts}
    assert len(logical) == 1
    names = [name for name, _, _ in logical.pop()]
    assert len(names) == len(set(names))


def test_step_is_traced_once() -> None:
    """A step is traced once per context, and not again after a checkpoint."""
    on = setup(8, 3)
    state, _ = advance(on, on.start(), range(1))
    traces = on.rate.traces  # more than one where the compiled programs of earlier tests were dropped
    state, _ = advance(on, state, range(1, 2))
    assert on.rate.traces == traces
    arrays = zero.to_global(state, on.layout, on.model.axis, on.devices, donate=True)
    state = zero.from_global(arrays, on.layout, on.model.axis, on.devices, donate=True)
    state, _ = advance(on, state, range(2, 4))
    assert on.rate.traces == traces
    for step in range(2):  # runs of short rows: tests/run/test_train_staged.py
        on.programs.step.lower(state, batch(on, step, partial(tokens, context=6)))
    assert on.rate.traces == traces + 1


def test_batch_without_tokens() -> None:
    """A batch without any token changes only the moments."""
    on = setup(8, 3)
    nothing = batch(on, 0)._replace(tokens=np.full((8, 3, 12), -1, np.int32))
    state, metrics = on.programs.step(on.start(), nothing)
    assert (metrics["loss"].item(), metrics["gradient_norm"].item(), metrics["skipped_steps"].item()) == (0, 0, 0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


@pytest.mark.parametrize("tied", [True, False])
def test_decayed_leaves(tied: bool) -> None:
    """Weight decay applies to matrices and the vocabulary."""
    model = ShardedGPT(dataclasses.replace(CONFIG, alibi_attn=False, tied=tied), zero.Axis("zero", (1, 8)), 3)
    names = [leaf.name for leaf in model.layout.leaves]
    chosen = jax.tree.leaves(decayed(model.axes)(model.layout.shapes()))
    kernels = ("query", "key", "value", "attention_out", "mlp_in", "mlp_out")
    assert {name for name, is_decayed in zip(names, chosen, strict=True) if is_decayed} == {
        "vocabulary/table",
        *([] if tied else ["head/table"]),
        *(f"blocks/{kernel}/kernel" for kernel in kernels),
    }


def test_bfloat16_on_the_wire() -> None:
    """With bfloat16 on the wire a model learns as in float32, and master weights stay float32.

    Two of three chunks of the vocabulary are computed at once.
    """
    on = setup(8, 3, max_norm=None, dtype=jnp.bfloat16, chunks_at_once=2)
    state, metrics = advance(on, on.start(), range(STEPS))
    assert {x.dtype for x in jax.tree.leaves((state.params, state.opt_state[0].mu, state.opt_state[0].nu))} == {
        jnp.dtype("float32")
    }
    losses = np.asarray([m["loss"] for m in metrics])
    expected = np.asarray(reference().metrics["loss"])
    assert 0 < abs(losses[0] - expected[0]) < 0.01 * expected[0]
    np.testing.assert_allclose(losses, expected, rtol=0.03)  # without clipping, so not more than near


def test_infinite_norm_is_skipped() -> None:
    """A gradient whose norm is infinite is skipped.

    Of a finite loss, without a NaN anywhere: a square overflows.
    """
    on = setup(8, 3)
    state = on.start()
    norm = {**state.params["norm"], "scale": state.params["norm"]["scale"] * np.float32(1e25)}
    _, (metrics,) = advance(on, state._replace(params={**state.params, "norm": norm}), range(1))
    assert np.isfinite(metrics["loss"]) and metrics["gradient_norm"] == np.inf
    assert metrics["skipped_steps"] == 1


POISONS = [(np.nan, 3, 8), (1e30, 2, 3)]  # the last one overflows in the norm alone


@pytest.mark.parametrize(
    ("poison", "stage", "devices"),
    [
        *POISONS,
        *(
            pytest.param(poison, stage, devices, marks=pytest.mark.slow if stage == 1 else pytest.mark.wide)
            for poison, (stage, devices) in itertools.product([np.nan, np.inf, 1e30], [(3, 8), (0, 8), (2, 3), (1, 3)])
            if (poison, stage, devices) not in POISONS
        ),
    ],
)
def test_not_finite_gradient_is_skipped(poison: float, stage: int, devices: int) -> None:
    """A gradient that is not finite is skipped on all devices alike."""
    on = setup(devices, stage, 4 if devices == 3 else 1)
    state, _ = advance(on, on.start(), range(1))
    healthy = np.asarray(state.params["blocks"]["mlp_in"]["kernel"])
    sick = healthy.copy()
    sick[slice(None) if stage == 0 else -1] *= poison  # on the last device alone, where it has its own shard

    def with_kernel(state: TrainState, kernel: np.ndarray) -> TrainState:
        leaf = state.params["blocks"]["mlp_in"]["kernel"]
        blocks = dict(
            state.params["blocks"],
            mlp_in=dict(state.params["blocks"]["mlp_in"], kernel=jax.device_put(kernel, leaf.sharding)),
        )
        return state._replace(params=dict(state.params, blocks=blocks))

    state = with_kernel(state, sick)
    before = bits((state.params, state.opt_state))
    state, metrics = advance(on, state, range(1, 3))
    for got, expected in zip(bits((state.params, state.opt_state)), before, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert [m["skipped_steps"] for m in metrics] == [m["skipped_in_a_row"] for m in metrics] == [1, 2]
    assert not any(np.isfinite(m["gradient_norm"]) for m in metrics)
    # The schedule goes on, Adam's count does not.
    rates = [float(RATE(1)), float(RATE(2))]  # compiled alone, so that the last bit may differ from the step's
    assert [m["learning_rate"] for m in metrics] == pytest.approx(rates, rel=1e-6)
    assert np.asarray(state.clock).tolist() == [3] * devices
    assert np.asarray(state.opt_state[0].count).tolist() == [1] * devices
    zero.check_replicated((state.clock, state.guard, state.opt_state[0].count), "zero", on.devices)

    state, metrics = advance(on, with_kernel(state, healthy), range(3, 4))
    assert (metrics[0]["skipped_steps"], metrics[0]["skipped_in_a_row"]) == (2, 0)
    # As if the two steps had not been, but for the place in the schedule.
    other, _ = advance(on, on.start(), range(1))
    other, _ = advance(on, other._replace(clock=other.clock + 2), range(3, 4))
    for got, expected in zip(bits((state.params, state.opt_state)), bits((other.params, other.opt_state)), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_elements_are_clipped(fused: bool) -> None:
    """With plain gradient descent no element moves by more than the rate times `max_gradient_value`, and some do."""
    most = 1e-3
    options: dict[str, Any] = {"max_norm": None, "skip_bad_steps": False, "fused_update": fused}
    on = setup(8, 3, max_gradient_value=most, tx=optax.identity(), **options)
    before = on.whole(on.start(), on.layout)
    state, (metrics,) = advance(on, on.start(), range(1))
    moved = {name: x - before[name] for name, x in on.whole(state, on.layout).items() if name.startswith("params/")}
    furthest = metrics["learning_rate"] * most
    for name, x in moved.items():
        assert np.abs(x).max() <= furthest * 1.02, name
    scale = np.abs(moved["params/embedding_norm/scale"])
    assert (scale > furthest * 0.98).any() and (scale < furthest / 2).any()


UNCLIPPED = optax.identity()


@pytest.mark.parametrize(
    ("wire", "stage", "clip", "options"),
    [
        pytest.param("bfloat16", 2, CLIP, {}, marks=pytest.mark.wide),  # the sum itself: collectives/test_arrays.py
        pytest.param(
            *("int8", 3, UNCLIPPED, {"fused_update": True, "max_norm": None, "skip_bad_steps": False}),
            marks=pytest.mark.wide,
        ),
    ],
)
def test_narrow_sums_between_copies(
    wire: str, stage: int, clip: optax.GradientTransformation, options: dict[str, Any]
) -> None:
    """Copies that send each other rounded sums train as without rounding, and stay copies to the bit."""
    on = setup(8, stage, axis=zero.Axis("zero", (2, 4), copies_dtype=wire), **options)
    state, metrics = advance(on, on.start(), range(STEPS))
    for leaf in jax.tree.leaves(state.params):
        first, second = np.split(np.asarray(leaf), 2)
        np.testing.assert_array_equal(first, second)
    losses = np.asarray([one["loss"] for one in metrics])
    errors = np.abs(losses / reference(clip=clip).metrics["loss"] - 1)
    assert 2e-6 < errors.max() < 1e-3  # below 1e-6 where nothing is rounded


@pytest.mark.wide  # tests/costs/test_between_slices.py has what crosses
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_sums_between_copies_cross_beside_layers(micro_batches: int) -> None:
    """Of one micro-batch each layer's gradient crosses in the backward pass; of more, that of all once."""
    axis = zero.Axis("zero", (2, 4))
    on = setup(8, 3, micro_batches, axis=axis)
    groups = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in axis.groups(2, apart=4) or []) + "}"
    bodies, entry = computations(on.programs.step.lower(shapes_of(on), batch(on, 0)).compile().as_text())
    times = runs_of(bodies, entry)
    found = {
        times[name]
        for name, body in bodies.items()
        for instruction in body
        if kind_of(instruction) == "all-reduce" and f"replica_groups={groups}" in instruction.rest and times[name]
    }
    assert CONFIG.N in found if micro_batches == 1 else found == {1}
