"""The sharded step against one unsharded device: any stage, number of devices and micro-batches, dropout included."""

import dataclasses
import math
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.typing import ArrayLike

import zero
from zero.models import gpt
from zero.models.attention import blockwise_attention
from zero.models.gpt import GPT, GPTConfig
from zero.training.programs import Programs, make_programs
from zero.training.schedules import LearningRate
from zero.training.step import (
    Batch,
    ShardedGPT,
    TrainState,
    adamw,
    add_to_running,
    decayed,
    is_spike,
    state_layout,
)

# Nothing divides by 8 but the batch: 3 heads of 14, 101 tokens in 3 chunks of 34.
CONFIG = GPTConfig(
    embedding_dim=42,
    vocab_size=101,
    num_head=3,
    block_size=12,
    dropout=0.1,
    N=2,
    vocab_chunks=3,
    embedding_norm=True,
)
ROWS, STEPS, SEED, MAX_NORM = 24, 4, 7, 0.65
RATE = LearningRate(peak=1e-2, end=1e-3, warmup_steps=2, total_steps=6)
KEY = np.asarray(jax.random.key_data(jax.random.key(SEED)))


@pytest.fixture(autouse=True, scope="module")
def quick_compilation(request: pytest.FixtureRequest) -> Iterator[None]:
    # The table of all cases is compared as it is shipped, the few of every day as they compile in half the time.
    jax.config.update("jax_disable_most_optimizations", request.config.getoption("-m") != "slow")
    yield
    jax.config.update("jax_disable_most_optimizations", False)


class CountedRate:
    """The learning rate, and how often a step was traced with it."""

    def __init__(self) -> None:
        self.traces = 0

    def __call__(self, step: ArrayLike) -> jax.Array:
        self.traces += 1
        return RATE(step)


class Setup(NamedTuple):
    model: ShardedGPT
    programs: Programs
    devices: tuple[jax.Device, ...]
    layout: zero.Layout
    rate: CountedRate

    def start(self) -> TrainState:
        return self.programs.start(self.programs.init(np.stack([KEY] * len(self.devices))))

    def whole(self, tree: Any, layout: zero.Layout) -> dict[str, np.ndarray]:
        """Logical arrays by name, put together on the host; their padding is zero."""
        found = {}
        for leaf, x in zip(layout.leaves, layout.treedef.flatten_up_to(tree), strict=True):
            shards = list(np.asarray(x))
            padded = np.concatenate(shards, leaf.splits[0].dim) if leaf.splits else shards[0]
            found[leaf.name] = padded[tuple(slice(size) for size in leaf.shape)]
            assert np.count_nonzero(padded) == np.count_nonzero(found[leaf.name]), f"padding of {leaf.name} is not zero"
        return found


def setup(devices: int, stage: int, micro_batches: int = 1) -> Setup:
    return _setup(devices, stage, micro_batches, MAX_NORM, jnp.float32)


@cache
def _setup(
    devices: int,
    stage: int,
    micro_batches: int,
    max_norm: float | None,
    dtype: Any,
    gradient_dtype: Any = jnp.float32,
    remat: str = "full",
    blockwise_from: int | None = None,
    tx: optax.GradientTransformation | None = None,
    **options: Any,
) -> Setup:
    axis = zero.Axis("zero", (1, devices))
    model = ShardedGPT(CONFIG, axis, stage, dtype, dtype, jnp.float32, gradient_dtype, remat, blockwise_from)
    tx, rate, used = tx or adamw(0.1), CountedRate(), tuple(jax.devices()[:devices])
    programs = make_programs(
        model,
        tx,
        learning_rate=rate,
        seed=SEED,
        micro_batches=micro_batches,
        max_gradient_norm=max_norm,
        devices=used,
        **options,
    )
    return Setup(model, programs, used, state_layout(model, tx, "ema_decay" in options), rate)


def tokens(step: int, context: int = 12) -> np.ndarray:
    """Rows of the global batch; those of the first devices are padded, so that a mean of means would be wrong."""
    rows = np.random.default_rng(step).integers(0, CONFIG.vocab_size, (ROWS, context), np.int32)
    rows[np.arange(context) >= np.linspace(2, 2 * context, ROWS).astype(int)[:, None]] = -1
    return rows


def batch(setup: Setup, step: int, context: int = 12) -> Batch:
    devices = len(setup.devices)
    rows = tokens(step, context).reshape(devices, -1, context)
    first: Any = (np.arange(devices) * rows.shape[1]).astype(np.int32)
    return Batch(rows, first)


class Run(NamedTuple):
    metrics: dict[str, list[float]]
    params: dict[str, np.ndarray]
    state: TrainState | None


def advance(setup: Setup, state: TrainState, steps: range) -> tuple[TrainState, list[dict[str, float]]]:
    metrics = []
    for step in steps:
        state, now = setup.programs.step(state, batch(setup, step))
        metrics.append({name: x.item() for name, x in now.items()})  # one step in flight at most
    return state, metrics


def run(devices: int, stage: int, micro_batches: int = 1) -> Run:
    return _run(devices, stage, micro_batches)


@cache
def _run(devices: int, stage: int, micro_batches: int) -> Run:
    return run_on(setup(devices, stage, micro_batches))


def run_on(on: Setup, start: TrainState | None = None) -> Run:
    state, metrics = advance(on, start or on.start(), range(STEPS))
    whole = on.whole(state, on.layout)  # of the optimizer too: its padding has to stay zero
    params = {name.removeprefix("params/"): x for name, x in whole.items() if name.startswith("params/")}
    return Run({name: [m[name] for m in metrics] for name in metrics[0]}, params, state)


def named(tree: Any) -> dict[str, np.ndarray]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in flat}


@cache
def first_params() -> Any:
    init = jax.jit(partial(GPT(CONFIG).init, method="hidden"))
    variables: Any = init(jax.random.key(SEED), jnp.zeros((1, 2), int), None)
    return variables["params"]


@cache
def reference() -> Run:
    """One device, nothing of `zero` but the model: what DESIGN.md says a step is."""
    model = GPT(CONFIG)
    params = first_params()
    no_decay = {"bias", "scale"}
    mask = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in no_decay, params)
    tx = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(RATE, b2=0.95, weight_decay=0.1, mask=mask))

    @jax.jit
    def step(params: Any, state: Any, rows: jax.Array, number: jax.Array) -> Any:
        step_key = jax.random.fold_in(jax.random.key(SEED), number)
        keys = jnp.stack([jax.random.fold_in(step_key, row) for row in range(ROWS)])

        def loss(params: Any) -> jax.Array:
            targets = jnp.concatenate([rows[:, 1:], jnp.full((ROWS, 1), -1)], axis=1)
            losses: Any = model.apply({"params": params}, jnp.maximum(rows, 0), targets, keys)
            return jnp.sum(losses * (targets >= 0)) / jnp.sum(targets >= 0)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, optax.tree.norm(grads)

    state, losses, norms = tx.init(params), [], []
    for number in range(STEPS):
        params, state, loss, norm = step(params, state, tokens(number), jnp.int32(number))
        losses.append(loss.item())
        norms.append(norm.item())
    return Run({"loss": losses, "gradient_norm": norms}, named(params), None)


def assert_equal(got: Run, expected: Run) -> None:
    assert got.metrics == expected.metrics
    for name, x in expected.params.items():
        np.testing.assert_array_equal(got.params[name], x, err_msg=name)


def assert_close(got: Run, expected: Run, rtol: float) -> None:
    for name in ("loss", "gradient_norm"):
        np.testing.assert_allclose(got.metrics[name], expected.metrics[name], rtol=rtol, err_msg=name)
    start = named(first_params())
    for name, x in expected.params.items():
        # Adam blows the rounding of small gradients up, and the gradient of the keys' bias, which softmax does not see,
        # is nothing else: so the whole of a leaf is compared, beside how far it has moved.
        if name != "blocks/key/bias":
            assert np.linalg.norm(got.params[name] - x) < 100 * rtol * np.linalg.norm(x - start[name]), name


def test_the_reference_clips_some_steps_and_not_others() -> None:
    norms = np.asarray(reference().metrics["gradient_norm"])
    assert (norms > MAX_NORM).any() and (norms < MAX_NORM).any()


def test_stages_agree() -> None:
    runs = [run(8, stage) for stage in range(4)]
    assert_equal(runs[1], runs[0])
    assert_equal(runs[3], runs[2])
    # Stages 2 and 3 reduce the gradient of the tied table in two parts, of the lookup and of the loss.
    assert_close(runs[2], runs[1], rtol=1e-6)


SOME = [(8, 0, 1), (8, 3, 1), (3, 1, 2), (3, 2, 4), (1, 3, 3)]
PARTS = {1: (1, 24), 2: (1, 3), 3: (1, 4), 6: (2,), 8: (1, 3)}
ALL = [(n, stage, m) for n, micro_batches in PARTS.items() for stage in range(4) for m in micro_batches]


@pytest.mark.parametrize(
    ("devices", "stage", "micro_batches"),
    [*SOME, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in SOME)],
)
def test_many_devices_and_micro_batches_equal_one_device(devices: int, stage: int, micro_batches: int) -> None:
    assert_close(run(devices, stage, micro_batches), reference(), rtol=1e-5)


@pytest.mark.parametrize(("devices", "stage"), [(8, 0), (8, 3), (3, 1), (1, 3)])
def test_first_parameters_do_not_depend_on_the_number_of_devices(devices: int, stage: int) -> None:
    on = setup(devices, stage)
    start = on.whole(on.programs.init(np.stack([KEY] * devices)), on.model.layout)
    expected = named(first_params())
    assert start.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(start[name], x, err_msg=name)


def test_an_update_inside_the_backward_pass_is_the_same_update() -> None:
    plain, fused = (_setup(8, 3, 1, None, jnp.float32, skip_bad_steps=False, fused_update=f) for f in (False, True))
    expected = run_on(plain)
    assert_close(run_on(fused), expected, rtol=1e-6)
    assert expected.metrics["gradient_norm"] != reference().metrics["gradient_norm"]  # no step was clipped


def shapes_of(on: Setup) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), on.layout.shard_shapes())


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_that_is_not_elementwise_is_refused(stage: int) -> None:
    """On slices it would clip by the norm of a slice."""
    on = _setup(8, stage, 1, None, jnp.float32, tx=optax.clip_by_global_norm(1.0))
    with pytest.raises(zero.NotElementwiseError, match=r"use zero\.clip_by_global_norm"):
        on.programs.step.lower(shapes_of(on), batch(on, 0))


def test_an_optimizer_that_communicates_equals_one_device() -> None:
    """Its clipping, of what AdamW made of the gradients, and a mask by the size of whole leaves."""

    def large(params: Any) -> Any:
        return jax.tree.map(lambda p: p.size > 600, params)

    def make(clip: Any) -> optax.GradientTransformation:
        return optax.chain(optax.scale_by_adam(), optax.masked(optax.scale(0.5), large), clip(0.5))

    on, plain = (
        _setup(devices, stage, 1, None, jnp.float32, tx=make(zero.clip_by_global_norm))
        for devices, stage in ((8, 3), (1, 1))
    )
    expected = run_on(plain)
    assert_close(run_on(on), expected, rtol=1e-5)
    assert_close(expected, run_on(_setup(1, 0, 1, None, jnp.float32, tx=make(zero.clip_by_global_norm))), rtol=1e-6)


def by_rank_and_size() -> optax.GradientTransformation:
    """Element-wise, but the shapes of the leaves, all layers together, decide."""

    def is_wide(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim == 2 and p.size > 200, params)

    return optax.chain(optax.scale_by_adam(), optax.masked(optax.scale(0.1), is_wide))


def test_an_update_inside_the_backward_pass_sees_the_shapes_of_all_layers() -> None:
    options: dict[str, Any] = {"skip_bad_steps": False, "tx": by_rank_and_size()}
    plain, fused = (_setup(8, 3, 1, None, jnp.float32, fused_update=f, **options) for f in (False, True))
    kinds = {leaf.name: (len(leaf.shape), math.prod(leaf.shape)) for leaf in plain.model.layout.leaves}
    assert any(rank == 2 and size > 200 and name.startswith("blocks") for name, (rank, size) in kinds.items())
    assert_close(run_on(fused), run_on(plain), rtol=1e-6)


@pytest.mark.parametrize(
    "tx",
    [
        optax.stateless(lambda g, _: jax.tree.map(lambda x: x - jnp.flip(x, 0), g)),
        zero.clip_by_global_norm(1.0),
    ],
    ids=["other layers", "all leaves"],
)
def test_an_update_inside_the_backward_pass_that_needs_other_layers_is_refused(tx: Any) -> None:
    on = _setup(8, 3, 1, None, jnp.float32, skip_bad_steps=False, fused_update=True, tx=tx)
    with pytest.raises(zero.NotElementwiseError):
        on.programs.step.lower(shapes_of(on), batch(on, 0))


def test_a_gradient_whose_norm_is_infinite_is_skipped() -> None:
    """Of a finite loss, without a NaN anywhere: a square overflows."""
    on = setup(8, 3)
    state = on.start()
    norm = {**state.params["norm"], "scale": state.params["norm"]["scale"] * np.float32(1e25)}
    _, (metrics,) = advance(on, state._replace(params={**state.params, "norm": norm}), range(1))
    assert np.isfinite(metrics["loss"]) and metrics["gradient_norm"] == np.inf
    assert metrics["skipped_steps"] == 1


@pytest.mark.parametrize("place", [(0, 0), (ROWS - 1, 3)])
def test_a_token_past_the_vocabulary_is_not_scored_as_if_it_were_one(place: tuple[int, int]) -> None:
    """The step is skipped and counted."""
    on = setup(8, 3)
    rows = batch(on, 0)
    tokens = np.array(rows.tokens).reshape(ROWS, -1)
    tokens[place] = CONFIG.vocab_size
    _, metrics = on.programs.step(on.start(), rows._replace(tokens=tokens.reshape(rows.tokens.shape)))
    assert np.isnan(metrics["loss"]) and metrics["skipped_steps"] == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"stage": 2},
        {"micro_batches": 3},
        {"max_norm": 1.0},
        {"skip_bad_steps": True},
        {"skip_spikes": 6.0},
        {"remat": "dots"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_needs_the_whole_gradient_is_refused_beside_a_fused_update(changed: dict[str, Any]) -> None:
    options = {"stage": 3, "micro_batches": 1, "max_norm": None, "skip_bad_steps": False} | changed
    on = _setup(8, dtype=jnp.float32, fused_update=True, **options)
    with pytest.raises(ValueError, match="fused_update needs"):
        on.programs.step.lower(shapes_of(on), batch(on, 0))


@pytest.mark.parametrize(
    ("stage", "micro_batches"),
    [(1, 1), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(3, 1, marks=pytest.mark.slow), (3, 3)],
)
def test_gradients_held_in_bfloat16_are_rounded_once(stage: int, micro_batches: int) -> None:
    on = _setup(8, stage, micro_batches, MAX_NORM, jnp.float32, gradient_dtype=jnp.bfloat16)
    (got,), (expected,) = (advance(s, s.start(), range(1))[1] for s in (on, setup(8, stage, micro_batches)))
    assert got["loss"] == expected["loss"]
    assert got["gradient_norm"] != expected["gradient_norm"]
    # Errors of 2^-9 of single elements, of either sign, all but cancel in the norm of thousands.
    np.testing.assert_allclose(got["gradient_norm"], expected["gradient_norm"], rtol=2**-10)


@pytest.mark.parametrize("remat", ["dots", "none"])
def test_what_is_computed_again_does_not_matter(remat: str) -> None:
    assert_close(run_on(_setup(8, 3, 1, MAX_NORM, jnp.float32, remat=remat)), run(8, 3), rtol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_blockwise_attention_trains_as_dense_attention_does(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same dropout masks, in blocks of 5 positions of 12."""
    monkeypatch.setattr(gpt, "blockwise_attention", partial(blockwise_attention, block=5))
    assert_close(run_on(_setup(8, stage, 1, MAX_NORM, jnp.float32, blockwise_from=2)), run(8, 3), rtol=1e-6)


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


def test_a_step_leaves_nothing_of_the_state_before_it() -> None:
    on = setup(8, 3)
    state = on.start()
    before = jax.tree.leaves(state)
    state, _ = advance(on, state, range(1))
    assert all(x.is_deleted() for x in before)


def test_state_is_the_same_logical_arrays_everywhere() -> None:
    layouts = [setup(devices, stage).layout for devices in (1, 3, 8) for stage in range(4)]
    logical = {tuple((leaf.name, leaf.shape, leaf.dtype) for leaf in layout.leaves) for layout in layouts}
    assert len(logical) == 1
    names = [name for name, _, _ in logical.pop()]
    assert len(names) == len(set(names))


def test_a_step_is_traced_once_a_context_and_not_again_after_a_checkpoint() -> None:
    on = setup(8, 3)
    state, _ = advance(on, on.start(), range(2))
    assert on.rate.traces == 1
    arrays = zero.to_global(state, on.layout, on.model.axis, on.devices, donate=True)
    state = zero.from_global(arrays, on.layout, on.model.axis, on.devices, donate=True)
    state, _ = advance(on, state, range(2, 4))
    assert on.rate.traces == 1
    for step in range(2):
        state, metrics = on.programs.step(state, batch(on, step, context=6))
        assert np.isfinite(metrics["loss"].item())
    assert on.rate.traces == 2


def bits(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x).view(np.uint32) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(("stage", "devices"), [(3, 8), (0, 8), (1, 3)])
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_a_gradient_that_is_not_finite_is_skipped_on_all_devices_alike(stage: int, devices: int, poison: float) -> None:
    on = setup(devices, stage, 2 if devices == 3 else 1)
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
    assert np.asarray(state.step).tolist() == [3] * devices
    assert np.asarray(state.opt_state[0].count).tolist() == [1] * devices
    zero.check_replicated(
        (state.step, state.skipped, state.skipped_in_a_row, state.opt_state[0].count), "zero", on.devices
    )

    state, metrics = advance(on, with_kernel(state, healthy), range(3, 4))
    assert (metrics[0]["skipped_steps"], metrics[0]["skipped_in_a_row"]) == (2, 0)
    # As if the two steps had not been, but for the place in the schedule.
    other, _ = advance(on, on.start(), range(1))
    other, _ = advance(on, other._replace(step=other.step + 2), range(3, 4))
    for got, expected in zip(bits((state.params, state.opt_state)), bits((other.params, other.opt_state)), strict=True):
        np.testing.assert_array_equal(got, expected)


def with_running(state: TrainState, running: Any) -> TrainState:
    copies = np.stack([np.asarray(running, np.float32)] * len(state.running))
    return state._replace(running=jax.device_put(copies, state.running.sharding))


def spiky(devices: int, stage: int, limit: tuple[float, float], deviations: float = 6.0) -> tuple[Setup, TrainState]:
    """A run that skips spikes, and its start, as if loss and norm had often been so far below these limits."""
    on = _setup(devices, stage, 1, MAX_NORM, jnp.float32, skip_spikes=deviations)
    mean, deviation = np.asarray(limit) - 1e-3, 1e-3 / deviations
    return on, with_running(on.start(), np.stack([mean, np.full(2, deviation**2), np.ones(2)], axis=1))


def test_running_statistics_are_weighted_means_of_what_was_seen() -> None:
    values = np.random.default_rng(0).normal([100, 2], [0.01, 1], (200, 2))  # a variance of 1e-8 of the square
    running, add = jnp.zeros((2, 3)), jax.jit(add_to_running)
    for n, value in enumerate(values, 1):
        running = add(running, jnp.asarray(value, jnp.float32))
        if n in (1, 2, 63, 64, 200):
            weights = (127 / 128) ** np.arange(n)[::-1]
            mean = np.average(values[:n], axis=0, weights=weights)
            variance = np.average((values[:n] - mean) ** 2, axis=0, weights=weights)
            np.testing.assert_allclose(running[:, 0], mean, rtol=1e-5)
            np.testing.assert_allclose(running[:, 1], variance, rtol=5e-3, atol=1e-9)
            for kind in range(2):
                for deviations, is_above in ((5.9, True), (6.1, False)):
                    value = mean.copy()
                    value[kind] += 6 * np.sqrt(variance[kind])
                    judged = is_spike(running, jnp.asarray(value, jnp.float32), deviations)
                    assert judged.item() == (is_above and n >= 64), (n, kind)
    assert not is_spike(running, jnp.asarray([np.nan, 2], jnp.float32), 6.0)
    assert not is_spike(running, jnp.asarray([0.0, -1e9], jnp.float32), 6.0)


@pytest.mark.parametrize("kind", ["loss", "gradient_norm"])
@pytest.mark.parametrize(
    ("stage", "devices"),
    [(3, 8), pytest.param(0, 8, marks=pytest.mark.slow), (1, 3), pytest.param(2, 1, marks=pytest.mark.slow)],
)
def test_a_spike_is_skipped_and_leaves_everything_as_it_was(stage: int, devices: int, kind: str) -> None:
    usual = reference().metrics[kind][0]
    limits = {"loss": 1e3, "gradient_norm": 1e3, kind: usual * 0.99}
    on, state = spiky(devices, stage, (limits["loss"], limits["gradient_norm"]))
    before = bits((state.params, state.opt_state, state.running))
    state, metrics = advance(on, state, range(2))
    for got, expected in zip(bits((state.params, state.opt_state, state.running)), before, strict=True):
        np.testing.assert_array_equal(got, expected)
    for name in ("skipped_spikes", "skipped_steps", "skipped_in_a_row"):
        assert [m[name] for m in metrics] == [1, 2]
    assert metrics[0][kind] == pytest.approx(usual, rel=1e-5)
    assert [m["learning_rate"] for m in metrics] == [np.float32(RATE(0)), np.float32(RATE(1))]
    assert np.asarray(state.step).tolist() == [2] * devices

    never = [[1e3, 1, 1], [1e3, 1, 1]]
    state, metrics = advance(on, with_running(state, never), range(2, 3))
    assert [metrics[0][name] for name in ("skipped_spikes", "skipped_steps", "skipped_in_a_row")] == [2, 2, 0]
    zero.check_replicated((state.step, state.skipped, state.skipped_spikes, state.running), "zero", on.devices)
    # As if the two steps had not been, but for the place in the schedule.
    start = with_running(on.start(), never)
    other, _ = advance(on, start._replace(step=start.step + 2), range(2, 3))
    for got, expected in zip(bits((state.params, state.opt_state)), bits((other.params, other.opt_state)), strict=True):
        np.testing.assert_array_equal(got, expected)


@cache
def spiky_run(devices: int, stage: int) -> Run:
    losses = reference().metrics["loss"]
    low, high = sorted(losses)[1:3]
    on, state = spiky(devices, stage, ((low + high) / 2, 1e3))
    return run_on(on, state)


@pytest.mark.slow
def test_stages_and_devices_agree_on_what_is_a_spike() -> None:
    runs = [spiky_run(8, stage) for stage in range(4)]
    assert 0 < runs[0].metrics["skipped_spikes"][-1] < STEPS
    assert_equal(runs[1], runs[0])
    assert_equal(runs[3], runs[2])
    for run in (*runs[1:], spiky_run(3, 3), spiky_run(1, 3)):
        for name in ("skipped_spikes", "skipped_steps", "skipped_in_a_row"):
            assert run.metrics[name] == runs[0].metrics[name]
        np.testing.assert_allclose(run.metrics["loss"], runs[0].metrics["loss"], rtol=1e-5)
        assert run.state is not None and runs[0].state is not None
        np.testing.assert_allclose(run.state.running[0], runs[0].state.running[0], rtol=1e-3)


def test_a_limit_that_nothing_reaches_changes_nothing() -> None:
    got = run_on(*spiky(8, 3, (1e3, 1e3)))
    assert got.metrics["skipped_steps"] == [0] * STEPS
    assert_close(got, run(8, 3), rtol=1e-6)  # of two programs: not bit for bit


def test_shuffled_tokens_are_skipped_once_enough_updates_were_made_and_after_a_checkpoint() -> None:
    on = _setup(8, 3, 1, MAX_NORM, jnp.float32, skip_spikes=6.0)
    text = batch(on, 0)._replace(tokens=np.broadcast_to(np.arange(12, dtype=np.int32), (8, 3, 12)))
    noise = text._replace(tokens=np.random.default_rng(0).permuted(text.tokens, axis=-1))
    # The model has learnt the text before the statistics begin; what is left is the noise of dropout.
    state = on.start()
    for _ in range(100):
        state, _ = on.programs.step(state, text)
    state = with_running(state, np.zeros((2, 3)))
    spikes = []
    for updates in (63, 1):
        for _ in range(updates):
            state, metrics = on.programs.step(state, text)
            assert metrics["skipped_steps"].item() == 0
        arrays = zero.to_global(state, on.layout, on.model.axis, on.devices)
        judged = zero.from_global(arrays, on.layout, on.model.axis, on.devices)
        before = bits(judged.params)
        judged, metrics = on.programs.step(judged, noise)
        spikes.append(metrics["skipped_spikes"].item())
        is_same = all((got == x).all() for got, x in zip(bits(judged.params), before, strict=True))
        assert is_same == bool(spikes[-1])
    assert spikes == [0, 1]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("skip_bad_steps", [True, False])
def test_what_is_not_finite_is_no_spike_and_never_enters_the_statistics(poison: float, skip_bad_steps: bool) -> None:
    on = _setup(8, 3, 1, MAX_NORM, jnp.float32, skip_spikes=6.0, skip_bad_steps=skip_bad_steps)
    state = with_running(on.start(), [[5, 1, 1], [1, 1, 1]])
    before = bits(state.running)
    sick = jax.tree.map(lambda x: x * poison, state.params)
    state, metrics = on.programs.step(state._replace(params=sick), batch(on, 0))
    assert not np.isfinite(metrics["gradient_norm"].item())
    assert (metrics["skipped_spikes"].item(), metrics["skipped_steps"].item()) == (0, int(skip_bad_steps))
    np.testing.assert_array_equal(bits(state.running), before)


@pytest.mark.parametrize("fused", [False, True])
def test_statistics_are_kept_where_nothing_is_skipped(fused: bool) -> None:
    on = _setup(8, 3, 1, None, jnp.float32, skip_bad_steps=False, fused_update=fused)
    state, metrics = advance(on, on.start(), range(2))
    running = jnp.zeros((2, 3))
    for m in metrics:
        running = add_to_running(running, jnp.asarray([m["loss"], m["gradient_norm"]]))
    np.testing.assert_allclose(state.running, np.stack([running] * 8), rtol=1e-6, atol=1e-7)


def test_a_batch_without_any_token_changes_nothing_but_moments() -> None:
    on = setup(8, 3)
    nothing = batch(on, 0)._replace(tokens=np.full((8, 3, 12), -1, np.int32))
    state, metrics = on.programs.step(on.start(), nothing)
    assert (metrics["loss"].item(), metrics["gradient_norm"].item(), metrics["skipped_steps"].item()) == (0, 0, 0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_decay_is_for_matrices_and_the_vocabulary() -> None:
    model = ShardedGPT(dataclasses.replace(CONFIG, alibi_attn=False), zero.Axis("zero", (1, 8)), 3)
    names = [leaf.name for leaf in model.layout.leaves]
    chosen = jax.tree.leaves(decayed(model.layout.shapes()))
    kernels = ("query", "key", "value", "attention_out", "mlp_in", "mlp_out")
    assert {name for name, is_decayed in zip(names, chosen, strict=True) if is_decayed} == {
        "vocabulary/table",
        *(f"blocks/{kernel}/kernel" for kernel in kernels),
    }


def test_bfloat16_on_the_wire_learns_like_float32_and_keeps_float32_master_weights() -> None:
    on = _setup(8, 3, 1, None, jnp.bfloat16)
    state, metrics = advance(on, on.start(), range(STEPS))
    assert {x.dtype for x in jax.tree.leaves((state.params, state.opt_state[0].mu, state.opt_state[0].nu))} == {
        jnp.dtype("float32")
    }
    losses = np.asarray([m["loss"] for m in metrics])
    expected = np.asarray(reference().metrics["loss"])
    assert 0 < abs(losses[0] - expected[0]) < 0.01 * expected[0]
    np.testing.assert_allclose(losses, expected, rtol=0.03)  # without clipping, so not more than near
