"""Models composed of every part against one written out in numpy; families are compared with transformers elsewhere."""

import dataclasses
import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.models.attention.scores import alibi_slopes
from zero.models.config import STACK, GPTConfig
from zero.models.elements import product
from zero.models.families import FAMILIES
from zero.models.gpt import GPT, init_cache

BASE = GPTConfig(42, 101, 6, 24, 0.0, 2, vocab_chunks=3, head_dim=10, kv_heads=2, mlp_dim=31, alibi_attn=False)
COMPOSED: dict[str, dict[str, Any]] = {
    "dense_lm": {**FAMILIES["dense_lm"], "kv_heads": 6},
    "norms after, no gains": {"norm_place": "after", "norm_gains": False, "activation": "relu", "windows": (3, 0)},
    "norms on both sides": {"norm_place": "both", "qk_norm": True, "activation": "selu", "attention_scale": "linear"},
    "offset gains": {"norm": "rms_offset", "activation": "squared_relu", "attention_scale": "none", "qkv_bias": False},
    "rms, no gains": {"norm": "rms", "norm_gains": False, "positions": "none", "attention_cap": 0.5, "logit_cap": 0.3},
    "scaled embedding": {"scale_embedding": True, "parallel_residual": True, "activation": "gelu_exact", "tied": False},
    "ALiBi": {"alibi_attn": True, "gated": True, "activation": "silu", "windows": (4,), "out_bias": False},
    "partial rotary": {"positions": "rotary", "rotary_fraction": 0.4, "rotary_base": 30.0, "extra_logit": True}
    | {"activation": "xielu"},
}
EACH = pytest.mark.parametrize("changes", COMPOSED.values(), ids=COMPOSED)
CACHED = ("dense_lm", "ALiBi", "partial rotary")  # whose positions count when a token is decoded


def random_params(config: GPTConfig) -> Any:
    """Not as they start: every leaf random and large enough to matter."""
    shape = partial(GPT(config).init, method="hidden")
    shapes = jax.eval_shape(shape, jax.random.key(0), jnp.zeros((1, 2), int), None)["params"]
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape, scale=0.3).astype(np.float32), shapes)


def norm_by_hand(config: GPTConfig, x: np.ndarray, p: Any) -> np.ndarray:
    centered = x - x.mean(-1, keepdims=True) if config.norm == "layer" else x
    normed = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + config.norm_epsilon)
    if not config.norm_gains:
        return normed
    return normed * (p["scale"] + (config.norm == "rms_offset")) + p.get("bias", 0)


def activation_by_hand(kind: str, x: np.ndarray, p: Any) -> np.ndarray:
    match kind:
        case "xielu":
            positive, negative = (np.log1p(np.exp(p[name])) for name in ("positive", "negative"))
            return np.where(x > 0, positive * x**2, (0.5 + negative) * (np.exp(x) - 1 - x)) + 0.5 * x
        case "gelu":
            return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case "gelu_exact":
            return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        case "relu":
            return np.maximum(x, 0)
        case "squared_relu":
            return np.maximum(x, 0) ** 2
        case "selu":
            return 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * (np.exp(x) - 1))
    return x / (1 + np.exp(-x))


def rotated_by_hand(config: GPTConfig, x_TK: np.ndarray) -> np.ndarray:
    width = int(config.rotary_fraction * config.head_width)
    out = x_TK.copy()
    for position in range(len(x_TK)):
        for i in range(width // 2):
            angle = position * config.rotary_base ** (-2 * i / width)
            a, b = x_TK[position, i], x_TK[position, i + width // 2]
            out[position, i] = a * math.cos(angle) - b * math.sin(angle)
            out[position, i + width // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention_by_hand(config: GPTConfig, h_TD: np.ndarray, p: Any, window: int) -> np.ndarray:
    length, width = len(h_TD), config.head_width

    def heads(name: str, norm: str) -> np.ndarray:
        x_THK = (h_TD @ p[name]["kernel"] + p[name].get("bias", 0)).reshape(length, -1, width)
        return norm_by_hand(config, x_THK, p.get(norm)) if config.qk_norm and norm else x_THK

    q_THK, k_TGK, v_TGK = heads("query", "query_norm"), heads("key", "key_norm"), heads("value", "")
    out = []
    for head in range(config.num_head):
        group = head * k_TGK.shape[1] // config.num_head
        q, k, v = q_THK[:, head], k_TGK[:, group], v_TGK[:, group]
        if config.positions == "rotary":
            q, k = rotated_by_hand(config, q), rotated_by_hand(config, k)
        scores = q @ k.T / {"sqrt": math.sqrt(width), "linear": width, "none": 1}[str(config.attention_scale)]
        if config.attention_cap:
            scores = config.attention_cap * np.tanh(scores / config.attention_cap)
        distance = np.arange(length)[:, None] - np.arange(length)[None, :]
        if config.alibi_attn:
            scores = scores - float(alibi_slopes(config.num_head)[head]) * distance
        if config.positions == "t5":
            far = 16 + (np.log(np.maximum(distance, 16) / 16) / np.log(8) * 16).astype(int)
            bucket = np.where(distance < 16, np.maximum(distance, 0), np.minimum(far, 31))
            scores = scores + p["relative_bias"][bucket, head]
        weights = np.exp(scores) * ((distance >= 0) & ((distance < window) | (window == 0)))
        out.append(weights / (weights.sum(-1, keepdims=True) + config.extra_logit) @ v)
    return np.concatenate(out, -1) @ p["attention_out"]["kernel"] + p["attention_out"].get("bias", 0)


def logits_by_hand(config: GPTConfig, params: Any, row: np.ndarray) -> np.ndarray:
    """`(positions, vocabulary)`, in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    table, head = (
        p[name]["table"].reshape(-1, config.embedding_dim)[: config.vocab_size]
        for name in ("vocabulary", "vocabulary" if config.tied else "head")
    )
    x = table[row] * (math.sqrt(config.embedding_dim) if config.scale_embedding else 1)
    if config.has_learned_positions:
        x = x + p["positions"]["table"][: len(row)]

    def normed(place: str, name: str, layer: Any, x: np.ndarray) -> np.ndarray:
        suffix = "_after" if place == "after" else ""
        return norm_by_hand(config, x, layer.get(name + suffix)) if config.norm_place in (place, "both") else x

    def mlp(layer: Any, x: np.ndarray) -> np.ndarray:
        def dense(name: str, x: np.ndarray) -> np.ndarray:
            return x @ layer[name]["kernel"] + layer[name].get("bias", 0)

        h, gate = dense("mlp_in", x), dense("mlp_gate", x) if config.gated else None
        h = (
            activation_by_hand(config.activation, h, layer.get("activation"))
            if gate is None
            else activation_by_hand(config.activation, gate, layer.get("activation")) * h
        )
        return dense("mlp_out", h)

    for i in range(config.N):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], p[STACK])
        window = config.windows[i % len(config.windows)]
        a = attention_by_hand(config, normed("before", "norm_attention", layer, x), layer, window)
        a = normed("after", "norm_attention", layer, a)
        h = mlp(layer, normed("before", "norm_mlp", layer, x if config.parallel_residual else x + a))
        x = x + a + normed("after", "norm_mlp", layer, h)
    logits = norm_by_hand(config, x, p.get("norm")) @ head.T
    if config.scale_output:
        logits = logits / math.sqrt(config.embedding_dim)
    return config.logit_cap * np.tanh(logits / config.logit_cap) if config.logit_cap else logits


def by_hand(config: GPTConfig) -> tuple[Any, np.ndarray, np.ndarray]:
    """The compiled functions of a model with random parameters, two rows, and their logits as written by hand."""
    params = random_params(config)
    rows = np.random.default_rng(1).integers(0, config.vocab_size, (2, 24), np.int32)
    expected = np.stack([logits_by_hand(config, params, row) for row in rows])
    return partial(jax.jit(GPT(config).apply, static_argnames="method"), {"params": params}), rows, expected


@EACH
def test_equals_model_written_by_hand(changes: dict[str, Any]) -> None:
    """Losses equal those of a model written by hand."""
    apply, rows, expected = by_hand(dataclasses.replace(BASE, **changes))
    targets = np.roll(rows, 3)
    losses = np.log(np.exp(expected).sum(-1)) - np.take_along_axis(expected, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(apply(rows, targets), losses, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CACHED else pytest.mark.wide) for name in COMPOSED]
)
def test_cached_logits_equal_model_written_by_hand(name: str) -> None:
    config = dataclasses.replace(BASE, **COMPOSED[name])
    apply, rows, expected = by_hand(config)
    logits, cache = apply(rows[:, :9], init_cache(config, 2, 24, jnp.float32), 0, method="logits")
    for position in range(9, 24):
        np.testing.assert_allclose(logits, expected[:, position - 1], rtol=1e-4, atol=1e-4)
        logits, cache = apply(rows[:, position : position + 1], cache, position, method="logits")


def test_z_loss_changes_only_the_gradient() -> None:
    """The z-loss changes the gradient, but not the loss that is reported."""
    config = dataclasses.replace(BASE, tied=False, qkv_bias=False)
    params = random_params(config)
    rows = np.random.default_rng(1).integers(0, config.vocab_size, (2, 24), np.int32)

    def loss(params: Any, z_loss: float) -> jax.Array:
        model = GPT(dataclasses.replace(config, z_loss=z_loss))
        losses: Any = model.apply({"params": params}, rows, np.roll(rows, 3))
        return losses.sum()

    def squares(params: Any) -> jax.Array:
        """Of the log-sum-exp of the logits."""
        x, _ = GPT(config).apply({"params": params}, rows, None, method="hidden")
        logits_BTV = x @ params["head"]["table"].reshape(-1, 42)[:101].T
        return jnp.sum(jax.nn.logsumexp(logits_BTV, axis=-1) ** 2)

    (plain, plain_grads), (value, grads) = (
        jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, z) for z in (0.0, 0.1)
    )
    assert value == plain
    expected = jax.tree.map(lambda a, b: a + 0.1 * b, plain_grads, jax.jit(jax.grad(squares))(params))
    for x, y, z in zip(*map(jax.tree.leaves, (grads, expected, plain_grads)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4 * np.abs(y).max())
        assert np.abs(z - y).max() > 1e-3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_heads": 4}, "num_head 6 does not divide into kv_heads 4"),
        ({"positions": "relative"}, "positions must be one of learned, rotary, t5, sinusoidal, none, got 'relative'"),
        ({"alibi_attn": True, "positions": "t5"}, "positions 't5' need alibi_attn: false"),
        ({"positions": "rotary", "head_dim": 7}, "are not even"),
        ({"rotary_scaling": (8.0, 1.0)}, "rotary_scaling must be"),
        ({"windows": (0, 2, 3)}, "N 2 must be a multiple of the 3 layers of windows"),
        ({"windows": ()}, "windows must be a list"),
        ({"attention_cap": 0.0}, "attention_cap must be more than 0"),
        ({"z_loss": -1.0}, "z_loss must be zero or more"),
        ({"mlp_dim": 0}, "mlp_dim must be at least 1"),
    ],
    ids=str,
)
def test_impossible_choices_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(BASE, **change)


def test_gradients_of_product() -> None:
    x, w, weights = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((2, 6, 5), (5, 7), (2, 6, 7)))
    )
    out, pull_back = jax.vjp(product, x, w)
    expected, plain_pull_back = jax.vjp(lambda x, w: jnp.tensordot(x, w, 1), x, w)
    np.testing.assert_array_equal(out, expected)
    for got, plain in zip(pull_back(weights), plain_pull_back(weights), strict=True):
        np.testing.assert_allclose(got, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.optimized
def test_product_on_cpu_contracts_rows() -> None:
    """XLA's library for CPU has products whose left operand is contracted along its rows."""
    x, w = jnp.ones((2, 64, 32)), jnp.ones((32, 48))
    compiled = jax.jit(jax.grad(lambda w, x: (product(x, w) ** 2).sum())).lower(w, x).compile()
    found = re.findall(
        r"f32\[32,48\]\S* dot\(.*?lhs_contracting_dims={(\d)}, rhs_contracting_dims={(\d)}", str(compiled.as_text())
    )
    assert found == [("1", "0")]
