"""One of two processes of one CPU device each; `test_damage.py` gives its number, a port and a folder."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import zero
from zero.base.errors import Unavailable, UserError
from zero.checkpoints.damage import DamagedCheckpoint
from zero.checkpoints.manager import Checkpoints
from zero.hosts.agreement import AnyHost

process, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
zero.use_cpu_devices(1)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)

axis = zero.Axis("zero", (1, 2))
layout = zero.make_layout({"w": jax.ShapeDtypeStruct((6, 400), jnp.float32)}, 2)
whole = np.random.default_rng(0).normal(size=(6, 400)).astype(np.float32)
target = zero.global_shapes(layout, axis)["w"]
state = {"w": jax.make_array_from_callback(whole.shape, target.sharding, lambda index: whole[index])}

with Checkpoints(folder / "whole", keep=1) as checkpoints:
    checkpoints.save(5, state, layout, {})


def torn_meta(step: Path) -> None:
    (step / "meta" / "metadata").write_text("")


def torn_arrays(step: Path) -> None:
    (step / "state" / "manifest.ocdbt").write_bytes(b"")


def unreadable(step: Path) -> None:
    """No damage that anything in the file tells, but an error of the moment."""
    (step / "meta" / "metadata").unlink()
    (step / "meta" / "metadata").mkdir()


def fine(step: Path) -> None:
    pass


def check(name: str, what: list[Callable[[Path], None]], kind: type[UserError] | None) -> None:
    """Each process reads a copy of its own, after `what` happened to it; both meet an error of this kind."""
    place = folder / f"{name}-{process}"
    shutil.copytree(folder / "whole", place)
    what[process](place / "5")
    caught: UserError | None = None
    with Checkpoints(place, keep=None) as checkpoints:
        try:
            restored = checkpoints.restore(5, layout, axis)
        except UserError as error:
            caught = error
    assert type(caught) is (kind or type(None)), (name, caught)
    if caught is None:
        for part in restored["w"].addressable_shards:
            np.testing.assert_array_equal(part.data, whole[part.index])
    else:
        expected = "another host could not read it" if what[process] is fine else "cannot be read"
        assert expected in str(caught) and f"{place}, step 5" in str(caught), (name, caught)


check("fine", [fine, fine], None)
check("meta-of-one", [fine, torn_meta], DamagedCheckpoint)
check("meta-of-the-first", [torn_meta, fine], DamagedCheckpoint)
check("arrays-of-one", [fine, torn_arrays], DamagedCheckpoint)
check("outage-of-one", [unreadable, fine], Unavailable)
check("damage-and-outage", [torn_meta, unreadable], Unavailable)

with Checkpoints(folder / "whole", keep=1) as checkpoints:
    checkpoints.set_aside(5)
    assert checkpoints.steps() == []
    checkpoints.save(5, state, layout, {})  # its step is free again
    checkpoints.wait()
    assert checkpoints.steps() == [5]

# jax hears of the end of a host (by SIGTERM, for which this program has no handler), and all stop at one step.
any_host = AnyHost(lag=0)
for step in range(600):
    is_stop, is_due = any_host(step, False, step == 2 and process == 1)
    assert is_due == (step == 2)
    if is_stop:
        break
    if step == 3 and process == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)
assert is_stop and step > 3
(folder / f"stopped-{process}").write_text(str(step))
multihost_utils.sync_global_devices("done")
print("done")
