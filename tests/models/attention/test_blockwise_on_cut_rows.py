"""Attention of rows that are cut over context groups, by a ring and by swapped heads, against that of whole rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.attention import EVERYTHING, ROWS, starts_of
from zero.models.attention.blockwise import blockwise_attention
from zero.models.attention.dense import dense_attention
from zero.models.attention.scores import Form, Terms
from zero.partition.collectives.axis import Axis
from zero.partition.collectives.context_group import ContextGroup, Ulysses
from zero.partition.collectives.ordering import in_order

WIDTH = 5
Inputs = tuple[Any, ...]  # queries, keys, values, bias, gradients of the output


def inputs(positions: int, heads: int, groups: int) -> Inputs:
    keys = jax.random.split(jax.random.key(positions), 5)
    shapes = [(ROWS, positions, count, WIDTH) for count in (heads, groups, groups)]
    q, k, v = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False))
    return q, k, v, jax.random.normal(keys[3], (32, heads)), jax.random.normal(keys[4], q.shape)


def output_and_gradients(attend: Callable[..., jax.Array], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    out, pull_back = jax.vjp(attend, *arrays[:4])
    return (out, *pull_back(arrays[4]))


def on_groups(context: int, arrays: Inputs, form: Form, segments: int, swaps: bool) -> list[np.ndarray]:
    """As `output_and_gradients`, from the parts of all devices; blocks of 4 positions."""
    group = ContextGroup(Axis("batch", (1, 8), context=context))
    keys, own = jax.random.split(jax.random.key(1), ROWS), group.input_positions

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        starts = starts_of(segments, q.shape[1])
        parts = [own(x) for x in (q, k, v)]
        own_starts = None if starts is None else own(starts)
        if not swaps:
            cut_form = form._replace(row_group=group)
            return blockwise_attention(
                *parts, form=cut_form, terms=Terms(bias, keys_B=keys, starts_BT=own_starts), block=4
            )
        swap = Ulysses(group)
        bias, parts = swap.row_group.part(bias, 1), [swap.to_heads(x) for x in parts]
        whole_starts = None if own_starts is None else swap.whole_rows(own_starts)
        cut_form = form._replace(row_group=swap.row_group)
        out = blockwise_attention(
            *parts, form=cut_form, terms=Terms(bias, keys_B=keys, starts_BT=whole_starts), block=4
        )
        return swap.to_positions(out)

    def on_device(_: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        own_weights, place = jax.vjp(own, arrays[4])
        out, *grads = output_and_gradients(attend, *arrays[:4], own_weights)
        return (*place(out), *grads)

    found = jax.pmap(in_order(on_device), "batch", in_axes=(0, *[None] * len(arrays)))(np.zeros(8), *arrays)
    by_group = [np.asarray(x).reshape(8 // context, context, *x.shape[1:]).sum(1) for x in found]
    for x in by_group:
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))  # every group computes the same
    return [x[0] for x in by_group]


CASES = {
    "alibi": (4, 56, 3, 3, Form(has_alibi=True, dropout_rate=0.3), 0),
    "all": (2, 36, 6, 2, EVERYTHING, 2),
    "window": (8, 96, 3, 1, Form(window=9), 0),
    "short pieces": (8, 16, 1, 1, Form(cap=1.0), 1),
}


@pytest.mark.parametrize(
    "case", [case if case == "all" else pytest.param(case, marks=pytest.mark.wide) for case in CASES]
)
def test_ring_equals_one_device(case: str) -> None:
    """Ring attention equals attention on one device."""
    context, positions, heads, groups, form, segments = CASES[case]
    check(context, inputs(positions, heads, groups), form, segments, swaps=False)


@pytest.mark.parametrize(
    ("context", "positions", "form", "segments"),
    [
        pytest.param(4, 56, Form(has_alibi=True, dropout_rate=0.3), 0, marks=pytest.mark.wide),
        (2, 36, EVERYTHING, 2),
        pytest.param(8, 48, Form(), 1, marks=pytest.mark.wide),
    ],
)
def test_ulysses_equals_one_device(context: int, positions: int, form: Form, segments: int) -> None:
    """Attention with swapped heads (Ulysses) equals attention on one device."""
    check(context, inputs(positions, 2 * context, context), form, segments, swaps=True)


def check(context: int, arrays: Inputs, form: Form, segments: int, *, swaps: bool) -> None:
    keys = jax.random.split(jax.random.key(1), ROWS)
    starts = starts_of(segments, arrays[0].shape[1])

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        return dense_attention(q, k, v, form=form, terms=Terms(bias, keys_B=keys, starts_BT=starts))

    expected = jax.jit(lambda *arrays: output_and_gradients(attend, *arrays))(*arrays)
    for got, x in zip(on_groups(context, arrays, form, segments, swaps), expected, strict=True):
        np.testing.assert_allclose(got, x, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("context", [2, 4, 8])
def test_pairs_are_balanced(context: int) -> None:
    """Every device has the same number of pairs to compute.

    Blocks of which a query sees a key, over all turns; a whole row cut in order would need up to 2 - 1/c as many.
    """
    group, block = ContextGroup(Axis("batch", (1, 8), context=context)), 4
    own = 4 * block  # two pieces of two blocks

    def numbers(_: jax.Array) -> jax.Array:
        return jnp.stack([group.numbers(own, turn).reshape(-1, block) for turn in range(context)])

    last = np.asarray(jax.pmap(numbers, "batch")(jnp.zeros(8)))[..., -1]  # (devices, turns, blocks)
    queries = last[:, :1, :, None]
    pairs = (last[:, :, None, :] <= queries).sum((2, 3))
    np.testing.assert_array_equal(pairs[:, 0], pairs[0, 0])
    np.testing.assert_array_equal(pairs[:, 1:], 8)  # half of 4 x 4
    blocks = 4 * context  # of a whole row
    assert pairs[:context].sum() == blocks * (blocks + 1) // 2
