"""A run directory that is renamed, removed or made read-only while its run trains."""

from pathlib import Path

import pytest

from tests.helpers import cli, disks, hosts
from tests.helpers.checkpoints import leaves
from zero.record.run_files import saved_steps

JOB = cli.later_values(*cli.TINY, "distributed.cpu_devices=1", "training.gradient_accumulation_steps=1")
HAPPEN = """
import os, shutil
import zero.run.feature_table as table
from zero.run.feature import Feature

class Happen(Feature):
    name = "happen"

    def before_step(self, run, step):
        if step == 8:
            run.directory.checkpoints.wait()
            {happening}

table.FEATURES = {{Happen: lambda config, run: Happen(), **table.FEATURES}}
"""


@pytest.fixture(scope="module")
def calm(workplace: Path) -> Path:
    return cli.Forks(workplace).train("calm", *JOB)


def test_renamed(workplace: Path, calm: Path) -> None:
    """The run ends with the new name, where it can be continued; nothing is made under the old one."""
    forks = cli.Forks(workplace)
    with cli.customized(HAPPEN.format(happening="os.rename(run.directory.path, 'moved')")):
        done = forks.run(*JOB, "hydra.run.dir=old")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and f"old was renamed to {workplace / 'moved'} while this process trained" in last
    assert not (workplace / "old").exists() and saved_steps(workplace / "moved") == [6]
    forks.check("--resume", "hydra.run.dir=moved")
    assert cli.metrics(workplace / "moved") == cli.metrics(calm)


def test_removed(workplace: Path, calm: Path) -> None:
    """The run saves whole where it was started, says so and goes on; what it saves can be resumed."""
    forks = cli.Forks(workplace)
    with cli.customized(HAPPEN.format(happening="shutil.rmtree(run.directory.path)")):
        done = forks.check(*JOB, "hydra.run.dir=removed")
    removed = workplace / "removed"
    (line,) = [line for line in done.stderr.splitlines() if "was removed while this process trained there" in line]
    assert "step 8 is saved there with the configuration" in line and line in (removed / "main_zero.log").read_text()
    assert saved_steps(removed) == [8, 12]
    for name, x in leaves(calm, 12, "params/").items():
        assert x.tobytes() == leaves(removed, 12, "params/")[name].tobytes(), name
    assert "nothing to do: the run is at step 12" in forks.check("--resume", "hydra.run.dir=removed").stderr


def test_read_only(workplace: Path, calm: Path) -> None:
    """The run ends with the reason at its next save; once the disk can be written to, it continues bit for bit."""
    forks = cli.Forks(workplace)
    disk = workplace / "disk"
    disk.mkdir()
    with disks.failing_disk(disk, workplace / "image"):
        fail = f"import subprocess; subprocess.run({[*disks.FAIL, str(disk)]}, check=True)"
        with cli.customized(HAPPEN.format(happening=fail)):
            done = forks.run(*JOB, "hydra.run.dir=disk/run")
        assert done.returncode == 1, done.stderr
        assert "Read-only file system" in done.stderr.strip().splitlines()[-1]
        assert "Traceback" not in done.stderr
    with disks.failing_disk(disk, workplace / "image"):
        assert saved_steps(disk / "run") == [6]
        forks.check("--resume", "hydra.run.dir=disk/run")
        assert cli.metrics(disk / "run") == cli.metrics(calm)


TWO = (*JOB, "training.batch_size=8")
ON_HOST_0 = """if jax.process_index() == 0:
                {happening}"""
# Files that are written meanwhile keep a folder from being removed at once.
REMOVE_DURING_A_SAVE = """while run.directory.path.exists():
                    shutil.rmtree(run.directory.path, ignore_errors=True)"""
# The commit of the checkpoint of step 6 waits until the directory is removed.
DURING_A_SAVE = """
import asyncio, os, jax
import zero.checkpoints.orbax_commit as commit

check_merged = commit._check_merged

async def slow(path):
    is_first = commit._is_whole(path) and path.get_final().name == "6"
    while jax.process_index() == 0 and is_first and os.path.exists(path.get()):
        await asyncio.sleep(0.1)
    await check_merged(path)

commit._check_merged = slow
"""


@pytest.mark.wide
def test_removed_on_two_hosts(workplace: Path) -> None:
    """The other host learns from host 0 that earlier checkpoints are gone, and logs to a file that exists."""
    code = HAPPEN.format(happening=ON_HOST_0.format(happening="shutil.rmtree(run.directory.path)"))
    with cli.customized(f"import jax{code}"):
        done = hosts.finish(hosts.start_forked([workplace] * 2, *TWO, "hydra.run.dir=both", "data.keep_checkpoints=2"))
    assert [host.returncode for host in done] == [0, 0], [host.stderr for host in done]
    assert "was removed while this process trained there" in done[0].stderr
    assert "cannot be read" not in done[1].stderr
    assert saved_steps(workplace / "both") == [8, 12]
    assert "finished at step 12" in (workplace / "both" / "main_zero.1.log").read_text()


@pytest.mark.wide
def test_removed_while_two_hosts_save(workplace: Path) -> None:
    """Nobody waits for the commit that cannot come: both end, with the reason."""
    happen = HAPPEN.replace("run.directory.checkpoints.wait()", "pass")
    code = happen.format(happening=ON_HOST_0.format(happening=REMOVE_DURING_A_SAVE))
    with cli.customized(DURING_A_SAVE + code):
        done = hosts.finish(hosts.start_forked([workplace] * 2, *TWO, "hydra.run.dir=saving"))
    assert [host.returncode for host in done] == [1, 1], [host.stderr for host in done]
    for host in done:
        assert "saving was removed while 2 hosts saved a checkpoint there: all exit" in host.stderr
