"""Bandwidth of saving and restoring 1 GB of float32 against one plain write and one plain read of the same bytes.

    python benchmarks/checkpoint.py

One process, 8 virtual CPU devices of 16, two cores, about two minutes. A save is timed until its files are synced; a
restore reads files that `posix_fadvise` has dropped from the page cache. Rounds take turns, so that a slow moment of
the machine affects all alike, and medians count. Ratios are of bandwidths: 1 is as fast as the plain file. The plain
read reuses one small buffer; the other one keeps its data in newly allocated memory, like a restore.

Then two processes of 4 devices each save and restore the same state. A process needs half of it: the bytes that it
reads, and its peak memory besides that half, are given as fractions of the whole.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.experimental import multihost_utils

import zero
from zero.checkpoints.manager import Checkpoints

STACK, WIDTH, VOCAB = 16, 1024, 50304


def placed(devices: int) -> tuple[zero.Layout, zero.Axis]:
    blocks = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH), "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    tree = {
        "vocabulary": jax.ShapeDtypeStruct((VOCAB, WIDTH), jnp.float32),
        "blocks": {name: jax.ShapeDtypeStruct((STACK, *shape), jnp.float32) for name, shape in blocks.items()},
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


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """A list that holds, at the end, the most bytes that were resident within, above those at the beginning."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or memory that was freed before, and is used again, would not count
    before = resident()
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def make_state(layout: zero.Layout, axis: zero.Axis) -> Any:
    generator = np.random.default_rng(0)

    def one(leaf: zero.groups.LeafLayout, to: jax.ShapeDtypeStruct) -> jax.Array:
        whole = generator.standard_normal(leaf.padded_shape, np.float32)
        return jax.make_array_from_callback(whole.shape, to.sharding, lambda index: whole[index])

    return layout.map(one, zero.global_shapes(layout, axis))


def run_two_processes(directory: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, __file__, "--directory", str(directory), "--port", port, "--process"]
    processes = [subprocess.Popen([*command, str(i)]) for i in range(2)]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        sys.exit(1)


def as_one_of_two(process: int, port: str, directory: Path) -> None:
    """The work of one of the two processes, which prints when its turn comes."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    zero.use_cpu_devices(4)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    layout, axis = placed(8)
    state = make_state(layout, axis)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    with Checkpoints(directory / "saved by 2 x 4", keep=1) as checkpoints:
        checkpoints.save(1, state, layout, {})
    del state
    lines = []
    for place in sorted(directory.glob("saved by *")):
        drop_from_cache(place)
        before = bytes_read()
        with Checkpoints(place, keep=None) as checkpoints, peak_memory() as peak:
            restored = jax.block_until_ready(checkpoints.restore(1, layout, axis))
        lines.append(
            f"{place.name}, read by 2 x 4, process {process}: "
            f"{(bytes_read() - before) / size:.2f} read, {peak[0] / size - 0.5:.2f} of memory above its half"
        )
        del restored
    for turn in range(2):
        multihost_utils.sync_global_devices(f"turn {turn}")
        if turn == process:
            print(*lines, sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="on the disk to measure; default: a temporary one")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if options.process is not None:
        as_one_of_two(options.process, options.port, Path(options.directory))
        return
    zero.use_cpu_devices(16)
    layout, axis = placed(8)
    state = make_state(layout, axis)
    arrays = jax.tree.leaves(state)
    size = sum(x.nbytes for x in arrays)
    seconds: dict[str, list[float]] = {}
    read: dict[str, float] = {}
    memory: dict[str, list[float]] = {}

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
            for name in ("untimed read", "same, new memory"):
                drop_from_cache(plain)
                started = time.perf_counter()
                kept = np.fromfile(plain, np.float32)
                timed(name, started)
                del kept
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
                name = f"restore by {devices}"
                with Checkpoints(place, keep=None) as checkpoints, peak_memory() as peak:
                    started = time.perf_counter()
                    restored = jax.block_until_ready(checkpoints.restore(1, *placed(devices)))
                    timed(name, started)
                read[name] = (bytes_read() - before) / size
                memory.setdefault(name, []).append(peak[0] / size - 1)
                del restored
            shutil.rmtree(place)
        middle = {name: median(times) for name, times in seconds.items()}
        print(f"{size / 1e9:.2f} GB, medians of {options.rounds}")
        print(f"{'':16} {'seconds':>8} {'ratio':>6} {'new memory':>11} {'read':>5} {'memory':>7}")
        print(f"{'save':16} {middle['save']:8.2f} {middle['plain write'] / middle['save']:6.2f}")
        for name in read:
            ratios = [middle[peer] / middle[name] for peer in ("plain read", "same, new memory")]
            more = f"{read[name]:5.2f} {median(memory[name]):7.2f}"
            print(f"{name:16} {middle[name]:8.2f} {ratios[0]:6.2f} {ratios[1]:11.2f} {more}")
        print(f"{'stall':16} {middle['stall']:8.2f} {middle['stall'] / middle['copy']:6.2f} x the copy to the host")
        for name in ("plain write", "plain read", "same, new memory", "copy"):
            print(f"{name:16} {middle[name]:8.2f}", flush=True)
        for devices in (8, 3, 1):
            layout, axis = placed(devices)
            with Checkpoints(Path(directory, f"saved by 1 x {devices}"), keep=1) as checkpoints:
                checkpoints.save(1, make_state(layout, axis), layout, {})
        run_two_processes(Path(directory))


if __name__ == "__main__":
    main()
