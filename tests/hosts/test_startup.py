"""What is set before the devices start."""

import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import psutil
import pytest

from zero.hosts import startup
from zero.hosts.startup import gpus_of_node


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "2"}, [0, 1, 2, 3]),
        ({"SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "2", "CUDA_VISIBLE_DEVICES": "4,6"}, [0, 1]),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_NODES": "2"}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, [0, 1, 2, 3]),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "JAX_LOCAL_DEVICE_IDS": "2"}, None),
        ({}, None),
    ],
)
def test_only_process_has_all_gpus(
    environment: dict[str, str], expected: list[int] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(startup, "DEVICES", tmp_path)
    for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_NODES", "OMPI_COMM_WORLD_LOCAL_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert gpus_of_node() == expected


def test_options_know_the_hosts_that_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many chips a job has decides which collectives the compiler may run beside computation."""
    given: list[int] = []
    monkeypatch.setattr(startup, "processes_that_joined", lambda: 5)
    monkeypatch.setattr(
        startup.xla_options, "set_before_start", lambda overlap, extra, hosts, in_groups: given.append(hosts)
    )
    monkeypatch.setattr(startup.watchdog, "start", lambda *minutes: None)
    monkeypatch.setattr(startup, "use_cpu_devices", lambda count: None)
    monkeypatch.setattr(startup.jax.config, "update", lambda name, value: None)
    startup.start(8, None, None, None, None, 30.0, None, None, overlap_gathers=True)
    assert given == [5]


def test_later_jobs_of_a_sweep_have_an_age_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run began with its process, which imported everything; the next one begins where the first ended."""
    monkeypatch.setattr(startup, "_runs", count())
    first, second = startup.begin_run(), startup.begin_run()
    age = time.time() - psutil.Process().create_time()
    assert time.monotonic() - first == pytest.approx(age, abs=5) and age > 1
    assert second == pytest.approx(time.monotonic(), abs=0.5)


LEFT = """
import ctypes, sys
import jax, jax.numpy as jnp
from zero.hosts import startup

if sys.argv[1] == "returns":
    startup._LONG_COMPILATION = 0.0
    startup.keep_freed_memory()
else:
    for parameter, value in ((startup._M_ARENA_MAX, 1), (startup._M_MMAP_MAX, 0), (startup._M_TRIM_THRESHOLD, -1)):
        ctypes.CDLL(None).mallopt(parameter, value)

def chain(x):
    for number in range(400):
        x = jnp.sin(x @ x.T + number) * x
    return x

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

jax.jit(chain).lower(jnp.ones((8, 8))).compile()
before = resident()
ctypes.CDLL(None).malloc_trim(0)
print(before - resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_memory_of_the_compiler_is_returned() -> None:
    """After a compilation there is little left to return to the system; without the listener there is more."""
    left = {}
    for case in ("returns", "keeps"):
        done = subprocess.run([sys.executable, "-c", LEFT, case], capture_output=True, text=True, check=True)
        left[case] = float(done.stdout)
    assert left["returns"] < 10 < left["keeps"], left
