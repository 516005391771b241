"""LoRA on shards: the losses of a plain loop at any stage and N; what is frozen, and what is merged."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero
from tests.training.small_gpt import CLIP, CONFIG, KEY, MAX_NORM, RATE, ROWS, batch, first_params, named, tokens
from zero.models.adapters import LORA_B, MAGNITUDE, Adapters, combine, merged
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.gpt import GPT, parameter_axes
from zero.models.stack import KINDS
from zero.partition.pmapped import pmap
from zero.run.frozen_base import fit_to_base
from zero.training.batch import Batch
from zero.training.block_codes import CODECS, dequantize, quantize
from zero.training.optimizers.optimizer import adamw
from zero.training.parts import StepOptions
from zero.training.programs import Programs, make_programs
from zero.training.sharded_gpt import ShardedGPT
from zero.training.step import state_layout
from zero.training.tuning import Tuning, merge_shards, quantize_shards

STEPS = 12
LLAMA: dict[str, Any] = {**FAMILIES["llama"], "kv_heads": 2, "mlp_dim": 48}
SIZE = GPTConfig(embedding_dim=32, vocab_size=101, num_head=4, block_size=12, dropout=0.0, N=2, vocab_chunks=2, **LLAMA)
ADAPTERS = Adapters(rank=3, alpha=6.0)
DORA = Adapters(rank=3, alpha=6.0, has_magnitudes=True)


class Tuned(NamedTuple):
    """The programs of a model with adapters, and its frozen parameters on the devices."""

    model: ShardedGPT
    programs: Programs
    devices: tuple[jax.Device, ...]
    frozen: Any


@cache
def tuned(
    devices: int, stage: int, axis: zero.Axis | None = None, adapters: Adapters = ADAPTERS, **options: Any
) -> Tuned:
    own = {name: options.pop(name) for name in ("micro_batches",) if name in options}
    dtype = options.pop("base_dtype", "float32")
    axis = axis or zero.Axis("zero", (1, devices))
    model = ShardedGPT(SIZE, axis, stage, jnp.float32, tuning=Tuning(adapters, dtype), **options)
    used = tuple(jax.devices()[:devices])
    base = model.base
    whole = base.layout.map(lambda leaf, x: np.asarray(x, leaf.dtype), first_params(SIZE))
    frozen = zero.to_devices(whole, base.layout, base.axis, used)
    if dtype in CODECS:
        layouts: Any = {"layout": base.layout, "quantized": model.frozen_layout, "axis": axis}
        frozen = pmap(partial(quantize_shards, **layouts, codec=dtype), "zero", devices=used)(frozen)
    chosen = StepOptions(RATE, max_gradient_norm=MAX_NORM, **own)
    return Tuned(model, make_programs(model, adamw(0.1, axes=model.axes), chosen, used), used, frozen)


@cache
def first_adapters(adapters: Adapters = ADAPTERS) -> Any:
    """Adapters in the middle of a training, whose B is not zero."""
    shapes = adapters.shapes(first_params(SIZE), parameter_axes(SIZE))
    rng = np.random.default_rng(0)

    def one(path: Any, leaf: Any) -> np.ndarray:
        x = rng.normal(0, 0.1, leaf.shape).astype(np.float32)
        return x + np.float32(path[-1].key == MAGNITUDE)

    return jax.tree_util.tree_map_with_path(one, shapes)


def losses_of(on: Tuned, steps: int = STEPS) -> tuple[list[float], Any]:
    model = on.model
    assert model.tuning is not None
    first = first_adapters(model.tuning.adapters)
    state = on.programs.start(zero.to_devices(first, model.layout, model.axis, on.devices))
    losses = []
    for step in range(steps):
        state, metrics = on.programs.step(state, batch(on, step % 2), on.frozen)  # type: ignore[arg-type]  # as of a Setup
        losses.append(metrics["loss"].item())
    return losses, state


@cache
def coded_params(form: str) -> Any:
    """The weights of which the codes of a base in bfloat16 are, with its vocabulary; norms stay float32."""
    rounded = jax.tree_util.tree_map_with_path(
        lambda path, x: x if path[-1].key == "scale" else x.astype(jnp.bfloat16).astype(jnp.float32), first_params(SIZE)
    )

    @jax.jit
    def coded(blocks: Any) -> Any:
        return jax.tree.map(
            lambda x, code: dequantize(x.shape, code, form, jnp.float32), blocks, quantize(blocks, form)
        )

    return {**rounded, "blocks": coded(rounded["blocks"])}


@cache
def plain_losses(form: str = "float32", adapters: Adapters = ADAPTERS) -> tuple[list[float], dict[str, np.ndarray]]:
    """One device, and nothing of zero but the model without adapters: its weights are W + scale A B.

    With magnitudes (DoRA, arXiv 2402.09353, equation 11) times m over the norm of their columns, a constant.
    """
    model, base = GPT(SIZE), first_params(SIZE) if form == "float32" else coded_params(form)
    mask = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != MAGNITUDE, first_adapters(adapters))
    tx = optax.chain(CLIP, optax.adamw(RATE, b2=0.95, weight_decay=0.1, mask=mask))

    def weights(own: Any) -> Any:
        blocks = dict(base["blocks"])
        for name, ab in own["blocks"].items():
            low = jnp.einsum("lir,lro->lio", ab["lora_a"], ab["lora_b"])
            kernel = blocks[name]["kernel"] + adapters.alpha / adapters.rank * low
            if adapters.has_magnitudes:
                norms = jax.lax.stop_gradient(jnp.sqrt((kernel**2).sum(1, keepdims=True)))
                kernel = ab["magnitude"][:, None] / norms * kernel
            blocks[name] = {**blocks[name], "kernel": kernel}
        return {**base, "blocks": blocks}

    @jax.jit
    def step(own: Any, state: Any, rows: jax.Array) -> Any:
        def loss(own: Any) -> jax.Array:
            targets = jnp.concatenate([rows[:, 1:], jnp.full((len(rows), 1), -1)], axis=1)
            losses: Any = model.apply({"params": weights(own)}, jnp.where(rows < 0, ~rows, rows), targets)
            return jnp.sum(losses * (targets >= 0)) / jnp.sum(targets >= 0)

        value, grads = jax.value_and_grad(loss)(own)
        updates, state = tx.update(grads, state, own)
        return optax.apply_updates(own, updates), state, value

    own = first_adapters(adapters)
    state, losses = tx.init(own), []
    for number in range(STEPS):
        own, state, loss = step(own, state, tokens(number % 2))
        losses.append(loss.item())
    return losses, named(own)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("devices", "stage"),
    [  # test_losses_equal_in_tensor_groups is a short form
        pytest.param(8, 3, marks=pytest.mark.wide),
        *(pytest.param(*case, marks=SLOW) for case in ((1, 3), (3, 1), (3, 3), (8, 0), (8, 1), (8, 2))),
    ],
)
def test_losses_equal_plain_loop(devices: int, stage: int) -> None:
    """Losses over 12 steps are those of an unsharded loop that differentiates by A and B."""
    got, _ = losses_of(tuned(devices, stage))
    np.testing.assert_allclose(got, plain_losses()[0], rtol=1e-4)
    assert got[-1] < got[0] - 0.03


@pytest.mark.slow  # the test below has them in groups
@pytest.mark.parametrize(("devices", "stage"), [(8, 0), (1, 3), (3, 3), (8, 3)])
def test_magnitudes_equal_plain_loop(devices: int, stage: int) -> None:
    """With magnitudes too, on shards of any number of devices."""
    got, _ = losses_of(tuned(devices, stage, adapters=DORA))
    np.testing.assert_allclose(got, plain_losses(adapters=DORA)[0], rtol=1e-4)
    assert abs(got[0] - plain_losses()[0][0]) > 1e-3


@pytest.mark.parametrize(
    "adapters", [pytest.param(ADAPTERS, marks=SLOW), pytest.param(DORA, marks=pytest.mark.wide)], ids=["lora", "dora"]
)
def test_losses_equal_in_tensor_groups(adapters: Adapters) -> None:
    """Groups that cut the products cut their adapters, and micro-batches add up; magnitudes are on top of both."""
    axis = zero.Axis.with_tensor_groups("zero", 8, 2, 1)
    got, _ = losses_of(tuned(8, 3, axis, adapters, micro_batches=3))
    np.testing.assert_allclose(got, plain_losses(adapters=adapters)[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("form", "devices", "stage"),
    [
        ("nf4", 3, 3),  # test_block_codes.py has the codes of int8
        *(pytest.param(form, 8, stage, marks=SLOW) for form, stage in (("int8", 3), ("nf4", 1), ("nf4", 3))),
    ],
)
def test_coded_base_equals_its_weights(form: str, devices: int, stage: int) -> None:
    """With a base in codes, losses are those of a plain loop on the weights that the codes stand for."""
    on = tuned(devices, stage, base_dtype=form)
    got, _ = losses_of(on)
    np.testing.assert_allclose(got, plain_losses(form)[0], rtol=1e-4)
    kernel = first_params(SIZE)["blocks"]["mlp_in"]["kernel"]
    assert np.abs(coded_params(form)["blocks"]["mlp_in"]["kernel"] - kernel).max() > 1e-3
    bits = 8 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(on.frozen["blocks"]["mlp_in"]["kernel"]))
    assert bits / (SIZE.N * 32 * 48) < {"int8": 9.4, "nf4": 8}[form]  # matrices of 32 x 48 hardly fill a block


@SLOW  # adapters are cut there as other parameters are, of which test_step_context_groups.py tells
def test_losses_equal_in_context_groups() -> None:
    """Groups that share sequences train the same adapters."""
    got, _ = losses_of(tuned(8, 3, zero.Axis("zero", (2, 4), context=2)))
    np.testing.assert_allclose(got, plain_losses()[0], rtol=1e-4)


def test_state_holds_adapters_alone() -> None:
    """Neither the state nor its layout has a leaf of the base, and the moments are those of adapters."""
    on = tuned(8, 3)
    layout = state_layout(on.model, adamw(0.1, axes=on.model.axes))
    params = [leaf.name for leaf in layout.leaves if leaf.name.startswith("params/")]
    assert len(params) == 2 * 7
    assert all(name.endswith(("lora_a", "lora_b")) for name in params)
    elements = sum(np.prod(leaf.shape) for leaf in on.model.layout.leaves)
    held = sum(np.prod(leaf.shape) for leaf in layout.leaves)
    assert held < 3 * elements + 20  # with two moments, counters and the statistics of the guard


@pytest.mark.wide
def test_new_adapters_change_nothing() -> None:
    """With new adapters, whose B is zero, the model scores as its base does; A is the same for any N."""
    found = []
    for devices in (1, 8):
        on = tuned(devices, 3)
        new = on.programs.init(np.stack([KEY] * devices))
        rows = tokens(0).reshape(devices, -1, 12)
        sums = on.programs.evaluate(combine(on.frozen, new), rows)
        tx = adamw(0.1, axes=on.model.base.axes)
        base = make_programs(on.model.base, tx, StepOptions(RATE), on.devices).evaluate(on.frozen, rows)
        assert sums[0].item() == base[0].item()
        whole = zero.to_host(new, on.model.layout, on.model.axis) if devices == 8 else new
        found.append(named(jax.tree.map(lambda x: np.asarray(x).reshape(-1), whole)))
    for name, x in found[0].items():
        np.testing.assert_array_equal(found[1][name], x)
        assert name.endswith(LORA_B) == (not x.any())


@pytest.mark.parametrize("form", [pytest.param("float32", marks=SLOW), "nf4"])
def test_first_magnitudes_change_nothing(form: str) -> None:
    """New magnitudes are the norms of the columns of the base as it is held."""
    on = tuned(8, 3, adapters=DORA, base_dtype=form)
    model = on.model
    fitted = fit_to_base(on.programs.init(np.stack([KEY] * 8)), on.frozen, model)
    whole = coded_params(form)["blocks"] if form in CODECS else first_params(SIZE)["blocks"]
    for name, x in zero.to_host(fitted, model.layout, model.axis)["blocks"].items():
        np.testing.assert_allclose(x["magnitude"], np.linalg.norm(whole[name]["kernel"], axis=1), rtol=1e-6)


@pytest.mark.wide  # tests/run/test_train_lora.py evaluates merged weights
@pytest.mark.parametrize("adapters", [pytest.param(ADAPTERS, marks=SLOW), DORA], ids=["lora", "dora"])
def test_merged_weights_score_as_adapters(adapters: Adapters) -> None:
    """A base with the adapters merged scores as the model with adapters does."""
    on = tuned(8, 3, adapters=adapters)
    model, base = on.model, on.model.base
    own = zero.to_devices(first_adapters(adapters), model.layout, model.axis, on.devices)
    rows = tokens(0).reshape(8, -1, 12)
    adapted = on.programs.evaluate(combine(on.frozen, own), rows)[0].item()
    merge = pmap(
        lambda frozen, own: merge_shards(
            frozen, own, layout=base.layout, low=model.layout, axis=model.axis, tuning=Tuning(adapters)
        ),
        "zero",
        devices=on.devices,
    )
    plain = make_programs(base, adamw(0.1, axes=base.axes), StepOptions(RATE), on.devices)
    together = merge(on.frozen, own)
    np.testing.assert_allclose(plain.evaluate(together, rows)[0].item(), adapted, rtol=1e-5)
    whole = named(merged(first_params(SIZE), first_adapters(adapters), adapters))
    for name, x in named(zero.to_host(together, base.layout, base.axis)).items():
        np.testing.assert_allclose(x, whole[name], atol=1e-6, err_msg=name)


def test_adapter_dropout_depends_on_row_keys() -> None:
    """Each row has a key of its own, by its number in the global batch, and drops by that alone."""
    drops = Adapters(rank=3, alpha=6.0, dropout=0.5)
    model = ShardedGPT(SIZE, zero.Axis("zero", (1, 1)), 3, jnp.float32, tuning=Tuning(drops))
    rows, key = np.maximum(tokens(0)[-6:], 0), jax.random.key(1)
    keys = model.dropout_keys(key, Batch(rows, np.asarray(18, np.int32)))
    assert keys is not None
    numbered = jnp.stack([jax.random.fold_in(key, row) for row in range(18, 24)])
    np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(numbered))
    base, own = first_params(SIZE), first_adapters(drops)
    blocks = {name: {**leaves, **own["blocks"].get(name, {})} for name, leaves in base["blocks"].items()}
    losses_of: Any = jax.jit(partial(GPT(SIZE, adapters=drops).apply, {"params": {**base, "blocks": blocks}}))
    losses, order = np.asarray(losses_of(rows, rows, keys)), np.array([3, 1, 5, 0, 2, 4])
    np.testing.assert_allclose(losses_of(rows[order], rows[order], keys[order]), losses[order], rtol=1e-5)
    for others in (keys[np.roll(np.arange(6), 1)], None):
        assert np.abs(losses_of(rows, rows, others) - losses).max(1).min() > 1e-4


@pytest.mark.wide
def test_adapter_dropout_is_per_row() -> None:
    """Dropped inputs of adapters are the same for any number of devices and at any stage, and differ from none."""
    drops = Adapters(rank=3, alpha=6.0, dropout=0.5)
    got = [losses_of(tuned(devices, stage, adapters=drops), 3)[0] for devices, stage in ((2, 1), (8, 3))]
    np.testing.assert_allclose(got[0], got[1], rtol=1e-5)
    assert abs(got[0][0] - plain_losses()[0][0]) > 1e-4


def test_chosen_products_have_adapters() -> None:
    """Only the products that are named have adapters; a model without one of them goes without."""
    shapes = Adapters(2, 2.0, targets=("query", "mlp_gate")).shapes(first_params(SIZE), parameter_axes(SIZE))
    assert set(named(jax.tree.map(lambda leaf: np.zeros(leaf.shape), shapes))) == {
        f"blocks/{name}/{half}" for name in ("query", "mlp_gate") for half in ("lora_a", "lora_b")
    }
    assert "mlp_gate" not in Adapters(2, 2.0).shapes(first_params(CONFIG), parameter_axes(CONFIG))["blocks"]
    assert ROWS == len(tokens(0))


def kernels_alone() -> optax.GradientTransformation:
    """Gradient descent on what adapters of all products change: the kernels of layers."""

    def mask(path: Any, x: jax.Array) -> jax.Array:
        return x if path[-1].key in ("kernel", "lora_a", "lora_b") and path[0].key == "blocks" else jnp.zeros_like(x)

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(mask, updates))


class Descent(NamedTuple):
    """Gradient descent on all kernels, or on adapters of all products, of scale 1."""

    model: ShardedGPT
    programs: Programs
    frozen: Any
    start: Any


@cache
def descent(rank: int | None) -> Descent:
    """A starts with orthonormal rows, or columns where the rank is too low for that; B at zero."""
    tuning = None if rank is None else Tuning(Adapters(rank, alpha=rank))
    axis, devices, first = zero.Axis("zero", (1, 8)), tuple(jax.devices()), first_params(SIZE)
    model = ShardedGPT(SIZE, axis, 3, tuning=tuning)
    programs = make_programs(model, kernels_alone(), StepOptions(lambda step: jnp.float32(0.5)), devices)
    start, frozen = first, {}
    if tuning is not None:
        frozen = zero.to_devices(first, model.base.layout, axis, devices)

        def new(path: Any, leaf: Any) -> np.ndarray:
            if path[-1].key == LORA_B:
                return np.zeros(leaf.shape, np.float32)
            random = np.random.default_rng(0).normal(size=leaf.shape)
            left, _, right = np.linalg.svd(random, full_matrices=False)
            return np.asarray(left @ right, np.float32)

        start = jax.tree_util.tree_map_with_path(new, tuning.adapters.shapes(first, parameter_axes(SIZE)))
    return Descent(model, programs, frozen, start)


def descended(rank: int | None, steps: int) -> tuple[list[float], Any]:
    """Losses and whole weights after some steps."""
    model, programs, frozen, start = descent(rank)
    state, losses = programs.start(zero.to_devices(start, model.layout, model.axis, tuple(jax.devices()))), []
    for _ in range(steps):
        state, metrics = programs.step(state, Batch(tokens(0).reshape(8, -1, 12), np.arange(0, ROWS, 3)), frozen)
        losses.append(metrics["loss"].item())
    whole = zero.to_host(state.params, model.layout, model.axis)
    return losses, whole if model.tuning is None else merged(first_params(SIZE), whole, model.tuning.adapters)


@pytest.mark.wide
def test_full_rank_takes_the_step_of_full_fine_tuning() -> None:
    """At full rank every change of a kernel is a product A B, and with A A^T = 1 and B = 0 the gradient is the same.

    The step of B is -rate A^T G, that of A is zero, so W changes by -rate A A^T G = -rate G, for any G.
    """
    _, whole = descended(48, 1)
    _, expected = descended(None, 1)
    first, expected = named(first_params(SIZE)), named(expected)
    for name, x in named(whole).items():
        step = expected[name] - first[name]
        np.testing.assert_allclose(x - first[name], step, atol=2e-5 * np.abs(step).max() + 1e-8, err_msg=name)


@SLOW  # the test above has the first step, which is exact
def test_full_rank_approaches_full_fine_tuning() -> None:
    """Losses at full rank stay near those of full fine-tuning, and those at rank 1 do not."""
    full, high, low = (descended(rank, 30)[0] for rank in (None, 48, 1))
    fallen = full[0] - full[-1]
    assert fallen > 0.2 and abs(high[-1] - full[-1]) < 0.01 * fallen and low[-1] - full[-1] > 0.5 * fallen


@pytest.mark.slow
def test_losses_with_activations_on_the_host() -> None:
    """Where activations lie changes no loss."""
    kept, moved = (losses_of(tuned(8, 3, remat="mlp", offload=offload))[0] for offload in ((), KINDS))
    assert moved == kept
