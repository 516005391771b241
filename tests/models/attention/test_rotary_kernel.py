"""The kernel that turns queries and keys, against the plain form."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.costs.topology import find_devices
from zero.models.attention.kernel import fuses_rotation
from zero.models.attention.rotary_kernel import fused_rotate
from zero.models.config import GPTConfig
from zero.models.gpt import GPT, variable_shapes
from zero.models.positions.rotary import cosines_and_sines, rotate, rotation_of

WIDE = GPTConfig(
    embedding_dim=48,
    vocab_size=101,
    num_head=2,
    head_dim=128,
    block_size=128,
    dropout=0.0,
    N=2,
    alibi_attn=False,
    positions="rotary",
)


@pytest.mark.parametrize("starts", [None, np.repeat([[0, 9], [0, 0]], [9, 15], axis=1)], ids=["whole rows", "segments"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kernel_turns_the_same(starts: Any, dtype: Any) -> None:
    """Outputs and gradients; float32 sums of two products may be fused in another order, which rounds once less."""
    x, grad = jax.random.normal(jax.random.key(0), (2, 2, 24, 3, 128)).astype(dtype)
    cos, sin = cosines_and_sines(24, 5, rotation_of(WIDE, 0, 64), starts)
    expected, pull_back = jax.vjp(jax.jit(lambda x: rotate(x, cos, sin)), x)
    got, kernel_pull_back = jax.vjp(lambda x: fused_rotate(x, cos[:, :, 0], sin[:, :, 0], interpret=True), x)
    tolerance = 1e-6 if dtype == jnp.float32 else 0.02
    for a, b in ((got, expected), (kernel_pull_back(grad)[0], pull_back(grad)[0])):
        assert a.dtype == dtype
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("kernel", "positions", "width", "pairs", "expected"),
    [
        ("tpu_v4", 64, 128, 64, True),
        ("tpu_v2", 64, 256, 128, True),
        ("tpu_v4", 1, 128, 64, False),  # in decoding
        ("tpu_v4", 64, 64, 32, False),
        ("tpu_v4", 64, 128, 32, False),  # a part of each head
        ("cudnn", 64, 128, 64, False),
        (None, 64, 128, 64, False),
    ],
)
def test_heads_that_are_turned(kernel: str | None, positions: int, width: int, pairs: int, expected: bool) -> None:
    assert fuses_rotation(kernel, positions, width, pairs) == expected


@pytest.mark.parametrize(("fraction", "kernels"), [(1.0, 2), (0.5, 0)])
def test_layers_use_the_kernel(fraction: float, kernels: int) -> None:
    """Queries and keys of a layer with a kernel of attention, where all of a head turns."""
    config = dataclasses.replace(WIDE, rotary_fraction=fraction)
    tokens = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    model = GPT(config, jnp.bfloat16, remat="full", kernel="tpu_v4")
    losses = jax.make_jaxpr(lambda variables, tokens: model.apply(variables, tokens, tokens))
    assert str(losses(variable_shapes(config), tokens)).count("name=zero_rotary") == kernels


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("v3-8", marks=pytest.mark.wide),
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("v4-8", "v6e-8")),
    ],
)
def test_kernel_compiles_for_tpu(topology: str) -> None:
    pytest.importorskip("libtpu")
    angles = jax.ShapeDtypeStruct((1, 1, 2048, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((1, 2, 2048, 32, 128), jnp.bfloat16)
    text = jax.pmap(fused_rotate, devices=find_devices(topology)[:1]).lower(x, angles, angles).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 1
