"""Experts against plain loops over tokens: choices, places, drops, outputs and auxiliary losses."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.models.config import GPTConfig
from zero.models.experts import Experts, assign_places, capacity_of, no_routing, routing_metrics
from zero.models.families import FAMILIES
from zero.models.gpt import GPT, init_cache

E, K, T = 5, 2, 13
SMALL = GPTConfig(
    embedding_dim=6, vocab_size=31, num_head=2, block_size=24, dropout=0.0, N=2, mlp_dim=7, mlp_bias=False,
    experts=E, experts_per_token=K, normalize_router=True, balance_loss=0.3, router_z_loss=0.2,
)  # fmt: skip
CAPPED = dataclasses.replace(SMALL, expert_capacity=0.7)
SWITCH = dataclasses.replace(CAPPED, experts_per_token=1, normalize_router=False)
GATED = dataclasses.replace(SMALL, gated=True, activation="silu")
CONFIGS = {
    "dropless": SMALL,
    "capacity": CAPPED,
    "switch": SWITCH,
    "gated": GATED,
    "gated_capacity": dataclasses.replace(GATED, expert_capacity=1.0, normalize_router=False),
}
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def hidden(rows: int = 3) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, T, SMALL.embedding_dim)).astype(np.float32)


def weights(config: GPTConfig) -> Any:
    rng = np.random.default_rng(1)
    shapes: Any = jax.eval_shape(partial(Experts(config, jnp.float32).init, drops=True), jax.random.key(0), hidden(), 0)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes["params"])


def changed(config: GPTConfig, **changes: Any) -> GPTConfig:
    return dataclasses.replace(config, **changes)


def applied(config: GPTConfig, p: Any, h: Any, dtype: Any = jnp.float32) -> Any:
    return jax.jit(partial(Experts(config, dtype).apply, drops=True))({"params": p}, h, 0)


def act(config: GPTConfig, x: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.silu(x) if config.activation == "silu" else jax.nn.gelu(x))


def by_hand(config: GPTConfig, p: Any, h_BTD: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, float]:
    """Outputs, penalties, choices, drops and entropy, one row after the other and one choice after the other."""
    experts = config.experts or 0
    outputs, penalties, all_choices, dropped, entropy = [], [], np.zeros(experts), 0, 0.0
    for row in h_BTD.astype(np.float64):
        logits = row @ p["router"]["kernel"].astype(np.float64)
        lse = np.log(np.exp(logits).sum(-1))
        probabilities = np.exp(logits - lse[:, None])
        entropy -= (probabilities * np.log(probabilities)).sum()
        order = np.argsort(-probabilities, axis=-1)[:, : config.experts_per_token]
        places = np.zeros(experts, int)
        output = np.zeros_like(row)
        for rank in range(config.experts_per_token):
            for t in range(len(row)):
                expert = order[t, rank]
                gate = probabilities[t, expert]
                if config.normalize_router:
                    gate /= probabilities[t, order[t]].sum()
                places[expert] += 1
                if config.expert_capacity is not None and places[expert] > capacity_of(config, len(row)):
                    dropped += 1
                    continue
                own = {name: p[name]["kernel"][expert].astype(np.float64) for name in p if name != "router"}
                x = row[t] @ own["mlp_in"]
                x = act(config, row[t] @ own["mlp_gate"]) * x if config.gated else act(config, x)
                output[t] += gate * (x @ own["mlp_out"])
        balance = experts * (places / len(row) * probabilities.mean(0)).sum() / config.scanned_layers
        penalties.append(config.balance_loss * balance + config.router_z_loss * (lse**2).mean())
        outputs.append(output)
        all_choices += places
    return np.stack(outputs), np.asarray(penalties), all_choices, dropped, entropy


@EACH
def test_experts_equal_loop(config: GPTConfig) -> None:
    """Experts compute the same as a loop over the choices of each token."""
    p, h = weights(config), hidden()
    apply: Any = jax.jit(partial(Experts(config, jnp.float32).apply, drops=True))
    y, routing = apply({"params": p}, h, 1)
    expected, penalties, choices, dropped, entropy = by_hand(config, p, h)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(routing.penalty_B, penalties, rtol=1e-5)
    np.testing.assert_array_equal(routing.choices_LE, [np.zeros(E), choices])
    assert routing.dropped == dropped
    assert (dropped > 0) == (config.expert_capacity is not None)
    np.testing.assert_allclose(routing.entropy, entropy, rtol=1e-5)


def test_enough_places_equal_sorting() -> None:
    """With enough places for all tokens the result equals that of sorting."""
    p, h = weights(GATED), hidden()
    enough = dataclasses.replace(GATED, expert_capacity=1000.0)
    assert capacity_of(enough, T) == T

    def loss(config: GPTConfig, p: Any) -> jax.Array:
        y, routing = applied(config, p, h)
        return jnp.sum(y**2) + routing.penalty_B.sum()

    value, grads = jax.jit(jax.value_and_grad(partial(loss, GATED)))(p)
    other, other_grads = jax.jit(jax.value_and_grad(partial(loss, enough)))(p)
    np.testing.assert_allclose(other, value, rtol=1e-5)
    for (path, g), x in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(other_grads), strict=True):
        np.testing.assert_allclose(x, g, rtol=1e-3, atol=1e-4 * np.abs(g).max(), err_msg=str(path))
        assert np.abs(g).max() > 1e-2, path


@pytest.mark.parametrize("name", ["balance_loss", pytest.param("router_z_loss", marks=pytest.mark.slow)])
def test_gradient_of_auxiliary_losses(name: str) -> None:
    """Auxiliary losses add the gradient of their formula and leave the reported loss as it is.

    By finite differences of the loop, of the router alone: nothing else has a gradient of the penalty.
    """
    config = changed(SWITCH, **{"balance_loss": 0.0, "router_z_loss": 0.0, name: 0.5})
    p, h = weights(config), hidden(1)

    def penalty(kernel: Any) -> jax.Array:
        penalty: jax.Array = applied(config, {**p, "router": {"kernel": kernel}}, h)[1].penalty_B[0]
        return penalty

    grad = np.asarray(jax.jit(jax.grad(penalty))(p["router"]["kernel"]))
    for index in ((0, 0), (3, 2), (5, 4)):
        step = np.zeros_like(grad, np.float64)
        step[index] = 1e-6
        kernel = p["router"]["kernel"].astype(np.float64)
        up, down = (by_hand(config, {**p, "router": {"kernel": kernel + s * step}}, h)[1][0] for s in (1, -1))
        assert grad[index] == pytest.approx((up - down) / 2e-6, rel=1e-3, abs=1e-5)

    x = np.random.default_rng(2).integers(0, 31, (2, T))
    params: Any = jax.jit(GPT(config).init)(jax.random.key(0), x, x)["params"]
    without = changed(config, **{name: 0.0})

    def mean(config: GPTConfig, params: Any) -> jax.Array:
        losses: Any = GPT(config).apply({"params": params}, x, x)
        return losses.mean()

    loss, grads = jax.jit(jax.value_and_grad(partial(mean, config)))(params)
    plain_loss, plain_grads = jax.jit(jax.value_and_grad(partial(mean, without)))(params)
    assert loss == plain_loss
    router, plain = (np.asarray(g["blocks"]["experts"]["router"]["kernel"]) for g in (grads, plain_grads))
    assert np.abs(router - plain).max() > 1e-3 * np.abs(plain).max()

    def penalties(params: Any) -> jax.Array:
        scores: Any = GPT(config).apply({"params": params}, x, x, method="scores")[0]
        return scores.routing.penalty_B.mean()

    expected = np.asarray(jax.jit(jax.grad(penalties))(params)["blocks"]["experts"]["router"]["kernel"])
    np.testing.assert_allclose(router - plain, expected, rtol=1e-3, atol=1e-6)


def test_drops_depend_on_own_row() -> None:
    """Which tokens of a row are dropped depends only on that row."""
    p, h = weights(CAPPED), hidden(4)
    apply: Any = jax.jit(partial(Experts(CAPPED, jnp.float32).apply, {"params": p}, drops=True))
    y, routing = apply(h, 0)
    for i in range(4):
        alone, of_row = apply(h[i : i + 1], 0)
        np.testing.assert_allclose(alone[0], y[i], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(of_row.penalty_B[0], routing.penalty_B[i], rtol=1e-6)
    first, second = apply(h[:2], 0)[1], apply(h[2:], 0)[1]
    assert first.dropped + second.dropped == routing.dropped > 0


def test_first_choices_come_first() -> None:
    """First choices of late positions get places before second choices of early ones."""
    chosen = jnp.asarray([[0, 2], [1, 2], [2, 0], [2, 1]])
    #        expert 2 is the first choice of positions 2 and 3, and then takes no more
    assert assign_places(chosen, experts=3, places=2).tolist() == [[0, 6], [2, 6], [4, 1], [5, 3]]


def test_priority_of_positions_is_causal() -> None:
    """With places by position no output depends on later tokens; with first choices first some do."""
    p, h = weights(CAPPED), hidden(8)
    later = np.concatenate([h[:, :6], np.random.default_rng(5).normal(size=h[:, 6:].shape)], axis=1)
    for priority in ("position", "choice"):
        config = dataclasses.replace(CAPPED, expert_priority=priority)
        (before, routing), (after, _) = (applied(config, p, x.astype(np.float32)) for x in (h, later))
        assert routing.dropped > 0
        is_same = np.allclose(before[:, :6], after[:, :6], rtol=1e-5, atol=1e-6)
        assert is_same == (priority == "position")
    assert assign_places(jnp.asarray([[0, 2], [1, 2], [2, 0]]), 3, 2, "position").tolist() == [[0, 4], [2, 5], [6, 1]]


def test_balance_loss_of_first_choices() -> None:
    """GShard's auxiliary loss: mean over experts of first choices per token times mean probability, times E squared."""
    config = dataclasses.replace(SMALL, N=1, balance_loss=1.0, router_z_loss=0.0, balance_choices="first")
    p, h = weights(config), hidden(1)
    logits = h[0].astype(np.float64) @ p["router"]["kernel"]
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    first = np.eye(E)[probabilities.argmax(-1)].mean(0)
    expected = (first * probabilities.mean(0)).mean() * E**2
    np.testing.assert_allclose(applied(config, p, h)[1].penalty_B[0], expected, rtol=1e-5)
    both = applied(dataclasses.replace(config, balance_choices="all"), p, h)[1]
    assert abs(both.penalty_B[0] - expected) > 0.1


def test_metrics_are_means_over_layers() -> None:
    routing = no_routing(SMALL, 1)
    assert routing is not None
    choices = jnp.asarray([[4.0, 0, 0, 0, 0], [1.0, 0, 1, 1, 1]])
    routing = routing._replace(choices_LE=choices, dropped=jnp.float32(2), entropy=jnp.float32(6))
    got = {name: float(x) for name, x in routing_metrics(routing, 3).items()}
    expected = {"expert_share_max": (1 + 0.25) / 2, "expert_share_min": 0.0, "dropped_share": 0.25, "router_entropy": 1}
    assert got == pytest.approx(expected)
    assert no_routing(dataclasses.replace(SMALL, **NONE), 1) is None


NONE: dict[str, Any] = {
    "experts": None, "experts_per_token": 1, "normalize_router": False, "balance_loss": 0.0, "router_z_loss": 0.0
}  # fmt: skip


def test_router_in_float32() -> None:
    """The router computes in float32 where the rest is bfloat16."""
    p, h = weights(SMALL), hidden()
    h16 = jnp.asarray(h, jnp.bfloat16)
    _, exact = applied(SMALL, p, h16.astype(jnp.float32))
    y, rounded = applied(SMALL, p, h16, jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded.penalty_B, exact.penalty_B)
    np.testing.assert_array_equal(rounded.choices_LE, exact.choices_LE)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_cached_logits(every: int) -> None:
    """Decoding with a cache gives the logits of the whole sequence.

    Nothing is dropped while text is generated, so the model without a capacity gives them.
    """
    config = dataclasses.replace(CAPPED, N=4, experts_every=every)
    x = np.random.default_rng(3).integers(0, 31, (2, 8))
    params: Any = jax.jit(GPT(config).init)(jax.random.key(0), x, x)["params"]
    params = jax.tree.map(lambda leaf: leaf + 0.2 * np.random.default_rng(4).normal(size=leaf.shape), params)
    whole = dataclasses.replace(config, expert_capacity=None)
    apply: Any = jax.jit(partial(GPT(config, drops=False).apply, {"params": params}, method="logits"))
    of_whole: Any = jax.jit(partial(GPT(whole).apply, {"params": params}, method="logits"))
    logits, cache = apply(x[:, :3], init_cache(config, 2, 8, jnp.float32), 0)
    for position in range(3, 7):
        expected, _ = of_whole(x, last=position - 1)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
        logits, cache = apply(x[:, position : position + 1], cache, position)


def test_only_every_second_layer_has_experts() -> None:
    config = dataclasses.replace(SMALL, N=4, experts_every=2)
    x = jnp.zeros((1, 4), int)
    blocks: Any = jax.eval_shape(GPT(config).init, jax.random.key(0), x, x)["params"]["blocks"]
    assert set(blocks) == {"layer_0", "layer_1"}
    assert "experts" not in blocks["layer_0"] and "mlp_in" not in blocks["layer_1"]
    assert blocks["layer_0"]["mlp_in"]["kernel"].shape == (2, 6, 7)
    assert blocks["layer_1"]["experts"]["mlp_in"]["kernel"].shape == (2, E, 6, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 1}, "experts_per_token 2 must be at most experts 1"),
        ({"experts": 0}, "experts must be at least 1, at most 2147483647, got 0"),
        ({"experts": None}, "experts_per_token 2 needs experts"),
        ({"experts_per_token": 1}, "normalize_router: true with experts_per_token 1"),
        ({"experts_every": 3}, "N 2 must be a multiple of experts_every 3"),
        ({"experts_every": 2, "windows": (0, 3)}, "experts_every 2 needs one window"),
        ({"expert_capacity": 0.0}, "expert_capacity must be more than 0"),
        ({"balance_loss": -1.0}, "balance_loss must be zero or more"),
        ({"activation": "clamped_swiglu"}, "activation: clamped_swiglu needs gated: true"),
        (
            {"parametrization": "mup", "mup_base_width": 4, "tied": False, "attention_scale": "linear"},
            "experts need parametrization: standard",
        ),
    ],
    ids=str,
)
def test_contradicting_keys_are_refused(change: dict[str, Any], message: str) -> None:
    """Keys that do not fit together are refused by name."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_capacity_of_a_family() -> None:
    config = dataclasses.replace(SMALL, **{**FAMILIES["mixtral"], "head_dim": 4, "expert_capacity": 1.25})
    assert [capacity_of(config, positions) for positions in (1, 3, 1024)] == [1, 1, math.ceil(1.25 * 1024 * 2 / 8)]
