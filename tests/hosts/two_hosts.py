"""One of two hosts that have host 0 do something first, or alone; test_agreement.py starts both."""

import sys
import time
from pathlib import Path

import jax

import zero
from zero.base.errors import Unavailable
from zero.hosts import agreement

PAUSE = 1.0  # seconds, within which a host that does not wait for the other one comes too early

number, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
zero.use_cpu_devices(1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, number)
agreement.wait_for_all()  # and compiles the sum, so that neither host is late below
of_host_0, of_host_1 = folder / "of host 0", folder / "of host 1"
with agreement.host_0_first():
    if number == 0:
        assert not of_host_1.exists()
        time.sleep(PAUSE)
        of_host_0.touch()
    else:
        assert of_host_0.exists()
        time.sleep(PAUSE)
        of_host_1.touch()
assert of_host_1.exists()

called: list[int] = []


def number_of_caller() -> list[int]:
    called.append(number)
    return [number]


def fail() -> None:
    raise Unavailable("no answer")


assert agreement.on_host_0("number", number_of_caller) == [0]
assert called == [0][number:]
try:
    agreement.on_host_0("failure", fail)
except Unavailable as error:
    assert str(error) == ("on host 0: " if number else "") + "no answer"
else:
    raise AssertionError("an error of host 0 ends no other host")
print("done")
