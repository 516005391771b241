"""Models whose layers have linear attention, alone or beside attention."""

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.base.errors import UserError
from zero.exchange.architecture_table import architecture_of
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.gpt import GPT, init_cache, variable_shapes
from zero.models.linear_attention import LinearAttention, linear_attention
from zero.models.mixer import LayerContext

SIZES: dict[str, Any] = {
    **FAMILIES["qwen2"],
    "embedding_dim": 12,
    "vocab_size": 31,
    "num_head": 4,
    "kv_heads": 2,
    "head_dim": 6,
    "mlp_dim": 16,
    "block_size": 32,
    "dropout": 0.0,
    "N": 2,
    "mixers": ("linear", "attention"),
}
ROWS, POSITIONS = 2, 11
STARTS = np.asarray([[0] * 4 + [4] * 7, [0] * 9 + [9] * 2])


def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 31, (ROWS, POSITIONS)), jnp.int32)


@pytest.fixture(scope="module")
def model() -> tuple[GPT, Any]:
    """Weights far from their start, so that each of them matters."""
    gpt = GPT(GPTConfig(**SIZES))
    rng = np.random.default_rng(1)
    shapes = variable_shapes(gpt.config)["params"]
    return gpt, {"params": jax.tree.map(lambda leaf: rng.normal(0, 0.4, leaf.shape).astype(np.float32), shapes)}


def weighted(q_TK: Any, k_TK: Any, v_TK: Any, starts_T: Any, epsilon: float) -> Any:
    """Equation 9 of arXiv 2006.16236 for one head, with the matrix of all weights."""
    number = np.arange(len(q_TK))
    sees = (number[:, None] >= number) & (starts_T[:, None] == starts_T)
    weights = np.where(sees, q_TK @ k_TK.T, 0)
    return weights @ v_TK / (weights.sum(1, keepdims=True) + epsilon)


@pytest.mark.parametrize("features", ["elu", "relu"])
def test_outputs_are_those_of_the_formula(features: str) -> None:
    """With two documents in a row, and heads of queries that share keys."""
    config = GPTConfig(
        **SIZES | {"mixers": ("linear",), "positions": "none", "linear_features": features, "linear_epsilon": 0.1}
    )
    rng = np.random.default_rng(2)
    shapes = variable_shapes(config)["params"]["blocks"]
    names = ("query", "key", "value", "attention_out")
    p = {name: jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape[1:]), shapes[name]) for name in names}
    h = rng.normal(size=(ROWS, POSITIONS, config.embedding_dim))
    of = {"elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))), "relu": lambda x: np.maximum(x, 0)}[
        features
    ]
    expected = []
    for row, starts in zip(h, STARTS, strict=True):
        q, k, v = ((row @ p[name]["kernel"] + p[name]["bias"]).reshape(POSITIONS, -1, 6) for name in names[:3])
        heads = [weighted(of(q[:, i]), of(k[:, i // 2]), v[:, i // 2], starts, 0.1) for i in range(4)]
        expected.append(np.concatenate(heads, axis=1) @ p["attention_out"]["kernel"])
    site = LayerContext(0, 0, 0, jnp.asarray(STARTS), None, None)
    found, _ = LinearAttention(config, jnp.float32).apply({"params": p}, h.astype(np.float32), None, site)
    np.testing.assert_allclose(found, np.stack(expected), atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunks_change_nothing(chunk: int) -> None:
    """Documents that begin within a chunk, at its beginning, and a state from before the row."""
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.uniform(size=(ROWS, POSITIONS, 3, 4)), jnp.float32) for _ in range(3))
    state = jnp.asarray(rng.uniform(size=(ROWS, 3, 4, 4)), jnp.float32)
    found, last = linear_attention(q, k, v, state, chunk=chunk)
    keys = jnp.einsum("bshk,bshv->bshkv", k, v)
    states = state[:, None] + jnp.cumsum(keys, axis=1)
    np.testing.assert_allclose(found, jnp.einsum("bthk,bthkv->bthv", q, states), rtol=1e-5)
    np.testing.assert_allclose(last, states[:, -1], rtol=1e-5)
    of_documents, _ = linear_attention(q, k, v, None, jnp.asarray(STARTS), chunk)
    for line, bounds in enumerate([(0, 4, 11), (0, 9, 11)]):
        for first, end in pairwise(bounds):
            own = [x[line : line + 1, first:end] for x in (q, k, v)]
            alone, _ = linear_attention(own[0], own[1], own[2])
            np.testing.assert_allclose(of_documents[line, first:end], alone[0], rtol=1e-5)


def test_a_cache_continues_a_row(model: tuple[GPT, Any]) -> None:
    """A prompt in a wider prefill, then a token at a time, gives the logits of whole rows."""
    gpt, variables = model
    read = 5
    cache: Any = init_cache(gpt.config, ROWS, POSITIONS, jnp.float32, known=read)
    prefill = jnp.where(jnp.arange(8) < read, tokens()[:, :8], 7)
    logits, cache = gpt.apply(variables, prefill, cache, 0, last=read - 1, method="logits")
    one_token = jax.jit(partial(gpt.apply, method="logits"))
    whole = jax.jit(lambda last: gpt.apply(variables, tokens(), last=last, method="logits")[0])
    for count in range(read, POSITIONS):
        np.testing.assert_allclose(logits, whole(count - 1), atol=3e-5)
        logits, cache = one_token(variables, tokens()[:, count : count + 1], cache, count)


@pytest.mark.parametrize(("family", "other"), [("qwen2", "attention"), ("qwen3_5", "delta")])
def test_an_export_is_refused(family: str, other: str) -> None:
    """Also in a family whose layers have other mixers."""
    mixers = ("linear", other, "attention")
    size = GPTConfig(**SIZES | FAMILIES[family] | {"mixers": mixers, "N": 3, "head_dim": 8})
    with pytest.raises(UserError, match=rf"mixers=.*this model \('linear', '{other}', 'attention'\)"):
        architecture_of(size)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mixers": ("attention",), "linear_features": "relu"}, "linear_features relu needs a layer with linear in mi"),
        ({"parametrization": "mup", "mup_base_width": 6}, "linear in mixers needs parametrization: standard, got mup"),
        ({"linear_features": "cosine"}, "linear_features must be one of elu, relu, squared_relu"),
    ],
)
def test_impossible_models_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**SIZES | keys)
