"""Shards as whole arrays and back, tables of bytes, and divergence between devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero

SHAPES = {"w": (5, 24), "odd": (13, 3), "b": (9,), "scalar": (), "tiny": (2,)}
AXES = [
    zero.Axis("batch", (1, 8)),
    zero.Axis("batch", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7)),
    zero.Axis("batch", (2, 4)),
    zero.Axis("batch", (4, 2), (7, 6, 5, 4, 3, 2, 1, 0)),
    zero.Axis("batch", (1, 3)),
    zero.Axis("batch", (1, 1)),
]


def make_whole() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def make_shards(layout: zero.Layout, axis: zero.Axis) -> dict[str, jax.Array]:
    whole = make_whole()
    return jax.pmap(lambda _: zero.shard(whole, layout, axis), "batch")(jnp.zeros(axis.size))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("axis", AXES, ids=str)
def test_to_global_is_the_whole_array_and_from_global_the_way_back(axis: zero.Axis, donate: bool) -> None:
    layout = zero.make_layout(make_whole(), axis.shards)
    shards = make_shards(layout, axis)
    before = {name: np.asarray(x) for name, x in shards.items()}
    result = zero.to_global(shards, layout, axis, donate=donate)
    for leaf, (name, x) in zip(layout.leaves, sorted(result.items()), strict=True):
        inside = tuple(slice(size) for size in leaf.shape)
        padded = np.zeros(leaf.padded_shape, np.float32)
        padded[inside] = make_whole()[name]
        np.testing.assert_array_equal(x, padded)
        assert x.sharding == zero.global_shapes(layout, axis)[name].sharding
    back = zero.from_global(result, layout, axis, donate=donate)
    for name, x in back.items():
        np.testing.assert_array_equal(x, before[name])
        assert x.sharding == shards[name].sharding  # else the program that takes it is compiled again
        assert shards[name].is_deleted() == donate


def test_donation_copies_no_byte() -> None:
    axis = zero.Axis("batch", (1, 8))
    layout = zero.make_layout(make_whole(), 8)
    shards = make_shards(layout, axis)
    addresses = [part.data.unsafe_buffer_pointer() for part in shards["w"].addressable_shards]
    back = zero.from_global(zero.to_global(shards, layout, axis, donate=True), layout, axis, donate=True)
    assert [part.data.unsafe_buffer_pointer() for part in back["w"].addressable_shards] == addresses


def test_from_global_takes_arrays_that_lie_elsewhere() -> None:
    axis = zero.Axis("batch", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7))
    layout = zero.make_layout({"w": jnp.zeros((5, 24))}, 8)
    expected = make_shards(zero.make_layout(make_whole(), 8), axis)["w"]
    whole = make_whole()["w"]
    np.testing.assert_array_equal(zero.from_global({"w": whole}, layout, axis)["w"], expected)
    np.testing.assert_array_equal(zero.from_global({"w": jnp.asarray(whole)}, layout, axis)["w"], expected)


def test_errors_name_the_leaf() -> None:
    axis = zero.Axis("batch", (1, 8))
    layout = zero.make_layout(make_whole(), 8)
    shards = make_shards(layout, axis)
    whole = zero.to_global(shards, layout, axis)
    with pytest.raises(ValueError, match=r"leaf odd: .* got shape \(8, 13, 3\)"):
        zero.to_global({**shards, "odd": jnp.zeros((8, 13, 3))}, layout, axis)
    with pytest.raises(ValueError, match=r"leaf w: .* on the host"):
        zero.to_global({**shards, "w": np.zeros((8, 5, 3))}, layout, axis)
    with pytest.raises(ValueError, match=r"leaf odd: the layout says float32\[16, 3\].* float32\[13, 3\]"):
        zero.from_global({**whole, "odd": jnp.zeros((13, 3))}, layout, axis)
    with pytest.raises(ValueError, match=r"leaf b: .* int32"):
        zero.from_global({**whole, "b": jnp.zeros(16, jnp.int32)}, layout, axis)
    with pytest.raises(ValueError, match="8 shards, but axis 'batch' spreads a copy over 4"):
        zero.to_global(shards, layout, zero.Axis("batch", (2, 4)))


def test_memory_counts_what_devices_hold() -> None:
    params = {"blocks": {"w": jnp.ones((4, 16, 8))}, "head": jnp.ones((16, 9)), "scale": jnp.ones(())}
    tx = optax.adamw(1e-3)
    table = zero.memory(params, tx, 8, stacked=["blocks"])
    layout = zero.make_layout(params, 8, stacked=["blocks"])

    def init(_: jax.Array) -> tuple[dict, optax.OptState]:
        shards = zero.shard(params, layout, "batch")
        return shards, tx.init(shards)

    held, state = jax.pmap(init, "batch")(jnp.zeros(8))
    for row in table.rows:
        if row.stage:
            assert row.parameters == sum(x.nbytes for x in jax.tree.leaves(held)) // 8
            assert row.state == sum(x.nbytes for x in jax.tree.leaves(state)) // 8
    whole = 4 * (4 * 16 * 8 + 16 * 9 + 1)
    by_stage = {(row.stage, row.compute_dtype): row for row in table.rows}
    assert by_stage[0, "float32"][2:] == (whole, 2 * whole + 4, 0, whole)
    assert by_stage[0, "bfloat16"].gathered == by_stage[1, "bfloat16"].gradients == whole // 2
    assert by_stage[2, "bfloat16"].gradients == by_stage[2, "bfloat16"].parameters
    assert by_stage[3, "bfloat16"].gathered == 2 * (2 * 16 * 8)  # two layers of the blocks
    assert "bfloat16" in str(table) and f"{whole:,}" in str(table)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.complex64, jnp.uint32])
def test_check_replicated_names_the_leaves_that_differ(dtype: jnp.dtype) -> None:
    same = jnp.stack([jnp.asarray([0, 1, 1], dtype)] * 8)
    zero.check_replicated({"a": same, "b": [same]}, "batch")
    for device in range(8):
        other = same.at[device, 1].set(jnp.asarray(0, dtype))
        with pytest.raises(ValueError, match=r"axis 'batch': b/0, c$"):
            zero.check_replicated({"a": same, "b": [other, same], "c": other}, "batch")


def test_check_replicated_compares_bits() -> None:
    nan = jnp.full((8, 2), jnp.nan)
    zero.check_replicated(
        {"nan": nan, "empty": jnp.zeros((8, 0)), "key": jnp.broadcast_to(jax.random.key(0), (8,))}, "i"
    )
    with pytest.raises(ValueError, match=r"zero$"):
        zero.check_replicated({"zero": jnp.zeros((8, 2)).at[3, 0].set(-0.0), "nan": nan}, "i")
    zero.check_replicated({"few": jnp.ones((4, 2))}, "i", devices=jax.devices()[2:6])


def test_devices_in_another_order() -> None:
    devices = jax.devices()[::-1]
    whole = make_whole()
    layout = zero.make_layout(whole, 8)
    shards = jax.pmap(lambda _: zero.shard(whole, layout, "batch"), "batch", devices=devices)(jnp.zeros(8))
    result = zero.to_global(shards, layout, "batch", devices)
    np.testing.assert_array_equal(result["w"], whole["w"])
    assert result["w"].addressable_shards[0].device in devices
    back = zero.from_global(result, layout, "batch", devices)
    gathered = jax.pmap(partial(zero.gather, layout=layout, axis="batch"), "batch", devices=devices)(back)
    np.testing.assert_array_equal(gathered["odd"][0], whole["odd"])
