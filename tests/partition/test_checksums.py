"""Checksums of sharded arrays, and divergence between devices."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zero
from tests.partition.sharded_arrays import AXES, MOST_AXES, make_whole
from zero.partition import checksums as checksums_of_whole
from zero.partition.checksums import examine

DTYPES = ["bool", "int8", "uint16", "int32", "bfloat16", "float16", "float32", "complex64"]
ONE = zero.Axis("batch", (1, 1))


def make_bits(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Any bits at all: NaNs of every kind, infinities, subnormal numbers."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * jnp.dtype(dtype).itemsize), jnp.dtype(dtype)).reshape(shape)


def placed(whole: Any, layout: zero.Layout, axis: zero.Axis, padding: Any = 0) -> Any:
    """Shards as pmap returns them, with this in place of the zeros."""

    def pad(leaf: zero.groups.LeafLayout, x: np.ndarray) -> np.ndarray:
        padded = np.full(leaf.padded_shape, padding, x.dtype)
        padded[tuple(slice(size) for size in leaf.shape)] = x
        return padded

    return zero.from_global(layout.map(pad, whole), layout, axis)


def checksums(whole: Any, axis: zero.Axis = ONE, *, is_whole: bool = False, padding: Any = 0) -> dict[str, int]:
    layout = zero.make_layout(whole, axis.shards)
    layout = layout.whole() if is_whole else layout
    return zero.checksums(placed(whole, layout, axis, padding), layout, axis)


AWKWARD = [(), (0,), (5, 0), (1,), (7,), (9,), (24,), (13, 3), (3, 13), (2, 9, 5), (2, 3, 2, 17)]
KINDS = [(shape, "float32") for shape in AWKWARD] + [(shape, dtype) for shape in [(9,), (13, 3)] for dtype in DTYPES]
BITS = {f"{dtype} {shape}": make_bits(shape, dtype, i) for i, (shape, dtype) in enumerate(KINDS)}


@cache
def checksums_of_bits(axis: zero.Axis = ONE) -> dict[str, int]:
    return checksums(BITS, axis)


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("axis", MOST_AXES, ids=str)
def test_checksums_depend_only_on_elements(axis: zero.Axis, is_whole: bool) -> None:
    """Checksums depend only on the elements, not on shards or devices."""
    expected = checksums_of_bits()
    assert checksums(BITS, axis, is_whole=is_whole) == expected
    assert set(expected) == set(BITS)
    distinct = [value for name, value in expected.items() if BITS[name].size]
    assert len(set(distinct)) == len(distinct) > 20
    assert all(0 <= value < 2**32 for value in distinct) and max(distinct) > 2**31


@settings(max_examples=6, deadline=None)
@given(
    axis=st.sampled_from(AXES),
    leaves=st.lists(
        st.tuples(st.lists(st.integers(0, 20), max_size=4), st.sampled_from(DTYPES)), min_size=1, max_size=4
    ),
    seed=st.integers(0, 2**32 - 1),
    is_whole=st.booleans(),
)
def test_checksums_of_random_trees(
    axis: zero.Axis, leaves: list[tuple[list[int], str]], seed: int, is_whole: bool
) -> None:
    """Any tree has the checksums of one device."""
    tree = [make_bits(tuple(shape), dtype, seed + i) for i, (shape, dtype) in enumerate(leaves)]
    assert checksums(tree, axis, is_whole=is_whole) == checksums(tree)


PHASED = AXES[1]


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from([name for name, x in BITS.items() if x.size]), data=st.data())
def test_one_changed_bit(name: str, data: st.DataObject) -> None:
    """One bit anywhere changes the checksum of its leaf."""
    x = BITS[name]
    place = data.draw(st.integers(0, x.size - 1))
    changed = x.copy()
    if x.dtype == bool:
        changed.flat[place] ^= True
    else:
        bit = data.draw(st.integers(0, 8 * x.itemsize - 1))
        changed.reshape(-1).view(np.uint8)[place * x.itemsize + bit // 8] ^= np.uint8(1 << bit % 8)
    before, after = checksums_of_bits(PHASED), checksums({**BITS, name: changed}, PHASED)
    assert {leaf for leaf in BITS if before[leaf] != after[leaf]} == {name}


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from([name for name, x in BITS.items() if x.size > 1]), data=st.data())
def test_swapped_elements(name: str, data: st.DataObject) -> None:
    """Elements that are swapped change the checksum."""
    x = BITS[name]
    i, j = data.draw(st.lists(st.integers(0, x.size - 1), min_size=2, max_size=2, unique=True))
    changed = x.copy()
    changed.flat[[i, j]] = x.flat[[j, i]]
    is_change = x.flat[i].tobytes() != x.flat[j].tobytes()
    before, after = checksums_of_bits(PHASED), checksums({**BITS, name: changed}, PHASED)
    assert {leaf for leaf in BITS if before[leaf] != after[leaf]} == ({name} if is_change else set())


def test_swapped_similar_numbers() -> None:
    """Swaps of numbers whose bits differ little change the checksum."""
    x = np.asarray([1, -1, 2, 0, 0.5, -2], np.float32)
    orders = [np.random.default_rng(seed).permutation(6) for seed in range(60)]
    distinct = {tuple(order): x[order] for order in orders}
    # Rows of one array would be other places: so one leaf for each.
    assert len(set(checksums(list(distinct.values()), PHASED).values())) == len(distinct)
    layers = np.arange(24, dtype=np.float32).reshape(4, 6)
    first, second, third = checksums([layers, layers[[1, 0, 2, 3]], layers[:, [0, 2, 1, 3, 4, 5]]], PHASED).values()
    assert len({first, second, third}) == 3


@pytest.mark.parametrize("axis", MOST_AXES, ids=str)
def test_padding_does_not_count(axis: zero.Axis) -> None:
    floats = {name: x for name, x in BITS.items() if x.dtype == np.float32}
    assert checksums(floats, axis, padding=-0.0) == checksums(floats, axis, padding=np.nan) == checksums(floats)


@pytest.mark.parametrize("axis", MOST_AXES, ids=str)
def test_not_finite_leaves_are_named(axis: zero.Axis) -> None:
    """Leaves that are not finite are named whichever device holds the element."""
    whole = {name: np.ones((13, 3), dtype) for name, dtype in [("w", "float32"), ("b", jnp.bfloat16), ("n", "int32")]}
    whole |= {"s": np.ones((), np.float32), "m": np.full((13, 3), np.finfo(np.float32).max)}
    layout = zero.make_layout(whole, axis.shards)

    def named(padding: Any = 0, **changed: Any) -> list[str]:
        return examine(placed(whole | changed, layout, axis, padding), layout, axis)[1]

    assert named() == []
    assert (
        examine(
            placed({"w": whole["w"]}, small := zero.make_layout({"w": whole["w"]}, axis.shards), axis, np.nan),
            small,
            axis,
        )[1]
        == []
    )
    for row, value in ((0, np.nan), (7, np.inf), (12, -np.inf)):
        broken = {name: whole[name].copy() for name in "wb"}
        for x in broken.values():
            x[row, 1] = value
        assert named(**broken) == ["b", "w"]
    assert named(s=np.float32(np.nan)) == ["s"]


def test_checksums_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, in blocks of any size."""
    for block in (1, 7, 50, checksums_of_whole._BLOCK):
        monkeypatch.setattr(checksums_of_whole, "_BLOCK", block)
        assert {name: checksums_of_whole.array_checksum(x) for name, x in BITS.items()} == checksums_of_bits()


def test_the_sign_of_zero_counts() -> None:
    zeros = np.zeros(9, np.float32)
    assert checksums([zeros], PHASED) != checksums([-zeros], PHASED)


@pytest.mark.parametrize("word", [0, 1])
def test_all_of_64_bits_count(word: int) -> None:
    with jax.enable_x64(True):
        x = make_bits((9, 3), "float64")
        changed = x.copy()
        changed.view(np.uint32)[8, 2 * 2 + word] ^= 1
        assert checksums([x], PHASED) == checksums([x]) != checksums([changed], PHASED)
        assert list(checksums([x]).values()) == [checksums_of_whole.array_checksum(x)]


def test_keys_have_checksums() -> None:
    layout = zero.derive_layout(lambda _: jax.random.split(jax.random.key(0), 3), zero.make_layout({}, 8))
    sums = []
    for seed in (0, 1):
        make = jax.pmap(lambda key: jax.random.split(jax.random.wrap_key_data(key), 3), "batch")
        keys = make(np.stack([np.asarray([0, seed], np.uint32)] * 8))
        sums.append(zero.checksums(keys, layout, "batch"))
    assert sums[0].keys() == sums[1].keys() == {""} and sums[0] != sums[1]


def with_one_changed(x: jax.Array, device: int) -> jax.Array:
    """One element differs on one device."""
    parts = [part.data for part in x.addressable_shards]
    changed = np.array(parts[device])
    changed.flat[0] += 1
    parts[device] = jax.device_put(changed, parts[device].device)
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


@pytest.mark.parametrize("device", [0, 5])
def test_copies_that_differ_are_named(device: int) -> None:
    whole = make_whole()
    hybrid = zero.Axis("batch", (2, 4))
    sharded, grouped = zero.make_layout(whole, 8), zero.make_layout(whole, 4)
    every, some = "b, odd, scalar, tiny, w", "scalar, tiny"
    for axis, layout, named in [
        (PHASED, sharded.whole(), every),
        (PHASED, sharded, some),  # of sharded leaves there is one copy
        (hybrid, grouped, every),
        (hybrid, grouped.whole(), every),
    ]:
        shards = placed(whole, layout, axis)
        broken = {name: with_one_changed(x, device) for name, x in shards.items()}
        with pytest.raises(ValueError, match=rf"copies on axis 'batch': {named}$"):
            zero.checksums(broken, layout, axis)
        with pytest.raises(ValueError, match=r"copies on axis 'batch': tiny$"):
            zero.checksums({**shards, "tiny": broken["tiny"]}, layout, axis)


def test_checksums_are_traced_once_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    module = zero.checksums.__globals__
    checksum = module["_checksum"]

    def counted(x: jax.Array, leaf: zero.groups.LeafLayout, axis: zero.Axis, first: Any) -> jax.Array:
        traced.append(leaf.name)
        return checksum(x, leaf, axis, first)

    monkeypatch.setitem(module, "_checksum", counted)
    whole = {"only here": np.arange(3.0, dtype=np.float32), "twice": np.ones((9, 2), np.float32)}
    first = checksums(whole, PHASED)
    assert checksums(whole, PHASED) == first  # of a layout that is equal, not the same
    assert checksums({name: x + 1 for name, x in whole.items()}, PHASED) != first
    assert traced == ["only here", "twice"]


def test_chosen_devices_and_empty_trees() -> None:
    """Checksums work on chosen devices, and for trees without leaves."""
    devices = jax.devices()[:4:-1]
    whole, axis = {"w": np.arange(7.0, dtype=np.float32)}, zero.Axis("batch", (1, 3))
    layout = zero.make_layout(whole, 3)
    shards = jax.pmap(lambda _: zero.shard(whole, layout, axis), "batch", devices=devices)(np.ones(3))
    assert zero.checksums(shards, layout, axis, devices) == checksums(whole)
    assert checksums({}, PHASED) == {}


def test_checksums_take_only_what_pmap_returned() -> None:
    layout = zero.make_layout(make_whole(), 8)
    shards = placed(make_whole(), layout, PHASED)
    with pytest.raises(ValueError, match=r"leaf odd: .* got shape \(8, 13, 3\)"):
        zero.checksums({**shards, "odd": jnp.zeros((8, 13, 3))}, layout, PHASED)
    with pytest.raises(ValueError, match=r"leaf w: .* on the host"):
        zero.checksums({**shards, "w": np.zeros((8, 5, 3))}, layout, PHASED)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.complex64, jnp.uint32])
def test_check_replicated(dtype: jnp.dtype) -> None:
    """`check_replicated` names the leaves that differ."""
    same = jnp.stack([jnp.asarray([0, 1, 1], dtype)] * 8)
    zero.check_replicated({"a": same, "b": [same]}, "batch")
    for device in range(8):
        other = same.at[device, 1].set(jnp.asarray(0, dtype))
        with pytest.raises(ValueError, match=r"axis 'batch': b/0, c\. Reduce"):
            zero.check_replicated({"a": same, "b": [other, same], "c": other}, "batch")


def test_check_replicated_compares_bits() -> None:
    nan = jnp.full((8, 2), jnp.nan)
    zero.check_replicated(
        {"nan": nan, "empty": jnp.zeros((8, 0)), "key": jnp.broadcast_to(jax.random.key(0), (8,))}, "i"
    )
    with pytest.raises(ValueError, match=r"axis 'i': zero\. Reduce"):
        zero.check_replicated({"zero": jnp.zeros((8, 2)).at[3, 0].set(-0.0), "nan": nan}, "i")
    zero.check_replicated({"few": jnp.ones((4, 2))}, "i", devices=jax.devices()[2:6])
