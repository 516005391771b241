"""`verify.every` in runs: nothing changes where devices agree; else the run ends before it saves."""

import pytest

from tests.helpers import cli, hosts

FAULTY = f"""
import sys
if sys.argv[0].endswith("main_zero.py") or "main_zero.py" in " ".join(sys.orig_argv):
    sys.path.insert(0, {str(cli.MAIN.parent)!r})
    from tests.helpers.faulty_device import install
    install(6)
"""


@pytest.mark.slow  # test_statistics_run.py compares devices beside statistics
def test_comparing_devices_changes_nothing(lasting: cli.Lasting) -> None:
    """A run that compares devices computes the same."""
    plain = lasting.train("plain", *cli.TINY)
    verified = lasting.train("verified", *cli.TINY, "verify.every=2")
    assert cli.metrics(verified) == cli.metrics(plain)


def test_hosts_name_the_failing_device(forks: cli.Forks) -> None:
    """Hosts name the device that errs and save nothing."""
    with cli.customized(FAULTY):
        job = ("verify.every=6", "distributed.cpu_devices=4", "training.batch_size=8", "hydra.run.dir=faulty")
        done = hosts.finish(hosts.start_forked([forks.workplace] * 2, *cli.TINY, *job))
    for one in done:
        assert one.returncode == 1, one.stderr
        assert "error: step 6: " in one.stderr and " of host 1 computed what other devices did not. " in one.stderr
    assert not list((forks.workplace / "faulty/checkpoints").glob("[0-9]*"))
