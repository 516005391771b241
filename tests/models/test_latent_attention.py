"""Latent attention against the formulas of its paper in float64, and its stored form against the whole one."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.models.adapters import Adapters
from zero.models.config import GPTConfig
from zero.models.gpt import GPT, init_cache, parameter_axes, variable_shapes
from zero.models.latent_attention import LatentAttention
from zero.models.mixer import LayerContext

T = 9
SMALL = GPTConfig(
    embedding_dim=10, vocab_size=31, num_head=3, block_size=24, dropout=0.0, N=2, alibi_attn=False, positions="rotary",
    norm="rms", qkv_bias=False, out_bias=False, mlp_bias=False, head_dim=9, rotary_dim=4, rotary_interleaved=True,
    latent_dim=8, query_latent_dim=6, value_dim=7, attention_scale=0.4,
)  # fmt: skip
CONFIGS = {
    "deepseek_v3": SMALL,
    "direct queries": dataclasses.replace(
        SMALL, query_latent_dim=None, rotary_interleaved=False, attention_scale="sqrt"
    ),
    "equal widths": dataclasses.replace(SMALL, value_dim=None, rotary_scaling=("yarn", 4.0, 4.0, 2.0, 1.0, 1.3)),
}
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def weights(config: GPTConfig) -> Any:
    rng = np.random.default_rng(0)
    shapes = variable_shapes(config)["params"]
    return jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape).astype(np.float32), shapes)


def by_hand(config: GPTConfig, p: Any, h_TD: Any) -> Any:
    """Attention of one row, one head after the other, as the paper writes it, with jax's arithmetic alone."""
    positions = np.arange(len(h_TD))[:, None]
    pairs = config.rotated // 2
    frequencies = config.rotary_base ** -(np.arange(pairs) / pairs)
    length = 1.0
    if config.rotary_scaling is not None:  # with these numbers both pairs are stretched, or none
        _, factor, original, fast, slow, length = config.rotary_scaling
        ends = [pairs * np.log(original / (turns * 2 * np.pi)) / np.log(config.rotary_base) for turns in (fast, slow)]
        first, last = max(np.floor(ends[0]), 0), min(np.ceil(ends[1]), 2 * pairs - 1)
        ramp = np.clip((np.arange(pairs) - first) / max(last - first, 0.001), 0, 1)
        frequencies = frequencies * (1 - ramp + ramp / factor)
    cos, sin = np.cos(positions * frequencies) * length, np.sin(positions * frequencies) * length

    def turned(x_TP: Any) -> Any:
        if config.rotary_interleaved:
            pairs_T2P = x_TP[:, 0::2], x_TP[:, 1::2]
        else:
            pairs_T2P = x_TP[:, :pairs], x_TP[:, pairs:]
        one, other = pairs_T2P
        return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], axis=1)

    def norm(x: Any, scale: Any) -> Any:
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale[None]

    plain = config.head_width - config.rotated
    of_queries = h_TD
    if config.query_latent_dim is not None:
        of_queries = norm(h_TD @ p["query_latent"]["kernel"], p["query_latent_norm"]["scale"])
    queries = of_queries @ p["query"]["kernel"]
    joint = h_TD @ p["latent"]["kernel"]
    latent = norm(joint[:, : config.latent_dim], p["latent_norm"]["scale"])
    shared_key = turned(joint[:, config.latent_dim :])
    keys_and_values = latent @ p["key_value"]["kernel"]
    factor = config.head_width**-0.5 if config.attention_scale == "sqrt" else config.attention_scale
    outputs = []
    for head in range(config.num_head):
        q = queries[:, head * config.head_width :][:, : config.head_width]
        q = jnp.concatenate([q[:, :plain], turned(q[:, plain:])], axis=1)
        kv = keys_and_values[:, head * (plain + config.value_width) :][:, : plain + config.value_width]
        k = jnp.concatenate([kv[:, :plain], shared_key], axis=1)
        scores = jnp.where(np.tri(len(h_TD), dtype=bool), factor * q @ k.T, -jnp.inf)
        outputs.append(jax.nn.softmax(scores) @ kv[:, plain:])
    return jnp.concatenate(outputs, axis=1) @ p["attention_out"]["kernel"]


@EACH
def test_outputs_and_gradients_equal_the_formula(config: GPTConfig) -> None:
    p = jax.tree.map(lambda x: x[0], weights(config)["blocks"])
    p = {name: tree for name, tree in p.items() if not name.startswith(("mlp_", "norm_"))}
    rng = np.random.default_rng(1)
    h, out = (rng.normal(size=(1, T, config.embedding_dim)).astype(np.float32) for _ in range(2))
    site = LayerContext(0, 0, 0, None, None, None)

    def loss(p: Any, h: Any) -> Any:
        y, _ = LatentAttention(config, jnp.float32).apply({"params": p}, h, None, site)
        return (y * out).sum(), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(p, h)
    with jax.enable_x64(True):

        def formula(p: Any, h: Any) -> Any:
            y = by_hand(config, p, h[0])[None]
            return (y * out).sum(), y

        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (p, h))
        (_, expected), expected_grads = jax.jit(jax.value_and_grad(formula, (0, 1), has_aux=True))(*wide)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    for (path, g), x in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(g, x, rtol=1e-4, atol=1e-5 * np.abs(x).max(), err_msg=str(path))


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "blocks": {"blockwise_from": 2},
    "adapters": {"adapters": Adapters(2, 4.0, has_magnitudes=True)},
}


@pytest.mark.parametrize("form", FORMS)
def test_stored_form_equals_whole_form(form: str) -> None:
    """Scores of whole rows are those of a prefill and of one position after the other; the latent alone is stored."""
    config = SMALL
    model = GPT(config, **FORMS[form])
    rng = np.random.default_rng(2)
    params = weights(config)
    if model.adapters is not None:
        shapes = model.adapters.shapes(params, parameter_axes(config))
        extra = jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape).astype(np.float32), shapes)
        blocks = {name: {**tree, **extra["blocks"].get(name, {})} for name, tree in params["blocks"].items()}
        params = {**params, "blocks": blocks}
    tokens = rng.integers(0, 31, (2, T))
    hidden: Any = jax.jit(partial(model.apply, {"params": params}, method="hidden"))
    whole, _ = hidden(tokens, None)
    cache = init_cache(config, 2, T + 1, jnp.float32)
    assert [x.shape for x in jax.tree.leaves(cache)] == [(2, 2, T + 1, 8 + 4)]
    first, cache = hidden(tokens[:, :4], None, cache, 0)
    np.testing.assert_allclose(first, whole[:, :4], rtol=1e-4, atol=1e-4)
    for position in range(4, T):
        one, cache = hidden(tokens[:, position : position + 1], None, cache, position)
        np.testing.assert_allclose(one[:, 0], whole[:, position], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 1}, "latent_dim needs kv_heads: 3, got 1"),
        ({"windows": (4,)}, r"latent_dim needs windows: \(0,\), got \(4,\)"),
        ({"qkv_bias": True}, "latent_dim needs qkv_bias: false, got true"),
        ({"qk_norm": True}, "latent_dim needs qk_norm: false, got true"),
        ({"local_rotary_base": 100.0}, "latent_dim needs local_rotary_base: none, got 100.0"),
        ({"extra_logit": "learned"}, "latent_dim needs extra_logit: false, got learned"),
        ({"positions": "none", "rotary_dim": None}, "latent_dim needs positions: rotary, got none"),
        ({"rotary_dim": None, "head_dim": 8}, "latent_dim needs a rotary_dim below head_dim 8, got None"),
        ({"rotary_dim": 3}, "rotary_dim must be even and at most the 9 of a head, got 3"),
        ({"value_dim": 10}, "value_dim 10 must be at most head_dim 9"),
        ({"latent_dim": None}, "query_latent_dim 6 needs latent_dim"),
        (
            {"parametrization": "mup", "mup_base_width": 4, "tied": False, "attention_scale": "linear"},
            "latent_dim needs parametrization: standard, got mup",
        ),
    ],
    ids=str,
)
def test_contradicting_keys_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)
