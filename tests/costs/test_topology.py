"""Names of slices, devices that are not on this machine, and the memory that the compiler says they have."""

import re

import jax
import pytest

from zero.base.errors import UserError, install_command
from zero.costs.topology import (
    available_bytes,
    find_devices,
    out_of_memory,
    prepare_environment,
    slice_shape,
)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("v3-8", "v3:2x2"),
        ("v3-32", "v3:4x4"),
        ("v3-256", "v3:8x16"),
        ("v3-2048", "v3:32x32"),
        ("v4-8", "v4:2x2x1"),
        ("v4-32", "v4:2x2x4"),
        ("v5e-16", "v5e:4x4"),
        ("v5litepod-8", "v5e:2x4"),
        ("v5p-128", "v5p:4x4x4"),
        ("v6e-256", "v6e:16x16"),
        ("tpu7x-8", "tpu7x:2x2x1"),
    ],
)
def test_names_of_slices(name: str, shape: str) -> None:
    assert slice_shape(name) == shape


@pytest.mark.parametrize("name", ["v3-12", "v3-7", "v9-8", "v4-1", "v3", "moon"])
def test_slices_that_do_not_exist(name: str) -> None:
    with pytest.raises(UserError, match=f"topology={name}"):
        slice_shape(name)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("v5e-17", "expected v5e- and a number that is a power of two; .* such as v5e:2x4"),
        ("v4-12", "expected v4- and a number that is 2 times a power of two; .* such as v4:2x2x4"),
        ("gpu:h100", "expected gpu:KINDxCOUNT, such as gpu:h100x8, with a KIND of a100"),
        ("moon", "expected a slice such as v3-32"),
    ],
)
def test_a_wrong_name_is_refused_before_a_process_starts(name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {})
    with pytest.raises(UserError, match=rf"^topology={name}: {line}"):
        prepare_environment(name)


def test_a_missing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"libtpu.*{re.escape(install_command('plan'))}"):
        prepare_environment("v3-8")


def test_missing_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that are not available are reported in one line."""

    def fail() -> None:
        raise AssertionError

    monkeypatch.setattr(jax, "local_devices", fail)
    with pytest.raises(UserError, match=r"topology=gpu: jax finds no such device"):
        find_devices("gpu")
    with pytest.raises(UserError, match=r"topology=v3:9x9x9x9: .*9x9x9x9"):
        pytest.importorskip("libtpu")
        find_devices("v3:9x9x9x9")


def test_misfit_is_read_from_error() -> None:
    """The bytes that did not fit are read from the error."""
    gib = 2**30
    error = RuntimeError("the total memory required for HLO temporaries (20.50G) exceeds available HBM (15.25G).")
    assert out_of_memory(error) == (int(20.5 * gib), int(15.25 * gib))
    assert out_of_memory(RuntimeError("Used 2.00T of 31.25G hbm. Exceeded")) == (2**41, int(31.25 * gib))
    with pytest.raises(RuntimeError, match="something else"):
        out_of_memory(RuntimeError("something else"))


@pytest.mark.parametrize(
    ("name", "devices", "gib"),
    [("v3-8", 8, 15.48), ("v4-32", 16, 30.75), ("v5e-16", 16, 15.75), ("v6e-8", 8, 31.25), ("tpu7x-8", 8, 94.75)],
)
def test_slices_equal_jax(name: str, devices: int, gib: float) -> None:
    """Slices are those that jax will see."""
    pytest.importorskip("libtpu")
    found = find_devices(name)
    assert len(found) == devices
    assert available_bytes(found) == pytest.approx(gib * 2**30, rel=1e-3)  # versions of libtpu differ by 0.01 GiB
