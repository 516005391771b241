"""Bandwidth of saving and restoring 1 GB of float32 against one plain write and one plain read of the same bytes.

    python benchmarks/checkpoint.py

One process, 8 virtual CPU devices of 16, two cores, about two minutes. A save is timed until its files are synced; a
restore reads files that `posix_fadvise` has dropped from the page cache. Rounds take turns, so that a slow moment of
the machine hits all alike, and medians count. Ratios are of bandwidths: 1 is as fast as the plain file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("NPROC", "64")

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

import zero
from zero.runtime.checkpoints import Checkpoints

LAYERS, WIDTH, VOCAB = 16, 1024, 50304


def placed(devices: int) -> tuple[zero.Layout, zero.Axis]:
    blocks = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH), "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    tree = {
        "vocabulary": jax.ShapeDtypeStruct((VOCAB, WIDTH), jnp.float32),
        "blocks": {name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for name, shape in blocks.items()},
    }
    return zero.make_layout(tree, devices, stacked=("blocks",)), zero.Axis("zero", (1, devices))


def drop_from_cache(place: Path) -> None:
    for file in [place] if place.is_file() else place.rglob("*"):
        if file.is_file():
            opened = os.open(file, os.O_RDONLY)
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(opened)


def bytes_read() -> int:
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="on the disk to measure; default: a temporary one")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 16)
    layout, axis = placed(8)
    generator = np.random.default_rng(0)
    state = layout.map(
        lambda leaf, to: jax.device_put(generator.standard_normal(leaf.padded_shape, np.float32), to.sharding),
        zero.global_shapes(layout, axis),
    )
    arrays = jax.tree.leaves(state)
    size = sum(x.nbytes for x in arrays)
    seconds: dict[str, list[float]] = {}
    read: dict[str, float] = {}

    def timed(name: str, started: float) -> None:
        seconds.setdefault(name, []).append(time.perf_counter() - started)

    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for _ in range(options.rounds):
            started = time.perf_counter()
            copies = [np.array(part.data) for x in arrays for part in x.addressable_shards]
            timed("copy", started)
            plain = Path(directory, "plain")
            for name in ("untimed write", "plain write"):  # whoever writes first pays for fresh pages of memory
                plain.unlink(missing_ok=True)
                started = time.perf_counter()
                with plain.open("wb", buffering=0) as file:
                    for copy in copies:
                        copy.tofile(file)
                    os.fsync(file.fileno())
                timed(name, started)
            drop_from_cache(plain)
            buffer = bytearray(8 << 20)
            started = time.perf_counter()
            with plain.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
            timed("plain read", started)
            plain.unlink()
            place = Path(directory, "checkpoints")
            with Checkpoints(place, keep=1) as checkpoints:
                started = time.perf_counter()
                checkpoints.save(1, state, layout, {})
                timed("stall", started)
                checkpoints.wait()
                timed("save", started)
            for devices in (8, 3, 16):
                drop_from_cache(place)
                before = bytes_read()
                with Checkpoints(place, keep=None) as checkpoints:
                    started = time.perf_counter()
                    jax.block_until_ready(checkpoints.restore(1, *placed(devices)))
                    timed(f"restore by {devices}", started)
                read[f"restore by {devices}"] = (bytes_read() - before) / size
            shutil.rmtree(place)
    middle = {name: median(times) for name, times in seconds.items()}
    print(f"{size / 1e9:.2f} GB, medians of {options.rounds}")
    print(f"{'':16} {'seconds':>8} {'ratio':>6}   bytes read / bytes")
    for name, peer in [("save", "plain write"), *((name, "plain read") for name in read)]:
        more = f"   {read[name]:.2f}" if name in read else ""
        print(f"{name:16} {middle[name]:8.2f} {middle[peer] / middle[name]:6.2f}{more}")
    print(f"{'stall':16} {middle['stall']:8.2f} {middle['stall'] / middle['copy']:6.2f} x the copy to the host")
    for name in ("plain write", "plain read", "copy"):
        print(f"{name:16} {middle[name]:8.2f}")


if __name__ == "__main__":
    main()
