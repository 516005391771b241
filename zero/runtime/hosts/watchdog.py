"""Hosts end together: each one reports that it is alive, and ends with a reason when another one does not."""

from __future__ import annotations

import atexit
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from zero.partition.whole_state import coordination_client
from zero.runtime.errors import UserError, first_line
from zero.runtime.hosts.agreement import wait_for_all
from zero.runtime.hosts.signals import exit_immediately, unanswered

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2
SILENCE_SECONDS = 20  # without a heartbeat, after which a host counts as dead and all others end
_FINISHED, _STOPPED = "finished", "stopped by signal"
_watchdog: _Watchdog | None = None


class _Watchdog(threading.Thread):
    """Sends this host's heartbeat, and ends this process when another host has ended or stopped sending.

    jax has a heartbeat of its own, which aborts with a C++ stack trace that names no host; and where the network
    reports the death first, a process that waits in a collective gets a connection error that names none either.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._client, self._host, self._hosts = client, jax.process_index(), jax.process_count()
        self._stopped = threading.Event()
        client.key_value_set(f"zero/name/{self._host}", socket.gethostname())
        wait = 1000 * SILENCE_SECONDS
        self._names = [client.blocking_key_value_get(f"zero/name/{host}", wait) for host in range(self._hosts)]
        log.info("hosts: %s", ", ".join(f"{host} is {name}" for host, name in enumerate(self._names)))
        if self._host:  # jax aborts before this watchdog can say anything
            log.info("if host 0 (%s) dies, jax ends this one with: Terminating process because ...", self._names[0])

    def run(self) -> None:
        heartbeats = 0
        reached = time.monotonic()  # when the key-value store last answered
        last: dict[int, tuple[str, float]] = dict.fromkeys(range(self._hosts), ("", reached))
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            heartbeats += 1
            try:
                self._publish(str(heartbeats))
                entries = self._client.key_value_dir_get("zero/heartbeat/")
            except jax.errors.JaxRuntimeError as error:
                if self._stopped.is_set():
                    return
                if time.monotonic() - reached > SILENCE_SECONDS:  # a single failed request may be a network glitch
                    self._end(0, f"which coordinates, has not answered for {SILENCE_SECONDS} s ({first_line(error)})")
                continue
            reached = time.monotonic()
            messages = {int(key.rsplit("/", 1)[1]): text for key, text in entries}
            for host, (before, since) in last.items():
                message = messages.get(host, "")
                if message.startswith("error "):
                    failed_with, _, text = message.removeprefix("error ").partition(": ")
                    self._end(host, f"ended: error: {text}", int(failed_with))
                if message.startswith(_STOPPED):
                    self._end(host, f"was {message}", status=128 + int(message.rpartition(" ")[2]))
                if message not in (before, _FINISHED):
                    last[host] = message, reached
                elif message != _FINISHED and reached - since > SILENCE_SECONDS and host != self._host:
                    self._end(host, f"has sent no heartbeat for {SILENCE_SECONDS} s")

    def _publish(self, message: str) -> None:
        self._client.key_value_set(f"zero/heartbeat/{self._host}", message, True)

    def _end(self, host: int, reason: str, status: int = 1) -> None:
        if host != self._host:
            log.error("host %d of %d (%s) %s; this one ends as well", host, self._hosts, self._names[host], reason)
            exit_immediately(status)

    def stop(self, last_message: str) -> None:
        """This host leaves; the others learn why."""
        self._stopped.set()
        self.join(HEARTBEAT_SECONDS)  # else a heartbeat might overwrite the last message
        self._publish(last_message)


def start() -> None:
    """Begins to watch the other hosts. Called once, when all of them have joined."""
    global _watchdog
    _watchdog = _Watchdog(coordination_client())
    _watchdog.start()


@contextmanager
def ending_together() -> Iterator[None]:
    """When this host fails, it says why and ends without waiting for the others, which then end as well.

    jax would wait at its exit for hosts that wait for this one in a collective.
    """
    try:
        yield
        if _watchdog is not None:
            wait_for_all()  # the others may still write; jax's shutdown waits for a minute only, and aborts
    except BaseException as error:
        if _watchdog is not None:
            if isinstance(error, jax.errors.JaxRuntimeError):
                # A lost connection: the watchdog ends this process and names the host that caused it.
                _watchdog.join(SILENCE_SECONDS + 3 * HEARTBEAT_SECONDS)
            status = error.status if isinstance(error, UserError) else 1
            if unanswered:  # a signal, when there was nothing to save yet
                _leave(f"{_STOPPED} {int(unanswered[0][0])}")
            else:
                _leave(f"error {status}: {first_line(error)}")
            atexit.register(exit_immediately, status)  # runs before jax's exit handler, and after the error was printed
        raise
    if _watchdog is not None:
        _leave(_FINISHED)
        jax.distributed.shutdown()  # waits for all hosts; one that left earlier would look dead


def _leave(last_message: str) -> None:
    global _watchdog
    if _watchdog is not None:
        try:
            _watchdog.stop(last_message)
        except jax.errors.JaxRuntimeError:  # the store is on host 0, which has ended first
            log.warning("host 0 can no longer be reached")
        _watchdog = None
