"""Gated units with vector-quantized keys, against a loop over positions that keeps every key."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.models.codebook import init_codebook, update_codebook, with_commitment
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.gated_layer import GatedLayer
from zero.models.gated_unit import (
    CODEBOOK,
    GatedUnit,
    Heads,
    Memory,
    assign_codes,
    attend,
)
from zero.models.gpt import GPT, init_cache

K, V = 4, 6
SIZE: dict[str, Any] = {"embedding_dim": 12, "vocab_size": 31, "num_head": 1, "block_size": 64, "dropout": 0.0, "N": 2}
UNITS: dict[str, Any] = {**FAMILIES["vq"], "codes": 5, "vq_block": 4, "key_width": K}
CONFIG = GPTConfig(**SIZE | UNITS)


@partial(jax.jit, static_argnums=(1, 2, 3))
def random_heads(seed: int, rows: int, positions: int, codes: int) -> tuple[Heads, jax.Array]:
    """Of random codes, and these codes."""
    keys = jax.random.split(jax.random.key(seed), 5)
    book = jax.random.normal(keys[0], (codes, K))
    of_codes = jax.random.randint(keys[1], (rows, positions), 0, codes)
    q, q_distance = jax.random.normal(keys[2], (2, rows, positions, K))
    return Heads(q, q_distance, book[of_codes], of_codes, jax.random.normal(keys[3], (rows, positions, V))), book


def empty(rows: int, block: int, codes: int) -> Memory:
    means = jnp.zeros((rows, codes, V))
    k = jnp.zeros((rows, 2 * block, K))
    return Memory(k, jnp.zeros(k.shape[:2], jnp.int32), jnp.zeros((rows, 2 * block, V)), means, means[..., 0])


def plain_loop(heads: Heads, r_WK: Any, block: int, codes: int, limit: int | None) -> np.ndarray:
    """One query after the other, with the keys of all positions before it."""
    limit = 2 * block if limit is None else limit
    q, q_distance, k, _, v, r = (np.asarray(x, np.float64) for x in (*heads, r_WK))
    out = np.zeros(v.shape)
    for row in range(len(q)):
        for t in range(q.shape[1]):
            first = max(0, t // block - 1) * block  # of the window
            scores = k[row, : t + 1] @ q[row, t]
            scores[first:] += [q_distance[row, t] @ r[t - s] * (t - s <= limit) for s in range(first, t + 1)]
            seen = slice(0 if codes else first, t + 1)
            weights = np.exp(scores[seen] - scores[seen].max())
            out[row, t] = weights @ v[row, seen] / weights.sum()
    return out


@settings(max_examples=2, deadline=None)  # others at each call
@given(
    positions=st.integers(2, 40),
    block=st.integers(2, 9),
    codes=st.integers(0, 7),
    cut=st.integers(0, 40),
    seed=st.integers(0, 99),
    is_limited=st.booleans(),
)
def test_equals_plain_loop(positions: int, block: int, codes: int, cut: int, seed: int, is_limited: bool) -> None:
    """Blocks and single positions equal a plain loop."""
    # On the host, where a part of an array is no program of its own.
    heads, book = jax.device_get(random_heads(seed, 2, positions, codes or 1))
    book = book[:codes]
    r = np.asarray(jax.random.normal(jax.random.key(seed + 1), (2 * block, K)))
    limit = block if is_limited else None
    expected = plain_loop(heads, r, block, codes, limit)
    compiled: Any = jax.jit(partial(attend, limit=limit))
    got, _ = compiled(heads, r, book, empty(2, block, codes))
    np.testing.assert_allclose(got, expected, atol=1e-5)

    def part(start: int, stop: int) -> Heads:
        return jax.tree.map(lambda x: x[:, start:stop], heads)

    # A whole number of blocks at once, then more with what is not known yet behind them, then one at a time.
    whole = min(cut, positions) // block * block
    outs, memory = [], empty(2, block, codes)
    if whole > 1:
        out, memory = compiled(part(0, whole), r, book, memory)
        outs.append(out)
    known = whole + (positions - whole) // 2
    if positions - whole > 1:
        out, memory = compiled(part(whole, positions), r, book, memory, jnp.int32(whole), jnp.int32(known))
        outs.append(np.asarray(out)[:, : known - whole])
    else:
        known = whole
    for t in range(known, positions):
        out, memory = compiled(part(t, t + 1), r, book, memory, jnp.int32(t))
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, 1), expected, atol=1e-5)


def test_gradients_equal_dense() -> None:
    """Gradients equal those of attention with the matrix of all scores.

    Where scores of keys older than a window give their keys no gradient, and with the option their values none.
    """
    positions, block, codes = 17, 3, 5
    heads, book = random_heads(3, 2, positions, codes)
    r = jax.random.normal(jax.random.key(4), (2 * block, K))
    weights = jax.random.normal(jax.random.key(5), (2, positions, V))
    t, s = jnp.arange(positions)[:, None], jnp.arange(positions)[None]
    is_near = s >= (t // block - 1) * block

    def dense(q: Any, q_distance: Any, k: Any, v: Any, r: Any, cache_gradient: bool) -> jax.Array:
        old_k, old_v = jax.lax.stop_gradient(k), v if cache_gradient else jax.lax.stop_gradient(v)
        bias = jnp.take_along_axis(q_distance @ r.T, jnp.clip(t - s, 0, 2 * block - 1)[None], axis=2)
        near, far = jnp.where(is_near[None], q @ k.swapaxes(1, 2) + bias, -jnp.inf), q @ old_k.swapaxes(1, 2)
        scores = jnp.where((s <= t)[None], jnp.where(is_near[None], near, far), -jnp.inf)
        p = jax.nn.softmax(scores)
        return (p * is_near[None]) @ v + (p * ~is_near[None]) @ old_v

    def blocks(q: Any, q_distance: Any, k: Any, v: Any, r: Any, cache_gradient: bool) -> jax.Array:
        made = Heads(q, q_distance, k, heads.codes_BT, v)
        return attend(made, r, book, empty(2, block, codes), cache_gradient=cache_gradient)[0]

    arguments = (heads.q_BTK, heads.q_distance_BTK, heads.k_BTK, heads.v_BTV, r)
    found = []
    for cache_gradient in (True, False):
        got, expected = (
            jax.jit(jax.grad(lambda *x, f=f, c=cache_gradient: (f(*x, c) * weights).sum(), range(5)))(*arguments)
            for f in (blocks, dense)
        )
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)
        found.append(got[3])
    assert float(jnp.abs(found[0] - found[1]).max()) > 1e-2


def test_straight_through_rounding() -> None:
    """Keys are rounded to the nearest code, and their gradient passes straight through."""
    keys = jax.random.normal(jax.random.key(0), (3, 11, K))
    counts, sums = jnp.asarray([2.0, 1.0, 0.5, 4.0]), jax.random.normal(jax.random.key(1), (4, K))
    weights = jax.random.normal(jax.random.key(2), keys.shape)
    codes = np.asarray(sums, np.float64) / np.asarray(counts)[:, None]
    nearest = np.square(np.asarray(keys)[:, :, None] - codes[None, None]).sum(-1).argmin(-1)
    rounded, found = assign_codes(keys, counts, sums)
    np.testing.assert_array_equal(found, nearest)
    assert len(np.unique(nearest)) > 1
    np.testing.assert_allclose(rounded, codes[nearest], rtol=1e-6)

    def loss(keys: jax.Array, counts: jax.Array, sums: jax.Array, commitment: float) -> jax.Array:
        return (assign_codes(keys, counts, sums, commitment)[0] * weights).sum()

    grads = jax.jit(jax.grad(loss, (0, 1, 2)))(keys, counts, sums, 0.25)
    np.testing.assert_allclose(grads[0], weights + 2 * 0.25 * (keys - codes[nearest]), rtol=1e-5, atol=1e-6)
    is_code = nearest[..., None] == np.arange(4)
    np.testing.assert_array_equal(grads[1], is_code.sum((0, 1)))
    np.testing.assert_allclose(grads[2], np.einsum("bts,btk->sk", is_code, keys), rtol=1e-5, atol=1e-5)


updated: Any = jax.jit(update_codebook, static_argnums=0)  # operation by operation it is dozens of programs


def moved(counts: Any, sums: Any, found: Any, found_sums: Any, key: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Counts and sums of a codebook of one unit and layer after a step."""
    old, new = (
        {"blocks": {"unit_0": {"counts": jnp.asarray([x]), "sums": jnp.asarray([y])}}}
        for x, y in ((counts, sums), (found, found_sums))
    )
    got = updated(CONFIG, old, new, jax.random.key(key))["blocks"]["unit_0"]
    return np.asarray(got["counts"][0]), np.asarray(got["sums"][0])


def test_codebook_update() -> None:
    """The codebook moves by averages of counts and sums."""
    counts, sums = moved([1.0, 2.0, 3.0], [[0.0, 1], [2, 3], [4, 5]], [7.0, 0, 0], [[2.0, -1], [0, 0], [0, 0]])
    np.testing.assert_allclose(counts, np.asarray([0.99 + 0.07, 1.98, 2.97]), rtol=1e-6)
    np.testing.assert_allclose(sums, np.asarray([[0.02, 0.98], [1.98, 2.97], [3.96, 4.95]]), rtol=1e-6)


def test_unused_code_is_replaced() -> None:
    """An unused code takes half of the keys of the code with the largest error.

    Keys of two dimensions have norm 2^(1/4): most keys have the second code, but are all alike.
    """
    alike, spread = np.asarray([2**0.25, 0.0]), np.asarray([0.3, 0.4])
    counts, sums = np.asarray([0.02, 50.0, 30.0]), np.stack([[0.01, 0.0], 50 * alike, 30 * spread])
    held = (counts, sums, counts, sums)  # as many keys of each code as on average
    new_counts, new_sums = moved(*held)
    np.testing.assert_allclose(new_counts, np.asarray([15.0, 50.0, 15.0]), rtol=1e-5)
    np.testing.assert_allclose(new_sums[1:], np.stack([50 * alike, 15 * spread]), rtol=1e-5)
    offsets = [x[1][0] / x[0][0] - spread for x in (moved(*held, key=key) for key in (0, 0, 1))]
    np.testing.assert_allclose(np.linalg.norm(offsets[0]), 0.01 * 0.5, rtol=1e-3)
    np.testing.assert_array_equal(offsets[0], offsets[1])
    assert np.abs(offsets[0] - offsets[2]).max() > 1e-4


def test_all_codes_unused() -> None:
    """Codes that are all unused stay where they are."""
    counts, sums = moved([0.0100001] * 2, [[2.0, 3.0]] * 2, [0.0, 0.0], [[0.0, 0.0]] * 2)
    np.testing.assert_allclose(counts, np.asarray([0.0100001] * 2), rtol=1e-6)
    np.testing.assert_allclose(sums, np.asarray([[2.0, 3.0]] * 2), rtol=1e-6)


def test_first_codebook_and_commitment() -> None:
    """A new codebook follows from its seed; the commitment loss is a mean over the positions of the step."""
    first, again, other = (init_codebook(CONFIG, jax.random.key(seed)) for seed in (0, 0, 1))
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(x, y)
    sums = [unit["sums"] for book in (first, other) for unit in book["blocks"].values()]
    assert len({np.asarray(layer).tobytes() for x in sums for layer in x}) == 8  # of each seed, unit and layer
    for unit in with_commitment(CONFIG, first, 50)["blocks"].values():
        np.testing.assert_allclose(unit["commitment"], np.full(CONFIG.N, 1e-4 / 50), rtol=1e-6)


def test_commitment_gradient() -> None:
    """Commitment pulls keys to their codes and does not change the output."""
    unit = GatedUnit(CONFIG, jnp.float32)
    x, weights = jax.random.normal(jax.random.key(0), (2, 2, 9, CONFIG.embedding_dim))
    params = jax.jit(unit.init)(jax.random.key(1), x, None, 0, None)["params"]
    of_layer = jax.tree.map(lambda x: x[0], init_codebook(CONFIG, jax.random.key(2))["blocks"]["unit_0"])

    def loss(params: Any, commitment: float) -> jax.Array:
        book = {**of_layer, "commitment": jnp.float32(commitment)}
        return (unit.apply({"params": params, CODEBOOK: book}, x, None, 0, None)[0] * weights).sum()

    def committed(params: Any) -> jax.Array:
        def rms(x: jax.Array) -> jax.Array:
            return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + CONFIG.norm_epsilon)

        keys = rms(rms(x) * params["norm"]["scale"][None, None] @ params["key"]["kernel"]) * K**-0.25
        codes = (of_layer["sums"] / of_layer["counts"][:, None])[None, None]
        return 0.5 * jnp.square(keys[:, :, None] - codes).sum(-1).min(-1).sum()

    (with_it, with_grads), (without, grads) = (jax.jit(jax.value_and_grad(loss))(params, w) for w in (0.5, 0.0))
    assert with_it == without
    expected = jax.tree.map(jnp.add, grads, jax.jit(jax.grad(committed))(params))
    for got, y in zip(jax.tree.leaves(with_grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, y, rtol=1e-4, atol=1e-5)
    assert float(jnp.abs(with_grads["key"]["kernel"] - grads["key"]["kernel"]).max()) > 1e-3


def test_layer_dropout_skips_units() -> None:
    """A row skips each of the two units of a layer with this probability; without keys none does."""
    layer = GatedLayer(dataclasses.replace(CONFIG, layer_dropout=0.5), jnp.float32)
    x_BTD = jax.random.normal(jax.random.key(0), (64, 3, CONFIG.embedding_dim))
    carry = (x_BTD, None), None
    variables = jax.jit(layer.init)(jax.random.key(1), carry, 0, None, 0)

    def unchanged(keys_B: Any) -> int:
        ((out_BTD, _), _), _ = jax.jit(layer.apply)(variables, carry, 0, keys_B, 0)
        return int((out_BTD == x_BTD).all((1, 2)).sum())

    assert unchanged(None) == 0
    assert 6 <= unchanged(jax.random.split(jax.random.key(2), 64)) <= 28  # a quarter, within 3 standard deviations


def test_state_of_constant_size() -> None:
    """A model gives the same logits for a whole row and token by token, with a state of constant size."""
    model = GPT(CONFIG)
    tokens = jax.random.randint(jax.random.key(0), (2, 27), 0, CONFIG.vocab_size)
    params = jax.jit(partial(model.init, method="hidden"))(jax.random.key(1), tokens, None)["params"]
    params = jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, params)  # far from uniform
    variables = {"params": params, CODEBOOK: init_codebook(CONFIG, jax.random.key(2))}
    hidden = jax.jit(partial(model.apply, method="hidden"))
    expected, _ = hidden(variables, tokens, None)
    read = 10  # of 14 that are computed, as a sampler reads a prompt whose length is rounded up
    cache = init_cache(CONFIG, 2, 27, jnp.float32, known=read)
    assert [x.shape for x in jax.tree.leaves(cache)] == [
        x.shape for x in jax.tree.leaves(init_cache(CONFIG, 2, 999, jnp.float32))
    ]
    logits, cache = jax.jit(partial(model.apply, method="logits"))(variables, tokens[:, :14], cache, 0, read - 1)
    table = params["vocabulary"]["table"][0]
    np.testing.assert_allclose(logits, expected[:, read - 1] @ table.T, atol=1e-5)
    for t in range(read, 27):
        got, cache = hidden(variables, tokens[:, t : t + 1], None, cache, jnp.int32(t))
        np.testing.assert_allclose(got[:, 0], expected[:, t], atol=1e-5, err_msg=str(t))


def test_memory_is_linear_in_the_context() -> None:
    def temporaries(positions: int) -> int:
        heads = jax.eval_shape(lambda: random_heads(0, 1, positions, 8)[0])

        def loss(heads: Heads, r: jax.Array, book: jax.Array) -> jax.Array:
            return attend(heads, r, book, empty(1, 16, 8))[0].sum()

        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, K), (8, K))]
        compiled: Any = jax.jit(jax.grad(loss, (1, 2))).lower(heads, *shapes).compile().memory_analysis()
        return int(compiled.temp_size_in_bytes)

    assert temporaries(4096) < 5 * temporaries(1024)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"alibi_attn": True}, "alibi_attn: false"),
        ({"positions": "rotary"}, "positions: none"),
        ({"num_head": 2}, "num_head: 1"),
        ({"windows": (4,)}, "layer: gated_units needs windows"),
        ({"parametrization": "mup", "mup_base_width": 4, "tied": False}, "layer: gated_units needs"),
        ({"attention_dropout": 0.1}, "layer: gated_units needs attention_dropout: none, got 0.1"),
        ({"mlp_dim": 9}, "layer: gated_units needs mlp_dim: none, got 9"),
        ({"layer": "transformer"}, "layer: transformer needs codes: 512, got 5"),
        ({"layer": "linear"}, "layer must be one of transformer, gated_units"),
        ({"codes": -1}, "codes must be at least 0"),
        ({"key_width": 5}, "key_width even"),
        ({"vq_block": 0}, "vq_block must be at least 1"),
    ],
)
def test_unsupported_keys_are_refused(keys: dict[str, Any], message: str) -> None:
    """Keys that gated units do not support are refused by name."""
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{**SIZE, **UNITS, **keys})


def test_segments_are_refused() -> None:
    tokens = jnp.zeros((1, 6), jnp.int32)
    variables = jax.eval_shape(GPT(CONFIG).init, jax.random.key(0), tokens, tokens)
    with pytest.raises(ValueError, match="do not keep segments of a row apart"):
        jax.eval_shape(partial(GPT(CONFIG).apply, starts_BT=tokens), variables, tokens, tokens)
