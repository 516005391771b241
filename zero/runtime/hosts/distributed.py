"""Hosts and their devices: joining, agreeing, and ending together (jax.distributed).

A host is a process of jax's; each runs the same program and owns some of the devices.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
from jax.experimental.multihost_utils import reached_preemption_sync_point

from zero.runtime.errors import UserError
from zero.runtime.hosts.preemption import end_at_once

log = logging.getLogger(__name__)

ACCELERATORS = ("accel*", "vfio/*", "nvidia0", "kfd")  # device files of TPUs, NVIDIA and AMD GPUs
BEAT_SECONDS = 2  # between two signs of life of a host
SILENCE_SECONDS = 20  # after which it counts as dead, and all others end
JOIN_SECONDS = 300  # in which all hosts have to start
_FINISHED, _STOPPED = "finished", "told to stop, signal"
_watch: _Watch | None = None


def start(
    cpu_devices: int,
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    compilation_cache: str | None,
) -> tuple[int, int]:
    """Joins the other hosts, if there are any, and brings up the devices.

    On TPU pods, under Slurm and under Open MPI jax finds the others itself; elsewhere they are told.

    Without an accelerator there are `cpu_devices` virtual CPU devices a host. They outnumber the cores, and XLA's
    collectives hang when a later step holds the thread that an earlier one waits for; a larger thread pool and at most
    one step in flight keep them apart. The pool is sized by the environment variable NPROC when jax starts.

    Returns:
      This process and the number of processes.

    Raises:
      UserError: jax cannot make out the other hosts.
    """
    global _watch
    os.environ.setdefault("NPROC", str(4 * cpu_devices))
    in_order = "--xla_cpu_enable_concurrency_optimized_scheduler=false"  # else devices run collectives in any order
    if in_order not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {in_order}".strip()
    if not any(next(Path("/dev").glob(pattern), None) for pattern in ACCELERATORS):
        jax.config.update("jax_platforms", "cpu")  # else an installed libtpu looks for a TPU, at length and aloud
    jax.config.update("jax_num_cpu_devices", cpu_devices)
    if compilation_cache is not None and not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(compilation_cache))
    if not jax.distributed.is_initialized() and (coordinator_address is not None or _jax_finds_hosts()):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        log.info(
            "waiting for the other hosts; after %d s jax ends this one with: Terminating process because ...",
            JOIN_SECONDS,
        )
        try:
            with _signals_left_to_the_system():
                jax.distributed.initialize(
                    coordinator_address,
                    num_processes,
                    process_id,
                    initialization_timeout=JOIN_SECONDS,
                    heartbeat_timeout_seconds=2 * SILENCE_SECONDS,  # jax's own: it aborts and names nobody
                    shutdown_timeout_seconds=3 * SILENCE_SECONDS,
                )
        except (RuntimeError, ValueError) as error:
            remedy = (
                "expected TPU pods, Slurm or Open MPI, or HOST:PORT with num_processes and process_id (1 and 0 alone)"
            )
            raise UserError(
                f"distributed.coordinator_address={coordinator_address}: {str(error).splitlines()[0]}; {remedy}"
            ) from error
        if jax.process_count() > 1:
            _watch = _Watch(_client())
            _watch.start()
    return jax.process_index(), jax.process_count()


@contextmanager
def _signals_left_to_the_system() -> Iterator[None]:
    """While jax waits for hosts it answers none, and then has a handler for SIGTERM of its own, which answers late."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _jax_finds_hosts() -> bool:
    """Whether jax knows by itself which processes belong together: TPU VMs, and tasks of Slurm and Open MPI."""
    has_tpu = find_spec("libtpu") is not None and any(
        next(Path("/dev").glob(pattern), None) for pattern in ("accel*", "vfio/*")
    )
    is_slurm_step = "SLURM_STEP_NODELIST" in os.environ and int(os.environ.get("SLURM_NTASKS", 1)) > 1
    return has_tpu or is_slurm_step or int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1


def _client() -> Any:
    """The key-value store that all hosts share."""
    from jax._src import distributed

    return distributed.global_state.client


def age() -> float:
    """Seconds since this process began."""
    return time.time() - psutil.Process().create_time()


def device_memory() -> int:
    """Bytes of one local device; virtual CPU devices share the machine's."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return int(device.memory_stats()["bytes_limit"])


_cache_hits = 0


def compilation_cache_hits() -> int:
    """Programs that jax has taken from its persistent cache since `start`."""
    return _cache_hits


def _listen(event: str, **_: Any) -> None:
    global _cache_hits
    _cache_hits += event == "/jax/compilation_cache/cache_hits"


jax.monitoring.register_event_listener(_listen)


# ---- Agreeing --------------------------------------------------------------------------------------------------------


def sum_over_hosts(*numbers: int) -> list[int]:
    """The sums, modulo 2^32, of what each host gives; all hosts call it at the same step (all-reduce)."""
    if jax.process_count() == 1:
        return [number % 2**32 for number in numbers]
    return _sum(_parts(numbers)).tolist()


def from_first_host(name: str, text: str) -> str:
    """What host 0 says where all hosts ask for the same name, once each."""
    if jax.process_count() == 1:
        return text
    if jax.process_index() == 0:
        _client().key_value_set(f"zero/said/{name}", text)
    return str(_client().blocking_key_value_get(f"zero/said/{name}", 1000 * JOIN_SECONDS))


def wait_for_all() -> None:
    """Returns when every host has come here."""
    sum_over_hosts(0)


def check_shared(key: str, place: Path | str) -> None:
    """Makes sure that all hosts see what one of them writes to a place.

    Raises:
      UserError: they do not; `key` says where.
    """
    if jax.process_count() == 1 or not isinstance(place, Path):
        return
    seen = place / f".seen-by-all-{from_first_host(key, secrets.token_hex(4))}"
    if jax.process_index() == 0:
        place.mkdir(parents=True, exist_ok=True)
        seen.touch()
    wait_for_all()
    (blind,) = sum_over_hosts(not seen.exists())
    if jax.process_index() == 0:
        seen.unlink()
    if blind:
        raise UserError(
            f"{key}: {blind} of {jax.process_count()} hosts do not see {place} of host 0; several hosts need "
            "data.bucket_path, or a disk that they share"
        )


class Agreement:
    """One decision for all hosts: what any of them asks for, all of them are told at the same call.

    Args:
      lag: 0 tells at once; 1 tells what was asked at the call before, and so waits for no device.
    """

    def __init__(self, lag: int) -> None:
        self._asked: list[jax.Array] = []
        self._lag = lag

    def __call__(self, step: int, *flags: bool) -> list[bool]:
        """Whether any host has each flag up. All hosts call it equally often at every step.

        The first one also goes up when jax hears of the maintenance or preemption of a host.
        """
        if jax.process_count() == 1:
            return list(flags)
        self._asked.append(_sum(_parts(flags)))
        told = self._asked.pop(0).tolist() if len(self._asked) > self._lag else [0] * len(flags)
        is_preempted = reached_preemption_sync_point(step)  # as orbax does: they have to count alike
        return [told[0] > 0 or is_preempted, *(number > 0 for number in told[1:])]


def _parts(numbers: tuple[int, ...] | tuple[bool, ...]) -> np.ndarray:
    """(local devices, numbers): this host's numbers on its first device, zeros on the others."""
    parts = np.zeros((jax.local_device_count(), len(numbers)), np.uint32)
    parts[0] = np.asarray(numbers, np.uint64).astype(np.uint32)
    return parts


@partial(jax.pmap, axis_name="hosts", out_axes=None)
def _sum(part: jax.Array) -> jax.Array:
    return jax.lax.psum(part, "hosts")


# ---- Ending together -------------------------------------------------------------------------------------------------


class _Watch(threading.Thread):
    """Tells the other hosts that this one lives, and ends this process when another one does not.

    jax has a heartbeat of its own, which aborts with a stack of C++ and without a name; and where the network tells of
    the death first, whoever waits in a collective gets a connection error that names nobody either.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(name="watch", daemon=True)
        self._client, self._host, self._hosts = client, jax.process_index(), jax.process_count()
        self._ended = threading.Event()
        client.key_value_set(f"zero/name/{self._host}", socket.gethostname())
        wait = 1000 * SILENCE_SECONDS
        self._names = [client.blocking_key_value_get(f"zero/name/{host}", wait) for host in range(self._hosts)]
        log.info("hosts: %s", ", ".join(f"{host} is {name}" for host, name in enumerate(self._names)))
        if self._host:  # jax aborts before anything of ours can speak
            log.info("if host 0 (%s) dies, jax ends this one with: Terminating process because ...", self._names[0])

    def run(self) -> None:
        beats = 0
        heard: dict[int, tuple[str, float]] = {host: ("", time.monotonic()) for host in range(self._hosts)}
        while not self._ended.wait(BEAT_SECONDS):
            beats += 1
            try:
                self._say(str(beats))
                said = {int(key.rsplit("/", 1)[1]): text for key, text in self._client.key_value_dir_get("zero/beat/")}
            except jax.errors.JaxRuntimeError:
                if self._ended.is_set():
                    return
                self._end(0, "which coordinates, cannot be reached")
                continue
            for host, (before, at) in heard.items():
                text = said.get(host, "")
                if text.startswith("error"):
                    self._end(host, f"ended: {text}")
                if text.startswith(_STOPPED):
                    self._end(host, f"was {text}", status=128 + int(text.rpartition(" ")[2]))
                if text not in (before, _FINISHED):
                    heard[host] = text, time.monotonic()
                elif text != _FINISHED and time.monotonic() - at > SILENCE_SECONDS and host != self._host:
                    self._end(host, f"has given no sign of life for {SILENCE_SECONDS} s")

    def _say(self, text: str) -> None:
        self._client.key_value_set(f"zero/beat/{self._host}", text, True)

    def _end(self, host: int, what: str, status: int = 1) -> None:
        if host != self._host:
            log.error("host %d of %d (%s) %s; this one ends as well", host, self._hosts, self._names[host], what)
            end_at_once(status)

    def stop(self, last_word: str) -> None:
        """This host leaves; the others learn why."""
        self._ended.set()
        self.join(BEAT_SECONDS)  # else a beat might overwrite the last word
        self._say(last_word)


@contextmanager
def ending_together() -> Iterator[None]:
    """Where a host fails, it says why and ends without waiting for the others, which then end as well.

    jax would wait at its exit for hosts that wait for this one in a collective.
    """
    try:
        yield
        if _watch is not None:
            wait_for_all()  # the others may still write; jax's own end waits for a minute only, and aborts
    except BaseException as error:
        if _watch is not None:
            if isinstance(error, jax.errors.JaxRuntimeError):
                _watch.join(SILENCE_SECONDS + 3 * BEAT_SECONDS)  # a lost connection: the watch ends us with the cause
            if isinstance(error, KeyboardInterrupt):  # there was nothing to save yet
                _leave(f"{_STOPPED} {int(error.args[0] if error.args else signal.SIGINT)}")
            else:
                _leave(f"error: {(str(error) or type(error).__name__).splitlines()[0]}")
            atexit.register(end_at_once, 1)  # runs before jax's own, and after the error was printed
        raise
    if _watch is not None:
        _leave(_FINISHED)
        jax.distributed.shutdown()  # waits for all; who left earlier would look dead


def _leave(last_word: str) -> None:
    global _watch
    if _watch is not None:
        try:
            _watch.stop(last_word)
        except jax.errors.JaxRuntimeError:  # of the host that coordinates: it has ended first
            log.warning("host 0 can no longer be reached")
        _watch = None
