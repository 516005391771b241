"""Shards as whole arrays and back: the same elements, in the same buffers where they may be donated."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import zero
from tests.partition.sharded_arrays import AXES, make_shards, make_whole
from zero.partition.collectives.arrays import fill_padding
from zero.partition.collectives.axis import as_axis


@pytest.mark.parametrize("donate", [pytest.param(False, marks=pytest.mark.wide), True])
@pytest.mark.parametrize("axis", AXES, ids=str)
def test_global_round_trip(axis: zero.Axis, donate: bool) -> None:
    """`to_global` gives the whole arrays, and `from_global` the shards again."""
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
        assert result[name].is_deleted() == donate


@pytest.mark.parametrize(
    "shapes",
    [
        [(5, 24), (13, 3)],
        [(8, 64), (512,)],  # shards of (1, 64) and (64,): of one the array has the shape that the other is given
        [(1, 16, 64), (16, 64), (64, 16, 1)],
        [(24, 16)] * 5,
    ],
    ids=str,
)
def test_donation_copies_no_byte(shapes: list[tuple[int, ...]]) -> None:
    whole = [np.full(shape, number, np.float32) for number, shape in enumerate(shapes)]
    layout = zero.make_layout(whole, 8)

    def addresses(arrays: list[jax.Array]) -> list[list[int]]:
        return [[part.data.unsafe_buffer_pointer() for part in x.addressable_shards] for x in arrays]

    shards = jax.pmap(lambda _: zero.shard(whole, layout, "batch"), "batch")(jnp.zeros(8))
    before = addresses(shards)
    back = zero.from_global(zero.to_global(shards, layout, "batch", donate=True), layout, "batch", donate=True)
    assert addresses(back) == before


def test_each_device_compiles_one_program(caplog: pytest.LogCaptureFixture) -> None:
    """Or two. One for each shape as well took seconds at the first checkpoint of a run."""
    axis, sizes = zero.Axis("batch", (1, 8)), range(40, 52)
    whole = {str(shape): np.ones(shape, np.float32) for n in sizes for shape in ((n, n + 8), (n,))}
    layout = zero.make_layout(whole, 8)
    shards = zero.to_devices(whole, layout, axis)
    with jax.log_compiles():
        zero.from_global(zero.to_global(shards, layout, axis, donate=True), layout, axis, donate=True)
    compiled = [record.getMessage() for record in caplog.records]
    assert sum(message.startswith("Finished XLA compilation") for message in compiled) == 2 * 2 * 8


def test_error_keeps_donated_arrays() -> None:
    """An error leaves donated arrays as they were."""
    layout = zero.make_layout(make_whole(), 8)
    shards = make_shards(layout, zero.Axis("batch", (1, 8)))
    with pytest.raises(ValueError, match="leaf w"):
        zero.to_global({**shards, "w": shards["b"]}, layout, "batch", donate=True)
    whole = zero.to_global(shards, layout, "batch")
    with pytest.raises(ValueError, match="leaf w"):
        zero.from_global({**whole, "w": whole["b"]}, layout, "batch", donate=True)
    assert not any(x.is_deleted() for x in (*shards.values(), *whole.values()))


def elsewhere(x: np.ndarray, leaf: zero.groups.LeafLayout) -> dict[str, Any]:
    """The array in the places that jax may share a buffer with, or not."""
    placed, devices = zero.global_shapes(zero.make_layout({"": x}, 8), "batch")[""].sharding, np.asarray(jax.devices())
    dims = [split.dim for split in leaf.splits]

    def on(mesh: Mesh, names: Any) -> Any:
        return NamedSharding(mesh, PartitionSpec(*(names if dim in dims else None for dim in range(x.ndim))))

    shardings = {
        "as to_global": placed,
        "the same by another name": on(Mesh(devices, "x"), "x"),
        "other shards on the same devices": on(Mesh(devices.reshape(4, 2), ("a", "b")), ("b", "a")),
        "other devices": on(Mesh(devices[::-1], "x"), "x"),
        "one device": jax.devices()[3],
        "four devices": NamedSharding(Mesh(devices[:4], "x"), PartitionSpec()),
    }
    return {"host": x, "default": jnp.asarray(x)} | {
        name: jax.device_put(x, place) for name, place in shardings.items()
    }


@pytest.mark.parametrize(
    "shape", [(5, 24), *(pytest.param(shape, marks=pytest.mark.wide) for shape in ((8,), (2,))), ()], ids=str
)
def test_undonated_arrays_stay(shape: tuple[int, ...]) -> None:
    """Arrays that are not donated stay as they were."""
    ones = np.ones(shape, np.float32)
    layout = zero.make_layout({"w": ones, "again": ones}, 8)
    for name, x in elsewhere(ones.copy(), layout.leaves[0]).items():
        for _ in range(2):
            shards = zero.from_global({"w": x, "again": x}, layout, "batch")["w"]
            jax.pmap(lambda x: x + 1, "batch", donate_argnums=0)(shards)
            np.testing.assert_array_equal(x, ones, name)


def test_from_global_moves_arrays() -> None:
    """`from_global` takes arrays from other devices."""
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
    with pytest.raises(
        ValueError, match=r"leaf odd: .* float32\[13, 3\], \[16, 3\] with padding, got float32\[41, 3\]"
    ):
        zero.from_global({**whole, "odd": jnp.zeros((41, 3))}, layout, axis)
    with pytest.raises(ValueError, match=r"leaf b: .* int32"):
        zero.from_global({**whole, "b": jnp.zeros(16, jnp.int32)}, layout, axis)
    with pytest.raises(ValueError, match="8 shards, but axis 'batch' spreads a copy over 4"):
        zero.to_global(shards, layout, zero.Axis("batch", (2, 4)))


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


# Split over eight devices with padding, over three along another dimension, over neither of them.
RESIZED = {"w": (5, 24), "odd": (13, 3), "long": (2, 7), "b": (9,), "few": (2,), "scalar": ()}


def placed(whole: Any, count: int) -> tuple[Any, zero.Layout, list[jax.Device]]:
    """Slices of these arrays on so many devices, whose padding is no zero: updates may have changed it."""
    devices, layout = jax.devices()[:count], zero.make_layout(whole, count)

    def shard(_: Any) -> Any:
        slices = zero.shard(whole, layout, "batch")
        axis = as_axis("batch", count)
        return layout.map(lambda leaf, x: fill_padding(x, leaf, axis, 7), slices)

    return jax.pmap(shard, "batch", devices=devices)(np.ones(count)), layout, devices


def assert_whole(slices: Any, layout: zero.Layout, devices: Any, whole: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, zero.to_host(slices, layout, "batch", devices), whole)


def test_another_number_of_devices(tmp_path: Path) -> None:
    """Stored by Orbax, or as they are: eight devices, then three, one and eight again."""
    rng = np.random.default_rng(0)
    whole = {name: rng.normal(size=shape).astype(np.float32) for name, shape in RESIZED.items()}
    slices, layout, devices = placed(whole, 8)
    for count in (3, 1, 8):
        arrays = zero.to_global(slices, layout, "batch", devices)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / str(count), arrays)
            checkpointer.wait_until_finished()
            expected, layout, devices = placed(whole, count)
            target = zero.global_shapes(layout, "batch", devices)
            restored = checkpointer.restore(tmp_path / str(count), target, strict=False)
        slices = zero.from_global(restored, layout, "batch", devices)
        assert_whole(slices, layout, devices, whole)
        for stored in (arrays, jax.tree.map(np.asarray, arrays)):
            resized = zero.from_global(stored, layout, "batch", devices)
            assert_whole(resized, layout, devices, whole)
            assert [x.sharding for x in resized.values()] == [x.sharding for x in expected.values()]


def test_resizing_holds_one_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """No host array is larger than a shard."""
    whole = {"w": np.ones((15, 9), np.float32)}
    slices, layout, devices = placed(whole, 8)
    arrays = zero.to_global(slices, layout, "batch", devices)
    sizes = list[int]()
    make = np.zeros

    def zeros(shape: Any, *args: Any) -> np.ndarray:
        sizes.append(int(np.prod(shape)))
        return make(shape, *args)

    monkeypatch.setattr(np, "zeros", zeros)
    three = zero.make_layout(whole, 3)
    zero.from_global(arrays, three, "batch", jax.devices()[:3])
    assert sizes == [5 * 9] * 3
