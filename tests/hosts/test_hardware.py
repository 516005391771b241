"""Accelerators by their device files, a TPU without its driver, and settings of a slice on a machine without TPU."""

import re
from pathlib import Path

import pytest
from jax._src import hardware_utils

from zero.base.errors import UserError
from zero.hosts import hardware

SCRIPT = Path(__file__).parents[2] / "prepareTPUVM.sh"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One without accelerator, whose /dev and PCI bus are folders."""
    (tmp_path / "dev").mkdir()
    add_pci(tmp_path, "0000:00:04.0", hardware.GOOGLE, "0x0042")  # a network card
    monkeypatch.setattr(hardware, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(hardware, "PCI", tmp_path / "pci")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    return tmp_path


def add_pci(machine: Path, address: str, vendor: str, device: str) -> None:
    folder = machine / "pci" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{device}\n")


@pytest.mark.parametrize(("file", "extra"), [("accel0", "tpu"), ("vfio/0", "tpu"), ("nvidia0", "cuda12")])
def test_accelerator(machine: Path, file: str, extra: str) -> None:
    assert hardware.accelerator() is None
    (machine / "dev" / file).parent.mkdir(exist_ok=True)
    (machine / "dev" / file).touch()
    assert hardware.accelerator() == extra


def test_missing_driver(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only of a TPU, only without a device file, and only if the CPU was not asked for."""
    assert hardware.missing_driver() is None
    add_pci(machine, "0000:00:05.0", hardware.GOOGLE, "0x0063")
    missing = hardware.missing_driver()
    assert missing is not None and "TPU v5e" in missing.problem and "--privileged" in missing.remedy
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert hardware.missing_driver() is None
    monkeypatch.delenv("JAX_PLATFORMS")
    (machine / "dev" / "accel0").touch()
    assert hardware.missing_driver() is None


def test_a_slice_on_a_cpu(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, unless the CPU was asked for or there is an accelerator."""
    with pytest.raises(UserError, match=r"slice=v5e-8: this machine has no TPU.*distributed\.cpu_devices=8"):
        hardware.check_slice("v5e-8", runs_on_cpu=False)
    hardware.check_slice(None, runs_on_cpu=False)
    hardware.check_slice("v5e-8", runs_on_cpu=True)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    hardware.check_slice("v5e-8", runs_on_cpu=False)
    monkeypatch.delenv("JAX_PLATFORMS")
    (machine / "dev" / "accel0").touch()
    hardware.check_slice("v5e-8", runs_on_cpu=False)


def test_ids_of_tpus_are_those_of_jax() -> None:
    """And those of prepareTPUVM.sh."""
    newer = {"0x007c", "0x0083"}  # TPU8t and TPU8i, which jax 0.10 does not know
    assert hardware.TPUS.keys() == hardware_utils._TPU_PCI_DEVICE_IDS.keys() | newer
    (line,) = re.findall(r"^tpu_ids='(.*?)'", SCRIPT.read_text(), re.M)
    assert {*line.split()} == hardware.TPUS.keys()
