"""What is set before the devices start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero.runtime.hosts import startup
from zero.runtime.hosts.startup import OVERLAP_ON_GPU, OVERLAP_ON_TPU, gpus_of_node, overlap_on_tpu, set_overlap

GATHER, EXCHANGE = (f"--{name}" for name in OVERLAP_ON_TPU)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", f"{GATHER}=false {EXCHANGE}=false"),
        ("--xla_other=1", f"--xla_other=1 {GATHER}=false {EXCHANGE}=false"),
        (f"{GATHER}=true", f"{GATHER}=true {EXCHANGE}=false"),
    ],
)
def test_overlap_can_be_overridden(before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The overlap of gathers is an option that users can override."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", before)
    set_overlap(False, None)
    assert os.environ["LIBTPU_INIT_ARGS"] == after


@pytest.mark.parametrize(("device", "offloads"), [("0x006f", True), ("0x0063", False), (None, False)])
def test_overlap_of_sparse_cores(
    device: str | None, offloads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A v6e gets the options of its SparseCores, a v5e and a machine without TPUs do not."""
    for number, (vendor, name) in enumerate([("0x8086", "0x006f"), *([("0x1ae0", device)] if device else [])]):
        (tmp_path / str(number)).mkdir()
        for file, text in (("vendor", vendor), ("device", name)):
            (tmp_path / str(number) / file).write_text(f"{text}\n")
    monkeypatch.setattr(startup, "PCI", tmp_path)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    set_overlap(True, "tpu")
    assert os.environ["LIBTPU_INIT_ARGS"].split() == [f"--{name}=true" for name in overlap_on_tpu(offloads)]


def test_overlap_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has set stays, and XLA knows every option: it ends the process at an unknown one."""
    given = "--xla_gpu_enable_pipelined_all_gather=false"
    monkeypatch.setenv("XLA_FLAGS", given)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    set_overlap(True, "cuda12")
    flags = os.environ["XLA_FLAGS"].split()
    assert flags[0] == given and {flag.split("=")[0] for flag in flags} == {f"--{name}" for name in OVERLAP_ON_GPU}
    assert [flag.endswith("=true") for flag in flags] == [False, True, True, True]
    code = "import jax; assert jax.device_count()"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True)
    assert done.returncode == 0, done.stderr


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
