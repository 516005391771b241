"""A compilation is left behind where a stop is asked for."""

import signal
import threading
from typing import Any

import jax
import pytest

from zero.hosts.interruptible_compilation import compile_unless_stopped


def test_a_stop_does_not_wait_for_the_compilation() -> None:
    stop: list[int] = []
    released = threading.Event()

    def endless(x: jax.Array) -> jax.Array:
        """Traced until it is released."""
        stop.append(signal.SIGTERM)
        released.wait()
        return x

    try:
        assert compile_unless_stopped(stop, jax.jit(endless), 1.0) is None
    finally:
        released.set()


def test_results_of_a_compilation() -> None:
    """A program that is compiled, or the error that it raises."""

    def wrong(x: Any) -> Any:
        raise ValueError("traced")

    doubled = compile_unless_stopped([], jax.jit(lambda x: 2 * x), 3.0)
    assert doubled is not None and doubled(3.0) == 6
    with pytest.raises(ValueError, match="traced"):
        compile_unless_stopped([], jax.jit(wrong), 3.0)
