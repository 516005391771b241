"""Estimates of the memory of activations against what jax stores for a backward pass."""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from zero.models.config import GPTConfig
from zero.models.gpt import GPT, variable_shapes
from zero.models.stack import KINDS, STORED, kinds_of
from zero.partition.collectives.axis import Axis
from zero.training.activations import (
    activation_bytes,
    fitting_remat,
    forward_flops,
    ladder,
    numbers_per_position,
    stored_bytes,
)
from zero.training.sharded_gpt import ShardedGPT

PLAIN = GPTConfig(embedding_dim=32, vocab_size=64, num_head=4, block_size=64, dropout=0.0, N=3, qkv_bias=False)
GATED = dataclasses.replace(PLAIN, gated=True, mlp_dim=96, kv_heads=2)
ROWS, CONTEXT = 2, 64


@cache
def residuals(config: GPTConfig, remat: str) -> int:
    """Bytes that the forward pass stores for the backward pass, blockwise attention."""
    gpt, tokens = GPT(config, remat=remat, blockwise_from=2), jnp.zeros((ROWS, CONTEXT), jnp.int32)

    def backward(variables: Any) -> Any:
        return jax.vjp(lambda variables: jnp.sum(jnp.asarray(gpt.apply(variables, tokens, tokens))), variables)[1]

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(backward, variable_shapes(config))))


@pytest.mark.parametrize("config", [pytest.param(PLAIN, marks=pytest.mark.wide), GATED], ids=["plain", "gated"])
@pytest.mark.parametrize("remat", STORED)
def test_stored_values(config: GPTConfig, remat: str) -> None:
    """The numbers per position are those that a policy stores beyond the inputs of layers."""
    model = ShardedGPT(config, Axis("zero", (1, 1)), 3, remat=remat)
    more = residuals(config, remat) - residuals(config, "full")
    logs = 2 * config.num_head if "attention" in remat or "projections" in remat else 0
    # Here the log-sum-exp has as many bytes as any other number, on TPU twice as many.
    numbers = numbers_per_position(model, kinds_of(remat)) - logs // 2
    assert more == pytest.approx(4 * ROWS * CONTEXT * config.N * numbers, rel=0.02)


def test_ladder() -> None:
    """Each policy of the ladder stores more, and the last one that fits is taken."""
    model = ShardedGPT(GATED, Axis("zero", (1, 8)), 3, jnp.bfloat16)
    rungs = ladder(model, CONTEXT)
    assert rungs == ("full", "mlp_in", "mlp", "mlp+attention")
    needs = [activation_bytes(dataclasses.replace(model, remat=remat), ROWS, CONTEXT) for remat in rungs]
    assert needs == sorted(set(needs))
    fit = partial(fitting_remat, model, ROWS, CONTEXT, 10**6)
    chosen = [rungs.index(fit((10**6 + need) * 1.3)) for need in (0, *needs)]
    assert chosen == sorted(chosen) and rungs[chosen[0]] == "full"
    assert fit(1e9) == "mlp+attention" and fit(0.0) == "full"


def test_no_more_than_the_link_carries() -> None:
    """On the host, what is stored is limited by the time that it takes to get there, not by the device's memory."""
    model = ShardedGPT(GATED, Axis("zero", (1, 8)), 3, jnp.bfloat16)
    moved = dataclasses.replace(model, offload=KINDS)
    stored = [stored_bytes(dataclasses.replace(moved, remat=remat), ROWS, CONTEXT) for remat in ladder(moved, CONTEXT)]
    need = activation_bytes(dataclasses.replace(moved, remat="mlp+attention"), ROWS, CONTEXT)
    kept = activation_bytes(dataclasses.replace(model, remat="mlp+attention"), ROWS, CONTEXT)
    assert kept - need == stored[-1] - 2 * stored[-1] // GATED.N
    choose = partial(fitting_remat, moved, ROWS, CONTEXT, 0, 1e9)
    assert choose(0.0) == "mlp+attention" and choose(1e9) == "full"
    forward = forward_flops(moved, ROWS, CONTEXT)
    assert [choose(0.999 * forward / size) for size in stored] == list(ladder(moved, CONTEXT))


def test_no_more_than_the_host_holds() -> None:
    model = ShardedGPT(GATED, Axis("zero", (1, 8)), 3, jnp.bfloat16, offload=KINDS)
    rungs = ladder(model, CONTEXT)
    stored = [stored_bytes(dataclasses.replace(model, remat=remat), ROWS, CONTEXT) for remat in rungs]
    chosen = [fitting_remat(model, ROWS, CONTEXT, 0, 1e9, host_capacity=size) for size in stored]
    assert chosen == list(rungs)
    assert fitting_remat(model, ROWS, CONTEXT, 0, 1e9, host_capacity=stored[-1] - 1) == rungs[-2]


@pytest.mark.parametrize(
    ("config", "kernel", "context", "rungs"),
    [
        (GATED, None, 8192, ["full", "mlp_in", "mlp", "mlp+attention"]),
        (GATED, "tpu_v4", 2048, ["full", "mlp_in", "mlp"]),
        (GATED, "tpu_v4", 4096, ["full", "attention", "mlp_in+attention", "mlp+attention"]),
        (dataclasses.replace(PLAIN, experts=4, experts_per_token=1), "tpu_v4", 8192, ["full"]),
    ],
)
def test_rungs_of_the_ladder(config: GPTConfig, kernel: str | None, context: int, rungs: list[str]) -> None:
    """Attention that a kernel computes is stored only in long rows, and nothing of experts."""
    model = ShardedGPT(config, Axis("zero", (1, 8)), 3, kernel=kernel)
    found = list(ladder(model, context))
    needs = [activation_bytes(dataclasses.replace(model, remat=remat), ROWS, context) for remat in found]
    assert found == rungs and needs == sorted(set(needs))
