"""Codes of frozen matrices: the published code book, errors, bytes per weight."""

from functools import cache, partial
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.training.block_codes import BLOCK, CODECS, NF4, dequantize, quantize


@cache
def quantizing(form: str) -> Any:
    """Compiled as a whole, as in a program: single operations would be compiled one by one for each shape."""
    return jax.jit(CODECS[form].quantize)


@partial(jax.jit, static_argnums=(0, 2))
def dequantized(shape: tuple[int, ...], quantized: Any, form: str) -> jax.Array:
    return dequantize(shape, quantized, form, jnp.float32)


def test_code_book_is_published() -> None:
    """The entries are quantiles of a normal distribution by the formula of QLoRA's own code."""
    offset, quantile = 0.9677083, NormalDist().inv_cdf  # as in `bitsandbytes.functional.create_normal_map`
    positive = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    negative = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    values = np.sort([*positive, 0, *negative])
    np.testing.assert_allclose(NF4, values / values.max(), atol=2e-6)


def test_entries_are_exact() -> None:
    """A block of entries of the code book, times one scale, is read back as it was."""
    rng = np.random.default_rng(0)
    block = np.concatenate([NF4, rng.permutation(np.tile(NF4, 3))])[:, None]
    matrix = np.asarray(np.tile(block, (2, 5)) * 0.75, np.float32)
    np.testing.assert_allclose(dequantized(matrix.shape, quantizing("nf4")(matrix), "nf4"), matrix, rtol=1e-6)


@pytest.mark.parametrize("shape", [(2, 64, 7), (130, 300), (3, 2, 33, 5)], ids=str)
def test_errors_are_bounded(shape: tuple[int, ...]) -> None:
    """Each element is off by at most half the widest step of its block, whatever divides."""
    x = (np.random.default_rng(0).normal(size=shape) * np.linspace(0.1, 9, shape[-1])).astype(np.float32)
    largest = np.repeat(
        np.stack([np.abs(x[..., i : i + BLOCK, :]).max(-2) for i in range(0, shape[-2], BLOCK)], -2), BLOCK, -2
    )[..., : shape[-2], :]
    for form, step in (("int8", 0.5 / 127), ("nf4", np.diff(NF4).max() / 2)):
        got = dequantized(shape, quantizing(form)(x), form)
        # The rounding of nf4's scales: half of 1 / 127 of the largest deviation.
        slack = 1.001 * step * largest + (largest.max() / 127 if form == "nf4" else 0)
        assert (np.abs(got - x) <= slack).all(), form
        assert np.abs(got - x).max() > 0


def test_bytes_per_weight() -> None:
    """QLoRA's 4.127 bits per weight, and 8.5 in int8; norms, biases and routers stay as they are."""
    kernel = jnp.zeros((1024, 2048))
    part: Any = {"query": {"kernel": kernel, "bias": np.zeros(2048)}, "router": {"kernel": np.zeros((1024, 8))}}
    for form, bits in (("nf4", 4.127), ("int8", 8.5)):
        quantized = quantize(part, form)
        found = 8 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(quantized["query"]["kernel"]))
        assert found / kernel.size == pytest.approx(bits, abs=2e-3)
        assert (
            quantized["query"]["bias"] is part["query"]["bias"]
            and quantized["router"]["kernel"] is part["router"]["kernel"]
        )
