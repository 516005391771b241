"""The model of each family of recipes, beside its source's formulas in numpy.

The models have the choices of the recipes and small sizes; weights are those that they start with. Losses and the first
scores are compared, and for each array the derivative of the loss along its gradient, with a difference quotient.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.commands.cli import compose
from zero.job.sizes import load_sizes
from zero.models.axes import EMBED, HEADS, Axes, Role
from zero.models.codebook import with_commitment
from zero.models.config import GPTConfig
from zero.models.gpt import GPT, empty_memory
from zero.models.parametrization import kernel_init

T = 12
GATED = {
    "embedding_dim": 24, "key_width": 6, "codes": 5, "vq_block": 3, "distance_width": 24,
    "residual_dropout": 0.0, "distance_dropout": 0.0, "layer_dropout": 0.0, "update_tokens": 6,
}  # fmt: skip
SMALL: dict[str, Any] = {"vocab_size": 23, "vocab_chunks": 1, "block_size": T, "dropout": 0.0, "N": 2}
SHAPE: dict[str, dict[str, Any]] = {
    "gpt-neo-125m": {"embedding_dim": 24, "num_head": 3, "windows": (0, 4)},
    "zero-transformer-580m": {"embedding_dim": 24, "num_head": 3},
    "mu-transformer-small": {"embedding_dim": 24, "num_head": 3, "head_dim": 8, "mup_base_width": 12},
    "mu-transformer-combined-huge": {"embedding_dim": 24, "num_head": 3, "head_dim": 8, "mup_base_width": 12},
    "lingvo-137b": {"embedding_dim": 24, "num_head": 3, "head_dim": 6, "mlp_dim": 40},
    "dense_lm_13b": {"embedding_dim": 24, "num_head": 3, "head_dim": 6, "mlp_dim": 40},
    "transformer-vq-enwik8": GATED,
    "transformer-vq-pg19": {**GATED, "output_scale": 0.5},  # not 0.005, which leaves gradients too small to compare
}


@cache
def size_of(name: str) -> GPTConfig:
    size = load_sizes()[name] if name.startswith("dense_lm") else compose([f"+recipe={name}"])[1]
    return dataclasses.replace(size, **SMALL, **SHAPE[name])


class Outcome(NamedTuple):
    """What a source computes for one row: each target's loss, the z-loss, and the scores of the first layer."""

    losses_T: np.ndarray
    z_loss: float
    scores: np.ndarray


def softmax(x: np.ndarray, beside: float = 0.0) -> np.ndarray:
    weights = np.exp(x)
    return weights / (weights.sum(-1, keepdims=True) + beside)


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def layer_norm(x: np.ndarray, p: Any, epsilon: float) -> np.ndarray:
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + epsilon) * p["scale"] + p["bias"]


def rms_norm(x: np.ndarray, scale: Any = 1.0, epsilon: float = 1e-6) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def scored(logits_TV: np.ndarray, targets_T: np.ndarray, z: float, scores: np.ndarray) -> Outcome:
    log_z_T = np.log(np.exp(logits_TV).sum(-1))
    return Outcome(log_z_T - logits_TV[np.arange(T), targets_T], z * float((log_z_T**2).mean()), scores)


def heads_of(x_TX: np.ndarray, heads: int) -> np.ndarray:
    return x_TX.reshape(T, heads, -1).swapaxes(0, 1)


def distances() -> np.ndarray:
    return np.arange(T)[:, None] - np.arange(T)[None]


def attended(scores_HTS: np.ndarray, v_HSK: np.ndarray, beside: float = 0.0) -> np.ndarray:
    """The output of causal attention, `(T, H K)`; `beside` is the weight of a further key without a value."""
    weights = softmax(np.where(distances()[None] >= 0, scores_HTS, -np.inf), beside)
    return (weights @ v_HSK).swapaxes(0, 1).reshape(T, -1)


def layer(p: Any, number: int) -> Any:
    return jax.tree.map(lambda x: x[number], p["blocks"])


def table(p: Any, name: str) -> np.ndarray:
    return p[name]["table"].reshape(-1, p[name]["table"].shape[-1])


def gpt_neo(p: Any, tokens_T: np.ndarray, targets_T: np.ndarray) -> Outcome:
    """models/gpt2/gpt2.py and models/layers.py of GPT-Neo: unscaled scores, global and local layers in turn."""
    x = table(p, "vocabulary")[tokens_T] + p["positions"]["table"][:T]
    first = None
    for number in range(2):
        own = layer(p, number)
        h = layer_norm(x, own["norm_attention"], 1e-5)
        q, k, v = (heads_of(h @ own[name]["kernel"], 3) for name in ("query", "key", "value"))
        scores = q @ k.swapaxes(1, 2)
        first = scores if first is None else first
        radius = 4 if number == 1 else T
        scores = np.where(distances()[None] < radius, scores, -np.inf)
        x = x + attended(scores, v) @ own["attention_out"]["kernel"] + own["attention_out"]["bias"]
        h = layer_norm(x, own["norm_mlp"], 1e-5)
        h = gelu(h @ own["mlp_in"]["kernel"] + own["mlp_in"]["bias"])
        x = x + h @ own["mlp_out"]["kernel"] + own["mlp_out"]["bias"]
    assert first is not None
    return scored(layer_norm(x, p["norm"], 1e-5) @ table(p, "vocabulary").T, targets_T, 1e-4, first)


def zero_transformer(p: Any, tokens_T: np.ndarray, targets_T: np.ndarray) -> Outcome:
    """src/models of ZeRO-transformer: ALiBi, whose slopes for 3 heads are two of 2 heads and the first of 4."""
    slopes = np.asarray([2**-4, 2**-8, 2**-2])
    x = table(p, "vocabulary")[tokens_T]
    first = None
    for number in range(2):
        own = layer(p, number)
        h = layer_norm(x, own["norm_attention"], 1e-6)
        q, k, v = (heads_of(h @ own[name]["kernel"] + own[name]["bias"], 3) for name in ("query", "key", "value"))
        scores = q @ k.swapaxes(1, 2) / math.sqrt(8) - slopes[:, None, None] * distances()[None]
        first = scores if first is None else first
        x = x + attended(scores, v) @ own["attention_out"]["kernel"] + own["attention_out"]["bias"]
        h = layer_norm(x, own["norm_mlp"], 1e-6)
        h = gelu(h @ own["mlp_in"]["kernel"] + own["mlp_in"]["bias"])
        x = x + h @ own["mlp_out"]["kernel"] + own["mlp_out"]["bias"]
    assert first is not None
    return scored(layer_norm(x, p["norm"], 1e-6) @ table(p, "vocabulary").T, targets_T, 0.0, first)


def turned(x_HTK: np.ndarray) -> np.ndarray:
    half = x_HTK.shape[-1] // 2
    angles = np.arange(T)[:, None] * 10_000.0 ** (-np.arange(half) / half)[None]
    first, second = x_HTK[..., :half], x_HTK[..., half:]
    pairs = (first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles))
    return np.concatenate(pairs, -1)


def mu_transformer(activation: Callable[[np.ndarray], np.ndarray]) -> Callable[..., Outcome]:
    """mu_transformer/jax_impl/model.py: norms without gains, rotary positions, scores divided by the head's width."""

    def model(p: Any, tokens_T: np.ndarray, targets_T: np.ndarray) -> Outcome:
        x = table(p, "vocabulary")[tokens_T]
        first = None
        for number in range(2):
            own = layer(p, number)
            h = rms_norm(x)
            q, k, v = (heads_of(h @ own[name]["kernel"], 3) for name in ("query", "key", "value"))
            scores = turned(q) @ turned(k).swapaxes(1, 2) / 8
            first = scores if first is None else first
            x = x + attended(scores, v) @ own["attention_out"]["kernel"]
            x = x + activation(rms_norm(x) @ own["mlp_in"]["kernel"]) @ own["mlp_out"]["kernel"]
        assert first is not None
        return scored(rms_norm(x) @ table(p, "head").T, targets_T, 0.0, first)

    return model


def buckets() -> np.ndarray:
    """16 buckets of one distance each, 16 of growing width up to 128."""
    distance = np.maximum(distances(), 0)
    far = 16 + (np.log(np.maximum(distance, 16) / 16) / np.log(128 / 16) * 16).astype(int)
    return np.where(distance < 16, distance, np.minimum(far, 31))


def lingvo(gated: bool, cap: float | None) -> Callable[..., Outcome]:
    """lingvo/core/gshard_builder.py: one more logit of 0 in each softmax, logits divided by the root of the width."""

    def model(p: Any, tokens_T: np.ndarray, targets_T: np.ndarray) -> Outcome:
        x = table(p, "vocabulary")[tokens_T]
        if not gated:
            x = x + p["positions"]["table"][:T]
        first = None
        for number in range(2):
            own = layer(p, number)
            h = rms_norm(x, own["norm_attention"]["scale"])
            q, k, v = (heads_of(h @ own[name]["kernel"], 3) for name in ("query", "key", "value"))
            scores = q @ k.swapaxes(1, 2)
            if cap is not None:
                scores = cap * np.tanh(scores / cap)
            if gated:
                scores = scores + own["relative_bias"][buckets()].transpose(2, 0, 1)
            first = scores if first is None else first
            x = x + attended(scores, v, beside=1.0) @ own["attention_out"]["kernel"]
            h = rms_norm(x, own["norm_mlp"]["scale"])
            if gated:
                h = gelu(h @ own["mlp_gate"]["kernel"]) * (h @ own["mlp_in"]["kernel"])
            else:
                h = relu(h @ own["mlp_in"]["kernel"])
            x = x + h @ own["mlp_out"]["kernel"]
        assert first is not None
        logits = rms_norm(x, p["norm"]["scale"]) @ table(p, "vocabulary").T / math.sqrt(24)
        return scored(logits, targets_T, 1e-4, first)

    return model


MODELS: dict[str, Callable[..., Outcome]] = {
    "gpt-neo-125m": gpt_neo,
    "zero-transformer-580m": zero_transformer,
    "mu-transformer-small": mu_transformer(relu),
    "mu-transformer-combined-huge": mu_transformer(lambda x: relu(x) ** 2),
    "lingvo-137b": lingvo(gated=True, cap=None),
    "dense_lm_13b": lingvo(gated=False, cap=50.0),
}


@cache
def first_params(name: str) -> Any:
    model = GPT(size_of(name))
    variables: Any = jax.jit(lambda key: model.init(key, jnp.zeros((1, 2), int), None, method="hidden"))(
        jax.random.key(3)
    )
    # Biases and gains that are not 0 and 1, so that each one counts.
    rng = np.random.default_rng(4)

    def moved(path: Any, x: Any) -> np.ndarray:
        is_vector = path[-1].key in ("scale", "bias", "key_bias", "distance_bias")
        return np.asarray(x + 0.1 * rng.normal(size=x.shape) * is_vector, np.float32)

    return jax.tree_util.tree_map_with_path(moved, variables["params"])


def row(size: GPTConfig) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(5).integers(0, size.vocab_size, T + 1)
    return tokens[:-1], tokens[1:]


def in_float64(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


# By default the two that have most of their own; GPT-Neo is compared with transformers (exchange/test_hf_folder.py).
OF_SOME = ("mu-transformer-small", "lingvo-137b")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OF_SOME else pytest.mark.wide) for name in MODELS]
)
def test_loss_and_gradients_are_those_of_the_formula(name: str) -> None:
    size, params = size_of(name), first_params(name)
    tokens, targets = row(size)

    def loss(params: Any) -> jax.Array:
        losses: Any = GPT(size).apply({"params": params}, tokens[None], targets[None])
        return losses.mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    exact = in_float64(params)
    outcome = MODELS[name](exact, tokens, targets)
    np.testing.assert_allclose(value, outcome.losses_T.mean(), rtol=1e-5)

    def along(index: int, direction: np.ndarray, by: float) -> float:
        leaves, tree = jax.tree.flatten(exact)
        leaves[index] = leaves[index] + by * direction
        moved = MODELS[name](jax.tree.unflatten(tree, leaves), tokens, targets)
        return float(moved.losses_T.mean()) + moved.z_loss

    for index, (path, g) in enumerate(jax.tree_util.tree_leaves_with_path(in_float64(grads))):
        norm = np.linalg.norm(g)
        if norm < 1e-9:  # values of zero queries have no gradient, nor has what is added to all scores of a query alike
            assert path[-2].key == "key" and ("query" in size.zero_init or path[-1].key == "bias")
            continue
        slope = (along(index, g / norm, 1e-5) - along(index, g / norm, -1e-5)) / 2e-5
        np.testing.assert_allclose(slope, norm, rtol=2e-5, err_msg=jax.tree_util.keystr(path))


QUERY_AND_KEY = (Axes((EMBED, HEADS), Role.QUERY), Axes((EMBED, HEADS)))


@pytest.mark.parametrize("name", MODELS)
def test_first_scores(name: str) -> None:
    """Scores start with mean 0 and, of sources that scale queries, with deviation 1; zero queries give zeros."""
    size = dataclasses.replace(size_of(name), embedding_dim=384, num_head=3, head_dim=128)
    h_TD = np.random.default_rng(0).normal(size=(256, 384))
    keys = jax.random.split(jax.random.key(1))
    q, k = (
        h_TD @ np.asarray(kernel_init(size, kind, axes)(key, (384, 128)), np.float64)
        for kind, axes, key in zip(("query", "key"), QUERY_AND_KEY, keys, strict=True)
    )
    divisor = {"none": 1.0, "sqrt": math.sqrt(128), "linear": 128.0}[size.attention_scale]
    scores = q @ k.T / divisor
    # GPT-2's weights: D x 0.02^2 / 1 of each product; muP: the root of the head's width over it.
    expected = {"gpt_neo": 1.0, "lingvo": 1.0, "gpt2": 384 * 0.02**2, "fan_in": 128**-0.5}[str(size.init)]
    expected = 0.0 if "query" in size.zero_init else expected
    assert np.std(scores) == pytest.approx(expected, rel=0.1)
    assert abs(np.mean(scores)) <= 0.1 * expected


@pytest.mark.parametrize("name", ["transformer-vq-enwik8", "transformer-vq-pg19"])
def test_first_scores_of_gated_units(name: str) -> None:
    """Queries and keys have norm K^(1/4) at any width, so the deviation of their products is 1 at the recipe's own."""
    _, size = compose([f"+recipe={name}"])
    h_TD = np.random.default_rng(0).normal(size=(256, size.embedding_dim))
    keys = jax.random.split(jax.random.key(1))
    shape = (size.embedding_dim, size.key_width)
    q, k = (
        rms_norm(h_TD @ np.asarray(kernel_init(size, kind, axes)(key, shape), np.float64)) * size.key_width**-0.25
        for kind, axes, key in zip(("query", "key"), QUERY_AND_KEY, keys, strict=True)
    )
    scores = q @ k.T
    assert np.std(scores) == pytest.approx(1.0, rel=0.1)
    assert abs(np.mean(scores)) <= 0.1


class Remembered(NamedTuple):
    """What a unit knows of the positions before a part: their codes and values, and their keys as they were rounded."""

    codes_S: np.ndarray
    values_SV: np.ndarray
    keys_SK: np.ndarray


class Rounded(NamedTuple):
    """The codes of the keys of a unit, and the keys: their gradient goes straight through."""

    codes_T: np.ndarray
    keys_TK: np.ndarray


class Book(NamedTuple):
    """The codes of all units; a code is a sum over a count."""

    counts: np.ndarray  # (layers x units, codes)
    sums: np.ndarray  # (layers x units, codes, K)

    @classmethod
    def random(cls, seed: int) -> "Book":
        rng = np.random.default_rng(seed)
        counts = rng.uniform(0.5, 2, (4, 5))
        return cls(counts, rng.normal(size=(4, 5, 6)) * counts[..., None])

    def of_zero(self) -> Any:
        """The collection of variables; the first unit of each layer, and the second."""
        units = {
            f"unit_{unit}": {"counts": np.float32(self.counts[unit::2]), "sums": np.float32(self.sums[unit::2])}
            for unit in range(2)
        }
        return {"blocks": units}


COMMITMENT = 1e-4
UNIT_BLOCK = 3


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


class GatedOutcome(NamedTuple):
    """Of a part of a row: each target's loss, the commitment, and for each unit what the next part needs."""

    losses_T: np.ndarray
    commitment: float
    rounded: list[Rounded]
    remembered: list[Remembered]


def gated_logits(size: GPTConfig, p: Any, x_TD: np.ndarray) -> np.ndarray:
    """src/transformer_vq/nn/model.py: PG-19's norm, table and scale, or enwik8's head alone; a bias of tokens."""
    if size.final_norm:
        x_TD = rms_norm(x_TD, p["norm"]["scale"]) + p["norm"]["bias"]
    logits_TV = x_TD @ table(p, "vocabulary" if size.tied else "head").T + p["head_bias"]["bias"]
    return logits_TV * size.output_scale


def transformer_vq(
    size: GPTConfig,
    p: Any,
    book: Book,
    tokens: np.ndarray,
    targets: np.ndarray,
    before: list[Remembered] | None = None,
    base: list[Rounded] | None = None,
) -> GatedOutcome:
    """src/transformer_vq/nn/attn.py, vq.py and norm.py, one query after the other, with all keys before it.

    All keys are rounded. In the blocks of a query and before it keys are those that were rounded then; older ones are
    the codes of today. Biases end at a distance of one block.

    Args:
      before: of each unit, where the tokens are a later part of a row; its arrays are constants.
      base: codes and keys around which rounding is taken as the identity; None: round these keys.
    """
    count = len(tokens)
    x = table(p, "vocabulary")[tokens]
    angles = np.arange(2 * UNIT_BLOCK)[:, None] * 100_000.0 ** (-np.arange(0, 24, 2) / 24)[None]
    features = np.concatenate([np.sin(angles), np.cos(angles)], 1)  # of distances, as wide as the model
    commitment = 0.0
    all_rounded, all_remembered = [], []
    for place in range(4):
        own = layer(p, place // 2)[f"unit_{place % 2}"]
        codes_SK = book.sums[place] / book.counts[place][:, None]
        h = rms_norm(x, own["norm"]["scale"]) + own["norm"]["bias"]
        q = rms_norm(h @ own["query"]["kernel"]) * 6**-0.25
        k = rms_norm(h @ own["key"]["kernel"]) * 6**-0.25
        if base is None:
            rounded = Rounded(((k[:, None] - codes_SK[None]) ** 2).sum(-1).argmin(-1), k)
        else:
            rounded = base[place]
        commitment += COMMITMENT * ((k - codes_SK[rounded.codes_T]) ** 2).sum() / count
        straight_TK = codes_SK[rounded.codes_T] + k - rounded.keys_TK
        v, gate = (silu(h @ own[name]["kernel"]) for name in ("value", "gate"))
        old = before[place] if before is not None else Remembered(rounded.codes_T[:0], v[:0], k[:0])
        codes_S = np.concatenate([old.codes_S, rounded.codes_T])
        values = np.concatenate([old.values_SV, v])
        keys = np.concatenate([old.keys_SK, straight_TK])
        r = features @ own["distance"]["kernel"] * 6**-0.25
        out = np.zeros_like(v)
        for number in range(count):
            t = len(old.codes_S) + number
            first = max(0, t // UNIT_BLOCK - 1) * UNIT_BLOCK
            seen = np.concatenate([codes_SK[codes_S[:first]], keys[first : t + 1]])
            scores = seen @ (q[number] + own["key_bias"] * 6**-0.25)
            for s in range(max(0, t - UNIT_BLOCK), t + 1):
                scores[s] += (q[number] + own["distance_bias"] * 6**-0.25) @ r[t - s]
            out[number] = softmax(scores) @ values[: t + 1]
        x = x + (out * gate) @ own["attention_out"]["kernel"]
        all_rounded.append(rounded)
        all_remembered.append(Remembered(codes_S, values, keys))
    logits = gated_logits(size, p, x)
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(count), targets]
    return GatedOutcome(losses, commitment, all_rounded, all_remembered)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        pytest.param("transformer-vq-enwik8", 1, marks=pytest.mark.slow),
        pytest.param(
            "transformer-vq-enwik8", 2, marks=pytest.mark.wide
        ),  # tests/models/test_gated_unit.py: a plain loop
        pytest.param("transformer-vq-pg19", 1, marks=pytest.mark.wide),
        pytest.param("transformer-vq-pg19", 2, marks=pytest.mark.slow),
    ],
)
def test_gated_units_are_those_of_transformer_vq(name: str, parts: int) -> None:
    """Losses and gradients of a row, and of its second part after a first one with other weights and other codes."""
    size = size_of(name)
    tokens, targets = row(size)
    length = T // parts
    model = GPT(size)
    memory = empty_memory(size, 1, jnp.float32)
    before = None
    params, book = first_params(name), Book.random(6)

    def loss(params: Any, collection: Any, memory: Any, number: jax.Array, own: jax.Array, nexts: jax.Array) -> Any:
        variables = {"params": params, "codebook": with_commitment(size, collection, length)}
        part = (own[None], nexts[None], None, memory, number * length)
        scores, memory = model.apply(variables, *part, method="scores_in_part")
        return scores.losses_BT.mean(), (scores.losses_BT[0], memory)

    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for number in range(parts):
        here = slice(number * length, (number + 1) * length)
        arguments = (tokens[here], targets[here])
        (_, (losses, memory)), grads = compiled(params, book.of_zero(), memory, jnp.int32(number), *arguments)
        outcome = transformer_vq(size, in_float64(params), book, *arguments, before)
        np.testing.assert_allclose(losses, outcome.losses_T, rtol=1e-5)
        if number + 1 < parts:
            before = outcome.remembered
            params = jax.tree.map(
                lambda x: x + 0.01 * np.random.default_rng(8).normal(size=x.shape).astype("f"), params
            )
            book = Book.random(9)

    exact = in_float64(params)

    def along(index: int, direction: np.ndarray, by: float) -> float:
        leaves, tree = jax.tree.flatten(exact)
        leaves[index] = leaves[index] + by * direction
        moved = transformer_vq(size, jax.tree.unflatten(tree, leaves), book, *arguments, before, outcome.rounded)
        return float(moved.losses_T.mean()) + moved.commitment

    for index, (path, g) in enumerate(jax.tree_util.tree_leaves_with_path(in_float64(grads))):
        norm = np.linalg.norm(g)
        assert norm > 1e-9, path
        slope = (along(index, g / norm, 1e-5) - along(index, g / norm, -1e-5)) / 2e-5
        np.testing.assert_allclose(slope, norm, rtol=1e-5, err_msg=jax.tree_util.keystr(path))
