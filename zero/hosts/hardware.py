"""The accelerator of this machine, by its device files, and a TPU whose device files are missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from zero.base.errors import UserError

ACCELERATORS = {"accel*": "tpu", "vfio/*": "tpu", "nvidia0": "cuda12", "kfd": "rocm"}  # device files; extras of jax
DEVICES = Path("/dev")
PCI = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
# As in jax's hardware_utils: Google's network cards and disks have other ids.
TPUS = {"0x0027": "v2 or v3", "0x0056": "", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e"}
TPUS |= {"0x0076": "TPU7x", "0x007c": "TPU8t", "0x0083": "TPU8i"}


class Missing(NamedTuple):
    """What this machine lacks, and the remedy."""

    problem: str
    remedy: str


def accelerator() -> str | None:
    """The extra of jax for the accelerator of this machine, by its device files; None without one."""
    return next((extra for pattern, extra in ACCELERATORS.items() if next(DEVICES.glob(pattern), None)), None)


def missing_driver() -> Missing | None:
    """A TPU on the PCI bus without a device file, which jax would ignore; None if there is none."""
    if accelerator() is not None or wants_cpu():
        return None
    for device in PCI.glob("*"):
        if _read(device / "vendor") == GOOGLE and _read(device / "device") in TPUS:
            name = f"TPU {TPUS[_read(device / 'device')]}".strip()
            return Missing(
                f"this machine has a {name}, but no /dev/accel* or /dev/vfio/* to reach it",
                "in a container, start it with --privileged; on a VM, create it with a TPU image, as ./slice.sh create "
                "does; JAX_PLATFORMS=cpu uses the CPU",
            )
    return None


def check_slice(name: str | None, runs_on_cpu: bool) -> None:
    """Refuses settings that were chosen for a TPU slice on a machine without accelerator.

    Args:
      name: of the slice, such as v5e-8; None if none was chosen.
      runs_on_cpu: whether virtual CPU devices were requested.

    Raises:
      UserError: this machine has no accelerator, and the CPU was not requested.
    """
    if name is None or runs_on_cpu or wants_cpu() or accelerator() is not None or missing_driver() is not None:
        return
    raise UserError(
        f"slice={name}: this machine has no TPU (no /dev/accel*, no /dev/vfio/*); to use virtual CPU devices, set "
        "distributed.cpu_devices=8; mode=plan needs no TPU"
    )


def wants_cpu() -> bool:
    """Whether jax was told to use the CPU."""
    return "cpu" in os.environ.get("JAX_PLATFORMS", "")


def _read(path: Path) -> str:
    if not path.is_file():
        return ""
    return path.read_text().strip()
