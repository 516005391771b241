"""One of two processes of four CPU devices each; `test_arrays_two_processes.py` gives number, port and folder."""

import gc
import os
import sys
import warnings
from functools import partial
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zero

gc.freeze()  # what has been imported is no garbage
gc.set_threshold(100_000, 20, 20)
process, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_disable_most_optimizations", True)  # compiles quickly
jax.config.update("jax_cpu_collectives_implementation", "gloo")
zero.use_cpu_devices(4)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)

AXES = {
    "flat": zero.Axis("batch", (1, 8)),
    "hybrid": zero.Axis("batch", (2, 4)),
    "phases": zero.Axis("batch", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7)),
}
shapes = {"w": (5, 24), "odd": (13, 3), "b": (9,), "scalar": ()}
rng = np.random.default_rng(0)
whole = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
ones = np.ones(4)


def check_refused(match: str, fn: Any) -> None:
    """On both processes, so that none waits for the other."""
    try:
        fn()
    except ValueError as error:
        assert match in str(error), error
    else:
        raise AssertionError(f"not refused: {match}")


def check_state(axis: zero.Axis, path: str) -> None:
    """Shards leave, are stored, restored for this axis, and come back as they were."""
    layout = zero.make_layout(whole, axis.shards)
    shards = jax.pmap(lambda _: zero.shard(whole, layout, axis), "batch")(ones)
    arrays = zero.to_global(shards, layout, axis)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, arrays)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(path, zero.global_shapes(layout, axis))
    back = zero.from_global(restored, layout, axis)
    for name, x in back.items():
        np.testing.assert_array_equal(x, shards[name])
    gathered = jax.pmap(lambda shards: zero.gather(shards, layout, axis), "batch")(back)
    for name, x in gathered.items():
        np.testing.assert_array_equal(x, np.broadcast_to(whole[name], x.shape))


def check_resize(path: str) -> None:
    """What eight devices have stored is restored on six of them, three of each process, and on eight again."""
    devices: Any = None
    layout = zero.make_layout(whole, 8)
    slices = zero.to_devices(whole, layout, "batch")
    for count in (6, 8):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(f"{path}{count}", zero.to_global(slices, layout, "batch", devices))
            checkpointer.wait_until_finished()
            layout = zero.make_layout(whole, count)
            devices = [device for device in jax.devices() if device.id % 4 < 3] if count == 6 else jax.devices()
            assert len(devices) == count, devices
            target = zero.global_shapes(layout, "batch", devices)
            restored = checkpointer.restore(f"{path}{count}", target, strict=False)
        slices = zero.from_global(restored, layout, "batch", devices)
        if count == 6:
            odd = zero.make_layout({"odd": whole["odd"]}, 8)
            apart = {"odd": restored["odd"]}
            check_refused(
                "and other processes hold parts of it", lambda odd=odd, x=apart: zero.from_global(x, odd, "batch")
            )
        expected = zero.to_devices(whole, layout, "batch", devices)
        for found, right in zip(slices.values(), expected.values(), strict=True):
            np.testing.assert_array_equal(found, right)
    copies = jax.device_put(whole, NamedSharding(jax.make_mesh((8,), ("x",)), P()))
    for found, right in zip(zero.from_global(copies, layout, "batch").values(), slices.values(), strict=True):
        np.testing.assert_array_equal(found, right)


EVERY_CHECK = bool(os.environ.get("ZERO_TEST_EVERY_CHECK"))
EVERY = "ZERO_TEST_EVERY_OPTIMIZER"  # set in the environment: all of these
OPTIMIZERS = {
    "a norm": (optax.clip_by_global_norm(0.5), zero.across_shards(optax.clip_by_global_norm(0.5))),
    "norms of leaves": (optax.lamb(0.1), zero.across_shards(optax.lamb(0.1))),
    "factored moments": (
        optax.adafactor(0.1, min_dim_size_to_factor=3),
        zero.across_shards(optax.adafactor(0.1, min_dim_size_to_factor=3)),
    ),
    "owned matrices": (optax.contrib.muon(0.1), zero.across_shards(optax.contrib.muon(0.1))),
    "hyperparameters": (optax.inject_hyperparams(optax.lion)(0.1), optax.inject_hyperparams(optax.lion)(0.1)),
}


def check_optimizer(axis: zero.Axis, plain: Any, right: Any) -> None:
    """On local gradients of both processes it equals the unsharded one on their mean."""
    tx, sharded = optax.chain(plain, optax.adam(0.1)), zero.shard_optimizer(optax.chain(right, optax.adam(0.1)), axis)
    grads = {name: rng.integers(-8, 9, (8, *shape)).astype(np.float32) for name, shape in shapes.items()}
    mine = {name: x[4 * process : 4 * process + 4] for name, x in grads.items()}
    params = jax.pmap(lambda _: whole, "batch")(ones)

    @partial(jax.pmap, axis_name="batch")
    def step(params: Any, grads: Any) -> Any:
        updates, _ = sharded.update(zero.local(grads), sharded.init(params), params)
        return updates

    updates = step(params, mine)
    zero.check_replicated(updates, "batch")
    mean = {name: x.mean(0) for name, x in grads.items()}
    expected = jax.jit(lambda grads, params: tx.update(grads, tx.init(params), params)[0])(mean, whole)
    for name, x in updates.items():
        np.testing.assert_allclose(x[0], expected[name], rtol=1e-5, atol=1e-6)


def check_quantized(axis: zero.Axis) -> None:
    """Moments of a byte and bfloat16 weights are on both processes what they are in the whole, bit for bit."""
    sizes = {"w": (13, 512), "odd": (7, 601)}
    grads = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in sizes.items()}
    params = {name: x.astype(jnp.bfloat16) for name, x in grads.items()}
    tx = optax.chain(zero.quantized.adamw(0.1), zero.quantized.round_stochastically())
    layout = zero.make_layout(params, axis.shards)
    on, state_layout = zero.on_shards(tx, layout, axis), zero.derive_layout(tx.init, layout)

    def step(tx: Any, params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    slices = jax.pmap(lambda _: [zero.shard(tree, layout, axis) for tree in (params, grads)], "batch")(ones)
    held = slices[0], jax.pmap(on.init, "batch")(slices[0])
    expected = params, tx.init(params)
    step_slices, step_whole = jax.pmap(partial(step, on), "batch"), jax.jit(partial(step, tx))
    for _ in range(3):
        held, expected = step_slices(*held, slices[1]), step_whole(*expected, grads)
    got = jax.pmap(lambda p, s: (zero.gather(p, layout, axis), zero.gather(s, state_layout, axis)), "batch")(*held)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        for part in x.addressable_shards:
            np.testing.assert_array_equal(np.asarray(part.data)[0], y)


def check_lift(axis: zero.Axis) -> None:
    """The gradient of a lifted function is the reduce-scattered plain one."""
    layout = zero.make_layout(whole, axis.shards)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.stack([jnp.sum(jnp.sin(p * x)) for p in params.values()]))

    def run(x: jax.Array) -> Any:
        shards = zero.shard(whole, layout, axis)
        lifted = jax.grad(zero.fully_shard(loss, layout, axis))(shards, x)
        return lifted, zero.scatter_sum(jax.grad(loss)(whole, x), layout, axis)

    lifted, plain = jax.pmap(run, "batch")(np.arange(4.0, dtype=np.float32) + 4 * process)
    for name, x in lifted.items():
        np.testing.assert_array_equal(x, plain[name])


def check_divergence() -> None:
    """One device of one process differs: every process says so."""
    x = np.ones((4, 3), np.float32)
    zero.check_replicated({"x": x}, "batch")
    x[2, 1] += process
    check_refused("devices of axis 'batch': x", lambda: zero.check_replicated({"x": x}, "batch"))


def check_checksums() -> None:
    """Both processes know them, they are the same in any groups, and a copy that differs is named by both."""
    found = []
    for axis in AXES.values():
        layout = zero.make_layout(whole, axis.shards)
        for held in (layout, layout.whole()):
            shards = jax.pmap(lambda _, held=held, axis=axis: zero.shard(whole, held, axis), "batch")(ones)
            found.append(zero.checksums(shards, held, axis))
    assert all(sums == found[0] for sums in found), found
    with open(f"{folder}/checksums{process}", "w") as file:
        file.write(repr(found[0]))
    layout = zero.make_layout(whole, 8).whole()
    broken = {name: np.array(x) for name, x in shards.items()}
    broken["odd"][2, 1] += process
    placed = jax.pmap(lambda x: x, "batch")(broken)
    check_refused("copies on axis 'batch': odd", lambda: zero.checksums(placed, layout, "batch"))


def check_whole_state(axis: zero.Axis, plain: Any, right: Any) -> None:
    """Optimizer state is whole and the same on both processes, and comes back as it was."""
    tx = zero.shard_optimizer(right, axis)
    params = jax.pmap(lambda _: whole, "batch")(ones)
    _, state = jax.pmap(lambda p: tx.update(zero.local(p), tx.init(p), p), "batch")(params)
    found = zero.to_host(state)
    _, expected = jax.jit(lambda p: plain.update(p, plain.init(p), p))(whole)
    (got, tree), (right_leaves, right_tree) = jax.tree.flatten(found), jax.tree.flatten(expected)
    assert str(tree) == str(right_tree)
    for x, y in zip(got, right_leaves, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
    back = zero.to_devices(found, like=tx.init(whole))
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert x.sharding == y.sharding
    for x, y in zip(jax.tree.leaves(zero.to_host(back)), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(x, y)


def check_local_decision() -> None:
    """What one process decides for itself is seen by both."""
    params = {"w": np.ones((16, 8), np.float32)}
    tx = zero.shard_optimizer(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=0)), "batch")
    replicated = jax.pmap(lambda _: params, "batch")(ones)
    step = jax.pmap(lambda p, s, loss: tx.update(zero.local(p), s, p, value=loss)[1], "batch")
    state = jax.pmap(tx.init, "batch")(replicated)
    for loss in (1, 0.5 + process):
        state = step(replicated, state, np.full(4, loss, np.float32))
    check_refused("1/scale", lambda: zero.to_host(state))


def check_mesh() -> None:
    """Under shard_map, on a mesh of two axes over both processes: state leaves whole and comes back."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    specs = {"w": P(None, "model"), "odd": P(), "b": P(), "scalar": P()}
    params = {
        name: jax.make_array_from_callback(x.shape, NamedSharding(mesh, specs[name]), x.__getitem__)
        for name, x in whole.items()
    }
    plain = optax.inject_hyperparams(optax.adam)(0.1)
    tx = zero.shard_optimizer(plain, "data")
    like = tx.init({name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in params.items()})
    state_specs: Any = zero.specs(like, mesh)

    def run(params: Any) -> Any:
        return tx.update(zero.local(params), tx.init(params), params)[1]

    mapped: Any = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=state_specs, check_vma=False)
    state = jax.jit(mapped)(params)
    found = zero.to_host(state, like=like)
    _, expected = jax.jit(lambda p: plain.update(p, plain.init(p), p))(whole)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
    back = zero.to_devices(found, like=like, devices=mesh)
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert x.sharding == y.sharding, (x.sharding, y.sharding)
    for x, y in zip(jax.tree.leaves(back.slices), jax.tree.leaves(state.slices), strict=True):
        for part, right in zip(x.addressable_shards, y.addressable_shards, strict=True):
            np.testing.assert_array_equal(part.data, right.data)


def bits(tree: Any) -> list[bytes]:
    def data(x: Any) -> Any:
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return [np.asarray(data(x)).tobytes() for x in jax.tree.leaves(tree)]


def check_device_order() -> None:
    """Shards of devices in another order leave by that order, and are refused without it."""
    devices = [device for process in range(2) for device in reversed(jax.local_devices(process))]
    layout, tx = zero.make_layout(whole, 8), zero.shard_optimizer(optax.adam(0.1), "batch")
    pmap = partial(jax.pmap, axis_name="batch", devices=devices)
    shards = pmap(lambda _: zero.shard(whole, layout, "batch"))(ones)
    params = pmap(lambda _: whole)(ones)
    state = pmap(lambda p: tx.update(zero.local(p), tx.init(p), p)[1])(params)
    for leave in (zero.to_host, zero.to_global, zero.checksums):
        check_refused("row 0 lies on", partial(leave, shards, layout, "batch"))
    check_refused("row 0 lies on", partial(zero.to_host, state))
    check_refused("row 0 lies on", partial(zero.check_replicated, params, "batch", jax.devices()))
    zero.check_replicated(params, "batch", devices)
    found = zero.to_host(shards, layout, "batch", devices)
    assert bits(found) == bits({name: whole[name] for name in found})
    saved = zero.to_host(state, devices=devices)
    np.testing.assert_allclose(saved[0].mu["w"], 0.1 * whole["w"], rtol=1e-6)
    back = zero.to_devices(saved, like=tx.init(whole), devices=devices)
    assert bits(zero.to_host(back, devices=devices)) == bits(saved)
    host = zero.to_devices(whole, layout, "batch", devices)
    stored = zero.from_global(zero.to_global(shards, layout, "batch", devices), layout, "batch", devices)
    for tree in (host, stored):
        for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(shards), strict=True):
            assert x.sharding == y.sharding
            assert bits([part.data for part in x.addressable_shards]) == bits([p.data for p in y.addressable_shards])


def check_dtypes() -> None:
    """What is held in a wider dtype than the layout's leaves and comes back in it, and keys do."""
    narrow = {name: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for name, x in whole.items()}
    layout = zero.make_layout(narrow, 8)
    shards = jax.pmap(lambda _: zero.shard(whole, layout, "batch"), "batch")(ones)
    found = zero.to_host(shards, layout, "batch")
    assert bits(found) == bits(whole) and found["w"].dtype == np.float32
    assert bits(zero.to_host(zero.to_devices(found, layout, "batch"), layout, "batch")) == bits(whole)
    check_refused("the array holds float32, the layout has bfloat16", lambda: zero.to_global(shards, layout, "batch"))

    noise = zero.across_shards(optax.add_noise(0.01, 0.55, key=jax.random.key(3)))
    tx = zero.shard_optimizer(optax.chain(noise, optax.adam(0.1)), "batch")
    params = jax.pmap(lambda _: whole, "batch")(ones)
    state = jax.pmap(lambda p: tx.update(zero.local(p), tx.init(p), p)[1], "batch")(params)
    saved = zero.to_host(state)
    assert saved[1][0].mu["w"].dtype == np.float32
    back = zero.to_devices(saved, like=tx.init(whole))
    assert bits(zero.to_host(back)) == bits(saved)
    inside = jax.pmap(lambda s, p: zero.gather(s)[1][0].mu, "batch")(back, params)
    for name, x in inside.items():
        assert bits([part.data for part in x.addressable_shards]) == bits([saved[1][0].mu[name]] * 4)


def check_mesh_slices() -> None:
    """Under shard_map averages and parameters leave and come back too, and copies are compared."""
    mesh = jax.make_mesh((8,), ("data",))
    layout = zero.make_layout(whole, 8)
    shapes: Any = zero.global_shapes(layout, "data", mesh)
    from_host: Any = zero.to_devices(whole, layout, "data", mesh)
    assert bits(zero.to_host(from_host, layout, "data", mesh)) == bits({name: whole[name] for name in from_host})
    again = zero.from_global(zero.to_global(from_host, layout, "data", mesh), layout, "data", mesh)
    for name, x in again.items():
        assert x.sharding.is_equivalent_to(shapes[name].sharding, x.ndim) and x.shape == shapes[name].shape
        for part, right in zip(x.addressable_shards, from_host[name].addressable_shards, strict=True):
            np.testing.assert_array_equal(part.data, right.data)

    noise = zero.across_shards(optax.add_noise(0.01, 0.55, key=jax.random.key(3)))
    tx = zero.shard_optimizer(optax.chain(noise, optax.adam(0.1)), "data")
    plain = jax.device_get(optax.adam(0.1).init(whole))
    of_noise = noise.init(whole)
    state = zero.to_devices((of_noise, plain), like=tx.init(whole), devices=mesh)
    assert bits(zero.to_host(state)) == bits((of_noise, plain))

    copied = NamedSharding(mesh, P())
    x = jax.make_array_from_callback((5, 24), copied, whole["w"].__getitem__)
    zero.check_replicated({"w": x}, "data")
    parts = [part.data + (part.device == jax.local_devices(1)[2]) for part in x.addressable_shards]
    broken = jax.make_array_from_single_device_arrays(x.shape, copied, parts)
    check_refused("devices of axis 'data': w", lambda: zero.check_replicated({"w": broken}, "data"))


def check_donation() -> None:
    """State from wherever it comes is donated without a copy, of which jax warns among several processes."""
    tx = zero.shard_optimizer(optax.adam(0.1), "batch")
    params = jax.pmap(lambda _: whole, "batch")(ones)
    made = jax.pmap(tx.init, "batch")(params)
    restored = zero.to_devices(zero.to_host(made), like=tx.init(whole))
    layout = zero.make_layout(whole, 8)
    shards = jax.pmap(lambda _: zero.shard(whole, layout, "batch"), "batch")(ones)
    again = zero.from_global(zero.to_global(shards, layout, "batch"), layout, "batch")
    held = zero.to_devices(zero.to_host(shards, layout, "batch"), layout, "batch")
    donated = jax.pmap(lambda tree: jax.tree.map(lambda x: x + 1, tree), "batch", donate_argnums=0)
    with warnings.catch_warnings(action="error"):
        for tree in (made, restored, shards, again, held):
            donated(tree)
            assert all(x.is_deleted() for x in jax.tree.leaves(tree))
        try:
            donated(jax.device_put(np.ones((4, 3)), jax.local_devices()[0]))
        except UserWarning as warning:
            assert "Donated pmap argument required resharding" in str(warning)
        else:
            raise AssertionError("jax copies a donated array without a word")


def check_lonely_call() -> None:
    """What only one process calls ends in an error that says so, not in a hang. Last, as barriers are counted."""
    layout = zero.make_layout(whole, 8)
    shards = jax.pmap(lambda _: zero.shard(whole, layout, "batch"), "batch")(ones)
    if process == 0:
        try:
            zero.to_host(shards, layout, "batch", timeout=1)
        except RuntimeError as error:
            assert "not every process gathered the sharded state" in str(error), error
        else:
            raise AssertionError("a process that gathered alone was not refused")


for name, axis in AXES.items():
    if EVERY_CHECK or name == "hybrid":
        check_state(axis, f"{folder}/{name}")
        check_whole_state(axis, optax.adam(0.1), optax.adam(0.1))
check_whole_state(AXES["phases"], *OPTIMIZERS["factored moments"])
check_resize(f"{folder}/resize")
check_checksums()
check_divergence()
check_local_decision()
check_mesh()
check_device_order()
check_donation()
check_lift(AXES["phases"])
if EVERY_CHECK:
    check_mesh_slices()
    check_dtypes()
    check_optimizer(AXES["hybrid"], *OPTIMIZERS["a norm"])
    check_quantized(AXES["phases"])
    check_lift(AXES["hybrid"])
for name in OPTIMIZERS if os.environ.get(EVERY) else ["owned matrices"]:
    check_optimizer(AXES["flat"], *OPTIMIZERS[name])
check_lonely_call()
print("done")
