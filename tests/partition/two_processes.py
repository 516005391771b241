"""One of two processes of four CPU devices each; `test_two_processes.py` gives its number, a port and a folder."""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "32"

import jax
import numpy as np
import orbax.checkpoint as ocp

import zero

shapes = {"w": (5, 24), "odd": (13, 3), "b": (9,), "scalar": ()}
rng = np.random.default_rng(0)
whole = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
ones = np.ones(4)


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


def check_divergence(process: int) -> None:
    """One device of one process differs: every process says so."""
    x = np.ones((4, 3), np.float32)
    zero.check_replicated({"x": x}, "batch")
    x[2, 1] += process
    try:
        zero.check_replicated({"x": x}, "batch")
    except ValueError as error:
        assert "x" in str(error)
    else:
        raise AssertionError("a difference between processes was not seen")


process, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
check_state(zero.Axis("batch", (1, 8)), f"{folder}/flat")
check_state(zero.Axis("batch", (2, 4)), f"{folder}/hybrid")
check_state(zero.Axis("batch", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7)), f"{folder}/phases")
check_divergence(process)
print("done")
