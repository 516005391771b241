"""The hosts of a job meet before jax connects them: host 0 knows who is missing, and says so while it waits.

It listens where jax's coordinator will, so that no further port has to be open. jax alone would name nobody while it
waits, and then abort the process.
"""

from __future__ import annotations

import json
import logging
import resource
import select
import socket
import time
from collections.abc import Collection
from contextlib import ExitStack

from zero.base.errors import Unavailable, UserError

log = logging.getLogger(__name__)

TELL_SECONDS = 15  # between two lines about hosts that are missing
_POLL_SECONDS = 0.1
_ALL, _REFUSED, _WRONG = "all", "refused ", "wrong "  # answers of host 0: a later start may succeed, or may not
_NO_ENTRY = (ValueError, KeyError, TypeError)  # what another program sends
_OTHER_FILES = 1000  # that a host may open besides its connections to others
_LONGEST_LINE = 1000  # bytes, of a host that says who it is


def meet(address: str, count: int, number: int, minutes: float) -> None:
    """Returns when all hosts have called it, on all of them.

    Args:
      address: HOST:PORT of the coordinator, host 0.
      number: of this host, of `count`.
      minutes: after which a host that has not arrived ends all others.

    Raises:
      Unavailable: a host has not arrived, and the message names it; or another process has the number of this host.
      UserError: on all hosts that have arrived, if one of them expects another number of hosts.
    """
    deadline = time.monotonic() + 60 * minutes
    place, _, port = address.rpartition(":")
    if number == 0:
        _call(int(port), count, deadline, f"distributed.join_minutes={minutes:g}")
    else:
        _answer((place.strip("[]"), int(port)), count, number, deadline, f"distributed.join_minutes={minutes:g}")


class _Visitor:
    """A connection over which nobody has said yet who it is."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = b""
        self._deadline = time.monotonic() + TELL_SECONDS
        connection.setblocking(False)

    def line(self) -> bytes | None:
        """What was sent, once it is a line or no line will follow; None if it may follow."""
        try:
            part = self.connection.recv(_LONGEST_LINE)
        except BlockingIOError:
            return self._received if time.monotonic() > self._deadline else None
        except OSError:
            return self._received
        self._received += part
        if part and b"\n" not in self._received and len(self._received) < _LONGEST_LINE:
            return None
        return self._received


def _call(port: int, count: int, deadline: float, limit: str) -> None:
    """What host 0 does: it collects a connection of each other host, and then answers all of them."""
    _allow_connections(count)
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, backlog=count, dualstack_ipv6=has_both)
    except OSError as error:
        raise Unavailable(f"distributed.coordinator_address: port {port} of host 0: {error.strerror}") from error
    arrived: dict[int, socket.socket] = {}
    visitors: list[_Visitor] = []
    looked_at = time.monotonic()
    told_at = looked_at + TELL_SECONDS
    with ExitStack() as stack:
        stack.enter_context(listener)
        listener.settimeout(_POLL_SECONDS)
        while len(arrived) < count - 1:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                pass
            except OSError as error:
                raise Unavailable(
                    f"host 0 cannot connect to all {count} hosts, only to {len(arrived)}: {error.strerror} (ulimit -n)"
                ) from error
            else:
                visitors.append(_Visitor(stack.enter_context(connection)))
            for visitor in visitors[:]:
                line = visitor.line()
                if line is not None:
                    visitors.remove(visitor)
                    _enter(visitor.connection, line, count, arrived)
            now = time.monotonic()
            if len(arrived) < count - 1 and now < looked_at + _POLL_SECONDS:
                continue  # to look at all hosts whenever one arrives would be the square of their number
            looked_at = now
            for host in [host for host, connection in arrived.items() if _has_left(connection)]:
                del arrived[host]
            missing = named([host for host in range(1, count) if host not in arrived], count)
            if missing and now > deadline:
                _tell(arrived.values(), f"{_REFUSED}{missing} not arrived within {limit}")
                raise Unavailable(f"{missing} not arrived within {limit}")
            if missing and now >= told_at:
                told_at = now + TELL_SECONDS
                log.info("%s not arrived; waiting for %.0f s more (distributed.join_minutes)", missing, deadline - now)
        _tell(arrived.values(), _ALL)
        for connection in arrived.values():  # whoever closes first keeps the port busy for a minute: not host 0
            _has_left(connection, TELL_SECONDS)


def _allow_connections(count: int) -> None:
    """Raises the limit of open files of this process, often 1024, as far as the system allows.

    Host 0 has a connection to each host here, and afterwards jax's coordinator has.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * count + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _enter(connection: socket.socket, line: bytes, count: int, arrived: dict[int, socket.socket]) -> None:
    """Adds a host that has connected and sent a line; another program's connection is closed."""
    connection.settimeout(TELL_SECONDS)
    try:
        entry = json.loads(line.partition(b"\n")[0])
        host, hosts = int(entry["host"]), int(entry["hosts"])
    except _NO_ENTRY:
        connection.close()
        return
    if hosts != count or not 0 < host < count:
        refusal = f"distributed.num_processes: host 0 expects {count} hosts, and host {host} expects {hosts}"
        _tell([connection, *arrived.values()], _WRONG + refusal)
        raise UserError(refusal)
    if host in arrived:  # started again, or a mistake, which ends the earlier one
        _tell([arrived[host]], f"{_REFUSED}distributed.process_id={host}: another process has this number too")
    arrived[host] = connection


def _has_left(connection: socket.socket, seconds: float = 0.0) -> bool:
    """Whether the other end closes a connection, over which it sends nothing, within so many seconds."""
    poll = select.poll()  # unlike `select.select`, of any number of open files
    poll.register(connection, select.POLLIN)
    try:
        return bool(poll.poll(1000 * seconds)) and connection.recv(1) == b""
    except OSError:
        return True


def _tell(connections: Collection[socket.socket], answer: str) -> None:
    for connection in connections:
        try:
            connection.sendall(f"{answer}\n".encode())
        except OSError as error:
            log.warning("a host left while it was told %r: %s", answer, error)


def _answer(address: tuple[str, int], count: int, number: int, deadline: float, limit: str) -> None:
    """What the others do: they connect to host 0, again if it is started again, and wait for its answer."""
    told_at = time.monotonic() + TELL_SECONDS
    while True:
        try:
            with socket.create_connection(address, timeout=TELL_SECONDS) as connection:
                connection.sendall(json.dumps({"host": number, "hosts": count}).encode() + b"\n")
                connection.settimeout(max(_POLL_SECONDS, deadline - time.monotonic()) + TELL_SECONDS)
                answer = connection.makefile(errors="replace").readline().strip()
        except OSError as error:
            failure = error.strerror or str(error)
        else:
            if answer == _ALL:
                return
            if answer.startswith(_WRONG):
                raise UserError(answer.removeprefix(_WRONG))
            if answer.startswith(_REFUSED):
                raise Unavailable(answer.removeprefix(_REFUSED))
            failure = "it has ended" if not answer else "another program answers there"
        now = time.monotonic()
        if now > deadline:
            raise Unavailable(
                f"host 0 of {count}, the coordinator, has not arrived within {limit}: {failure} "
                f"(distributed.coordinator_address={address[0]}:{address[1]})"
            )
        if now >= told_at:
            told_at = now + TELL_SECONDS
            log.info("host 0, the coordinator, has not arrived at %s:%d: %s", *address, failure)
        time.sleep(_POLL_SECONDS)


def named(hosts: Collection[int], count: int) -> str:
    """Hosts, the subject of a sentence; empty for none.

    >>> named([2], 4), named([1, 3], 4), named([], 4)
    ('host 2 of 4 has', 'hosts 1, 3 of 4 have', '')
    """
    if not hosts:
        return ""
    numbers = ", ".join(map(str, hosts))
    return f"host {numbers} of {count} has" if len(hosts) == 1 else f"hosts {numbers} of {count} have"
