"""State on its way to the host: the dtype that is held, the order of the devices, and copies that agree."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero
from tests.partition.exact_training import local_grads, make_params, replicate

VALUE = np.float32(1.001)  # 1.0 in bfloat16


def narrow(params: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(np.shape(p), dtype), params)


def updated(tx: Any, params: Any, **extra: Any) -> Any:
    """The state of all devices after one update."""
    step = jax.pmap(lambda p, g: tx.update(zero.local(g), tx.init(p), p, **extra)[1], "batch")
    return step(replicate(params), local_grads(0))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_saved_dtype_of_state(dtype: Any) -> None:
    """State is saved in the dtype in which it is held.

    Whatever the copy of the parameters is in that was at hand.
    """
    tx, params = zero.shard_optimizer(optax.adam(0.1), "batch"), make_params()
    state = updated(tx, params)
    expected = zero.to_host(state)
    found = zero.to_host(state)
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_saved_dtype_of_averages() -> None:
    """An average is saved in the dtype in which it is held."""
    params = {"w": np.full(13, VALUE), "few": np.full(3, VALUE)}
    layout = zero.make_layout(narrow(params, jnp.bfloat16), 8)
    held = jax.pmap(lambda p: zero.shard(p, layout, "batch"), "batch")(replicate(params))
    for leaf in zero.to_host(held, layout, "batch").values():
        assert leaf.dtype == np.float32 and (leaf == VALUE).all()
    with pytest.raises(ValueError, match=r"leaf few: .* holds float32, .* bfloat16.* zero.make_layout"):
        zero.to_global(held, layout, "batch")


@pytest.mark.parametrize("wide", [False, True])
def test_promoted_state(wide: bool) -> None:
    """State that optax promotes is restored as it was saved.

    A rate in the dtype of the first leaf makes moments of narrower leaves wider, in the unsharded program too.
    """
    with jax.enable_x64(wide):
        params = {"a": np.full(16, VALUE, np.float64 if wide else np.float32), "b": np.full((13, 3), 1, jnp.bfloat16)}
        plain = optax.inject_hyperparams(optax.adamw)(0.1)
        tx = zero.shard_optimizer(plain, "batch")
        grads = jax.tree.map(np.ones_like, params)
        unsharded = jax.jit(plain.update)(grads, plain.init(params), params)[1]
        step = jax.pmap(lambda p, s, g: tx.update(zero.local(g), s, p), "batch")
        _, state = step(replicate(params), jax.pmap(tx.init, "batch")(replicate(params)), replicate(grads))
        saved = zero.to_host(state)
        for found, right in zip(jax.tree.leaves(saved), jax.tree.leaves(unsharded), strict=True):
            assert found.dtype == right.dtype
            np.testing.assert_allclose(found, right, rtol=1e-6)
        for whole in (saved, jax.device_get(unsharded)):
            back = zero.to_devices(whole, like=tx.init(params))
            again, _ = step(replicate(params), back, replicate(grads))
            right, _ = step(replicate(params), state, replicate(grads))
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), again, right)


def test_other_dtype_is_refused() -> None:
    """Another dtype is refused without a hint about shapes."""
    layout = zero.make_layout({"few": jax.ShapeDtypeStruct((3,), np.float32)}, 8)
    for dtype in (np.float16, np.int32):
        with pytest.raises(ValueError, match=r"leaf few: .*float32\[3\], .* got \w+\[3\]; the layout has the dtypes"):
            zero.to_devices({"few": np.ones(3, dtype)}, layout, "batch")


def test_stacks_on_the_host_are_named() -> None:
    """State that numpy holds, slice by slice, is named where it is saved and where it is restored."""
    tx, params = zero.shard_optimizer(optax.adam(0.1), "batch"), make_params()
    held = jax.tree.map(np.asarray, updated(tx, params))
    with pytest.raises(ValueError, match=r"leaf shard: .* what pmap returns, .* on the host: spread it by jax.pmap"):
        zero.to_host(held)
    with pytest.raises(ValueError, match=r"leaf 0/count: .* stack of all devices: .* zero.to_host of slices"):
        zero.to_devices(held.slices, like=tx.init(params))


def aligned(shape: tuple[int, ...]) -> Any:
    """Zeros at an address at which XLA for CPU takes an array without a copy."""
    size = int(np.prod(shape))
    buffer = np.zeros(size + 16, np.float32)
    first = -buffer.ctypes.data // 4 % 16
    return buffer[first : first + size].reshape(shape)


@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize("enter", ["a train state", "slices", "global arrays"])
def test_arrays_of_the_caller_are_copied(enter: str, on_mesh: bool) -> None:
    """What is on the devices does not change when the program writes into its numpy arrays."""
    tree = {"split": aligned((64, 16)), "padded": aligned((13, 16)), "few": aligned((3,))}
    layout = zero.make_layout(tree, 8)
    mesh: Any = jax.make_mesh((8,), ("batch",)) if on_mesh else None
    if enter == "a train state":
        placed = zero.to_devices(tree, devices=mesh)
    elif enter == "slices":
        placed = zero.to_devices(tree, layout, "batch", mesh)
    else:
        placed = zero.from_global(tree, layout, "batch", mesh)
    jax.block_until_ready(placed)
    for x in tree.values():
        x[...] = 5
    assert not any(np.asarray(part.data).any() for x in jax.tree.leaves(placed) for part in x.addressable_shards)


@pytest.mark.parametrize("leave", [zero.to_host, zero.to_global, zero.checksums])
def test_devices_in_another_order_are_named(leave: Any) -> None:
    layout = zero.make_layout(make_params(), 8)
    devices = [jax.devices()[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    shards = jax.pmap(lambda p: zero.shard(p, layout, "batch"), "batch", devices=devices)(replicate(make_params()))
    with pytest.raises(ValueError, match=r"leaf b: row 1 lies on .*2, expected it on .*1: .*devices="):
        leave(shards, layout, "batch")
    leave(shards, layout, "batch", devices)


def test_differing_state_is_named() -> None:
    """State that differs between devices, though it should not, is named.

    Each device has decided by its own loss.
    """
    params = {"w": np.ones((16, 8), np.float32)}
    tx = zero.shard_optimizer(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=0)), "batch")

    @partial(jax.pmap, axis_name="batch")
    def step(params: Any, state: Any, loss: jax.Array) -> Any:
        return tx.update(zero.local(params), state, params, value=loss)[1]

    state = jax.pmap(tx.init, "batch")(replicate(params))
    for losses in (np.ones(8), np.linspace(0.5, 1.5, 8)):
        state = step(replicate(params), state, losses.astype(np.float32))
    with pytest.raises(ValueError, match=r"differ .*: 1/scale, .* lax.pmean"):
        zero.to_host(state)


@pytest.mark.parametrize("shape", [(2, 4), (8, 1)])
def test_differing_copies_are_named(shape: tuple[int, int]) -> None:
    """Copies of slices that differ are named."""
    axis = zero.Axis("batch", shape)
    layout = zero.make_layout({"w": jax.ShapeDtypeStruct((16, 3), np.float32)}, axis.shards)
    held = jax.pmap(lambda p: zero.shard(p, layout, axis), "batch")({"w": np.ones((8, 16, 3), np.float32)})
    zero.to_host(held, layout, axis)
    broken = np.array(held["w"])
    broken[5, 0, 0] = 2
    with pytest.raises(ValueError, match=r"leaves differ between .*: w"):
        zero.to_host({"w": jax.pmap(lambda x: x, "batch")(broken)}, layout, axis)


def test_replicas_on_devices_in_another_order() -> None:
    """Devices in another order than that of the arrays are named: XLA would end the process."""
    params = jax.pmap(lambda _: jnp.ones(3), "batch")(np.arange(8))
    with pytest.raises(ValueError, match=r"row 0 lies on .*, expected it on .*: pass the devices="):
        zero.check_replicated({"w": params}, "batch", devices=jax.devices()[::-1])
