"""`training.verify_every` in runs: nothing changes where devices agree; else the run ends before it saves."""

from pathlib import Path

import pytest

from tests.helpers import cli, hosts
from zero.runtime.tracking.metrics_file import read_metrics

FAULTY = f"""
import sys
if sys.argv[0].endswith("main_zero.py") or "main_zero.py" in " ".join(sys.orig_argv):
    sys.path.insert(0, {str(cli.MAIN.parent)!r})
    from tests.helpers.faulty_device import install
    install(6)
"""


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> cli.Forks:
    return cli.Forks(cli.make_workplace(tmp_path_factory.mktemp("verified")))


def metrics(run: Path) -> list[dict[str, float]]:
    return [
        {name: x for name, x in line.items() if name not in cli.CLOCKED} for line in read_metrics(run / "metrics.jsonl")
    ]


def test_a_run_that_compares_devices_computes_the_same(forks: cli.Forks) -> None:
    for name, *arguments in (("plain",), ("verified", "training.verify_every=2")):
        done = forks.run(*cli.TINY, *arguments, f"hydra.run.dir={name}")
        assert done.returncode == 0, done.stderr
    assert metrics(forks.workplace / "verified") == metrics(forks.workplace / "plain")


def test_hosts_name_the_device_that_errs_and_save_nothing(forks: cli.Forks) -> None:
    with cli.customized(FAULTY):
        job = ("training.verify_every=6", "distributed.cpu_devices=4", "training.batch_size=8", "hydra.run.dir=faulty")
        done = hosts.finish(hosts.start([forks.workplace] * 2, *cli.TINY, *job))
    for one in done:
        assert one.returncode == 1, one.stderr
        assert "error: step 6: " in one.stderr and " of host 1 computed what other devices did not. " in one.stderr
    assert not list((forks.workplace / "faulty/checkpoints").glob("[0-9]*"))
