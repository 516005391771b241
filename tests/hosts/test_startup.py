"""What is set before the devices start."""

from pathlib import Path

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
