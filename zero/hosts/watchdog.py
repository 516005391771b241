"""Hosts end together: each sends a heartbeat, and ends with a reason when another host's is missing.

The reports are in jax's key-value store, on host 0. A host that ends leaves a last report: the status, the host that
is the cause and the reason. All others repeat it, and host 0 leaves last.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import jax

from zero.base.errors import Unavailable, UserError, causes, first_line
from zero.hosts.agreement import advances, arrivals, arrive, wait_for_all
from zero.hosts.signals import exit_immediately, unanswered
from zero.partition.whole_state import coordination_client, coordinator_address

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2
SILENCE_SECONDS = 20  # without a heartbeat, after which a host counts as lost and all others end
LEAVE_SECONDS = 10  # that host 0, which holds the store, waits for the others to have read a reason
_FINISHED, _LEAVING = "finished", "leaving"  # a last report: finished, or leaving STATUS HOST REASON
_STALLED = "has made no progress for"
LOST_HOST = re.compile(r"Gloo [\w-]+ failed")  # of a collective, which jax raises as one of several classes
_LOST_STORE = re.compile(r"^(UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED): ")  # of jax's key-value store
_watchdog: _Watchdog | None = None


def progress() -> None:
    """Tells the watchdog that training advances; `distributed.stall_minutes` counts from the first call on."""
    arrive()
    if _watchdog is not None:
        _watchdog.limit = _Limit.STALL
        _watchdog.has_progress.set()


def wait_without_limit() -> None:
    """Ends `distributed.start_minutes`: what follows may take any time, such as a conversation."""
    if _watchdog is not None:
        _watchdog.limit = None


class _Limit(StrEnum):
    """The key of section `distributed` that limits the minutes without progress."""

    START = "start_minutes"  # until the first step
    STALL = "stall_minutes"


class _Watchdog:
    """Sends this host's heartbeat, and ends this process if another host has ended or stopped, or training stalls.

    Host 0 hears all others, and its last report names the one that ended; the others hear host 0 while it has news.

    Two threads, because requests to the store of a stopped host 0 never return. One iteration of the watching thread
    counts for at most three heartbeats, so that a process that was itself stopped does not report the others.

    A heartbeat is three numbers: of the heartbeat, the arrivals of its host (`agreement.arrivals`), and the progress of
    all hosts that it knows of. Progress of any host is progress, since the others may wait for it.

    Args:
      client: of jax's key-value store; None for a single process.
      stall_minutes: without progress, after which the stack is logged and the process ends; None: never.
      start_minutes: the same until the first call of `progress`.
    """

    def __init__(self, client: Any, stall_minutes: float | None, start_minutes: float | None = None) -> None:
        self._client = client
        self._host = jax.process_index()
        self._hosts = jax.process_count()
        self._minutes = {_Limit.STALL: stall_minutes, _Limit.START: start_minutes}
        self.limit: _Limit | None = _Limit.START
        self.has_progress = threading.Event()  # since the watching thread last looked
        self._stopped = threading.Event()
        self._leaving = threading.Lock()  # the lock stays with who takes it first
        self._reports: dict[int, str] = {}
        self._unchanged = 0  # how often in a row host 0 reported nothing new
        self._has_answer = threading.Event()  # of the store, since the watching thread last looked
        self._failure = "no answer"
        self._names = [socket.gethostname()]
        targets = [self._watch]
        if client is not None:
            self._names = self._names_of_all()
            targets = [self._exchange, self._watch]
            log.info("hosts: %s", ", ".join(f"{host} is {name}" for host, name in enumerate(self._names)))
        self._has_ended = threading.Event()
        self._threads = [threading.Thread(target=run, name="watchdog", daemon=True) for run in targets]

    def _names_of_all(self) -> list[str]:
        """The name of each host: host 0 collects them, and tells all, or who said nothing.

        Raises:
          Unavailable: on all hosts, where one has joined and then said nothing.
        """
        self._client.key_value_set(f"zero/name/{self._host}", socket.gethostname())
        if self._host == 0:
            self._client.key_value_set("zero/names", json.dumps(self._collect_names()))
        try:
            names = json.loads(self._client.blocking_key_value_get("zero/names", 3000 * SILENCE_SECONDS))
        except jax.errors.JaxRuntimeError as error:
            raise Unavailable(
                f"host 0 of {self._hosts}, the coordinator, joined but did not list the hosts ({first_line(error)})"
            ) from error
        silent = [str(host) for host, name in enumerate(names) if name is None]
        if silent:
            who = f"host {silent[0]}" if len(silent) == 1 else f"hosts {', '.join(silent)}"
            raise Unavailable(f"{who} of {self._hosts} joined, then did not respond for {SILENCE_SECONDS} s")
        return [str(name) for name in names]

    def _collect_names(self) -> list[str | None]:
        """The reports of hosts, collected until no new one arrives for `SILENCE_SECONDS`; None for a missing one."""
        names: dict[int, str] = {}
        deadline = 0.0
        while len(names) < self._hosts:
            told = self._read("zero/name/")
            if len(told) > len(names):
                deadline = time.monotonic() + SILENCE_SECONDS
            elif time.monotonic() > deadline:
                break
            names = told
            if len(names) < self._hosts:
                time.sleep(0.1)
        return [names.get(host) for host in range(self._hosts)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, seconds: float | None = None) -> None:
        """Waits until the watching thread has ended this process, or so long."""
        self._threads[-1].join(seconds)

    def _exchange(self) -> None:
        heartbeats = 0
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            heartbeats += 1
            try:
                self._publish(f"{heartbeats} {arrivals()} {self._known_progress()}")
                self._reports = self._read_reports()
            except jax.errors.JaxRuntimeError as error:  # a single failed request may be a network glitch
                self._failure = first_line(error)
            else:
                self._has_answer.set()

    def _watch(self) -> None:
        silent = [0.0] * self._hosts  # seconds
        heard = [""] * self._hosts  # the newest reports
        unanswered_for = idle = 0.0  # seconds
        known = 0  # progress
        turned = time.monotonic()
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            turn = min(time.monotonic() - turned, 3 * HEARTBEAT_SECONDS)
            turned = time.monotonic()
            unanswered_for += turn
            if self._has_answer.is_set():
                self._has_answer.clear()
                since, unanswered_for, reports = unanswered_for, 0.0, self._reports
                for host in set(reports if self._host else range(self._hosts)) - {self._host}:
                    report = reports.get(host, "")
                    silent[host] = silent[host] + since if report == heard[host] else 0.0
                    heard[host] = report
                    if report.startswith(_LEAVING):
                        _, status, cause, reason = report.split(" ", 3)
                        self._end(int(cause), reason, int(status))
                    elif report != _FINISHED and silent[host] > SILENCE_SECONDS:
                        self._end(host, f"has sent no heartbeat for {SILENCE_SECONDS} s")
            elif unanswered_for > SILENCE_SECONDS and self._host:
                self._end(0, f"the coordinator, has not responded for {SILENCE_SECONDS} s ({self._failure})")
            idle += turn
            before, known = known, self._known_progress()
            if self.has_progress.is_set() or known != before:
                self.has_progress.clear()
                idle = 0.0
            minutes = None if self.limit is None else self._minutes[self.limit]
            if minutes is not None and idle > 60 * minutes:
                self._end_stalled(f"{_STALLED} distributed.{self.limit}={minutes}")

    def _known_progress(self) -> int:
        """Arrivals of all hosts that this one hears of, and its own work: host 0 hears all, the others host 0 alone."""
        own = arrivals() + advances()
        if self._host == 0:
            return own + sum(_arrivals_in(report)[0] for report in self._reports.values())
        return own + _arrivals_in(self._reports.get(0, ""))[1]

    def _end_stalled(self, reason: str) -> None:
        """Ends this process; names the hosts that have not arrived where others wait."""
        reports = self._reports
        if self._client is not None and self._host:
            try:
                reports = self._read("zero/heartbeat/")
            except jax.errors.JaxRuntimeError as error:
                log.warning("the arrivals of the hosts are not known: %s", first_line(error))
        by_host = {host: _arrivals_in(report)[0] for host, report in reports.items() if report[:1].isdecimal()}
        by_host[self._host] = arrivals()
        behind = [host for host, number in sorted(by_host.items()) if number == min(by_host.values())]
        if len(behind) == len(by_host):
            self._end(self._host, reason)
            return
        others = f", nor have hosts {', '.join(map(str, behind[1:]))}" if behind[1:] else ""
        self._end(behind[0], f"{reason}, and has not arrived where the others wait{others}")

    def on_abort(self) -> None:
        """Ends this process with the reason when jax aborts it because host 0, and with it the store, is gone."""
        if self._leaving.locked():
            time.sleep(LEAVE_SECONDS)  # for the thread that is leaving, to report the reason
        try:
            socket.create_connection(coordinator_address(), timeout=HEARTBEAT_SECONDS).close()
        except OSError as error:
            self._end(0, f"the coordinator, is gone ({error})")

    def _publish(self, report: str) -> None:
        self._client.key_value_set(f"zero/heartbeat/{self._host}", report, True)

    def _read_reports(self) -> dict[int, str]:
        """Host 0 reads what all report, and the others what host 0 does: each reading all would be their square.

        If host 0 reports nothing new three times, the others read all reports, because it may not pass on what it
        hears. A host 0 that is merely slow reports nothing new now and then, and must not be asked more for it.
        """
        if self._host:
            before = self._reports.get(0)
            report = str(self._client.blocking_key_value_get("zero/heartbeat/0", 1000 * SILENCE_SECONDS))
            self._unchanged = self._unchanged + 1 if report == before else 0
            if report != _FINISHED and self._unchanged < 3:
                return {0: report}
        return self._read("zero/heartbeat/")

    def _read(self, directory: str) -> dict[int, str]:
        """What each host has written into a directory of the store."""
        return {int(key.rsplit("/", 1)[1]): text for key, text in self._client.key_value_dir_get(directory)}

    def _end(self, cause: int, reason: str, status: int = 1) -> None:
        """Logs why this process ends, tells the others, and ends it, unless another thread already does."""
        if not self._leaving.acquire(blocking=False):
            return
        who = f"host {cause} of {self._hosts} ({self._names[cause]})"
        log.error("%s %s%s", who, reason, "; this host exits too" if cause != self._host else "")
        if reason.startswith(_STALLED):
            log.error("stacks of the threads of host %d:\n%s", self._host, _stacks())
        # In a thread: where host 0 is stopped the request never returns.
        leave = threading.Thread(target=self._leave, args=(cause, reason, status), daemon=True)
        leave.start()
        leave.join(2 * HEARTBEAT_SECONDS if self._host else LEAVE_SECONDS + HEARTBEAT_SECONDS)
        exit_immediately(status)
        self._has_ended.set()  # in tests

    def leave(self, reason: str, status: int) -> None:
        """The last report of a host that has failed; on host 0 it returns when the others have left.

        It never returns if another thread has named a host already: that thread ends this process, and what this one
        would say of the lost connection only follows from it.
        """
        if self._leaving.acquire(blocking=False):
            self._leave(self._host, reason, status)
        else:
            self.join()
            self._has_ended.wait(LEAVE_SECONDS + 3 * HEARTBEAT_SECONDS)

    def finish(self) -> None:
        """The last report of a host that has done its work."""
        self._report_last(_FINISHED)

    def _leave(self, cause: int, reason: str, status: int) -> None:
        if not self._report_last(f"{_LEAVING} {status} {cause} {reason}") or self._host:
            return
        deadline = time.monotonic() + LEAVE_SECONDS
        others = set(range(self._hosts)) - {self._host}
        if not reason.startswith(_STALLED):  # such a host lives, and logs where it hangs
            others.discard(cause)
        while others and time.monotonic() < deadline:
            reports = self._read("zero/heartbeat/")
            others = {host for host in others if not reports.get(host, "").startswith((_LEAVING, _FINISHED))}
            time.sleep(HEARTBEAT_SECONDS / 10)

    def _report_last(self, report: str) -> bool:
        """Writes the last report; False for a single process, or if host 0 is gone."""
        self._stopped.set()
        if self._client is None:
            return False
        self._threads[0].join(HEARTBEAT_SECONDS)  # else a heartbeat might overwrite the last report
        try:
            self._publish(report)
        except jax.errors.JaxRuntimeError:
            return False
        return True


def _arrivals_in(report: str) -> tuple[int, int]:
    """The numbers in a heartbeat: arrivals of its host, and progress that it knows of; none in a last report."""
    numbers = report.split(" ")
    if not numbers[0].isdecimal():
        return 0, 0
    return int(numbers[1]), int(numbers[2])


def start(stall_minutes: float | None, start_minutes: float | None = None) -> None:
    """Starts watching this host and the others. Called once, when all have joined."""
    global _watchdog
    if _watchdog is not None:  # of an earlier call, whose progress nobody would tell it
        _watchdog.finish()
    _watchdog = _Watchdog(coordination_client() if jax.process_count() > 1 else None, stall_minutes, start_minutes)
    _watchdog.start()
    if jax.process_count() > 1 and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(signal.SIGABRT, ctypes.cast(_on_abort, ctypes.c_void_p))


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(number: int) -> None:
    """Handles SIGABRT in the aborting thread (Python's handlers wait for the main thread); then abort() continues."""
    if _watchdog is not None:
        _watchdog.on_abort()


def _stacks() -> str:
    """The stack of each thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    )


def _is_lost_connection(error: BaseException) -> bool:
    is_of_store = isinstance(error, jax.errors.JaxRuntimeError) and _LOST_STORE.match(str(error)) is not None
    return is_of_store or LOST_HOST.search(str(error)) is not None


@contextmanager
def ending_together() -> Iterator[None]:
    """A failing host reports the reason and ends without waiting for the others, which then end as well.

    jax would wait at its exit for hosts that wait for this one in a collective.

    Raises:
      Unavailable: the connection to another host was lost, and the watchdog has not named that host.
    """
    global _watchdog
    try:
        yield
        if _watchdog is not None:
            wait_for_all()  # the others may still write; jax's shutdown waits for a minute only, and aborts
    except BaseException as error:
        if _watchdog is not None and jax.process_count() == 1:
            watchdog, _watchdog = _watchdog, None
            watchdog.finish()  # a notebook lives on, and would be ended as stalled
        elif _watchdog is not None:
            if isinstance(error, Exception) and not isinstance(error, UserError) and not unanswered:
                # Most likely a lost connection, which jax raises as one of several classes: the watchdog ends this
                # process and names the host that caused it.
                _watchdog.join(SILENCE_SECONDS + 3 * HEARTBEAT_SECONDS + LEAVE_SECONDS)
            status = error.status if isinstance(error, UserError) else 1
            reason = f"ended: error: {first_line(error)}"
            if unanswered:  # a signal, when there was nothing to save yet
                status = 128 + int(unanswered[0][0])
                reason = f"was stopped by {signal.Signals(unanswered[0][0]).name}"
            _watchdog.leave(reason, status)
            atexit.register(exit_immediately, status)  # runs before jax's exit handler, and after the error was printed
            if isinstance(error, Exception) and not isinstance(error, UserError):
                for cause in filter(_is_lost_connection, causes(error)):
                    raise Unavailable(f"the connection to another host was lost: {first_line(cause)}") from error
        raise
    if _watchdog is not None:
        watchdog, _watchdog = _watchdog, None
        watchdog.finish()
        if jax.process_count() > 1:
            jax.distributed.shutdown()  # waits for all hosts; one that left earlier would look dead
