"""Routers with sigmoid scores, groups and a bias, MLPs beside experts, and layers before them, against plain loops."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.models.config import GPTConfig
from zero.models.experts import Experts, no_routing
from zero.models.gpt import GPT
from zero.models.router import ROUTER_BIAS

E, GROUPS, T = 12, 4, 9
BALANCED = GPTConfig(
    embedding_dim=6, vocab_size=31, num_head=2, block_size=24, dropout=0.0, N=3, mlp_dim=7, mlp_bias=False,
    gated=True, activation="silu", experts=E, experts_per_token=3, normalize_router=True, router="sigmoid",
    router_scale=2.5, router_groups=GROUPS, router_groups_per_token=2, router_bias_rate=0.1, balance_loss=0.3,
    first_dense=1, dense_dim=11, shared_dim=5,
)  # fmt: skip
CONFIGS = {
    "groups": BALANCED,
    "one group": dataclasses.replace(BALANCED, router_groups=1, router_groups_per_token=1, normalize_router=False),
    "no bias": dataclasses.replace(BALANCED, router_bias_rate=None),
    "softmax": dataclasses.replace(BALANCED, router="softmax"),
}


def random(shapes: Any, seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


def chosen_by_hand(config: GPTConfig, scores: np.ndarray, bias: np.ndarray) -> list[int]:
    """The experts of one token, by sorting."""
    biased = scores + bias
    size = E // config.router_groups
    if config.router_groups > 1:
        sums = [sorted(biased[g * size : (g + 1) * size])[-2:] for g in range(config.router_groups)]
        groups = sorted(range(config.router_groups), key=lambda g: -sum(sums[g]))[: config.router_groups_per_token]
        experts = [expert for expert in range(E) if expert // size in groups]
    else:
        experts = list(range(E))
    return sorted(experts, key=lambda expert: -biased[expert])[: config.experts_per_token]


def output_by_hand(config: GPTConfig, p: Any, h_TD: Any, chosen: list[list[int]]) -> Any:
    """The formula of the experts for one row, in the precision of its inputs, with choices that are given."""
    rows = []
    for h_D, experts in zip(h_TD, chosen, strict=True):
        logits = h_D @ p["router"]["kernel"]
        scores = jax.nn.softmax(logits) if config.router == "softmax" else 1 / (1 + jnp.exp(-logits))
        total = sum(scores[expert] for expert in experts)
        y_D = 0
        for expert in experts:
            factor = config.router_scale * scores[expert] / (total if config.normalize_router else 1)
            gate, into, out = (p[name]["kernel"][expert] for name in ("mlp_gate", "mlp_in", "mlp_out"))
            y_D = y_D + factor * ((jax.nn.silu(h_D @ gate) * (h_D @ into)) @ out)
        rows.append(y_D)
    return jnp.stack(rows)


@pytest.mark.parametrize(
    "name", [x if x in ("groups", "softmax") else pytest.param(x, marks=pytest.mark.wide) for x in CONFIGS]
)
def test_outputs_and_gradients_equal_the_formula(name: str) -> None:
    """In float64: choices by sorting, outputs and gradients of plain loops; the bias has no gradient but counts."""
    config = CONFIGS[name]
    module = Experts(config, jnp.float32)
    h = np.random.default_rng(0).normal(size=(1, T, 6)).astype(np.float32)
    shapes: Any = jax.eval_shape(partial(module.init, drops=True), jax.random.key(0), h, 0)
    p = random(shapes["params"])
    bias = random(shapes[ROUTER_BIAS], 2)["bias"] if config.has_router_bias else np.zeros(E)
    weights = np.random.default_rng(3).normal(size=(T, 6)).astype(np.float32)

    def loss(p: Any, bias: Any) -> Any:
        variables = {"params": p, ROUTER_BIAS: {"bias": bias}} if config.has_router_bias else {"params": p}
        y, routing = module.apply(variables, h, 0, drops=True)
        return (y[0] * weights).sum(), (y[0], routing)

    (_, (y, routing)), (grads, counts) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(p, bias)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), p)
        logits = np.asarray(h[0].astype(np.float64) @ p["router"]["kernel"].astype(np.float64))
        scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        if config.router == "sigmoid":
            scores = 1 / (1 + np.exp(-logits))
        chosen = [chosen_by_hand(config, row, bias) for row in scores]

        def formula(p: Any) -> Any:
            y = output_by_hand(config, p, jnp.asarray(h[0], jnp.float64), chosen)
            return (y * weights).sum(), y

        (_, expected), expected_grads = jax.jit(jax.value_and_grad(formula, has_aux=True))(wide)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    for (path, g), x in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(g, x, rtol=1e-3, atol=1e-5 * np.abs(x).max(), err_msg=str(path))
    often = np.bincount(np.concatenate(chosen), minlength=E)
    np.testing.assert_array_equal(counts, often if config.has_router_bias else np.zeros(E))
    np.testing.assert_array_equal(routing.choices_LE[0], often)
    shares = scores / scores.sum(-1, keepdims=True)
    balance = config.balance_loss * E * (often / T * shares.mean(0)).sum() / 2
    np.testing.assert_allclose(routing.penalty_B, [balance], rtol=1e-5)
    np.testing.assert_allclose(routing.entropy, -(shares * np.log(shares)).sum(), rtol=1e-5)


def test_layers_of_a_model() -> None:
    """The first layer has a wide MLP, the others experts and one beside them; their outputs are added."""
    x = jnp.zeros((1, 4), int)
    shapes: Any = jax.eval_shape(GPT(BALANCED).init, jax.random.key(0), x, x)
    first, blocks = shapes["params"]["first_blocks"], shapes["params"]["blocks"]
    assert "experts" not in first and first["mlp_in"]["kernel"].shape == (1, 6, 11)
    assert blocks["mlp_in"]["kernel"].shape == (2, 6, 5)
    assert blocks["experts"]["mlp_in"]["kernel"].shape == (2, E, 6, 7)
    assert shapes[ROUTER_BIAS]["blocks"]["experts"]["bias"].shape == (2, E)
    params = random(shapes["params"])
    bias = {ROUTER_BIAS: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes[ROUTER_BIAS])}
    tokens = np.random.default_rng(5).integers(0, 31, (1, T))

    def outputs(params: Any) -> Any:
        return jax.jit(partial(GPT(BALANCED).apply, method="embed"))({"params": params, **bias}, tokens)[0]

    layer: Any = jax.jit(GPT(BALANCED).layer(GPT(BALANCED).row_group).apply)
    stream = outputs(params), None

    def of_layer(**kernels: Any) -> Any:
        own = jax.tree.map(lambda x: x[0], params["blocks"])
        for name, factor in kernels.items():
            module = own["experts"]["mlp_out"] if name == "experts" else own["mlp_out"]
            module["kernel"] = factor * module["kernel"]
        variables = {"params": own, ROUTER_BIAS: {"experts": {"bias": jnp.zeros(E)}}}
        return layer(variables, ((stream[0], no_routing(BALANCED, 1)), None), 0, None, 0)[0][0][0]

    nothing, experts, shared = of_layer(experts=0, shared=0), of_layer(shared=0), of_layer(experts=0)
    both = of_layer()
    assert np.abs(experts - nothing).max() > 0.1 and np.abs(shared - nothing).max() > 0.1
    np.testing.assert_allclose(both - nothing, experts + shared - 2 * nothing, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"router_groups": 5}, "experts 12 do not make router_groups 5"),
        ({"router_groups": 12}, "do not make router_groups 12 of at least 2 experts"),
        ({"router_groups_per_token": 5}, "router_groups_per_token 5 must be at most router_groups 4"),
        ({"router_groups_per_token": 1, "experts_per_token": 4}, "experts_per_token 4 must be at most the 3 experts"),
        ({"first_dense": 3}, "first_dense 3 must be less than N 3"),
        ({"first_dense": 2, "experts_every": 2}, "N 3 less first_dense 2 must be a multiple of experts_every 2"),
        ({"windows": (0, 4, 0)}, "first_dense 1 needs one window"),
        ({"router": "tanh"}, "router must be one of softmax, sigmoid"),
        ({"router_bias_rate": -1.0}, "router_bias_rate must be zero or more"),
    ],
    ids=str,
)
def test_contradicting_keys_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BALANCED, **change)


def test_keys_need_experts() -> None:
    for name, value in {"router": "sigmoid", "shared_dim": 4, "first_dense": 1, "dense_dim": 4}.items():
        with pytest.raises(ValueError, match=f"{name} {value} needs experts"):
            GPTConfig(8, 16, 2, 4, 0.0, 2, mlp_bias=False, **{name: value})  # type: ignore[arg-type]
