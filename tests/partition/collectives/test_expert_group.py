"""Leaves of experts, exchanged inside groups and gathered across them, and tokens that travel to experts and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero

N = 8
SHAPES = {"odd": (8, 5, 3), "wide": (8, 2, 33), "few": (8, 1), "whole": (8,)}  # none divides, one is not split


def made(experts: int, replicas: int = 1) -> tuple[zero.Axis, zero.Layout, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    whole = {name: rng.integers(-8, 8, shape).astype(np.float32) for name, shape in SHAPES.items()}  # exact in bfloat16
    axis = zero.Axis.with_expert_groups("zero", N, experts, replicas)
    return axis, zero.groups.make_grouped_layout(whole, axis.shards, expert=experts, is_expert=lambda name: True), whole


@pytest.mark.parametrize(
    ("experts", "replicas"),
    [(2, 1), (4, 2), *(pytest.param(*x, marks=pytest.mark.wide) for x in ((4, 1), (8, 1), (2, 2)))],
)
@pytest.mark.parametrize("wire", [None, jnp.bfloat16])
def test_gather_and_scatter_of_experts(experts: int, replicas: int, wire: Any) -> None:
    """Each device gathers its own experts and scatters their sums."""
    axis, layout, whole = made(experts, replicas)

    def gathered(_: jax.Array) -> Any:
        return zero.gather(zero.shard(whole, layout, axis), layout, axis, wire)

    parts = jax.pmap(gathered, "zero")(np.ones(N))
    for name, x in whole.items():
        for device in range(N):
            rank, own = device % experts, 8 // experts
            np.testing.assert_array_equal(parts[name][device], x[rank * own : (rank + 1) * own], err_msg=name)

    def scattered(device: jax.Array) -> Any:
        own = jax.tree.map(lambda x: x.astype(jnp.float32) * device, gathered(device))
        return zero.scatter_sum(own, layout, axis, wire_dtype=wire, reduce_dtype=jnp.float32)

    shards = jax.pmap(scattered, "zero")(np.arange(1.0, N + 1, dtype=np.float32))
    for leaf in layout.leaves:
        x = whole[leaf.name]
        counts = np.asarray([sum(1 + d for d in range(N) if d % experts == e // (8 // experts)) for e in range(8)])
        expected = x * counts.reshape(-1, *[1] * (x.ndim - 1))
        first_copy = np.asarray(shards[leaf.name])[: axis.shards]
        if not leaf.splits:
            got = first_copy[0]
        else:
            got = np.concatenate(first_copy, leaf.splits[0].dim)[tuple(slice(size) for size in leaf.shape)]
        # A summand times 8 has more digits than bfloat16 has for some values.
        np.testing.assert_allclose(got, expected, rtol=0 if wire is None else 0.02, err_msg=leaf.name)


def test_split_dimension_of_experts() -> None:
    """Experts are never split along the dimension that numbers them."""
    _, layout, _ = made(4)
    assert all(split.dim > 0 for leaf in layout.leaves for split in leaf.splits)
    alone = zero.make_layout({"w": np.zeros((8, 5, 3), np.float32)}, N)
    assert alone.leaves[0].splits[0].dim == 0


@pytest.mark.parametrize("experts", [2, 8])
def test_tokens_return_in_order(experts: int) -> None:
    """Tokens travel to their experts and back in order."""
    group = zero.groups.ExpertGroup(zero.Axis.with_expert_groups("zero", N, experts))
    device, row, expert = np.meshgrid(np.arange(N), np.arange(3), np.arange(8), indexing="ij")
    x = (100 * device + 10 * row + expert)[..., None, None].astype(np.float32)

    there = np.asarray(jax.pmap(group.to_experts, "zero")(x))
    own = 8 // experts
    assert there.shape == (N, 3 * experts, own, 1, 1)
    for at in range(N):
        senders = [d for d in range(N) if d // experts == at // experts]
        expected = [[100 * d + 10 * r + at % experts * own + e for e in range(own)] for d in senders for r in range(3)]
        assert there[at, :, :, 0, 0].tolist() == expected
    back = jax.pmap(lambda x: group.from_experts(group.to_experts(x)), "zero")(x)
    np.testing.assert_array_equal(back, x)
