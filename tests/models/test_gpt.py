"""The transformer against one written out in numpy, and what must hold of it at any size."""

import dataclasses
import math
import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.config.files import conf_directory
from zero.job.sizes import load_sizes
from zero.models.attention.scores import alibi_slopes
from zero.models.config import GPTConfig
from zero.models.elements import dropout
from zero.models.gpt import GPT, init_cache

SIZES_TEXT = "".join(
    path.read_text() for path in (conf_directory() / "model_config.yaml", *conf_directory().glob("models/*"))
)
SIZES = load_sizes()
ODD = GPTConfig(embedding_dim=42, vocab_size=101, num_head=3, block_size=12, dropout=0.0, N=2, vocab_chunks=3)
LEARNED = dataclasses.replace(ODD, alibi_attn=False, vocab_chunks=1)
NORMED = dataclasses.replace(ODD, embedding_norm=True, norm_epsilon=1e-2)  # one that shows
# What transformers counts in models of their published configurations; Lingvo's, in its own comments.
PUBLISHED = {
    "gpt_neo_2_7b": 2_651_307_520,
    "pythia_1b": 1_011_781_632,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_5_9b": 8_953_803_264,
    "smollm3_3b": 3_075_098_624,
    "starcoder2_3b": 3_030_371_328,
    "starcoder2_7b": 7_173_923_840,
    "olmo2_7b": 7_298_617_344,
    "olmo3_7b": 7_298_011_136,
    "stablelm_3b": 2_795_443_200,
    "phi4": 14_659_507_200,
    "granite3_2b": 2_533_531_648,
    "gemma_2b": 2_506_172_416,
    "gemma3_1b": 999_885_952,
    "mistral_7b": 7_241_732_096,
    "qwen3_8b": 8_190_735_360,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_next_80b_a3b": 79_674_391_296,
    "qwen3_5_35b_a3b": 34_660_610_688,
    "qwen1_5_moe_a2_7b": 14_315_784_192,
    "glm4_5_air": 106_852_245_504,
    "glm4_5": 352_797_814_784,
    "deepseek_v3": 671_026_404_352,
    "kimi_k2": 1_026_408_209_408,
    "ernie4_5_0_3b": 360_748_032,
    "glm4_9b": 9_400_279_040,
    "olmoe_1b_7b": 6_919_161_856,
    "granite3_1b_a400m": 1_334_628_352,
    "seed_oss_36b": 36_151_104_512,
    "apertus_8b": 8_053_338_176,
    "apertus_70b": 70_599_864_480,
    "ministral_8b": 8_019_808_256,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "gemma2_9b": 9_241_705_984,
    "dense_lm_137b": 137_702_416_384,
}
# Of other widths or forms than the formulas below: only counted.
COUNTED = {"test_experts", "mu_transformer", "transformer_vq"}
COUNTED |= {f"gpt_neo_{size}" for size in ("125m", "350m", "760m", "1_3b", "6_7b", "13b")}
COUNTED |= {f"dense_lm_{size}" for size in ("8b", "13b", "41b", "162b", "175b", "1t")}

# By default each kind of layer; the others are numbers in a table.
FIRST = {"test", "test_experts", "test_vq", "bytes_mup", "transformer_vq", "gshard_105b", "llama3_8b", "gemma2_9b"}
FIRST |= {"deepseek_v3", "qwen3_next_80b_a3b", "gpt_oss_20b", "glm4_5"}
ALL = pytest.mark.parametrize("config", [ODD, LEARNED, NORMED], ids=["alibi", "learned", "embedding_norm"])


def shapes(config: GPTConfig) -> Any:
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    return jax.eval_shape(partial(GPT(config).init, method="hidden"), jax.random.key(0), tokens, None)["params"]


@cache
def params(config: GPTConfig) -> Any:
    """Not as they start: every leaf random and large enough to matter."""
    leaves, treedef = jax.tree.flatten(shapes(config))
    rng = np.random.default_rng(0)
    values = [rng.normal(size=leaf.shape, scale=0.3).astype(np.float32) for leaf in leaves]
    return jax.tree.unflatten(treedef, values)


def tokens(config: GPTConfig, rows: int = 2, length: int = 12) -> np.ndarray:
    return np.random.default_rng(1).integers(0, config.vocab_size, (rows, length), np.int32)


@partial(jax.jit, static_argnums=0, static_argnames="method")
def apply(config: GPTConfig, params: Any, *args: Any, method: str | None = None) -> Any:
    return GPT(config).apply({"params": params}, *args, method=method)


@cache
def by_hand(config: GPTConfig) -> np.ndarray:
    """Logits `(rows, positions, vocabulary)` in float64, one row, layer and head after the other."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params(config))

    def norm(x: np.ndarray, p: Any) -> np.ndarray:
        centered = x - x.mean(-1, keepdims=True)
        return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + config.norm_epsilon) * p["scale"] + p["bias"]

    table = p["vocabulary"]["table"].reshape(-1, config.embedding_dim)[: config.vocab_size]
    width = config.embedding_dim // config.num_head
    logits = []
    for row in tokens(config):
        x = table[row]
        if not config.alibi_attn:
            x = x + p["positions"]["table"][: len(row)]
        if config.embedding_norm:
            x = norm(x, p["embedding_norm"])
        for i in range(config.N):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], p["blocks"])
            h = norm(x, layer["norm_attention"])
            q, k, v = (h @ layer[n]["kernel"] + layer[n]["bias"] for n in ("query", "key", "value"))
            heads = []
            for head in range(config.num_head):
                part = slice(head * width, (head + 1) * width)
                scores = q[:, part] @ k[:, part].T / math.sqrt(width)
                if config.alibi_attn:
                    distance = np.arange(len(row))[:, None] - np.arange(len(row))[None, :]
                    scores = scores - float(alibi_slopes(config.num_head)[head]) * distance
                weights = np.exp(scores - scores.max(-1, keepdims=True)) * np.tri(len(row))
                heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, part])
            x = x + np.concatenate(heads, -1) @ layer["attention_out"]["kernel"] + layer["attention_out"]["bias"]
            h = norm(x, layer["norm_mlp"]) @ layer["mlp_in"]["kernel"] + layer["mlp_in"]["bias"]
            h = h / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
            x = x + h @ layer["mlp_out"]["kernel"] + layer["mlp_out"]["bias"]
        logits.append(norm(x, p["norm"]) @ table.T)
    return np.stack(logits)


@ALL
def test_equals_transformer_written_by_hand(config: GPTConfig) -> None:
    """Losses are those of a transformer written by hand."""
    x = tokens(config)
    targets = np.roll(x, 3)
    expected = by_hand(config)
    largest = expected.max(-1, keepdims=True)
    lse = (largest + np.log(np.exp(expected - largest).sum(-1, keepdims=True)))[..., 0]
    losses = apply(config, params(config), x, targets)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, lse - np.take_along_axis(expected, targets[..., None], -1)[..., 0], rtol=1e-5)


@ALL
def test_cached_logits(config: GPTConfig) -> None:
    """Decoding with a cache gives the logits of the whole sequence."""
    x = tokens(config)
    logits, kept = apply(config, params(config), x[:, :5], init_cache(config, 2, 12, jnp.float32), 0, method="logits")
    for position in range(5, 12):
        np.testing.assert_allclose(logits, by_hand(config)[:, position - 1], rtol=1e-5, atol=1e-4)
        token = x[:, position : position + 1]
        logits, kept = apply(config, params(config), token, kept, position, method="logits")


@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=() if size in FIRST else pytest.mark.wide) for size in SIZES]
)
def test_parameter_count(size: str) -> None:
    """The parameter count is that of the comment beside the size."""
    comment = re.search(rf'^"?{size}"?: # ([0-9,]+) parameters', SIZES_TEXT, re.MULTILINE)
    assert comment is not None
    config = SIZES[size]
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes(config)))
    assert f"{count:,}" == comment[1]
    if size in COUNTED:
        return
    if size in PUBLISHED:
        assert count == PUBLISHED[size]
        return
    if size == "gshard_105b":  # in half of the layers, with a router; no biases, gains alone
        d, experts = config.embedding_dim, 128
        pair = 8 * d**2 + 8 * d**2 + experts * (8 * d**2 + d) + 4 * d
        assert count == config.N // 2 * pair + d + config.vocab_size * d
        return
    d, rows = config.embedding_dim, (2 - config.tied) * config.vocab_chunks * config.chunk_rows
    if config.layer == "gated_units":
        # Of each of two units three d x 2d matrices, queries and keys, what embeds distances, two biases and a norm.
        k = config.key_width
        assert count == config.N * 2 * (6 * d**2 + 2 * d * k + k**2 + 2 * k + d) + d + rows * d
        return
    # Four d x d and two d x 4d matrices with their biases and two norms per layer; one norm and the tables.
    assert count == config.N * (12 * d**2 + 13 * d) + 2 * d + rows * d


def test_sizes_of_the_first_gpts() -> None:
    published = {"580m": (1536, 18, 12), "760m": (1536, 24, 12), "1_1b": (1536, 36, 12), "1_3b": (2048, 24, 16)}
    for size, shape in published.items():
        config = SIZES[size]
        assert (config.embedding_dim, config.N, config.num_head, config.vocab_size) == (*shape, 50304)
    assert {"test", "bytes", "124m", "417m"} < set(SIZES)


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (3, [4, 8, 2]),
        # Of the reference implementation: the slopes of 8 heads, then every second one of 16.
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_alibi_slopes(heads: int, exponents: list[float]) -> None:
    np.testing.assert_allclose(alibi_slopes(heads), 2.0 ** -np.asarray(exponents), rtol=1e-7)


@ALL
def test_a_position_sees_nothing_after_it(config: GPTConfig) -> None:
    x = tokens(config)
    other = x.copy()
    other[:, 7] = (x[:, 7] + 1) % config.vocab_size
    before, after = (np.asarray(apply(config, params(config), x, None, method="hidden")[0]) for x in (x, other))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


def in_chunks(table: Any, chunks: int, vocab_size: int) -> Any:
    """The same tied table, cut into another number of chunks; padding is zero."""
    rows = -(-vocab_size // chunks)
    whole = np.asarray(table).reshape(-1, table.shape[-1])[:vocab_size]
    return np.pad(whole, ((0, rows * chunks - vocab_size), (0, 0))).reshape(chunks, rows, -1)


@cache
def loss_and_gradient(config: GPTConfig) -> Any:
    """With the table of one chunk."""
    start = params(dataclasses.replace(config, vocab_chunks=1))
    table = in_chunks(start["vocabulary"]["table"], config.vocab_chunks, config.vocab_size)
    x = tokens(config)

    def loss(params: Any) -> jax.Array:
        losses: Any = GPT(config).apply({"params": params}, x[:, :-1], x[:, 1:])
        return losses.mean()

    return jax.jit(jax.value_and_grad(loss))({**start, "vocabulary": {"table": table}})


@pytest.mark.parametrize(
    "chunks", [pytest.param(3, marks=pytest.mark.wide), 4]
)  # of 101: one and three rows of padding
def test_vocabulary_chunks(chunks: int) -> None:
    """Chunks of the vocabulary change neither loss nor gradient."""
    loss, grads = loss_and_gradient(dataclasses.replace(ODD, vocab_chunks=1))
    cut_loss, cut_grads = loss_and_gradient(dataclasses.replace(ODD, vocab_chunks=chunks))
    np.testing.assert_allclose(cut_loss, loss, rtol=1e-6)
    table, cut_table = grads["vocabulary"]["table"], cut_grads["vocabulary"]["table"]
    np.testing.assert_allclose(cut_table, in_chunks(table, chunks, 101), rtol=1e-4, atol=1e-7)
    for got, expected in zip(jax.tree.leaves(cut_grads["blocks"]), jax.tree.leaves(grads["blocks"]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(cut_table.reshape(-1, 42)[101:], 0)


@pytest.mark.parametrize("vocab_size", [257, 50257])
@pytest.mark.parametrize("chunks", [1, 6])
def test_logits_of_odd_vocabulary(vocab_size: int, chunks: int) -> None:
    """An odd vocabulary has as many logits as tokens."""
    config = dataclasses.replace(ODD, vocab_size=vocab_size, vocab_chunks=chunks)
    x = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    logits, _ = jax.eval_shape(partial(GPT(config).apply, method="logits"), {"params": shapes(config)}, x)
    assert (logits.shape, logits.dtype) == ((2, vocab_size), jnp.float32)


def test_dropout_share_and_mean() -> None:
    """Dropout drops its share and keeps the mean."""
    x = jnp.ones((2, 100, 100))
    dropped = dropout(x, 0.3, jax.random.split(jax.random.key(0), 2))
    np.testing.assert_allclose(jnp.unique(dropped), [0, 1 / 0.7], rtol=1e-6)
    np.testing.assert_allclose((dropped == 0).mean((1, 2)), 0.3, atol=0.02)
    assert dropout(x, 0.3, None) is x and dropout(x, 0.0, jax.random.split(jax.random.key(0), 2)) is x


def test_dropout_depends_on_row_key() -> None:
    """The dropout of a row depends only on the key of the row."""
    config = dataclasses.replace(ODD, dropout=0.4)
    x = tokens(config, rows=4)
    keys = jax.random.split(jax.random.key(3), 4)
    losses = np.asarray(apply(config, params(config), x, x, keys))
    order = np.array([2, 0, 3, 1])
    np.testing.assert_allclose(apply(config, params(config), x[order], x[order], keys[order]), losses[order], rtol=1e-6)
    other = np.asarray(apply(config, params(config), x, x, keys[order]))
    assert (np.abs(other - losses).max(1) > 0.01).all()


def test_dropout_sites() -> None:
    """Dropout is applied at every site and differs between sites."""
    # With all weights zero but one bias of ones, what is left of the stream are the masks of one kind of site.
    config = dataclasses.replace(ODD, dropout=0.5, vocab_chunks=1)
    keys = jax.random.split(jax.random.key(0), 2)

    def stream(site: str, layer: int) -> np.ndarray:
        p = jax.tree.map(np.zeros_like, params(config))
        p["blocks"][site]["bias"][layer] = np.arange(1, 43)
        p["norm"]["scale"][:] = 1
        return np.asarray(apply(config, p, tokens(config), keys, method="hidden")[0])

    streams = [stream(site, layer) for site in ("attention_out", "mlp_out") for layer in (0, 1)]
    dropped = [x == x.min(-1, keepdims=True) for x in streams]
    for i, mask in enumerate(dropped):
        assert abs(mask.mean() - 0.5) < 0.05
        assert all((mask != other).any(-1).all() for other in dropped[:i])


def test_dropout_rates() -> None:
    """Each kind of dropout has its own rate.

    With the other two at zero only its own masks are drawn, and they are those of the common rate.
    """
    keys, x = jax.random.split(jax.random.key(0), 2), tokens(ODD)
    zero_rates = {f"{site}_dropout": 0.0 for site in ("embedding", "attention", "residual")}

    def stream(**changes: Any) -> np.ndarray:
        config = dataclasses.replace(ODD, **{"dropout": 0.4, **changes})
        return np.asarray(apply(config, params(config), x, keys, method="hidden")[0])

    plain = stream(dropout=0.0)
    alone = [stream(**{**zero_rates, f"{site}_dropout": 0.4}) for site in ("embedding", "attention", "residual")]
    for i, one in enumerate(alone):
        assert all(np.abs(one - other).max() > 0.01 for other in (plain, *alone[:i]))
    both = stream(embedding_dropout=0.0, attention_dropout=0.4, residual_dropout=0.4, dropout=0.0)
    np.testing.assert_array_equal(both, stream())
    config = dataclasses.replace(ODD, embedding_dropout=0.4, embedding_norm=False, alibi_attn=True)
    embedded = np.asarray(apply(config, params(config), x, keys, method="embed")[0])
    assert abs((embedded == 0).mean() - 0.4) < 0.05


def test_rate_zero_is_no_dropout() -> None:
    """A rate of zero is no dropout, bit for bit."""
    x = tokens(ODD)
    keys = jax.random.split(jax.random.key(0), 2)
    np.testing.assert_array_equal(apply(ODD, params(ODD), x, x, keys), apply(ODD, params(ODD), x, x))


def test_bfloat16_is_near_float32() -> None:
    """In bfloat16 the model is near float32, and parameters and losses stay float32."""
    x = tokens(ODD)
    model = GPT(ODD, jnp.bfloat16)
    losses = jax.jit(model.apply)({"params": params(ODD)}, x, x)
    assert losses.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0), x, x))} == {
        jnp.dtype("float32")
    }
    exact = np.asarray(apply(ODD, params(ODD), x, x))
    assert 0 < np.abs(losses - exact).max() < 0.05 * exact.max()


def test_gradient_reaches_every_parameter() -> None:
    _, grads = loss_and_gradient(LEARNED)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        # A bias of all keys moves every score of a query alike, and softmax does not see it.
        if "key" not in jax.tree_util.keystr(path, simple=True, separator="/") or path[-1].key == "kernel":
            assert np.abs(grad).max() > 1e-5, path


def test_parameters_start_as_gpt_2_says() -> None:
    config = dataclasses.replace(LEARNED, embedding_dim=192, N=8, vocab_chunks=3)
    start = jax.jit(partial(GPT(config).init, method="hidden"))(jax.random.key(0), tokens(config), None)["params"]
    for path, x in jax.tree_util.tree_leaves_with_path(start):
        kind, name = path[-1].key, path[-2].key
        if kind == "scale":
            np.testing.assert_array_equal(x, 1)
        elif kind == "bias":
            np.testing.assert_array_equal(x, 0)
        else:
            expected = 0.02 / math.sqrt(2 * 8) if name in ("attention_out", "mlp_out") else 0.02
            np.testing.assert_allclose(np.std(x), expected, rtol=0.03, err_msg=str(path))
            assert abs(np.mean(x)) < expected / 20
    kernel = np.asarray(start["blocks"]["query"]["kernel"])
    table = np.asarray(start["vocabulary"]["table"])
    for stack in (kernel, table):  # neither layers nor chunks start alike
        assert (stack[0] != stack[1]).mean() > 0.99


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_head": 5}, "embedding_dim 42 .* num_head 5"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": -0.1}, "dropout"),
        ({"N": 0}, "N must be at least 1"),
        ({"vocab_chunks": 0}, "vocab_chunks must be at least 1"),
        ({"norm_epsilon": 0.0}, "norm_epsilon"),
        ({"vocab_chunks": 99}, "vocab_chunks 99 .* vocab_size 101"),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(ODD, **change)
