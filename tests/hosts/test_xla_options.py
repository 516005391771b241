"""Options of XLA that a run sets before the devices start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero.hosts import xla_options
from zero.hosts.xla_options import (
    EXCHANGES_ON_SPARSECORES,
    GATHERS_ON_SPARSECORES,
    HOST_LINK,
    OVERLAP_ON_GPU,
    OVERLAP_ON_SPARSECORES,
    OVERLAP_ON_TPU,
    QUEUE,
    SCATTER_LATENCY,
    TRUE_GATHERS,
    set_before_start,
)

GATHER, EXCHANGE = (f"--{name}" for name in OVERLAP_ON_TPU)
STACK = "--fibers_default_thread_stack_size"


@pytest.fixture(autouse=True)
def pci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The PCI devices of this machine: none."""
    monkeypatch.setattr(xla_options, "PCI", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", f"{GATHER}=false {EXCHANGE}=false {STACK}={2**21}"),
        ("--xla_other=1", f"--xla_other=1 {GATHER}=false {EXCHANGE}=false {STACK}={2**21}"),
        (f"{GATHER}=true {STACK}=9", f"{GATHER}=true {STACK}=9 {EXCHANGE}=false"),
    ],
)
def test_overlap_can_be_overridden(before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The overlap of gathers is an option that users can override."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", before)
    set_before_start(False, None)
    assert os.environ["LIBTPU_INIT_ARGS"] == after


@pytest.mark.parametrize(
    ("device", "overlaps", "vmem_kib"),
    [
        ("0x005e", (TRUE_GATHERS,), None),
        ("0x0062", (*GATHERS_ON_SPARSECORES["TPU v5"], TRUE_GATHERS), 32768),
        ("0x0063", (), 32768),
        ("0x006f", (*OVERLAP_ON_SPARSECORES, TRUE_GATHERS, QUEUE), 65536),
        ("0x0076", (*OVERLAP_ON_SPARSECORES, TRUE_GATHERS), 65536),
        (None, (), None),
    ],
    ids=["v4", "v5p", "v5e", "v6e", "TPU7x", "no TPU"],
)
def test_options_of_this_machine(
    device: str | None, overlaps: tuple[str, ...], vmem_kib: int | None, pci: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine gets the options of its TPUs, and of no other vendor's device of the same number."""
    for number, (vendor, name) in enumerate([("0x8086", "0x006f"), *([("0x1ae0", device)] if device else [])]):
        (pci / str(number)).mkdir()
        for file, text in (("vendor", vendor), ("device", name)):
            (pci / str(number) / file).write_text(f"{text}\n")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    set_before_start(True, "tpu")
    expected = [f"--{name}=true" for name in OVERLAP_ON_TPU + overlaps]
    if device == "0x006f":
        expected += [f"--{SCATTER_LATENCY}=4"]
    expected += [] if vmem_kib is None else [f"--xla_tpu_scoped_vmem_limit_kib={vmem_kib}"]
    assert os.environ["LIBTPU_INIT_ARGS"].split() == [*expected, f"{STACK}={2**21}"]


def find_chips(pci: Path, device: str) -> None:
    """This machine has 8 chips of this number."""
    for number in range(8):
        (pci / str(number)).mkdir()
        (pci / str(number) / "vendor").write_text("0x1ae0\n")
        (pci / str(number) / "device").write_text(f"{device}\n")


@pytest.mark.parametrize(("hosts", "slices", "overlaps"), [(2, None, True), (3, "", False), (4, "2", True)])
def test_exchanges_of_many_chips(
    hosts: int, slices: str | None, overlaps: bool, pci: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler refuses all-to-alls beside computation on a v5e slice of more than 16 chips, here 8 of each host."""
    if slices is not None:
        monkeypatch.setenv("MEGASCALE_NUM_SLICES", slices)
    find_chips(pci, "0x0063")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    set_before_start(True, "tpu", hosts)
    assert f"{GATHER}=true" in os.environ["LIBTPU_INIT_ARGS"]
    assert f"{EXCHANGE}={str(overlaps).lower()}" in os.environ["LIBTPU_INIT_ARGS"]


@pytest.mark.parametrize(
    ("hosts", "slices", "in_groups", "offloads"),
    [
        (1, None, False, False),
        (2, None, False, True),
        (2, None, True, False),
        (8, "1", False, True),
        (8, "4", False, True),
        (32, "1", False, False),
    ],
)
def test_exchanges_on_sparsecores(
    hosts: int, slices: str | None, in_groups: bool, offloads: bool, pci: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On v6e slices of 4x4 and 8x8 chips, here 8 of each host, whose scatters alone are all-to-alls."""
    if slices is not None:
        monkeypatch.setenv("MEGASCALE_NUM_SLICES", slices)
    find_chips(pci, "0x006f")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    set_before_start(True, "tpu", hosts, in_groups)
    names = {option.partition("=")[0] for option in os.environ["LIBTPU_INIT_ARGS"].split()}
    assert {f"--{name}" in names for name in (EXCHANGES_ON_SPARSECORES, HOST_LINK)} == {offloads}


def test_slices_by_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued resources set no variable, but jax's own way finds the number; without a server there is one slice."""
    from jax._src.clusters import cloud_tpu_cluster

    monkeypatch.delenv("MEGASCALE_NUM_SLICES", raising=False)
    monkeypatch.setattr(cloud_tpu_cluster, "get_tpu_env_value_from_metadata", {"MEGASCALE_NUM_SLICES": "4"}.get)
    assert xla_options._slices_of_the_job() == 4

    def unreachable(key: str) -> str:
        raise ConnectionError(key)

    monkeypatch.setattr(cloud_tpu_cluster, "get_tpu_env_value_from_metadata", unreachable)
    assert xla_options._slices_of_the_job() == 1


def test_overlap_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has set stays, and XLA knows every option: it ends the process at an unknown one."""
    given = "--xla_gpu_enable_pipelined_all_gather=false"
    monkeypatch.setenv("XLA_FLAGS", given)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    set_before_start(True, "cuda12")
    flags = os.environ["XLA_FLAGS"].split()
    assert flags[0] == given and {flag.split("=")[0] for flag in flags} == {f"--{name}" for name in OVERLAP_ON_GPU}
    assert [flag.endswith("=true") for flag in flags] == [False, True, True, True]
    code = "import jax; assert jax.device_count()"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_longer_option_hides_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option is set beside a longer one whose name begins with its own; one that is given stays."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_gather_fused=false --xla_scatter=3")
    xla_options._append("LIBTPU_INIT_ARGS", {"xla_gather": True, "xla_scatter": 4})
    assert os.environ["LIBTPU_INIT_ARGS"] == "--xla_gather_fused=false --xla_scatter=3 --xla_gather=true"
