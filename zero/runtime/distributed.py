"""Processes, devices and signals (jax.distributed)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import jax
import numpy as np

ACCELERATORS = ("accel*", "vfio/*", "nvidia0", "kfd")  # device files of TPUs, NVIDIA and AMD GPUs
PREEMPTED = 75  # exit status of a run that was told to stop and saved; EX_TEMPFAIL of sysexits.h


def start(
    cpu_devices: int, coordinator_address: str | None, num_processes: int | None, process_id: int | None
) -> tuple[int, int]:
    """Joins the other hosts, if there are any, and brings up the devices.

    Without an accelerator there are `cpu_devices` virtual CPU devices a host. They outnumber the cores, and XLA's
    collectives hang when a later step holds the thread that an earlier one waits for; a larger thread pool and at most
    one step in flight keep them apart. The pool is sized by the environment variable NPROC when jax starts.

    Returns:
      This process and the number of processes.
    """
    os.environ.setdefault("NPROC", str(4 * cpu_devices))
    if not any(next(Path("/dev").glob(pattern), None) for pattern in ACCELERATORS):
        jax.config.update("jax_platforms", "cpu")  # else an installed libtpu looks for a TPU, at length and aloud
    jax.config.update("jax_num_cpu_devices", cpu_devices)
    if coordinator_address is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator_address, num_processes, process_id)
    return jax.process_index(), jax.process_count()


def device_memory() -> int:
    """Bytes of one local device; virtual CPU devices share the machine's."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return int(device.memory_stats()["bytes_limit"])


def sum_over_hosts(number: int) -> int:
    """The sum of what each host gives; all hosts call it at the same step (all-reduce)."""
    parts = np.zeros(jax.local_device_count(), np.int32)
    parts[0] = number
    return _sum(parts).item()


@partial(jax.pmap, axis_name="hosts", out_axes=None)
def _sum(part: jax.Array) -> jax.Array:
    return jax.lax.psum(part, "hosts")


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT in a list, for a loop to look at between steps; a second one stops at once."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if received:
            raise SystemExit(128 + number)
        received.append(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
