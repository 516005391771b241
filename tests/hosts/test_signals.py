"""Streams whose reader is gone, and what a stop request says."""

import os
import pty
import signal

import pytest

from zero.hosts.signals import IgnoreBrokenPipe, stop_requests


def test_output_is_dropped_without_a_reader() -> None:
    """A pipe without a reader and a closed terminal end nothing; other errors do."""
    pipe, terminal = os.pipe(), pty.openpty()
    for reader, writer in (pipe, terminal):
        os.close(reader)
        with open(writer, "w", buffering=1, closefd=False) as plain:
            stream = IgnoreBrokenPipe(plain)
            stream.write("a line\n")
            stream.flush()
            with pytest.raises(OSError):
                plain.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # what is buffered can be written when it is closed
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "w", buffering=1) as full:
        IgnoreBrokenPipe(full).write("a line\n")


def test_a_stop_request_is_acknowledged_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """A compilation may take minutes until the loop answers; companions of the first signal say nothing more."""
    with stop_requests() as received:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert received == [signal.SIGINT, signal.SIGUSR1]
    expected = "\nSIGINT: saving a checkpoint and stopping; press Ctrl-C again to stop without saving\n"
    assert capfd.readouterr().err == expected
