"""`verify.every` in runs: nothing changes where devices agree; else the run ends before it saves."""

import subprocess

import jax
import pytest

from tests.helpers import cli, hosts

FAILING = 6
FAULTY = f"""
import sys
if sys.argv[0].endswith("main_zero.py") or "main_zero.py" in " ".join(sys.orig_argv):
    sys.path.insert(0, {str(cli.MAIN.parent)!r})
    from tests.helpers.faulty_device import install
    install({FAILING})
"""


@pytest.mark.slow  # test_statistics.py compares devices beside statistics
def test_comparing_devices_changes_nothing(lasting: cli.Lasting) -> None:
    """A run that compares devices computes the same."""
    plain = lasting.train("plain", *cli.TINY)
    verified = lasting.train("verified", *cli.TINY, "verify.every=2")
    assert cli.metrics(verified) == cli.metrics(plain)


@pytest.mark.wide  # tests/training/test_verification.py has devices that err, and the feature
def test_failing_device_ends_the_run(forks: cli.Forks) -> None:
    """The run names the device that errs, and saves nothing."""
    with cli.customized(FAULTY):
        done = forks.run(*cli.TINY, "verify.every=6", "hydra.run.dir=faulty")
    check_end(done)
    assert not list((forks.workplace / "faulty/checkpoints").glob("[0-9]*"))


@pytest.mark.slow  # test_hosts.py has the names of devices on two hosts
def test_hosts_name_the_failing_device(forks: cli.Forks) -> None:
    """Hosts name the device that errs and save nothing."""
    with cli.customized(FAULTY):
        job = ("verify.every=6", "distributed.cpu_devices=4", "training.batch_size=8", "hydra.run.dir=hosts")
        both = hosts.finish(hosts.start_forked([forks.workplace] * 2, *cli.TINY, *job))
    for done in both:
        check_end(done, host=1)
    assert not list((forks.workplace / "hosts/checkpoints").glob("[0-9]*"))


def check_end(done: subprocess.CompletedProcess[str], host: int = 0) -> None:
    assert done.returncode == 1, done.stderr
    assert "error: step 6: " in done.stderr
    assert f" of host {host} computed a different result from other devices. " in done.stderr
    if host == 0:
        assert f"step 6: {jax.devices()[FAILING]} of host 0" in done.stderr
