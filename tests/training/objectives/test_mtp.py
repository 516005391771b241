"""Multi-token prediction on shards: the numbers of a model with experts by hand, and targets within a document."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests.helpers.preferences import CONTEXTS, DEVICES, SIZE, check_steps, pairs
from tests.training.small_gpt import first_params
from zero.models.config import GPTConfig
from zero.training.batch import UNDIVIDED, Separators
from zero.training.objectives.mtp import Mtp, mtp_inputs, sum_mtp
from zero.training.sharded_gpt import ShardedGPT

PLAIN = replace(SIZE, vocab_chunks=4, predictor=True)
WITH_MTP = replace(
    PLAIN, mlp_dim=16, experts=4, experts_per_token=2, router="sigmoid", normalize_router=True, router_scale=1.5,
    balance_loss=0.2, shared_dim=32, first_dense=1, dense_dim=48,
)  # fmt: skip
# Every expert has a place for each token, so that nothing is dropped.
IN_PLACES = replace(WITH_MTP, expert_capacity=2.0)
GROUPS: list[Any] = [
    *DEVICES[:-1],
    pytest.param(8, 3, {"axis": CONTEXTS, "size": PLAIN}),  # in which no experts are
    pytest.param(8, 3, {"axis": zero.Axis.with_expert_groups("zero", 8, 4), "size": IN_PLACES}),
]
WEIGHT = 0.4


def norm(x: Any, p: Any, xp: Any) -> Any:
    return x / xp.sqrt((x**2).mean(-1, keepdims=True) + WITH_MTP.norm_epsilon) * p["scale"]


def mlp(p: Any, h: Any, xp: Any) -> Any:
    gate = h @ p["mlp_gate"]["kernel"]
    return gate / (1 + xp.exp(-gate)) * (h @ p["mlp_in"]["kernel"]) @ p["mlp_out"]["kernel"]


def routed(p: Any, h: Any, xp: Any) -> tuple[Any, Any]:
    """The outputs of all experts, those that are not chosen times zero, and the balancing loss of each row."""
    scores = 1 / (1 + xp.exp(-h @ p["router"]["kernel"]))
    is_chosen = scores >= xp.sort(scores, -1)[..., -WITH_MTP.experts_per_token, None]
    factors = xp.where(is_chosen, scores, 0)
    factors = WITH_MTP.router_scale * factors / factors.sum(-1, keepdims=True)
    experts = [jax.tree.map(lambda x, number=number: x[number], p) for number in range(factors.shape[-1])]
    y = sum(factors[..., number, None] * mlp(expert, h, xp) for number, expert in enumerate(experts))
    shares = scores / scores.sum(-1, keepdims=True)
    return y, len(experts) * (is_chosen.mean(1) * shares.mean(1)).sum(-1)


def layer(p: Any, x: Any, xp: Any) -> tuple[Any, Any]:
    """A layer of Llama, or one with experts and an MLP beside them; and the balancing loss of each row."""
    batch, positions, _ = x.shape
    half = WITH_MTP.head_width // 2
    angles = xp.arange(positions)[:, None] * WITH_MTP.rotary_base ** -(xp.arange(half) / half)
    cos, sin = xp.cos(angles)[None, :, None], xp.sin(angles)[None, :, None]

    def heads(name: str, h: Any) -> Any:
        return (h @ p[name]["kernel"]).reshape(batch, positions, -1, WITH_MTP.head_width)

    def turned(x: Any) -> Any:
        first, second = x[..., :half], x[..., half:]
        return xp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    h = norm(x, p["norm_attention"], xp)
    q, k, v = turned(heads("query", h)), turned(heads("key", h)), heads("value", h)
    k, v = (xp.repeat(x, WITH_MTP.num_head // WITH_MTP.key_heads, axis=2) for x in (k, v))
    scores = xp.einsum("bthk,bshk->bhts", q, k) / WITH_MTP.head_width**0.5
    scores = xp.where(xp.tril(xp.ones((positions, positions), bool)), scores, -1e30)
    weights = xp.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    x = x + xp.einsum("bhts,bshk->bthk", weights, v).reshape(batch, positions, -1) @ p["attention_out"]["kernel"]
    h = norm(x, p["norm_mlp"], xp)
    x = x + mlp(p, h, xp)
    if "experts" not in p:
        return x, 0.0
    y, balance = routed(p["experts"], h, xp)
    return x + y, balance


def losses_by_hand(params: Any, rows: Any, xp: Any) -> tuple[Any, Any, Any]:
    """Sums over tokens, divided by the number of next tokens (arXiv 2412.19437, equations 21 to 25).

    The total has the losses of both tokens, and the balancing loss of the experts of both layers.
    """
    width = WITH_MTP.embedding_dim
    table, head = (params[name]["table"].reshape(-1, width)[: WITH_MTP.vocab_size] for name in ("vocabulary", "head"))
    ids = xp.where(rows < 0, ~rows, rows)
    x = table[ids]
    for stack in (params[name] for name in ("first_blocks", "blocks") if name in params):
        for number in range(len(stack["norm_mlp"]["scale"])):
            x, balance = layer(jax.tree.map(lambda leaf, number=number: leaf[number], stack), x, xp)
    x = norm(x, params["norm"], xp)

    def nats(x: Any, targets: Any) -> Any:
        """Of the tokens that are targets: those that are not negative."""
        logits = x @ head.T
        lse = xp.log(xp.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        chosen = xp.take_along_axis(logits, xp.maximum(targets, 0)[..., None], axis=2)[..., 0]
        return xp.where(targets >= 0, lse - chosen, 0).sum()

    join = params["predictor_join"]
    following = xp.concatenate([ids[:, 1:], 0 * ids[:, :1]], 1)  # the last position is not scored, but routed
    both = [norm(table[following], join["norm_next"], xp), norm(x, join["norm_hidden"], xp)]
    further = jax.tree.map(lambda leaf: leaf[0], params["predictor_blocks"])
    ahead, more = layer(further, xp.concatenate(both, -1) @ join["product"]["kernel"], xp)
    scored = (rows[:, 1:] >= 0).sum(1)
    ahead = norm(ahead[:, :-2], params["predictor_norm"], xp)
    sums = [nats(x[:, :-1], rows[:, 1:]), nats(ahead, rows[:, 2:]), (scored * (balance + more) / 2).sum()]
    next_loss, ahead_loss, balance_loss = (x / scored.sum() for x in sums)
    return next_loss, ahead_loss, balance_loss


def formula(params: Any, _: jax.Array, rows: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
    next_loss, ahead_loss, balance_loss = losses_by_hand(params, rows, jnp)
    only_gradient = balance_loss - jax.lax.stop_gradient(balance_loss)
    loss = next_loss + WEIGHT * ahead_loss + WITH_MTP.balance_loss * only_gradient
    return loss, {"next_loss": next_loss, "ahead_loss": ahead_loss}


@pytest.mark.wide  # the next test has losses and gradients by the same hand
@pytest.mark.parametrize(("devices", "stage", "options"), GROUPS)
def test_steps_equal_the_formula(devices: int, stage: int, options: dict[str, Any]) -> None:
    with jax.numpy_rank_promotion("allow"):
        check_steps(Mtp(weight=WEIGHT).objective(), formula, devices, stage, {"size": WITH_MTP, **options})


def test_losses_and_gradients_in_float64() -> None:
    """The gradients of all leaves: the balancing loss reaches the router of the further layer too."""
    rows = pairs(0)
    model = ShardedGPT(WITH_MTP, zero.Axis("zero", (1, 1)), 0)
    tokens, targets, _ = model.inputs(rows)

    def losses(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        scores = model.apply(
            {"params": params}, tokens, targets, inputs={"predictor": mtp_inputs(model, rows)}, method="scores"
        )[0]
        sums = [model.sum_scored(scores.losses_BT, rows), sum_mtp(model, scores.extra["predictor"], rows)]
        next_loss, ahead_loss = (x / model.count_scored(rows) for x in sums)
        return next_loss + WEIGHT * ahead_loss, {"next_loss": next_loss, "ahead_loss": ahead_loss}

    found, grads = jax.jit(jax.value_and_grad(losses, has_aux=True))(first_params(WITH_MTP))
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), first_params(WITH_MTP))
        by_hand = jax.value_and_grad(lambda params: formula(params, jnp.zeros(0), rows), has_aux=True)
        expected, expected_grads = jax.jit(by_hand)(wide)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    for (path, g), x in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(g, x, rtol=1e-3, atol=2e-6 * np.abs(x).max(), err_msg=str(path))


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
    model = ShardedGPT(WITH_MTP, zero.Axis("zero", (1, 1)), 0, separators=separators, last_target=last_target)
    inputs = mtp_inputs(model, np.asarray([[4, ~5, 6, 0, 7, 8, 9]], np.int32))
    positions = 7 - last_target
    assert np.maximum(inputs.targets_BT[0], -1).tolist() == targets[:positions]
    assert inputs.tokens_BT[0, :6].tolist() == [5, 6, 0, 7, 8, 9]


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
        replace(PLAIN, **keys)


def test_a_model_without_a_predictor_is_the_same() -> None:
    """Parameters of the further layer are beside the others, which start as they do without it."""
    without: GPTConfig = replace(WITH_MTP, predictor=False)
    with_it, alone = first_params(WITH_MTP), first_params(without)
    jax.tree.map(np.testing.assert_array_equal, {name: with_it[name] for name in alone}, dict(alone))
