"""Processes, devices and signals (jax.distributed)."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import jax
import numpy as np

log = logging.getLogger(__name__)

ACCELERATORS = ("accel*", "vfio/*", "nvidia0", "kfd")  # device files of TPUs, NVIDIA and AMD GPUs
HEARTBEAT_SECONDS = 30  # of silence after which a host counts as lost, and all others end
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
        jax.distributed.initialize(
            coordinator_address, num_processes, process_id, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
        )
    return jax.process_index(), jax.process_count()


def device_memory() -> int:
    """Bytes of one local device; virtual CPU devices share the machine's."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return int(device.memory_stats()["bytes_limit"])


@contextmanager
def ending_alone() -> Iterator[None]:
    """Where a host fails, its process ends without waiting for the others, which then notice and end as well.

    jax would wait at its exit for hosts that wait for this one in a collective.
    """
    try:
        yield
    except BaseException:
        if jax.distributed.is_initialized() and jax.process_count() > 1:
            log.error(
                "host %d of %d ends with an error; if that is a lost connection, the first host to fail says why",
                jax.process_index(),
                jax.process_count(),
            )
            atexit.register(_exit)  # runs before jax's own, and after the error was printed
        raise


def _exit() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


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
