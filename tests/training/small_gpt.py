"""Training steps of a small GPT on shards, and one unsharded device to compare them with.

- `setup(devices, stage, ...)`: a `Setup`, the compiled programs of a model, with `first_weights()`, `start()` and
  `whole(tree, layout)`; compiled once per process. `CONFIG` is the default model, others are `PLAIN`, `EXPERTS`
  and `VQ`; `ROWS`, `STEPS`, `SEED`, `MAX_NORM`, `RATE` are the job.
- `tokens(step)`: rows of a global batch, some of them padded; `batch(setup, step)`: the same, split over devices.
- `run(devices, stage)`, `run_on(setup)`: a `Run`, the metrics, parameters and state after `STEPS` steps.
  `advance(setup, state, steps)`: some more steps.
- `reference(...)`: the `Run` of one device, which uses nothing of `zero` but the model; `first_params`: its start.
- `assert_equal`, `assert_close`: compare two `Run`s; `assert_first_weights`: new weights with those of one device.
- `named(tree)`: leaves by name; `shapes_of(setup)`: shapes of the state on 8 devices; `bits(tree)`: leaves as integers.
"""

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

import zero
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.gpt import GPT
from zero.models.products import PRODUCTS
from zero.training.batch import UNDIVIDED, Batch, Separators
from zero.training.host_rows import split_rows
from zero.training.optimizers.optimizer import adamw
from zero.training.parts import StepOptions, TrainState
from zero.training.programs import Programs, make_programs
from zero.training.schedules import LearningRate
from zero.training.sharded_gpt import ShardedGPT
from zero.training.step import state_layout

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
PLAIN = dataclasses.replace(CONFIG, dropout=0.0)  # dropout is a quarter of the time of a compilation
EXPERTS = dataclasses.replace(
    CONFIG, mlp_bias=False, experts=8, experts_per_token=2, normalize_router=True, expert_capacity=1.0
)
VQ = GPTConfig(
    embedding_dim=42,
    vocab_size=101,
    block_size=12,
    dropout=0.1,
    N=2,
    vocab_chunks=3,
    codes=6,
    vq_block=3,
    key_width=10,
    **FAMILIES["vq"],
)
ROWS, STEPS, SEED, MAX_NORM = 24, 4, 7, 0.65
RATE = LearningRate(peak=1e-2, end=1e-3, warmup_steps=2, total_steps=6)
Data = Callable[[int], np.ndarray]  # from a step to the rows of its global batch
KEY = np.asarray(jax.random.key_data(jax.random.key(SEED)))


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

    def new_weights(self) -> Any:
        return self.programs.init(np.stack([KEY] * len(self.devices)))

    def first_weights(self) -> Any:
        """Those of `programs.init`, which takes a while to compile; `assert_first_weights` compares them."""
        model = self.model

        def place(tree: Any, layout: zero.Layout) -> Any:
            held = layout.map(lambda leaf, x: np.asarray(x, leaf.dtype), tree)
            return zero.to_devices(held, layout, model.axis, self.devices)

        collections = first_collections(model.config)
        own = {name: place(collections[name], layout) for name, layout in model.collection_layouts.items()}
        return {**place(first_params(model.config), model.layout), **own}

    def start(self) -> TrainState:
        return self.programs.start(self.first_weights())

    def weights(self, state: TrainState) -> Any:
        return self.model.weights(state.params, state.averages)

    def whole(self, tree: Any, layout: zero.Layout) -> dict[str, np.ndarray]:
        """Logical arrays by name, put together on the host; their padding is zero."""
        found = {}
        for leaf, x in zip(layout.leaves, layout.treedef.flatten_up_to(tree), strict=True):
            shards = np.asarray(x)[list(self.model.axis.devices)[: self.model.axis.shards]]  # of the first copy
            padded = np.concatenate(shards, leaf.splits[0].dim) if leaf.splits else shards[0]
            found[leaf.name] = padded[tuple(slice(size) for size in leaf.shape)]
            assert np.count_nonzero(padded) == np.count_nonzero(found[leaf.name]), f"padding of {leaf.name} is not zero"
        return found


def setup(
    devices: int,
    stage: int,
    micro_batches: int = 1,
    max_norm: float | None = MAX_NORM,
    dtype: Any = jnp.float32,
    **options: Any,
) -> Setup:
    """A step that is compiled once per process, whichever test is the first to need it, and however it names it."""
    chosen = {name: x for name, x in sorted(options.items()) if name not in DEFAULTS or x != DEFAULTS[name]}
    return _setup(devices, stage, micro_batches, max_norm, dtype, **chosen)


@cache
def _setup(
    devices: int,
    stage: int,
    micro_batches: int,
    max_norm: float | None,
    dtype: Any,
    gradient_dtype: Any = jnp.float32,
    remat: str = "full",
    offload: tuple[str, ...] = (),
    chunks_at_once: int = 1,
    blockwise_from: int | None = None,
    tx: optax.GradientTransformation | None = None,
    master_dtype: Any = jnp.float32,
    config: GPTConfig = CONFIG,
    axis: zero.Axis | None = None,
    separators: Separators = UNDIVIDED,
    gather_dtype: Any = None,
    wire_dtype: Any = None,
    last_target: bool = False,
    product_dtype: str = "auto",
    gathers_rounded: bool = False,
    **options: Any,
) -> Setup:
    axis = axis or zero.Axis("zero", (1, devices))
    model = ShardedGPT(
        config,
        axis,
        stage,
        dtype,
        wire_dtype=wire_dtype or dtype,
        gradient_dtype=gradient_dtype,
        remat=remat,
        offload=offload,
        chunks_at_once=chunks_at_once,
        blockwise_from=blockwise_from,
        master_dtype=master_dtype,
        separators=separators,
        gather_dtype=gather_dtype,
        last_target=last_target,
        product_dtype=product_dtype,
        gathers_rounded=gathers_rounded,
    )
    tx, rate, used = tx or adamw(0.1, axes=model.axes), CountedRate(), tuple(jax.devices()[:devices])
    chosen = StepOptions(rate, SEED, micro_batches, max_norm, **options)
    layout = state_layout(model, tx, chosen)
    return Setup(model, make_programs(model, tx, chosen, used), used, layout, rate)


# Of the options: one that is given as it is by default makes no other program.
DEFAULTS: dict[str, Any] = {name: one.default for name, one in inspect.signature(_setup).parameters.items()}
DEFAULTS |= {field.name: field.default for field in dataclasses.fields(StepOptions)}


def tokens(step: int, context: int = 12) -> np.ndarray:
    """Rows of the global batch; those of the first devices are padded, so that a mean of means would be wrong."""
    rows = np.random.default_rng(step).integers(0, CONFIG.vocab_size, (ROWS, context), np.int32)
    rows[np.arange(context) >= np.linspace(2, 2 * context, ROWS).astype(int)[:, None]] = -1
    return rows


def batch(setup: Setup, step: int, data: Data = tokens) -> Batch:
    rows = split_rows(data(step), setup.model.axis)
    first = np.asarray(setup.model.axis.row_group_of_device()) * rows.shape[1]
    return Batch(rows, first.astype(np.int32))


class Run(NamedTuple):
    metrics: dict[str, list[float]]
    params: dict[str, np.ndarray]
    state: TrainState | None


def advance(
    setup: Setup, state: TrainState, steps: range, data: Data = tokens
) -> tuple[TrainState, list[dict[str, float]]]:
    metrics = []
    for step in steps:
        state, now = setup.programs.step(state, batch(setup, step, data))
        metrics.append({name: x.item() for name, x in now.items()})  # one step in flight at most
    return state, metrics


def run(devices: int, stage: int, micro_batches: int = 1) -> Run:
    return _run(devices, stage, micro_batches)


@cache
def _run(devices: int, stage: int, micro_batches: int) -> Run:
    return run_on(setup(devices, stage, micro_batches))


def run_on(on: Setup, start: TrainState | None = None, data: Data = tokens) -> Run:
    state, metrics = advance(on, start or on.start(), range(STEPS), data)
    whole = on.whole(state, on.layout)  # of the optimizer too: its padding has to stay zero
    params = {name.removeprefix("params/"): x for name, x in whole.items() if name.startswith("params/")}
    return Run({name: [m[name] for m in metrics] for name in metrics[0]}, params, state)


def named(tree: Any) -> dict[str, np.ndarray]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in flat}


@cache
def first_params(config: GPTConfig = CONFIG) -> Any:
    init = jax.jit(partial(GPT(config).init, method="hidden"))
    variables: Any = init(jax.random.key(SEED), jnp.zeros((1, 2), int), None)
    return variables["params"]


@cache
def first_collections(config: GPTConfig) -> dict[str, Any]:
    """The variables of a new model beside its parameters."""
    model = ShardedGPT(config, zero.Axis("zero", (1, 1)), 3, jnp.float32)
    return jax.jit(model.new_collections)(jax.random.key(SEED)) if model.collections else {}


CLIP, UNCLIPPED = optax.clip_by_global_norm(MAX_NORM), optax.identity()  # one object a program


@cache
def reference(
    config: GPTConfig = CONFIG,
    clip: optax.GradientTransformation = CLIP,
    optimizer: optax.GradientTransformation | None = None,
    data: Data = tokens,
    product_dtype: str = "auto",
) -> Run:
    """One device, nothing of `zero` but the model: what DESIGN.md says a step is. By default the optimizer is AdamW."""
    model = GPT(config, product=PRODUCTS[product_dtype])
    params = first_params(config)
    no_decay = {"bias", "scale", "logits"}
    mask = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in no_decay, params)
    tx = optax.chain(clip, optimizer or optax.adamw(RATE, b2=0.95, weight_decay=0.1, mask=mask))

    @jax.jit
    def step(params: Any, state: Any, rows: jax.Array, number: jax.Array) -> Any:
        step_key = jax.random.fold_in(jax.random.key(SEED), number)
        keys = jax.vmap(partial(jax.random.fold_in, step_key))(jnp.arange(len(rows)))

        def loss(params: Any) -> jax.Array:
            targets = jnp.concatenate([rows[:, 1:], jnp.full((len(rows), 1), -1)], axis=1)
            losses: Any = model.apply({"params": params}, jnp.where(rows < 0, ~rows, rows), targets, keys)
            return jnp.sum(losses * (targets >= 0)) / jnp.sum(targets >= 0)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, optax.tree.norm(grads)

    state, losses, norms = tx.init(params), [], []
    for number in range(STEPS):
        params, state, loss, norm = step(params, state, data(number), jnp.int32(number))
        losses.append(loss.item())
        norms.append(norm.item())
    return Run({"loss": losses, "gradient_norm": norms}, named(params), None)


def assert_equal(got: Run, expected: Run) -> None:
    assert got.metrics == expected.metrics
    for name, x in expected.params.items():
        np.testing.assert_array_equal(got.params[name], x, err_msg=name)


def assert_close(got: Run, expected: Run, rtol: float, config: GPTConfig = CONFIG) -> None:
    for name in ("loss", "gradient_norm"):
        np.testing.assert_allclose(got.metrics[name], expected.metrics[name], rtol=rtol, err_msg=name)
    start = named(first_params(config))
    for name, x in expected.params.items():
        # Adam blows the rounding of small gradients up, and the gradient of the keys' bias, which softmax does not see,
        # is nothing else: so the whole of a leaf is compared, beside how far it has moved.
        if not name.endswith("/key/bias"):
            assert np.linalg.norm(got.params[name] - x) < 100 * rtol * np.linalg.norm(x - start[name]), name


def assert_first_weights(on: Setup) -> None:
    """New weights are those of the model on one device, rounded to the dtype in which they are held."""
    params, collections = on.model.split(on.new_weights())
    got, expected = on.whole(params, on.model.layout), named(first_params(on.model.config))
    for name, layout in on.model.collection_layouts.items():
        got |= on.whole(collections[name], layout)
        expected |= named(first_collections(on.model.config)[name])
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(got[name], x.astype(got[name].dtype), err_msg=name)


def shapes_of(on: Setup) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), on.layout.shard_shapes())


def bits(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x).view(np.uint32) for x in jax.tree.leaves(tree)]
