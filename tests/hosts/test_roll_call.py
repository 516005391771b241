"""Hosts that meet: all arrive, some never do, and some are not those that are expected."""

import fcntl
import json
import logging
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from tests.helpers import cli, hosts
from zero.base.errors import Unavailable, UserError
from zero.hosts import roll_call

Answer = Future[None]


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(roll_call, "TELL_SECONDS", 0.3)
    return f"127.0.0.1:{hosts.free_port()}"


def started(pool: ThreadPoolExecutor, address: str, count: int, *numbers: int, minutes: float) -> list[Answer]:
    return [pool.submit(roll_call.meet, address, count, number, minutes) for number in numbers]


def test_all_arrive(address: str) -> None:
    """In any order; the port is free at once for what follows."""
    with ThreadPoolExecutor(4) as pool:
        answers = started(pool, address, 4, 3, 1, minutes=1)
        time.sleep(0.3)
        answers += started(pool, address, 4, 0, minutes=1)
        time.sleep(0.3)
        assert not any(answer.done() for answer in answers)
        answers += started(pool, address, 4, 2, minutes=1)
        for answer in answers:
            answer.result(60)
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        pass


def test_missing_host_is_named_while_others_wait_and_at_the_end(address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with ThreadPoolExecutor(2) as pool:
        for answer in started(pool, address, 4, 0, 2, minutes=0.02):
            with pytest.raises(
                Unavailable, match=r"^hosts 1, 3 of 4 have not arrived within distributed\.join_minutes=0\.02$"
            ):
                answer.result(60)
    assert "hosts 1, 3 of 4 have not arrived; waiting for 1 s more" in caplog.text


def test_missing_host_0_is_named(address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(Unavailable, match=r"^host 0 of 2, the coordinator, has not arrived within .*=0\.01: .*refused"):
        roll_call.meet(address, 2, 1, 0.01)
    assert f"host 0, the coordinator, has not arrived at {address}: Connection refused" in caplog.text


def test_a_host_that_has_left_is_missing(address: str) -> None:
    """So is one that was there, and ended before the others had arrived; another program is none."""
    place, _, port = address.rpartition(":")
    with ThreadPoolExecutor(1) as pool:
        (answer,) = started(pool, address, 3, 0, minutes=0.03)
        time.sleep(0.3)
        for line in (b'{"host": 1, "hosts": 3}\n', b"GET / HTTP/1.1\r\n", b'{"host": []}\n'):
            with socket.create_connection((place, int(port))) as connection:
                connection.sendall(line)
                time.sleep(0.1)
        with pytest.raises(Unavailable, match="hosts 1, 2 of 3 have not arrived"):
            answer.result(60)


def test_hosts_that_disagree_are_told(address: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        answers = [*started(pool, address, 3, 0, minutes=1), *started(pool, address, 2, 1, minutes=1)]
        for answer in answers:
            with pytest.raises(UserError, match="num_processes: host 0 expects 3 hosts, and host 1 expects 2") as error:
                answer.result(60)
            assert error.type is UserError  # not one after which a launcher would start them again
        twice = started(pool, address, 3, 0, 1, minutes=0.03)
        time.sleep(0.3)
        twice += started(pool, address, 3, 1, minutes=0.03)
        with pytest.raises(Unavailable, match=r"distributed\.process_id=1: another process has this number too"):
            twice[1].result(60)


def connected(host: str, port: int) -> socket.socket:
    """A connection to a listener that is about to be there."""
    until = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_silent_connections_hold_nobody_up(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts meet beside programs that have connected and say nothing, or half a line; these are closed later."""
    monkeypatch.setattr(roll_call, "TELL_SECONDS", 20)
    place, _, port = address.rpartition(":")
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        answers = started(pool, address, 2, 0, minutes=1)
        silent = [stack.enter_context(connected(place, int(port))) for _ in range(2)]
        silent[1].sendall(b'{"host": 1, ')
        time.sleep(0.3)
        began = time.monotonic()
        answers += started(pool, address, 2, 1, minutes=1)
        for answer in answers:
            answer.result(60)
        assert time.monotonic() - began < 10
        monkeypatch.setattr(roll_call, "TELL_SECONDS", 0.3)
        answers = started(pool, address, 2, 0, minutes=0.5)
        with connected(place, int(port)) as connection:
            connection.settimeout(25)
            assert connection.recv(1) == b""
        with pytest.raises(Unavailable, match="host 1 of 2 has not arrived"):
            answers[0].result(60)


def test_port_in_use(address: str) -> None:
    with socket.create_server(("", int(address.rpartition(":")[2]))):
        with pytest.raises(Unavailable, match=r"coordinator_address: port .* of host 0: Address already in use"):
            roll_call.meet(address, 2, 0, 0.01)


def test_a_run_whose_host_never_comes(forks: cli.Forks) -> None:
    """The program ends with 1, so that a launcher starts it again, and names the host."""
    (job, _) = hosts.joining(2)
    done = forks.run(*cli.TINY, *job, "distributed.join_minutes=0.01")
    assert done.returncode == 1
    assert "error: host 1 of 2 has not arrived within distributed.join_minutes=0.01" in done.stderr


def test_more_files_than_select_takes() -> None:
    """A thousand hosts are as many connections of host 0."""
    own, other = socket.socketpair()
    with socket.socket(fileno=fcntl.fcntl(own.fileno(), fcntl.F_DUPFD, 1024)) as high, own:
        with other:
            assert not roll_call._has_left(high)
        assert roll_call._has_left(high, 10)


MANY = """
import resource, socket, sys, threading, time
from zero.hosts import roll_call

count, soft, hard = map(int, sys.argv[2:])
looks = 0
has_left = roll_call._has_left


def counted(*arguments):
    global looks
    looks += 1
    return has_left(*arguments)


roll_call._has_left = counted
roll_call._POLL_SECONDS = 60.0  # only the last host to arrive, not the clock, makes host 0 look at all
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
roll_call.meet(sys.argv[1], count, 0, 5)
print(looks, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def arrive_at(address: str, count: int, soft: int, hard: int) -> tuple[str, str]:
    """What host 0 prints, of so many hosts, in a process with these limits of open files."""
    place, _, port = address.rpartition(":")
    command = [sys.executable, "-c", MANY, address, str(count), str(soft), str(hard)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as host_0,
        ExitStack() as stack,
    ):
        connections: list[socket.socket] = []
        while host_0.poll() is None and len(connections) < count - 1:
            try:
                connection = stack.enter_context(socket.create_connection((place, int(port))))
                connections.append(connection)
                connection.sendall(json.dumps({"host": len(connections), "hosts": count}).encode() + b"\n")
            except ConnectionError:  # it does not listen yet, or has ended
                time.sleep(0.01)
        for connection in connections:
            with suppress(ConnectionError):  # of a host 0 that has ended
                connection.recv(100)
            connection.close()
        return host_0.communicate(timeout=300)


def test_many_hosts(address: str) -> None:
    """More than the files that a process may open at first; host 0 looks at each a few times, not once per arrival."""
    output, errors = arrive_at(address, 300, soft=128, hard=4096)
    assert not errors
    looks, limit = map(int, output.split())
    assert looks <= 2 * 300
    assert limit == 2 * 300 + 1000


def test_too_many_hosts(address: str) -> None:
    """If the system allows no more open files, the last line says so."""
    _, errors = arrive_at(address, 300, soft=128, hard=200)
    last = errors.splitlines()[-1]
    assert "host 0 cannot connect to all 300 hosts, only to 1" in last
    assert last.endswith("Too many open files (ulimit -n)")
