"""Joins the other hosts and initializes the devices (jax.distributed).

A host is a jax process; each runs the same program and owns some of the devices.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import jax
import psutil

from zero.base.errors import Unavailable, UserError
from zero.base.keys import Check, Mistakes, at_least, key, positive
from zero.hosts import roll_call, watchdog, xla_options
from zero.hosts.agreement import ANSWER_SECONDS
from zero.hosts.hardware import DEVICES, accelerator, missing_driver
from zero.hosts.signals import SIGNALS, handled
from zero.hosts.watchdog import SILENCE_SECONDS
from zero.partition.virtual_devices import use_cpu_devices
from zero.partition.whole_state import cluster_of_processes, processes_that_joined

log = logging.getLogger(__name__)

# Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_COMPILED = "/jax/core/compile/backend_compile_duration"  # an event of jax.monitoring
_runs = itertools.count()  # of this process
_LONG_COMPILATION = 1.0  # seconds, from which the compiler's memory is worth a pass over the heap


@dataclass(frozen=True)
class DistributedKeys:
    """The section `distributed`."""

    cpu_devices: int = key(2, at_least(1), "Number of virtual devices on a machine without an accelerator.")
    coordinator_address: str | None = key(
        None,
        Check(lambda value: re.fullmatch(r".+:\d+", value) is not None, "host:port of the first process"),
        "host:port of process 0, for clusters that jax does not recognize; null: a TPU pod, Slurm or Open MPI, which "
        "jax recognizes, or a single process.",
        per_host=True,
        anew=True,
    )
    num_processes: int | None = key(
        None, at_least(1), "Number of processes if coordinator_address is given, else null.", anew=True
    )
    process_id: int | None = key(
        None,
        at_least(0),
        "Index of this process, from 0, if coordinator_address is given, else null.",
        per_host=True,
        anew=True,
    )
    compilation_cache: str | None = key(
        "~/.cache/zero",
        None,
        "Directory that caches compiled programs for later starts; null: no cache.",
        "JAX_COMPILATION_CACHE_DIR takes precedence. The cache is off on several hosts without accelerators.",
        per_host=True,
    )
    join_minutes: float = key(
        30.0,
        positive(),
        "Minutes to wait for all hosts, while the missing ones are logged every 15 s; after that, the hosts that have "
        "joined exit with status 1.",
    )
    start_minutes: float | None = key(
        60.0,
        positive(),
        "Before the first step: after this many minutes in which no host makes progress in preparing, restoring or "
        "compiling, all hosts exit as for stall_minutes; null: no limit.",
    )
    stall_minutes: float | None = key(
        60.0,
        positive(),
        "After this many minutes without a step, each host logs the stack of each thread and exits with status 1; "
        "null: no limit.",
    )

    def mistakes(self) -> Mistakes:
        number = self.process_id
        count = self.num_processes
        if self.coordinator_address is None:
            for name, value in (("num_processes", count), ("process_id", number)):
                if value is not None:
                    yield f"distributed.{name}", "null without distributed.coordinator_address"
        elif count is None:
            yield "distributed.num_processes", "the number of processes, with distributed.coordinator_address"
        elif number is None or number >= count:
            yield "distributed.process_id", f"0 to {count - 1}, different on each process"


@cache
def keep_freed_memory() -> None:
    """Has glibc reuse freed memory instead of returning it to the system. Call it before jax starts its threads.

    XLA's CPU backend allocates a program's temporary memory at each call, and the system fills new pages with zeros:
    with 80 MB a step spends a third of its time there (docs/decisions/cpu-speed.md). What the compiler of a large
    program leaves is returned, before the program allocates more beside it.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for parameter, value in ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1)):
        libc.mallopt(parameter, value)

    def return_what_is_left(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED and duration_secs > _LONG_COMPILATION:
            libc.malloc_trim(0)

    jax.monitoring.register_event_duration_secs_listener(return_what_is_left)


def start(
    cpu_devices: int,
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    compilation_cache: str | None,
    join_minutes: float,
    start_minutes: float | None,
    stall_minutes: float | None,
    overlap_gathers: bool,
    in_groups: bool = True,
) -> tuple[int, int]:
    """Joins the other hosts, if there are any, and initializes the devices.

    On TPU pods, under Slurm and under Open MPI jax finds the other hosts itself; elsewhere the arguments name them.
    The only process of a GPU node has all of its GPUs; of several processes on a node each has one.

    Without an accelerator there are `cpu_devices` virtual CPU devices per host (`zero.use_cpu_devices`).
    `overlap_gathers` runs collectives beside computation, in training without groups more of them: `in_groups` is
    false there (`zero.hosts.xla_options`).

    Returns:
      The index of this process and the number of processes.

    Raises:
      UserError: there is a TPU without its driver.
      Unavailable: jax cannot find or reach the other hosts.
    """
    if (missing := missing_driver()) is not None:
        raise UserError(f"{missing.problem}: {missing.remedy}")
    if accelerator() is None:
        jax.config.update("jax_platforms", "cpu")  # else libtpu searches long for a TPU, and prints errors
        keep_freed_memory()
    if compilation_cache is not None and not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(compilation_cache))
    if not jax.distributed.is_initialized() and (coordinator_address is not None or _jax_finds_hosts()):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            coordinator_address, num_processes, process_id = _cluster(coordinator_address, num_processes, process_id)
            roll_call.meet(coordinator_address, num_processes, process_id, join_minutes)
            with handled(SIGNALS, signal.SIG_DFL):  # Python's would not run meanwhile, and jax sets its own
                jax.distributed.initialize(
                    coordinator_address,
                    num_processes,
                    process_id,
                    local_device_ids=gpus_of_node(),
                    initialization_timeout=ANSWER_SECONDS,
                    heartbeat_timeout_seconds=3 * SILENCE_SECONDS,  # jax's heartbeat aborts and names no host
                    shutdown_timeout_seconds=3 * SILENCE_SECONDS,
                )
        except (RuntimeError, ValueError) as error:
            remedy = (
                "expected TPU pods, Slurm or Open MPI, or HOST:PORT with num_processes and process_id (1 and 0 for a "
                "single process)"
            )
            raise Unavailable(
                f"distributed.coordinator_address={coordinator_address}: {str(error).splitlines()[0]}; {remedy}"
            ) from error
    use_cpu_devices(cpu_devices)
    xla_options.set_before_start(overlap_gathers, accelerator(), processes_that_joined(), in_groups)
    if jax.distributed.is_initialized() and jax.process_count() > 1 and jax.default_backend() == "cpu":
        # docs/decisions/virtual-devices.md, "Several hosts"
        jax.config.update("jax_enable_compilation_cache", False)
    watchdog.start(stall_minutes, start_minutes)
    return jax.process_index(), jax.process_count()


def _cluster(address: str | None, count: int | None, number: int | None) -> tuple[str, int, int]:
    """The address of host 0, the number of hosts, and which one this is: as given, or as jax finds them.

    Raises:
      ValueError: jax finds no cluster.
    """
    if address is None:
        address, count, number = cluster_of_processes(ANSWER_SECONDS)
    if address is None or count is None or number is None:
        raise ValueError("jax finds no cluster")
    return address, count, number


def gpus_of_node() -> list[int] | None:
    """The numbers of all GPUs of this node if Slurm or Open MPI has started one process on it; else None.

    jax would give this process the first one only; with None it decides itself.
    """
    is_alone = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
    if "SLURM_STEP_NUM_NODES" in os.environ:
        is_alone = os.environ.get("SLURM_NTASKS") == os.environ["SLURM_STEP_NUM_NODES"]
    if not is_alone or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(list(DEVICES.glob("nvidia[0-9]*"))) if visible is None else len(visible.split(","))
    return list(range(count)) or None


def _jax_finds_hosts() -> bool:
    """Whether jax detects the processes of the run itself: TPU VMs, and tasks of Slurm and Open MPI."""
    has_tpu = find_spec("libtpu") is not None and accelerator() == "tpu"
    is_slurm_step = "SLURM_STEP_NODELIST" in os.environ and int(os.environ.get("SLURM_NTASKS", 1)) > 1
    return has_tpu or is_slurm_step or int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1


def begin_run() -> float:
    """When a run began, on the monotonic clock: the first one with its process, a later job of a sweep now."""
    is_first = next(_runs) == 0
    age = time.time() - psutil.Process().create_time() if is_first else 0.0
    return time.monotonic() - age


def device_memory() -> int:
    """Bytes of one local device; virtual CPU devices share the machine's."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return int(device.memory_stats()["bytes_limit"])
