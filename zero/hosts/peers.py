"""Files that hosts send to each other over TCP, in the background and without the devices."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import jax

from zero.base.errors import Unavailable
from zero.hosts import agreement
from zero.partition.whole_state import coordinator_address

log = logging.getLogger(__name__)

CHUNK = 1 << 24  # bytes
FAILURES = (OSError, EOFError, AuthenticationError)  # of a connection


class Peers:
    """Serves the files of one directory to the other hosts, and takes files from them. All hosts make one together.

    It sends bytes, no pickles, and only between processes that hold a key drawn by host 0.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = bytes.fromhex(agreement.broadcast("peers' key", secrets.token_hex(32)))
        if jax.process_count() > 1:
            self._listener = Listener(("", 0), authkey=self._key, backlog=16)
            threading.Thread(target=self._serve, name="peers", daemon=True).start()
            address = json.dumps([_own_address(), self._listener.address[1]])
            self._address_of = agreement.left_by_hosts("peers", address)

    def put(self, host: int, name: str) -> None:
        """Sends a file; it appears whole on the other host, or not at all. Raises one of `FAILURES`."""
        with Client(self._address(host), authkey=self._key) as connection:
            connection.send_bytes(b"put " + name.encode())
            _send(connection, self._directory / name)
            connection.recv_bytes()  # it is in place

    def get(self, host: int, name: str) -> None:
        """Fetches a file into the directory; raises one of `FAILURES`."""
        with Client(self._address(host), authkey=self._key) as connection:
            connection.send_bytes(b"get " + name.encode())
            _receive(connection, self._directory / name)

    def _address(self, host: int) -> tuple[str, int]:
        try:
            place, port = json.loads(self._address_of(host))
        except Unavailable as error:
            raise ConnectionError(str(error)) from error
        return place, port

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except FAILURES as error:  # of one who connects; this thread ends with the process
                log.warning("a connection of another host failed: %s", error)
                continue
            threading.Thread(target=self._answer, args=[connection], name="peers", daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        try:
            with connection:
                verb, _, name = connection.recv_bytes(1000).decode().partition(" ")
                path = self._directory / Path(name).name
                if verb == "put":
                    _receive(connection, path)
                    connection.send_bytes(b"done")
                else:
                    _send(connection, path)
        except FAILURES as error:
            log.warning("a transfer of %s failed: %s", self._directory, error or type(error).__name__)


def _own_address() -> str:
    """The address of this host for the others: host 0's own, else the one from which host 0 is reached."""
    host, port = coordinator_address()
    if jax.process_index() == 0:
        return host
    with socket.socket(socket.getaddrinfo(host, port)[0][0], socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])


def _send(connection: Connection, path: Path) -> None:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            connection.send_bytes(chunk)
    connection.send_bytes(b"")  # the end: a message that is cut off before it does not count


def _receive(connection: Connection, path: Path) -> None:
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with aside.open("wb") as file:
            while chunk := connection.recv_bytes():
                file.write(chunk)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
