"""One of the hosts of test_emergency.py: NUMBER HOSTS PORT FOLDER LINEAGE; saves twice, or restores and compares."""

import sys
from pathlib import Path

import jax
import numpy as np

import zero
from zero.checkpoints.emergency import EmergencyCheckpoints
from zero.hosts import agreement
from zero.partition.collectives.axis import Axis

number, hosts = map(int, sys.argv[1:3])
port, folder, lineage = sys.argv[3], Path(sys.argv[4]), sys.argv[5]
jax.config.update("jax_platforms", "cpu")
zero.use_cpu_devices(2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", hosts, number)

shapes = {"w": jax.ShapeDtypeStruct((25, 3), np.float32), "n": jax.ShapeDtypeStruct((), np.int32)}
axis = Axis("zero", (1, 2 * hosts))
layout = zero.make_layout(shapes, axis.shards)


def on_devices(step: int) -> dict[str, jax.Array]:
    """Other numbers on each device of all hosts where a leaf is split."""
    random = np.random.default_rng(100 * step + number)
    shards = layout.map(
        lambda leaf: (
            random.normal(size=(2, *leaf.shard_shape)) if leaf.splits else np.full((2, *leaf.shard_shape), step)
        ).astype(leaf.dtype)
    )
    return jax.pmap(lambda x: x, "zero")(shards)


with_steps = EmergencyCheckpoints(folder / str(number), "gs://bucket/run", list, {}, layout, axis)
if lineage == "new":
    for step in (3, 6):
        with_steps.save(step, on_devices(step), {"step": step})
    with_steps._pool.shutdown()
    agreement.wait_for_all()
    print(with_steps.lineage)
else:
    found = with_steps.restore([lineage], after=0)
    assert found is not None
    position, restored = found
    expected = on_devices(position["step"])
    assert all(np.array_equal(restored[name], expected[name]) for name in expected)
    agreement.wait_for_all()
    print(position["step"])
jax.distributed.shutdown()
