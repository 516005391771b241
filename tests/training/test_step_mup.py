"""Whole steps with learning rates by leaf, at every stage, against one device and only optax."""

import dataclasses
import itertools
from functools import cache, partial
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
    RATE,
    Run,
    assert_close,
    first_params,
    reference,
    run_on,
    setup,
    tokens,
)
from zero.models.config import GPTConfig
from zero.models.gpt import parameter_axes
from zero.models.parametrization import multipliers_of
from zero.training.optimizers.optimizer import MULTIPLIABLE, NAMES, make_optimizer

DECAY, W = 0.1, 3
MUP = dataclasses.replace(
    CONFIG,
    dropout=0.0,
    embedding_dim=48,  # which tensor groups can cut
    num_head=8,
    block_size=16,
    alibi_attn=False,
    tied=False,
    attention_scale=None,
    parametrization="mup",
    mup_base_width=48 // W,
)
DATA = partial(tokens, context=16)
AXES = parameter_axes(MUP)


def is_matrix(path: Any) -> bool:
    """By hand: which leaves have both dimensions in proportion to the width, or are the head."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return name in {"head/table", *(f"blocks/{n}/kernel" for n in ("query", "key", "value", "attention_out"))} | {
        f"blocks/{n}/kernel" for n in ("mlp_in", "mlp_out")
    }


@cache
def by_optax(name: str) -> optax.GradientTransformation:
    """Two groups of leaves, each with an optimizer of optax of its own; matrices decay as fast as the rest."""

    def group(w: float) -> optax.GradientTransformation:
        options: Any = {"weight_decay": DECAY * w, "mask": decays}
        return (
            optax.adamw(lambda step: RATE(step) / w, b2=0.95, **options)
            if name == "adamw"
            else optax.lion(lambda step: RATE(step) / w, **options)
        )

    def decays(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key not in ("bias", "scale") and path[0].key != "positions", params
        )

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "matrix" if is_matrix(path) else "rest", params)

    return optax.multi_transform({"matrix": group(W), "rest": group(1)}, labels)


@cache
def transform(name: str, state_dtype: Any = jnp.float32, config: GPTConfig = MUP) -> optax.GradientTransformation:
    axes = parameter_axes(config)
    return make_optimizer(name, DECAY, axes=axes, state_dtype=state_dtype, multipliers=multipliers_of(config, axes))


@cache
def trained(devices: int, stage: int, name: str = "adamw", state_dtype: Any = jnp.float32, **options: Any) -> Run:
    return run_on(setup(devices, stage, config=MUP, tx=transform(name, state_dtype), **options), data=DATA)


WIDE = [("adamw", 3, 1)]  # eight devices at stage 3: test_parts_equal_whole_matrix; lion: test_decay_is_not_multiplied
SLOW = {(n, d, s) for n in MULTIPLIABLE for d in (1, 3, 8) for s in range(4)} - {*WIDE}


@pytest.mark.parametrize(
    ("name", "devices", "stage"),
    [
        *(pytest.param(*case, marks=pytest.mark.wide) for case in WIDE),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in sorted(SLOW)),
    ],
)
def test_equals_two_optax_optimizers(name: str, devices: int, stage: int) -> None:
    """Every stage trains as one device with two optimizers of optax."""
    got, expected = trained(devices, stage, name), reference(MUP, CLIP, by_optax(name), DATA)
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=1e-6)
    if name == "adamw":  # the sign of a gradient that is nothing but rounding is anything
        assert_close(got, expected, rtol=1e-5, config=MUP)


@pytest.mark.slow  # test_fused_update.py has rates by leaf
@pytest.mark.parametrize("state_dtype", [jnp.float32, jnp.int8])
def test_rates_in_fused_update(state_dtype: Any) -> None:
    """A fused update moves each leaf at its own rate."""
    options: dict[str, Any] = {"max_norm": None, "skip_bad_steps": False}
    fused = trained(8, 3, state_dtype=state_dtype, fused_update=True, **options)
    assert_close(fused, trained(8, 3, state_dtype=state_dtype, **options), rtol=1e-5, config=MUP)


@pytest.mark.parametrize("tensor", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_parts_equal_whole_matrix(tensor: int) -> None:
    """Parts of a matrix start and move as the whole one.

    In tensor groups, whose devices hold a part of the rows or columns of each matrix.
    """
    got = trained(8, 3, axis=zero.Axis.with_tensor_groups("zero", 8, tensor))
    expected = reference(MUP, CLIP, by_optax("adamw"), DATA)
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=1e-6)
    assert_close(got, expected, rtol=1e-6, config=MUP)


@pytest.mark.wide
def test_base_width() -> None:
    """At the base width nothing is multiplied."""
    base = dataclasses.replace(MUP, mup_base_width=MUP.embedding_dim)
    params = first_params(base)
    grads = jax.tree.map(lambda p: jnp.linspace(-1, 2, p.size).reshape(p.shape), params)
    same, plain, multiplied = (
        jax.jit(tx.update)(grads, tx.init(params), params)[0]
        for tx in (transform("adamw", config=base), make_optimizer("adamw", DECAY, axes=AXES), transform("adamw"))
    )
    jax.tree.map(np.testing.assert_array_equal, same, plain)
    assert any((x != y).any() for x, y in zip(jax.tree.leaves(multiplied), jax.tree.leaves(plain), strict=True))


HELD = [("adamw", jnp.float32), ("adamw", jnp.int8), ("lion", jnp.bfloat16)]  # each optimizer and each dtype


@pytest.mark.parametrize(
    ("name", "state_dtype"),
    [
        pytest.param(*case, id=f"{name}-{dtype.__name__}", marks=() if case in HELD else pytest.mark.slow)
        for case in itertools.product(MULTIPLIABLE, [jnp.float32, jnp.bfloat16, jnp.int8])
        for name, dtype in [case]
    ],
)
def test_decay_is_not_multiplied(name: str, state_dtype: Any) -> None:
    """Updates are multiplied and weight decay is not."""
    params = first_params(MUP)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
    no_decay, decayed = make_optimizer(name, 0.0, axes=AXES, state_dtype=state_dtype), transform(name, state_dtype)
    plain, got = (jax.jit(lambda tx=tx: tx.update(grads, tx.init(params), params)[0])() for tx in (no_decay, decayed))

    def check(path: Any, got: jax.Array, plain: jax.Array, p: jax.Array) -> None:
        is_decayed = path[-1].key == "kernel" or path[0].key in ("vocabulary", "head")
        expected = plain / (W if is_matrix(path) else 1) + DECAY * p * is_decayed
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7, err_msg=str(path))

    jax.tree_util.tree_map_with_path(check, got, plain, params)


ABSOLUTE = dataclasses.replace(MUP, parametrization="mup_absolute", mup_base_width=None, mlp_dim=100)


def tensor_rates(config: GPTConfig) -> dict[str, float]:
    """By hand, as in mu_transformer: the factor of the learning rate of each kind of leaf."""
    if config.parametrization == "mup":
        return {"inner": 1 / W, "mlp_out": 1 / W, "rest": 1}
    return {"inner": 1 / config.embedding_dim, "mlp_out": 1 / config.mlp_width, "rest": 1}


# Each pair of choices.
PAIRS = [
    (MUP, "coupled", False),
    (MUP, "independent", True),
    (ABSOLUTE, "coupled", True),
    (ABSOLUTE, "independent", False),
]


@pytest.mark.parametrize(
    ("config", "decay", "scaled_eps"),
    [
        pytest.param(*case, marks=() if case in PAIRS else pytest.mark.slow, id="-".join(map(str, (name, *case[1:]))))
        for name, config in (("relative", MUP), ("absolute", ABSOLUTE))
        for case in itertools.product([config], ["coupled", "independent"], [False, True])
    ],
)
def test_ten_steps_of_mu_transformer(config: GPTConfig, decay: str, scaled_eps: bool) -> None:
    """Ten steps are those of `optax.multi_transform` with an AdamW for each kind of leaf, and its kinds of decay."""
    peak, eps = 2e-2, 1e-3
    rates = tensor_rates(config)

    def decays(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key == "kernel" or path[0].key in ("vocabulary", "head"), params
        )

    def labels(params: Any) -> Any:
        def of(path: Any, _: Any) -> str:
            return ("mlp_out" if "mlp_out" in str(path) else "inner") if is_matrix(path) else "rest"

        return jax.tree_util.tree_map_with_path(of, params)

    own = DECAY if decay == "coupled" else 0.0
    groups = {
        name: optax.adamw(peak * rate, eps=eps * (rate if scaled_eps else 1), weight_decay=own, mask=decays)
        for name, rate in rates.items()
    }
    after = [] if decay == "coupled" else [optax.add_decayed_weights(-DECAY, decays)]
    source = optax.chain(optax.multi_transform(groups, labels), *after)  # times a schedule, which is 1 here

    weight_decay = DECAY / peak if decay == "independent" else DECAY  # as zero.job gives it
    options: dict[str, Any] = {"b2": 0.999, "eps": eps, "decay": decay, "scaled_eps": scaled_eps}
    axes = parameter_axes(config)
    tx = make_optimizer("adamw", weight_decay, axes=axes, multipliers=multipliers_of(config, axes), **options)
    params = expected = first_params(config)
    state, source_state, rng = tx.init(params), source.init(params), np.random.default_rng(0)
    own_update, source_update = jax.jit(tx.update), jax.jit(source.update)  # one by one they are dozens of programs
    for _ in range(10):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape) * 1e-2, jnp.float32), params)
        updates, state = own_update(grads, state, params)
        params = jax.tree.map(lambda p, u: p - peak * u, params, updates)
        updates, source_state = source_update(grads, source_state, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), params, expected)


def test_multipliers_change_nothing_of_the_state() -> None:
    """So a checkpoint is read whatever the parametrization, and resumes as others do."""
    plain, multiplied = (
        tx.init(first_params(MUP)) for tx in (make_optimizer("adamw", DECAY, axes=AXES), transform("adamw"))
    )
    paths = [[path for path, _ in jax.tree_util.tree_leaves_with_path(state)] for state in (plain, multiplied)]
    assert paths[0] == paths[1]


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(MULTIPLIABLE)))
def test_other_optimizers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"adamw and lion, not for {name}"):
        transform(name)
