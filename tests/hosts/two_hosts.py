"""One of two hosts that have host 0 do something first; test_agreement.py starts both."""

import sys
import time
from pathlib import Path

import jax

import zero
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
print("done")
