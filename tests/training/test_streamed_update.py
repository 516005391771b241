"""The optimizer's state of layers lies in the host's memory, and the update is that of the fused update.

XLA compiles other programs, whose sums round otherwise in the last digit. Between settings of the streamed update
itself everything is equal to the bit.
"""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero
from tests.training.divisible_models import DIVISIBLE
from tests.training.small_gpt import EXPERTS, PLAIN, STEPS, Setup, advance, batch, bits, setup
from zero.models.gpt import parameter_axes
from zero.models.stack import KINDS
from zero.partition import host_blocks
from zero.partition.checksums import examine
from zero.partition.host_blocks import DEVICE, HOST, HostQueue
from zero.training.optimizers.optimizer import make_optimizer
from zero.training.parts import TrainState
from zero.training.state_storage import LayersOnHost, OnDevices
from zero.training.streamed_update import StreamedState, layers_of, with_layers

SPAN, SPANS = 2, 3
DEEP = dataclasses.replace(PLAIN, N=SPAN * SPANS, gated=True)
FUSED: dict[str, Any] = {"config": DEEP, "fused_update": True, "remat": "nested"}
TENSOR = zero.Axis.with_tensor_groups("zero", 8, 2)


def joined(state: TrainState) -> TrainState:
    """The state as the fused update holds it."""
    streamed: Any = state.opt_state

    def stack(*blocks: Any) -> np.ndarray:
        return np.concatenate([np.asarray(x) for x in blocks], axis=1)

    stacks = [jax.tree.map(stack, *parts) for parts in zip(*streamed.blocks, strict=True)]
    return state._replace(opt_state=with_layers(streamed.rest, stacks))


@cache
def trained(devices: int, streams: bool, **options: Any) -> tuple[Setup, TrainState, list[dict[str, float]]]:
    on = setup(devices, 3, streams_state=streams, **(FUSED | options))
    return on, *advance(on, on.start(), range(STEPS))


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "layer by layer": (8, {}),
    "one device, clipped elements": (1, {"max_gradient_value": 1e-3, "max_norm": None}),
    "copies": (8, {"axis": zero.Axis("zero", (2, 4))}),
    "tensor groups": (8, {"config": dataclasses.replace(DIVISIBLE, N=4), "axis": TENSOR}),
    "context groups": (8, {"axis": zero.Axis("zero", (1, 8), context=2), "blockwise_from": 2}),
    "experts": (8, {"config": EXPERTS}),
    "an average": (8, {"ema_decay": 0.9}),
    "moments of a byte": (8, {"tx": make_optimizer("adamw", 0.1, axes=parameter_axes(DEEP), state_dtype=jnp.int8)}),
    "lion": (8, {"tx": make_optimizer("lion", 0.1, axes=parameter_axes(DEEP))}),
}
CASES = {name: (devices, options | {"remat": "full"}) for name, (devices, options) in CASES.items()}
CASES |= {"spans": (8, {}), "spans, on three devices": (3, {})}
WIDE = ("layer by layer", "spans, on three devices")


@pytest.mark.parametrize(
    "case",
    [
        "spans",
        *(pytest.param(name, marks=pytest.mark.wide) for name in WIDE),
        *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in ("spans", *WIDE)),
    ],
)
def test_same_update(case: str) -> None:
    devices, options = CASES[case]
    on, state, metrics = trained(devices, True, **options)
    _, expected, expected_metrics = trained(devices, False, **options)
    for now, then in zip(metrics, expected_metrics, strict=True):
        assert now == pytest.approx(then, rel=1e-5)
    got = on.whole(joined(state), on.layout)
    for name, x in on.whole(expected, on.layout).items():
        if "/key/bias" not in name and np.issubdtype(x.dtype, np.floating):
            assert np.linalg.norm(got[name] - x) <= 3e-4 * np.linalg.norm(x), name


def test_only_layers_lie_on_the_host() -> None:
    """The blocks do, before and after a step, and nothing else; what a step has read is gone."""
    on = setup(8, 3, streams_state=True, **FUSED)
    first = on.start()
    state, _ = on.programs.step(first, batch(on, 0))
    for one in (first, state):
        assert isinstance(one.opt_state, StreamedState)
        assert {x.sharding.memory_kind for x in jax.tree.leaves(one.opt_state.blocks)} == {HOST}
        rest = one._replace(opt_state=one.opt_state.rest)
        assert {x.sharding.memory_kind for x in jax.tree.leaves(rest)} == {DEVICE}
    assert len(state.opt_state.blocks) == SPANS
    assert all(x.is_deleted() for x in jax.tree.leaves(first.opt_state.blocks))


@pytest.mark.wide  # the next test sees them move
def test_inputs_on_the_host_change_no_bit() -> None:
    """`zero.offload=both`: inputs of spans wait there for the backward pass."""
    _, state, metrics = trained(8, True)
    _, moved, moved_metrics = trained(8, True, offload=KINDS)
    assert metrics == moved_metrics
    assert_same(joined(moved), bits(joined(state)))


@pytest.mark.parametrize(
    ("offload", "queues"),
    [((), 1), pytest.param(KINDS, 2, marks=pytest.mark.wide)],
    ids=["none", "activations"],
)
def test_a_step_waits_for_what_leaves(offload: tuple[str, ...], queues: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the devices hold all blocks, or inputs, at once; the last one of each kind may still be on its way."""
    on = setup(8, 3, streams_state=True, offload=offload, **FUSED)
    state = on.start()
    waited: list[Any] = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    on.programs.step(state, batch(on, 0))
    assert len([moved for moved in waited if moved is not None]) == queues * (SPANS - 1)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(waited)} == {HOST}


def test_bad_layers_are_skipped() -> None:
    """A part whose gradient is not finite keeps its weights and its state, here all of them."""
    on = setup(8, 3, streams_state=True, **FUSED)
    state = on.start()
    norm = state.params["norm"]
    broken = state._replace(params={**state.params, "norm": jax.tree.map(lambda x: x * np.nan, norm)})
    kept = [np.asarray(x) for x in jax.tree.leaves((broken.params["blocks"], broken.opt_state.blocks))]
    after, metrics = on.programs.step(broken, batch(on, 0))
    assert metrics["skipped_steps"] == 1
    for x, y in zip(jax.tree.leaves((after.params["blocks"], after.opt_state.blocks)), kept, strict=True):
        np.testing.assert_array_equal(np.asarray(x), y)


def test_few_blocks_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next block comes before the span that is computed, and only when the one before the last one has left."""
    events: list[str] = []
    arrived: dict[int, str] = {}

    class Block:
        def __init__(self, name: str) -> None:
            self.name = name

    def ready(moved: Block | None) -> None:
        if moved is not None:
            events.append(f"wait {moved.name}")

    def taken(block: Block) -> Block:
        events.append(f"take {block.name}")
        return block

    monkeypatch.setattr(host_blocks, "to_host", lambda block: block)
    monkeypatch.setattr(host_blocks, "taken", taken)
    monkeypatch.setattr(jax, "block_until_ready", ready)
    leaving = HostQueue()
    for number, block in host_blocks.in_reverse([Block(str(i)) for i in range(5)]):
        events.append(f"compute {number}")
        arrived[number] = leaving.put(block).name
    assert arrived == {i: str(i) for i in range(5)}
    first = "take 4, take 3, compute 4, take 2, compute 3, wait 4, take 1, compute 2, wait 3, take 0, compute 1, wait 2"
    assert ", ".join(events) == f"{first}, compute 0, wait 1"


def storages(on: Setup, size: int) -> tuple[OnDevices, LayersOnHost]:
    return OnDevices(on.layout, on.model.axis), LayersOnHost(on.layout, on.model.axis, size)


def test_whole_arrays_and_back() -> None:
    """What a checkpoint holds does not tell where the state lay, and fits into blocks of another size."""
    on = setup(8, 3, streams_state=True, **FUSED)
    plain, by_span = storages(on, SPAN)
    state, _ = advance(on, on.start(), range(1))
    expected = bits(joined(state))
    blocks = jax.tree.leaves(state.opt_state.blocks)
    sums = by_span.examine(state)
    whole = by_span.to_global(state)
    assert all(x.is_deleted() for x in blocks)  # the host holds no stack twice
    assert [x.sharding for x in by_span.targets()] == [x.sharding for x in jax.tree.leaves(whole)]
    assert [x.sharding.spec for x in plain.targets()] == [x.sharding.spec for x in by_span.targets()]
    on_devices = [
        jax.device_put(np.array(x), y.sharding) for x, y in zip(jax.tree.leaves(whole), plain.targets(), strict=True)
    ]
    assert_same(plain.from_global(on.layout.treedef.unflatten(on_devices)), expected)
    in_threes = dataclasses.replace(by_span, size=3)
    stacks = jax.tree.leaves(layers_of(whole.opt_state))
    restored = in_threes.from_global(whole)
    assert all(x.is_deleted() for x in stacks)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(restored.opt_state.blocks)} == {HOST}
    assert jax.tree.map(lambda x: x.shape[1:], restored) == jax.tree.map(lambda x: x.shape, in_threes.shapes())
    assert_same(joined(restored), expected)
    assert in_threes.examine(restored) == sums


def assert_same(state: TrainState, expected: list[np.ndarray]) -> None:
    for x, y in zip(bits(state), expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_checksums_are_those_of_whole_arrays() -> None:
    on = setup(8, 3, streams_state=True, **FUSED)
    _, by_span = storages(on, SPAN)
    state, _ = advance(on, on.start(), range(1))
    sums, not_finite = by_span.examine(state)
    whole = jax.pmap(lambda x: x, "zero")(joined(state))
    assert (sums, not_finite) == examine(whole, on.layout, on.model.axis)
    assert not not_finite and list(sums) == [leaf.name for leaf in on.layout.leaves]
    blocks: Any = list(state.opt_state.blocks)
    (path, x), *_ = jax.tree_util.tree_leaves_with_path(blocks[2])
    spoiled = np.asarray(x).copy()
    spoiled[0].flat[0] = np.nan
    blocks[2] = jax.tree.map(lambda y: jax.device_put(spoiled, x.sharding) if y is x else y, blocks[2])
    changed, not_finite = by_span.examine(state._replace(opt_state=StreamedState(state.opt_state.rest, tuple(blocks))))
    (name,) = [name for name in sums if changed[name] != sums[name]]
    assert not_finite == [name] and name.startswith("opt_state/0/mu/blocks/"), path


def test_bytes_by_place() -> None:
    on = setup(8, 3, streams_state=True, **FUSED)
    plain, by_span = storages(on, SPAN)
    assert by_span.device_bytes + by_span.host_bytes == plain.device_bytes
    blocks = on.start().opt_state.blocks
    assert by_span.host_bytes == sum(x.nbytes for x in jax.tree.leaves(blocks)) // 8
    assert by_span.moving_bytes == 3 * by_span.host_bytes // SPANS
    assert (plain.host_bytes, plain.moving_bytes) == (0, 0)


def planned(on: Setup) -> Any:
    """As a plan, which has shapes alone, lowers the step."""
    _, by_span = storages(on, SPAN)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), by_span.shapes())
    of_rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(on, 0))
    return on.programs.step.lower(shapes, of_rows)


@pytest.mark.wide
def test_lowered_for_the_same_shapes() -> None:
    """A plan compiles the programs of a run."""
    on = setup(8, 3, streams_state=True, **FUSED)
    assert planned(on).as_text() == on.programs.step.lower(on.start(), batch(on, 0)).as_text()


@pytest.mark.wide
def test_planned_step_computes_the_same() -> None:
    on = setup(8, 3, streams_state=True, **FUSED)
    expected, _ = on.programs.step(on.start(), batch(on, 0))
    got, _ = planned(on).compile()(on.start(), batch(on, 0))
    assert_same(joined(got), bits(joined(expected)))


def test_refused() -> None:
    """Where the fused update is refused, by the same words."""
    with pytest.raises(ValueError, match="fused_update needs stage 3"):
        setup(8, 2, streams_state=True, **FUSED)
    with pytest.raises(zero.NotElementwiseError):
        planned(setup(8, 3, streams_state=True, tx=optax.lamb(0.1), **FUSED))
