"""Values that a stack of layers stores for its backward pass or recomputes, and the memory layout of its inputs."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.equations import equations
from zero.models.config import GPTConfig
from zero.models.gpt import GPT, variable_shapes
from zero.models.stack import REMAT, STORED
from zero.training.flops import matmul_flops

CONFIG = GPTConfig(embedding_dim=32, vocab_size=64, num_head=2, block_size=64, dropout=0.0, N=4, gated=True)


SOME = ("nested", "none", "dots", "mlp+projections", "mlp_in+attention")  # of whose parts all the others are


@pytest.mark.wide  # tests/training/test_activations.py has them
@pytest.mark.parametrize(
    ("blockwise_from", "some"),
    [
        (2, SOME),
        pytest.param(2, (*REMAT,), marks=pytest.mark.wide),
        pytest.param(None, (*REMAT,), marks=pytest.mark.slow),
    ],
)
def test_stored_values_are_not_computed_again(blockwise_from: int | None, some: tuple[str, ...]) -> None:
    """Products that a policy stores are computed once."""
    tokens = jnp.zeros((2, 32), jnp.int32)

    def flops(remat: str) -> int:
        gpt = GPT(CONFIG, remat=remat, blockwise_from=blockwise_from)
        gradient = jax.grad(lambda variables: jnp.sum(jnp.asarray(gpt.apply(variables, tokens, tokens))))
        return matmul_flops(jax.make_jaxpr(gradient)(variable_shapes(CONFIG)).jaxpr)

    counted = {remat: flops(remat) for remat in ("full", *some)}
    per_layer = 2 * 2 * 32 * 32 * 32 * CONFIG.N  # one product of (2 x 32, 32) and (32, 32) in every layer
    of_attention = per_layer * (1 if blockwise_from is None else 2)
    products = {"attention": of_attention, "projections": of_attention + 4 * per_layer}
    of_mlp = {"mlp_in": 4 * per_layer, "mlp": 8 * per_layer, "experts": 8 * per_layer}  # without experts as mlp
    products |= of_mlp | {f"{mlp}+{name}": of_mlp[mlp] + products[name] for mlp in of_mlp for name in products}
    for remat in products.keys() & counted.keys():
        assert counted["full"] - counted[remat] == products[remat], remat
    assert products.keys() == {*STORED}
    assert counted["mlp+projections"] == counted["dots"] >= counted["none"]
    assert counted["nested"] > counted["full"]


HEADS, KEYS, VALUES, LAYERS, CHOSEN = 4, 8, 16, 2, 2


def of_experts(capacity: float | None) -> tuple[dict[str, Any], Any]:
    """The gradient of experts behind the delta rule by each policy that stores one of them, and its variables."""
    config = dataclasses.replace(
        CONFIG, alibi_attn=False, positions="none", mixers=("delta",), delta_key_heads=2, delta_value_heads=HEADS,
        delta_key_dim=KEYS, delta_value_dim=VALUES, N=LAYERS, mlp_bias=False, mlp_dim=40, experts=4,
        experts_per_token=CHOSEN, expert_capacity=capacity, qkv_bias=False, out_bias=False,
    )  # fmt: skip
    tokens = jax.random.randint(jax.random.key(1), (2, 32), 0, 64)
    variables = variable_shapes(config)

    def gradient(remat: str) -> Any:
        gpt = GPT(config, remat=remat)
        return jax.jit(jax.grad(lambda variables: jnp.sum(jnp.asarray(gpt.apply(variables, tokens, tokens)))))

    return {remat: gradient(remat) for remat in ("full", "attention", "mlp", "experts")}, variables


@pytest.mark.parametrize("capacity", [None, pytest.param(1.5, marks=pytest.mark.slow)])
def test_experts_and_the_delta_rule_are_not_computed_again(capacity: float | None) -> None:
    """What a policy stores of them is computed once."""
    programs, variables = of_experts(capacity)
    counted = {remat: matmul_flops(jax.make_jaxpr(program)(variables).jaxpr) for remat, program in programs.items()}
    positions = 2 * 32
    product = 2 * positions * CHOSEN * (capacity or 1.0) * 32 * 40 * LAYERS
    rule = 2 * positions * HEADS * (3 * KEYS * VALUES + 32 * (2 * KEYS + VALUES)) * LAYERS
    saved = {remat: counted["full"] - flops for remat, flops in counted.items()}
    assert saved == {"full": 0, "attention": rule, "mlp": 2 * product, "experts": 3 * product}


@pytest.mark.wide
@pytest.mark.parametrize("capacity", [None, pytest.param(1.5, marks=pytest.mark.slow)])
def test_what_is_stored_changes_no_gradient(capacity: float | None) -> None:
    programs, shapes = of_experts(capacity)
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(shapes))))
    variables = jax.tree.map(lambda leaf: 0.2 * jax.random.normal(next(keys), leaf.shape, leaf.dtype), shapes)
    expected = programs["full"](variables)
    for remat, program in programs.items():
        equal = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7, err_msg=remat)
        jax.tree.map(equal, program(variables), expected)


@pytest.mark.parametrize(("kernel", "per_layer"), [(None, 0), ("tpu_v4", 2)])
def test_rows_are_contiguous_for_kernels_of_tpu(kernel: str | None, per_layer: int) -> None:
    """The input of a layer and the first product of its MLP have a fixed layout, and so have their gradients."""
    tokens, gpt = jnp.zeros((2, 32), jnp.int32), GPT(CONFIG, remat="none", kernel=kernel)

    def loss(variables: Any) -> jax.Array:
        return jnp.sum(jnp.asarray(gpt.apply(variables, tokens, tokens)))

    counted = [
        str(jax.make_jaxpr(program)(variable_shapes(CONFIG))).count("= layout_constraint")
        for program in (loss, jax.grad(loss))
    ]
    assert counted == [per_layer, 2 * per_layer]


WINDOWED = dataclasses.replace(CONFIG, N=5, windows=(4, 0, 4, 0, 4))  # two periods of two layers, and one layer more


@pytest.mark.wide
def test_layers_after_the_last_whole_period() -> None:
    """They equal those of a policy whose layers choose among the windows when they run."""
    tokens = jax.random.randint(jax.random.key(1), (2, 32), 0, 64)
    variables = GPT(WINDOWED).init(jax.random.key(0), tokens, None, method="hidden")

    def gradient(remat: str) -> Any:
        gpt = GPT(WINDOWED, remat=remat)
        return jax.jit(jax.grad(lambda variables: jnp.sum(jnp.asarray(gpt.apply(variables, tokens, tokens)))))(
            variables
        )

    equal = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(equal, gradient("full"), gradient("nested"))


@pytest.mark.parametrize(
    ("windows", "expected"),
    [((0,), [False]), ((4, 0, 4, 0, 4), [False, False, True]), ((4, 4, 4, 4, 0), [True] * 5)],
    ids=["one", "two-and-rest", "no-loop"],
)
def test_xla_keeps_no_more_than_the_policy(windows: tuple[int, ...], expected: list[bool]) -> None:
    """Layers outside a loop, and those of a loop of one iteration, are computed again behind a barrier."""
    gpt = GPT(dataclasses.replace(WINDOWED, windows=windows))
    tokens = jnp.zeros((2, 32), jnp.int32)
    shapes = variable_shapes(gpt.config)
    program = jax.make_jaxpr(lambda variables: gpt.apply(variables, tokens, tokens))(shapes)
    barriers = [eqn.params["prevent_cse"] for eqn in equations(program.jaxpr) if "prevent_cse" in eqn.params]
    assert barriers[1:-1] == expected  # the first and the last are of the vocabulary
