"""Models whose layers have gated DeltaNet, alone or beside attention."""

from __future__ import annotations

from functools import cache, partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zero.models.adapters import Adapters, combine, merged
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.gated_delta import GatedDelta
from zero.models.gpt import GPT, init_cache, parameter_axes, variable_shapes
from zero.models.mixer import LayerContext
from zero.partition.model_parallel import WHOLE, ModelParallel

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
# Without the keys of attention.
DELTA: dict[str, Any] = {"mixers": ("delta",), "kv_heads": None, "qk_norm": False, "positions": "none"}
ROWS, POSITIONS = 2, 11


@pytest.fixture(
    scope="module", params=["pattern", *(pytest.param(x, marks=pytest.mark.wide) for x in ("delta alone", "experts"))]
)
def model(request: pytest.FixtureRequest) -> tuple[GPT, Any]:
    others: dict[str, dict[str, Any]] = {
        "pattern": {},
        "delta alone": {**DELTA, "N": 2},
        "experts": {"experts": 4, "experts_per_token": 2, "N": 3, "attention_gate": True}
        | {"shared_dim": 8, "shared_gate": True},
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


@pytest.mark.parametrize("read", [pytest.param(1, marks=pytest.mark.slow), 5])
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


def test_adapters_equal_merged_weights(model: tuple[GPT, Any]) -> None:
    """Queries, keys, values, outputs and gates of both mixers have them, the rates of one, and MLPs."""
    gpt, variables = model
    adapters = Adapters(2, 3.0)
    rng = np.random.default_rng(0)
    params = variables["params"]
    shapes = adapters.shapes(params, parameter_axes(gpt.config))
    own = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)
    of_delta = own["blocks"] if "query" in own["blocks"] else own["blocks"]["layer_0"]
    assert {"query", "key", "value", "attention_out", "output_gate", "rate", "decay_input"} <= {*of_delta}
    if gpt.config.shared_gate:
        assert {"attention_gate", "shared_gate"} <= {*own["blocks"]["layer_2"]}
    adapted: Any = gpt.clone(adapters=adapters).apply({"params": combine(params, own)}, tokens(), tokens())
    whole: Any = gpt.apply({"params": merged(params, own, adapters)}, tokens(), tokens())
    np.testing.assert_allclose(adapted, whole, atol=1e-4)
    assert np.abs(whole - gpt.apply(variables, tokens(), tokens())).max() > 0.1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mixers": ("delta", "gamma"), "N": 2}, "mixers must name attention or delta or linear, got 'gamma'"),
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


ONE_LAYER = GPTConfig(**SIZES | DELTA | {"N": 1})
STARTS = np.asarray([[0] * 4 + [4] * 7])


def mixer_inputs() -> tuple[Any, Any]:
    """Weights of a mixer, and normalized rows."""
    rng = np.random.default_rng(2)
    whole = variable_shapes(ONE_LAYER)["params"]["blocks"]
    shapes = {name: tree for name, tree in whole.items() if not name.startswith(("mlp_", "norm_"))}
    p = jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape[1:]).astype(np.float32), shapes)
    return p, rng.normal(size=(1, POSITIONS, ONE_LAYER.embedding_dim)).astype(np.float32)


def by_hand(p: Any, h_TD: Any) -> Any:
    """Gated DeltaNet of one row with two documents, one position after the other, as arXiv 2412.06464 writes it."""
    config = ONE_LAYER
    shared = config.delta_heads // config.delta_groups

    def mixed(name: str, heads: int) -> Any:
        x_TX = h_TD @ p[name]["kernel"]
        y_TX = jnp.zeros_like(x_TX)
        for ago, weight_X in enumerate(p[f"{name}_convolution"]["taps"][::-1]):
            is_seen_T = np.arange(POSITIONS) - ago >= STARTS[0]  # in the same document
            y_TX = y_TX + jnp.where(is_seen_T[:, None], jnp.roll(x_TX, ago, axis=0), 0) * weight_X[None]
        return (y_TX * jax.nn.sigmoid(y_TX)).reshape(POSITIONS, heads, -1)

    def unit(x: Any) -> Any:
        return x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)

    q_THK = jnp.repeat(unit(mixed("query", config.delta_groups)), shared, axis=1) * config.delta_key_width**-0.5
    k_THK = jnp.repeat(unit(mixed("key", config.delta_groups)), shared, axis=1)
    v_THV = mixed("value", config.delta_heads)
    rate_TH = jax.nn.sigmoid(h_TD @ p["rate"]["kernel"])
    softplus_TH = jnp.log1p(jnp.exp(h_TD @ p["decay_input"]["kernel"] + p["decay"]["offset"][None]))
    keep_TH = jnp.exp(-jnp.exp(p["decay"]["log_rate"])[None] * softplus_TH)
    keep_TH = jnp.where((STARTS[0] == np.arange(POSITIONS))[:, None], 0, keep_TH)
    gate_THV = (h_TD @ p["output_gate"]["kernel"]).reshape(v_THV.shape)

    def position(state_HKV: Any, xs: Any) -> Any:
        q_HK, k_HK, v_HV, rate_H, keep_H = xs
        state_HKV = keep_H[:, None, None] * state_HKV
        error_HV = v_HV - jnp.einsum("hkv,hk->hv", state_HKV, k_HK)
        state_HKV = state_HKV + rate_H[:, None, None] * k_HK[:, :, None] * error_HV[:, None]
        return state_HKV, jnp.einsum("hkv,hk->hv", state_HKV, q_HK)

    state_HKV = jnp.zeros((config.delta_heads, config.delta_key_width, config.delta_value_width), h_TD.dtype)
    _, o_THV = lax.scan(position, state_HKV, (q_THK, k_THK, v_THV, rate_TH, keep_TH))
    o_THV = o_THV / jnp.sqrt((o_THV**2).mean(-1, keepdims=True) + config.norm_epsilon)
    o_THV = o_THV * p["delta_norm"]["scale"][None, None] * gate_THV * jax.nn.sigmoid(gate_THV)
    return o_THV.reshape(POSITIONS, -1) @ p["attention_out"]["kernel"]


@cache
def formula() -> tuple[Any, Any]:
    """The output, and the gradients of its product with a constant by weights and rows, in float64."""
    p, h = mixer_inputs()

    def loss(p: Any, h: Any) -> Any:
        y = by_hand(p, h[0])[None]
        return (y * direction()).sum(), y

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (p, h))
        (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*wide)
    return jax.tree.map(np.asarray, (y, grads))


def direction() -> Any:
    return np.random.default_rng(3).normal(size=(1, POSITIONS, ONE_LAYER.embedding_dim)).astype(np.float32)


class OneOfTwo(ModelParallel):
    """A device of a tensor group, whose outputs are a part of the sum."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @property
    def size(self) -> int:
        return 2

    def part(self, x: jax.Array, dim: int) -> jax.Array:
        return jnp.split(x, 2, dim)[self.rank]


CUT_WEIGHTS = {"query": 1, "key": 1, "value": 1, "output_gate": 1, "attention_out": 0}


@pytest.mark.parametrize("parts", [1, 2])
def test_outputs_and_gradients_equal_the_formula(parts: int) -> None:
    """The sum of the parts of a tensor group too, each from its part of the large weights."""
    p, h = mixer_inputs()
    starts = jnp.asarray(STARTS)

    def loss(p: Any, h: Any) -> Any:
        total = jnp.zeros(h.shape, jnp.float32)
        for rank in range(parts):
            cut = WHOLE if parts == 1 else OneOfTwo(rank)
            own = {
                name: {"kernel": cut.part(tree["kernel"], CUT_WEIGHTS[name])} if name in CUT_WEIGHTS else tree
                for name, tree in p.items()
            }
            site = LayerContext(0, 0, 0, starts, None, None)
            y, _ = GatedDelta(ONE_LAYER, jnp.float32, row_group=cut).apply({"params": own}, h, None, site)
            total = total + y
        return (total * direction()).sum(), total

    (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(p, h)
    expected, expected_grads = formula()
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    for (path, g), x in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(g, x, rtol=1e-4, atol=1e-5 * np.abs(x).max(), err_msg=str(path))
