"""`zero-train --doctor`: a line per check, and each fault with its remedy."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import bucket, cli
from zero.commands import doctor
from zero.hosts import hardware, startup

Examine = Callable[..., tuple[int, dict[str, str]]]


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Examine:
    """Runs the doctor, or some of its checks, on the devices of this process; returns its status and lines by check."""
    checks = doctor.CHECKS
    monkeypatch.setattr(startup, "start", lambda *args, **options: (0, 1))
    monkeypatch.setattr(doctor, "packages", lambda: "not examined")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, only: Sequence[str] = tuple(checks)) -> tuple[int, dict[str, str]]:
        monkeypatch.setattr(doctor, "CHECKS", {name: checks[name] for name in only})
        status = doctor.main(arguments)
        *lines, verdict = capsys.readouterr().out.splitlines()
        faults = sum(line.startswith("FAULT") for line in lines)
        assert (status, verdict.split()[0]) == (min(1, faults), str(faults or "no"))
        return status, {line[7:22].strip(): line for line in lines}

    return run


def test_doctor_as_a_command(workplace: Path) -> None:
    """The whole command, with two mistakes in its arguments, which name lines of their own."""
    done = cli.run(workplace, "--doctor", "seed=x", "zero.stage=7", "--resume=auto")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    faults = [line for line in done.stdout.splitlines() if line.startswith("FAULT")]
    assert len(faults) == 2 and "seed" in faults[0] and "zero.stage=7" in faults[1], done.stdout
    assert "ok     devices          2 x cpu" in done.stdout and "jax 0." in done.stdout
    assert done.stdout.endswith("\n2 faults\n") and len(done.stdout.splitlines()) <= 24
    assert not (workplace / "runs").exists()


def test_healthy_machine(examine: Examine) -> None:
    status, lines = examine("seed=3")
    assert status == 0 and [*lines] == ["packages", *doctor.CHECKS]
    assert "5 kinds over 8 devices are exact" in lines["collectives"]


def test_versions_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that are missing or too old are named, with the command that installs them."""
    required = {
        "zero-pmap": ["jax>=99", "absent-package>=2", "numpy>=2", 'wandb>=99; extra == "train"', 'ruff; extra == "x"'],
        "jax": ['libtpu==9.9.*; extra == "tpu"', 'absent-plugin==1; extra == "cuda12"'],
    }
    monkeypatch.setattr(doctor, "requires", required.get)
    with pytest.raises(
        doctor.Fault, match=r"^jax .* does not satisfy >=99.*; absent-package is missing; wandb .*; libtpu"
    ) as error:
        doctor.packages()
    assert error.value.remedy == "pip install -U 'jax>=99' 'absent-package>=2' 'wandb>=99' 'libtpu==9.9.*'"


@pytest.mark.parametrize(
    ("platforms", "remedy"), [(None, "pip install -U 'jax[tpu]'"), ("cpu", "unset JAX_PLATFORMS, which is cpu")]
)
def test_unused_accelerator(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, platforms: str | None, remedy: str
) -> None:
    monkeypatch.setattr(hardware, "accelerator", lambda: "tpu")
    monkeypatch.delenv("JAX_PLATFORMS")
    if platforms is not None:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    status, lines = examine(only=["devices"])
    assert status == 1 and lines["devices"].startswith("FAULT") and lines["devices"].endswith(remedy)


def test_a_slice_on_a_machine_without_tpu(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a fault, as the run would be refused; so is a TPU without its driver."""
    monkeypatch.setattr(hardware, "accelerator", lambda: None)
    monkeypatch.delenv("JAX_PLATFORMS")
    status, lines = examine("+slice=v5e-8", only=["devices"])
    assert status == 1 and "+slice=v5e-8 is for TPUs, and this machine has none" in lines["devices"]
    monkeypatch.setattr(hardware, "missing_driver", lambda: hardware.Missing("a TPU, but no /dev", "load it"))
    status, lines = examine(only=["devices"])
    assert status == 1 and "a TPU, but no /dev; remedy: load it" in lines["devices"]


def test_wrong_collective_names_its_device(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(fn: Any, axis: str) -> Callable[..., dict[str, np.ndarray]]:
        return lambda x: {"psum": np.arange(8) >= 0, "all_gather": np.arange(8) != 5}

    monkeypatch.setattr(doctor, "pmap", faulty)
    status, lines = examine(only=["collectives"])
    assert status == 1 and "wrong results: all_gather on device 5; remedy: restart all hosts" in lines["collectives"]


def test_slow_device(examine: Examine) -> None:
    status, lines = examine("profile.peak_flops=1e18", only=["matrix products"])
    assert (
        status == 1 and "device" in lines["matrix products"] and "0% of the published peak" in lines["matrix products"]
    )


def test_full_disk(examine: Examine) -> None:
    """A disk without room for the checkpoints is named with what the run needs."""
    status, lines = examine("model.size=119_9b", "data.keep_checkpoints=1000", only=["disk"])
    assert status == 1 and "GiB free" in lines["disk"] and "data.keep_checkpoints" in lines["disk"]


def test_unreachable_bucket(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A network that does not answer is said, and is a fault within seconds, not a stall of this process."""
    from zero.files.storage import fsspec_store, gcs

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    gcs.client.cache_clear()
    monkeypatch.setattr(fsspec_store, "TOLD_AFTER", 0)
    monkeypatch.setattr(doctor, "BUCKET_SECONDS", 1)
    status, lines = examine("data.bucket_path=absent", only=["bucket"])
    gcs.client.cache_clear()
    assert status == 1 and "no answer within 1 s" in lines["bucket"]
    assert any("retrying for up to 1 s" in message for message in caplog.messages)


def test_bucket(examine: Examine, monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    """A bucket is written, read and left as it was; one that does not exist is a fault."""
    bucket.use(monkeypatch, server)
    status, lines = examine(f"data.bucket_path={bucket.BUCKET}/doctor", only=["bucket"])
    assert status == 0 and f"gs://{bucket.BUCKET}/doctor can be written, read, listed" in lines["bucket"]
    from zero.files import storage

    assert storage.list_files(f"gs://{bucket.BUCKET}/doctor") == []
    status, lines = examine("data.bucket_path=absent", only=["bucket"])
    assert status == 1 and "gs://absent" in lines["bucket"] and "roles/storage.objectAdmin" in lines["bucket"]


def test_library_error_is_a_fault(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("the TPU is already in use by process 7\nand more")

    monkeypatch.setattr(startup, "start", refuse)
    status, lines = examine(only=["hosts"])
    assert status == 1 and "already in use by process 7; remedy: start this command on all hosts" in lines["hosts"]
