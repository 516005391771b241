"""Multi-token prediction on shards: the numbers of a transformer written by hand, and targets within a document."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests.helpers.preferences import DEVICES, SIZE, TENSOR, check_steps, pairs, programs_on
from tests.training.small_gpt import first_params
from zero.models.config import GPTConfig
from zero.training.batch import UNDIVIDED, Separators
from zero.training.objectives.multi_token import MultiToken
from zero.training.sharded_gpt import ShardedGPT

AHEAD = replace(SIZE, vocab_chunks=4, predictor=True)
WEIGHT = 0.4


def norm(x: Any, p: Any, xp: Any) -> Any:
    return x / xp.sqrt((x**2).mean(-1, keepdims=True) + AHEAD.norm_epsilon) * p["scale"]


def layer(p: Any, x: Any, xp: Any) -> Any:
    """A layer of Llama."""
    batch, positions, _ = x.shape
    half = AHEAD.head_width // 2
    angles = xp.arange(positions)[:, None] * AHEAD.rotary_base ** -(xp.arange(half) / half)
    cos, sin = xp.cos(angles)[None, :, None], xp.sin(angles)[None, :, None]

    def heads(name: str, h: Any) -> Any:
        return (h @ p[name]["kernel"]).reshape(batch, positions, -1, AHEAD.head_width)

    def turned(x: Any) -> Any:
        first, second = x[..., :half], x[..., half:]
        return xp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    h = norm(x, p["norm_attention"], xp)
    q, k, v = turned(heads("query", h)), turned(heads("key", h)), heads("value", h)
    k, v = (xp.repeat(x, AHEAD.num_head // AHEAD.key_heads, axis=2) for x in (k, v))
    scores = xp.einsum("bthk,bshk->bhts", q, k) / AHEAD.head_width**0.5
    scores = xp.where(xp.tril(xp.ones((positions, positions), bool)), scores, -1e30)
    weights = xp.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    x = x + xp.einsum("bhts,bshk->bthk", weights, v).reshape(batch, positions, -1) @ p["attention_out"]["kernel"]
    h = norm(x, p["norm_mlp"], xp)
    gate = h @ p["mlp_gate"]["kernel"]
    return x + (gate / (1 + xp.exp(-gate)) * (h @ p["mlp_in"]["kernel"])) @ p["mlp_out"]["kernel"]


def losses_by_hand(params: Any, rows: Any, xp: Any) -> tuple[Any, Any]:
    """Sums over tokens of both losses, divided by the number of next tokens (arXiv 2412.19437, equations 21 to 25)."""
    width = AHEAD.embedding_dim
    table, head = (params[name]["table"].reshape(-1, width)[: AHEAD.vocab_size] for name in ("vocabulary", "head"))
    ids = xp.where(rows < 0, ~rows, rows)
    x = table[ids]
    for number in range(AHEAD.N):
        x = layer(jax.tree.map(lambda leaf, number=number: leaf[number], params["blocks"]), x, xp)

    def nats(x: Any, targets: Any) -> Any:
        """Of the tokens that are targets: those that are not negative."""
        logits = x @ head.T
        lse = xp.log(xp.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        chosen = xp.take_along_axis(logits, xp.maximum(targets, 0)[..., None], axis=2)[..., 0]
        return xp.where(targets >= 0, lse - chosen, 0).sum()

    join = params["predictor_join"]
    both = [norm(x[:, :-2], join["norm_stream"], xp), norm(table[ids[:, 1:-1]], join["norm_next"], xp)]
    ahead = xp.concatenate(both, -1) @ join["product"]["kernel"]
    ahead = layer(jax.tree.map(lambda leaf: leaf[0], params["predictor_blocks"]), ahead, xp)
    count = (rows[:, 1:] >= 0).sum()
    next_loss = nats(norm(x[:, :-1], params["norm"], xp), rows[:, 1:]) / count
    return next_loss, nats(norm(ahead, params["predictor_norm"], xp), rows[:, 2:]) / count


def formula(params: Any, _: jax.Array, rows: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
    next_loss, ahead_loss = losses_by_hand(params, rows, jnp)
    return next_loss + WEIGHT * ahead_loss, {"next_loss": next_loss, "ahead_loss": ahead_loss}


@pytest.mark.wide  # the next test has losses by the same hand, and gradients are jax's
@pytest.mark.parametrize(("devices", "stage", "options"), DEVICES)
def test_steps_equal_the_formula(devices: int, stage: int, options: dict[str, Any]) -> None:
    with jax.numpy_rank_promotion("allow"):
        check_steps(MultiToken(weight=WEIGHT).make(), formula, devices, stage, {**options, "size": AHEAD})


def test_losses_in_float64() -> None:
    one = programs_on(MultiToken(weight=WEIGHT).make(), 8, 3, TENSOR, size=AHEAD, micro_batches=2)
    (step,) = one.steps(one.start(), lambda step: None, count=1)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), first_params(AHEAD))
    next_loss, ahead_loss = losses_by_hand(params, pairs(0), np)
    assert step["next_loss"] == pytest.approx(next_loss, rel=1e-6)
    assert step["ahead_loss"] == pytest.approx(ahead_loss, rel=1e-6)
    assert step["loss"] == pytest.approx(next_loss + WEIGHT * ahead_loss, rel=1e-6)


@pytest.mark.parametrize(
    ("separators", "targets"),
    [
        (UNDIVIDED, [6, 0, 7, 8, 9, -1, -1]),
        # 0 is predicted from the document that it follows, what follows it from 0 on.
        (Separators(starts=(0,)), [6, 0, -1, 8, 9, -1, -1]),
        (Separators(ends=(0,)), [6, 0, -1, -1, 9, -1, -1]),
    ],
    ids=["undivided", "starts", "ends"],
)
@pytest.mark.parametrize("last_target", [False, True])
def test_no_target_beyond_a_document(separators: Separators, targets: list[int], last_target: bool) -> None:
    """Of a row whose second token is read alone."""
    model = ShardedGPT(AHEAD, zero.Axis("zero", (1, 1)), 0, separators=separators, last_target=last_target)
    ahead = model.ahead(np.asarray([[4, ~5, 6, 0, 7, 8, 9]], np.int32))
    positions = 7 - last_target
    assert np.maximum(ahead.targets_BT[0], -1).tolist() == targets[:positions]
    assert ahead.tokens_BT[0, :6].tolist() == [5, 6, 0, 7, 8, 9]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"windows": (4, 0)}, r"predictor: true needs one entry in windows, got \[4, 0\]"),
        ({"mixers": ("delta", "attention")}, "predictor: true needs one entry in mixers"),
        ({"unrotated_every": 2}, "predictor: true needs unrotated_every: null, got 2"),
        ({"positions": "learned"}, "predictor: true needs positions that no embedding has, got learned"),
    ],
)
def test_impossible_models_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(AHEAD, **keys)


def test_a_model_without_a_predictor_is_the_same() -> None:
    """Parameters of the further layer are beside the others, which start as they do without it."""
    without: GPTConfig = replace(AHEAD, predictor=False)
    with_it, alone = first_params(AHEAD), first_params(without)
    jax.tree.map(np.testing.assert_array_equal, {name: with_it[name] for name in alone}, dict(alone))
