"""Codes of frozen matrices: the published code book, errors, bytes per weight."""

from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.training.block_codes import BLOCK, FORMS, NF4, hold, thaw


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
    matrix = jnp.asarray(np.tile(block, (2, 5)) * 0.75)
    np.testing.assert_allclose(thaw(matrix.shape, FORMS["nf4"].hold(matrix), "nf4", jnp.float32), matrix, rtol=1e-6)


@pytest.mark.parametrize("shape", [(2, 64, 7), (130, 300), (3, 2, 33, 5)], ids=str)
def test_errors_are_bounded(shape: tuple[int, ...]) -> None:
    """Each element is off by at most half the widest step of its block, whatever divides."""
    x = np.asarray(jax.random.normal(jax.random.key(0), shape)) * np.linspace(0.1, 9, shape[-1])
    largest = np.repeat(
        np.stack([np.abs(x[..., i : i + BLOCK, :]).max(-2) for i in range(0, shape[-2], BLOCK)], -2), BLOCK, -2
    )[..., : shape[-2], :]
    for form, step in (("int8", 0.5 / 127), ("nf4", np.diff(NF4).max() / 2)):
        got = thaw(shape, FORMS[form].hold(jnp.asarray(x)), form, jnp.float32)
        # The rounding of nf4's scales: half of 1 / 127 of the largest deviation.
        slack = 1.001 * step * largest + (largest.max() / 127 if form == "nf4" else 0)
        assert (np.abs(got - x) <= slack).all(), form
        assert np.abs(got - x).max() > 0


def test_bytes_per_weight() -> None:
    """QLoRA's 4.127 bits per weight, and 8.5 in int8; norms, biases and routers stay as they are."""
    kernel = jnp.zeros((1024, 2048))
    part = {"query": {"kernel": kernel, "bias": jnp.zeros(2048)}, "router": {"kernel": jnp.zeros((1024, 8))}}
    for form, bits in (("nf4", 4.127), ("int8", 8.5)):
        held = hold(part, form)
        found = 8 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held["query"]["kernel"]))
        assert found / kernel.size == pytest.approx(bits, abs=2e-3)
        assert held["query"]["bias"] is part["query"]["bias"] and held["router"]["kernel"] is part["router"]["kernel"]
