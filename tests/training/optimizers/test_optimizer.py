"""Every optimizer of the configuration on shards, layer by layer, and in steps of the trainer."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero
from tests.helpers.toy_axes import toy_axes
from tests.training import small_gpt
from zero.models.gpt import STACK, VOCABULARY, parameter_axes
from zero.partition.layout import make_layout
from zero.partition.sharded_optimizer import on_shards
from zero.training.optimizers.optimizer import NAMES, PER_LAYER, decayed, hyperparameters, make_optimizer
from zero.training.schedules import CURVES, LearningRate
from zero.training.sharded_gpt import ShardedGPT

RATE, DECAY = 0.01, 0.1
SMALL: dict[str, dict[str, Any]] = {"adafactor": {"factored_from": 8}}  # of matrices this small


def random_like(rng: np.random.Generator, tree: Any) -> Any:
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), tree)


def make_params(rng: np.random.Generator) -> Any:
    kernel, bias = np.zeros((3, 13, 20)), np.zeros((3, 20))
    blocks = {"a": {"kernel": kernel, "bias": bias}, "b": {"kernel": np.zeros((3, 32, 16))}}
    return random_like(rng, {STACK: blocks, VOCABULARY: np.zeros((2, 11, 16)), "norm": {"scale": np.zeros(16)}})


@partial(jax.jit, static_argnums=0)
def moved(tx: optax.GradientTransformation, params: Any, gradients: list[Any]) -> Any:
    state = tx.init(params)
    for grads in gradients:
        updates, state = tx.update(grads, state, params)
        params = jax.tree.map(lambda p, u: p - RATE * u, params, updates)
    return params


SLOW, WIDE = pytest.mark.slow, pytest.mark.wide
TABLE: dict[str, Any] = {name: () if name == "adafactor" else WIDE for name in PER_LAYER}  # it factors a table


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        *((name, 3) for name in PER_LAYER),
        *(
            pytest.param(name, 8, marks=SLOW if name in PER_LAYER else () if name == "adamw" else WIDE)
            for name in NAMES
        ),
    ],
)
def test_shards_move_as_whole_parameters_do(name: str, devices: int) -> None:
    rng = np.random.default_rng(0)
    params = make_params(rng)
    gradients = [random_like(rng, params) for _ in range(3)]
    layout = make_layout(params, devices, stacked=(STACK, VOCABULARY))
    tx = make_optimizer(name, DECAY, axes=toy_axes(params), **SMALL.get(name, {}))

    def on_a_device(_: jax.Array) -> Any:
        cut = [zero.shard(tree, layout, "batch") for tree in (params, *gradients)]
        return zero.gather(moved(on_shards(tx, layout, "batch"), cut[0], cut[1:]), layout, "batch")

    found = jax.pmap(zero.in_order(on_a_device), "batch")(np.arange(devices))
    expected = moved(tx, params, gradients)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got[0], want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        pytest.param(name, devices, marks=SLOW if (name == "adafactor") != (devices == 8) else TABLE[name])
        for name in PER_LAYER
        for devices in (8, 3)
    ],
)
def test_chunked_table_is_one_leaf(name: str, devices: int) -> None:
    """A table in chunks, with padding, moves as the same table in one, whole and on shards."""
    rng = np.random.default_rng(4)
    tokens, chunks, rows, width = 37, 3, 13, 5  # rows are split, with padding on 8 and on 3 devices
    tree = {STACK: {"kernel": np.zeros((2, 6, 5))}, VOCABULARY: {"table": np.zeros((chunks, rows, width))}}
    params, *gradients = (random_like(rng, tree) for _ in range(4))

    def in_one(tree: Any) -> Any:
        return tree | {VOCABULARY: {"table": tree[VOCABULARY]["table"].reshape(1, -1, width)[:, :tokens]}}

    hyperparameters: dict[str, Any] = {"factored_from": 4} if name == "adafactor" else {}
    tx = make_optimizer(name, DECAY, axes=toy_axes(tree), vocab_size=tokens, **hyperparameters)
    expected = moved(tx, in_one(params), [in_one(grads) for grads in gradients])
    layout = make_layout(params, devices, stacked=(STACK, VOCABULARY))
    assert all(leaf.splits[0].dim == 1 for leaf in layout.leaves)

    def on_a_device(_: jax.Array) -> Any:
        cut = [zero.shard(tree, layout, "batch") for tree in (params, *gradients)]
        return zero.gather(moved(on_shards(tx, layout, "batch"), cut[0], cut[1:]), layout, "batch")

    found = jax.tree.map(lambda x: x[0], jax.pmap(zero.in_order(on_a_device), "batch")(np.arange(devices)))
    for got in (moved(tx, params, gradients), found):
        for x, y in zip(jax.tree.leaves(in_one(got)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)
        np.testing.assert_array_equal(got[VOCABULARY]["table"].reshape(-1, width)[tokens:], in_padding(params, tokens))


def in_padding(params: Any, tokens: int) -> Any:
    """Rows past the last token, which no update moves."""
    table = params[VOCABULARY]["table"]
    return table.reshape(-1, table.shape[-1])[tokens:]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "lamb" else WIDE) for name in PER_LAYER])
def test_optimizers_see_all_experts(name: str) -> None:
    """Optimizers see the experts of all devices: those of a group of four, and the shards of two groups."""
    rng = np.random.default_rng(5)
    shapes = {STACK: {"experts": {"kernel": np.zeros((2, 8, 13, 6))}, "bias": np.zeros((2, 7))}}
    params, *gradients = (random_like(rng, shapes | {VOCABULARY: np.zeros((2, 11, 16))}) for _ in range(3))
    axis = zero.Axis.with_expert_groups("zero", 8, 4)
    layout = zero.groups.make_grouped_layout(
        params, 8, stacked=(STACK, VOCABULARY), expert=axis.expert, is_expert=lambda name: "experts" in name
    )
    tx = make_optimizer(name, DECAY, axes=toy_axes(params), **SMALL.get(name, {}))
    cut = [zero.to_devices(tree, layout, axis) for tree in (params, *gradients)]
    on_a_device = zero.in_order(lambda params, *grads: moved(on_shards(tx, layout, axis), params, list(grads)))
    found = zero.to_host(jax.pmap(on_a_device, "zero")(*cut), layout, axis)
    expected = moved(tx, params, gradients)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", PER_LAYER)
def test_layers_move_independently(name: str) -> None:
    """A layer of a stack moves as if it were the only one."""
    rng = np.random.default_rng(1)
    params = make_params(rng)
    grads = random_like(rng, params)
    tx = make_optimizer(name, DECAY, axes=toy_axes(params), **SMALL.get(name, {}))
    together = moved(tx, params, [grads])[STACK]
    for layer in range(3):
        alone, alone_grads = (
            {**tree, STACK: jax.tree.map(lambda x, layer=layer: x[layer : layer + 1], tree[STACK])}
            for tree in (params, grads)
        )
        for got, want in zip(
            jax.tree.leaves(together), jax.tree.leaves(moved(tx, alone, [alone_grads])[STACK]), strict=True
        ):
            np.testing.assert_allclose(got[layer], want[0], rtol=1e-5, atol=1e-6)


def plain(name: str) -> optax.GradientTransformation:
    """Optax's own, for a tree without stacks of layers."""

    def mask(params: Any) -> Any:
        return {key: key != "bias" for key in params}

    contrib = optax.contrib.muon(
        RATE, weight_decay=DECAY, adam_b2=0.95, adam_weight_decay=DECAY, weight_decay_mask=mask, consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: None, params),
    )  # fmt: skip
    return {
        "adamw": optax.adamw(RATE, b2=0.95, weight_decay=DECAY, mask=mask),
        "ademamix": optax.contrib.ademamix(RATE, weight_decay=DECAY, mask=mask),
        "lion": optax.lion(RATE, weight_decay=DECAY, mask=mask),
        "sgd": optax.chain(optax.add_decayed_weights(DECAY, mask), optax.sgd(RATE, 0.9)),
        "adafactor": optax.adafactor(
            RATE, min_dim_size_to_factor=8, weight_decay_rate=DECAY * RATE, weight_decay_mask=mask
        ),
        "lamb": optax.lamb(RATE, weight_decay=DECAY, mask=mask),
        "muon": contrib,
    }[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_rest_moves_as_by_optax(name: str) -> None:
    rng = np.random.default_rng(2)
    params = {VOCABULARY: rng.normal(size=(11, 16)).astype(np.float32), "bias": np.ones(5, np.float32)}
    gradients = [random_like(rng, params) for _ in range(3)]
    blocks: Any = {STACK: {"bias": np.zeros((1, 2), np.float32)}}
    tx = make_optimizer(name, DECAY, axes=toy_axes(params, blocks), **SMALL.get(name, {}))
    found = moved(tx, params | blocks, [grads | blocks for grads in gradients])
    expected, optaxs = params, plain(name)
    state, update = optaxs.init(expected), jax.jit(optaxs.update)
    for grads in gradients:
        updates, state = update(grads, state, expected)
        expected = optax.apply_updates(expected, updates)
    for key in params:
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name",  # lamb communicates; adamw is in test_step.py
    [
        *(pytest.param(name, marks=WIDE) for name in ("lamb", "muon")),
        *(pytest.param(name, marks=SLOW) for name in NAMES if name not in ("adamw", "lamb", "muon")),
    ],
)
def test_stages_agree_and_learn(name: str) -> None:
    losses: dict[int, list[float]] = {}
    for stage in (0, 3):
        setup = small_gpt.setup(8, stage, tx=TRANSFORMS[name], config=small_gpt.PLAIN)
        state, losses[stage] = setup.start(), []
        for _ in range(3):
            state, metrics = setup.programs.step(state, small_gpt.batch(setup, 0))
            losses[stage].append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[3], losses[0], rtol=1e-6)
    assert losses[3][-1] < losses[3][0]


SHAPES = {STACK: {"kernel": np.zeros((1, 8, 9))}, VOCABULARY: np.zeros((4, 5)), "positions": np.zeros((3, 5))}
AXES = {**toy_axes(SHAPES), **parameter_axes(small_gpt.PLAIN)}
TRANSFORMS = {  # one object a program
    name: make_optimizer(name, DECAY, axes=AXES, **SMALL.get(name, {})) for name in NAMES
}


@pytest.mark.parametrize("name", NAMES)
def test_hyperparameters_reach_their_optimizer(name: str) -> None:
    rng = np.random.default_rng(3)
    params = random_like(rng, SHAPES)
    gradients = [random_like(rng, params) for _ in range(2)]
    default = moved(TRANSFORMS[name], params, gradients)
    others: dict[str, Any] = {"factored_from": 1000, "newton_schulz_steps": 2, "nesterov": True, "min_scale": 5.0}
    others |= {"scale_by_parameter": False, "bias_correction": False, "decay_on": "gpt_neo"}
    for key, value in hyperparameters(name).items():
        if key in ("decay", "scaled_eps"):  # of models in mup (test_step_mup.py)
            continue
        if key not in others:
            others[key] = 0.5 if value is None else value * 0.9 + 0.01
        tx = make_optimizer(name, DECAY, axes=AXES, **{**SMALL.get(name, {}), key: others[key]})
        changed = moved(tx, params, gradients)
        pairs = zip(jax.tree.leaves(default), jax.tree.leaves(changed), strict=True)
        assert any((np.asarray(a) != np.asarray(b)).any() for a, b in pairs), key


@pytest.mark.parametrize("name", NAMES)
def test_state_keeps_its_dtypes(name: str) -> None:
    """With weights in bfloat16 the state of an update is that of the next one: a compiled step takes no other."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_params(np.random.default_rng(0)))
    grads = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    tx = make_optimizer(name, DECAY, axes=toy_axes(params), **SMALL.get(name, {}))
    state = jax.eval_shape(tx.init, params)
    _, after = jax.eval_shape(lambda grads, state, params: tx.update(grads, state, params), grads, state, params)
    dtypes, dtypes_after = (jax.tree.map(lambda x: x.dtype.name, one) for one in (state, after))
    assert dtypes == dtypes_after


@pytest.mark.parametrize("schedule", sorted({*CURVES} - {"sqrt_decay", "ramped_cosine"}))
def test_schedules(schedule: str) -> None:
    """Schedules warm up to the peak and end at the rate that is asked for."""
    rate = LearningRate(2.0, 0.2, 10, 110, schedule, decay_steps=20)
    got = [float(rate(step)) for step in range(112)]
    np.testing.assert_allclose(got[:10], 0.2 * np.arange(1, 11), rtol=1e-6)
    expected = {"inverse_sqrt": 2 * (10 / 110) ** 0.5, "constant": 2.0}.get(schedule, 0.2)
    assert got[109] == pytest.approx(expected) and np.argmax(got) == 9
    middle = {"cosine": 1.1, "linear": 1.1, "inverse_sqrt": 2 * (10 / 60) ** 0.5}.get(schedule, 2.0)
    assert got[59] == pytest.approx(middle, rel=1e-5)
    assert schedule != "wsd" or (got[89] == 2.0 and got[99] == pytest.approx(1.1))
    same = dataclasses.replace(rate, peak=2.0)
    assert float(jax.jit(same)(jnp.int32(59))) == got[59]


@pytest.mark.parametrize("b1", [None, 0.9])
@pytest.mark.parametrize("scale_by_parameter", [True, False])
def test_adafactor_is_that_of_optax(b1: float | None, scale_by_parameter: bool) -> None:
    """Adafactor with momentum, epsilon and without the parameter's scale is optax's; the least scale holds."""
    params = {"blocks": {"mlp_in": {"kernel": jnp.full((1, 130, 128), 1e-4)}}, "norm": {"scale": jnp.ones(5)}}
    options: dict[str, Any] = {"b1": b1, "eps": 1e-8, "scale_by_parameter": scale_by_parameter}
    own = PER_LAYER["adafactor"](0.1, axes=toy_axes(params), **options)
    expected = optax.adafactor(
        momentum=b1,
        eps=1e-8,
        multiply_by_parameter_scale=scale_by_parameter,
        weight_decay_rate=0.1,
        weight_decay_mask=decayed(toy_axes(params)),
    )
    states, rng = (own.init(params), expected.init(params)), np.random.default_rng(0)
    own_update, expected_update = jax.jit(own.update), jax.jit(expected.update)
    for _ in range(3):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
        updates, state = own_update(grads, states[0], params)
        reference, reference_state = expected_update(grads, states[1], params)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, -y, rtol=1e-6), updates, reference)
        states = state, reference_state
    least = PER_LAYER["adafactor"](0.0, min_scale=0.5, axes=toy_axes(params))
    updates, _ = least.update(grads, least.init(params), params)
    assert float(jnp.sqrt(jnp.square(updates["blocks"]["mlp_in"]["kernel"]).mean())) == pytest.approx(0.5, rel=0.05)


def test_adam_without_bias_correction() -> None:
    """Moments start at zero and are not divided: as Mesh TensorFlow's `AdamWeightDecayOptimizer`, in numpy."""
    b1, b2, eps, decay = 0.9, 0.95, 1e-8, 0.1
    params: Any = {STACK: {"query": {"kernel": jnp.full((1, 3, 2), 0.5)}}}
    tx = make_optimizer("adamw", decay, axes=toy_axes(params), b1=b1, b2=b2, eps=eps, bias_correction=False)
    state, rng = tx.init(params), np.random.default_rng(0)
    mean = square = np.zeros((1, 3, 2))
    for _ in range(10):
        g = rng.normal(size=(1, 3, 2))
        mean, square = b1 * mean + (1 - b1) * g, b2 * square + (1 - b2) * g**2
        updates, state = tx.update({STACK: {"query": {"kernel": jnp.asarray(g, jnp.float32)}}}, state, params)
        expected = mean / (np.sqrt(square) + eps) + decay * 0.5
        np.testing.assert_allclose(updates[STACK]["query"]["kernel"], expected, rtol=1e-5)


def test_decayed_leaves_of_gpt_neo() -> None:
    """GPT-Neo leaves out names with "norm" or "bias"; its positions, `wpe`, and its last norm, `ln_f`, decay."""
    config = dataclasses.replace(small_gpt.CONFIG, alibi_attn=False, embedding_norm=False)
    layout = ShardedGPT(config, zero.Axis("zero", (1, 1)), 0).layout
    chosen = layout.treedef.flatten_up_to(decayed(parameter_axes(config), "gpt_neo")(layout.shapes()))
    kept = {leaf.name for leaf, is_decayed in zip(layout.leaves, chosen, strict=True) if not is_decayed}
    names = {leaf.name for leaf in layout.leaves}
    assert {"positions/table", "norm/scale", "norm/bias", "vocabulary/table"} <= names - kept
    assert kept == {name for name in names if name.startswith("blocks/") and not name.endswith("/kernel")}
