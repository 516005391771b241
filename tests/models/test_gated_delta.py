"""Models whose layers have gated DeltaNet, alone or beside attention."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.gpt import GPT, init_cache

PATTERN = ("delta", "delta", "attention")
SIZES: dict[str, Any] = {
    **FAMILIES["qwen3"],
    "embedding_dim": 12,
    "vocab_size": 31,
    "num_head": 3,
    "kv_heads": 1,
    "head_dim": 4,
    "block_size": 32,
    "dropout": 0.0,
    "N": 6,
    "mixers": PATTERN,
    "delta_key_heads": 2,
    "delta_value_heads": 4,
    "delta_value_dim": 3,
}
ROWS, POSITIONS = 2, 11


@pytest.fixture(scope="module", params=["pattern", pytest.param("delta alone", marks=pytest.mark.wide), "experts"])
def model(request: pytest.FixtureRequest) -> tuple[GPT, Any]:
    others: dict[str, dict[str, Any]] = {
        "pattern": {},
        "delta alone": {"mixers": ("delta",), "N": 2},
        "experts": {"experts": 4, "experts_per_token": 2, "N": 3},
    }
    gpt = GPT(GPTConfig(**SIZES | others[request.param]))
    variables = jax.jit(partial(gpt.init, method="hidden"))(jax.random.key(0), tokens(), None)
    # Weights far from their start, so that each of them matters.
    leaves, tree = jax.tree.flatten(variables)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + 0.2 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    return gpt, jax.tree.unflatten(tree, moved)


def tokens(positions: int = POSITIONS) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 31, (ROWS, positions)), jnp.int32)


@pytest.mark.parametrize("read", [pytest.param(1, marks=pytest.mark.wide), 5])
def test_a_cache_continues_a_row(model: tuple[GPT, Any], read: int) -> None:
    """A prompt in a wider prefill, then a token at a time, gives the logits of whole rows."""
    gpt, variables = model
    cache: Any = init_cache(gpt.config, ROWS, POSITIONS, jnp.float32, known=read)
    prefill = jnp.where(jnp.arange(8) < read, tokens()[:, :8], 7)
    logits, cache = gpt.apply(variables, prefill, cache, 0, last=read - 1, method="logits")
    one_token = jax.jit(partial(gpt.apply, method="logits"))
    whole = jax.jit(lambda last: gpt.apply(variables, tokens(), last=last, method="logits")[0])
    for count in range(read, POSITIONS):
        np.testing.assert_allclose(logits, whole(count - 1), atol=3e-5)
        logits, cache = one_token(variables, tokens()[:, count : count + 1], cache, count)


def test_packed_documents_do_not_see_each_other(model: tuple[GPT, Any]) -> None:
    """Each segment of a row has the losses that it has alone."""
    gpt, variables = model
    row = tokens()
    starts = jnp.asarray([[0] * 4 + [4] * 7, [0] * 9 + [9] * 2])
    losses: Any = gpt.apply(variables, row, row, None, starts)
    alone: Any = jax.jit(partial(gpt.apply, variables))
    for line, bounds in enumerate([(0, 4, 11), (0, 9, 11)]):
        for first, end in pairwise(bounds):
            # A later position changes no earlier one, so that all segments have one length.
            own = jnp.pad(row[line : line + 1, first:end], ((0, 0), (0, 9 - end + first)))
            np.testing.assert_allclose(losses[line, first:end], alone(own, own)[0, : end - first], atol=3e-5)


def test_no_position_sees_a_later_one(model: tuple[GPT, Any]) -> None:
    gpt, variables = model
    changed = tokens().at[:, 6].add(1)
    losses_of = jax.jit(partial(gpt.apply, variables))
    losses, others = (np.asarray(losses_of(x, tokens())) for x in (tokens(), changed % 31))
    np.testing.assert_array_equal(losses[:, :6], others[:, :6])
    assert np.all(losses[:, 6:] != others[:, 6:])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mixers": ("delta", "gamma"), "N": 2}, "mixers must name attention or delta, got 'gamma'"),
        ({"N": 4}, "N 4 must be a multiple of the 3 layers of mixers"),
        ({"windows": (4, 0)}, "mixers .* need one window"),
        ({"delta_value_heads": 3}, "delta_value_heads 3 must be a multiple of delta_key_heads 2"),
        ({"mixers": ("attention",)}, "delta_key_heads 2 needs a layer with delta in mixers"),
        ({"experts": 4, "experts_every": 2}, "experts_every 2 needs one mixer"),
    ],
)
def test_impossible_models_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**SIZES | keys)
