"""Kills before, within and after each effect of save, protect and mirror: the run ends as one that was left alone.

A run of 12 steps has emergency checkpoints at 3, 6, 9 and 12 and durable ones at 3, 6 and 12, outside its directory. It
is killed at one moment after the other, each time resumed by the same command, and compared at its end. A short form is
in tests/run/test_durable_run.py.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias
from unittest.mock import patch

import numpy as np
import pytest

from tests.helpers import bucket, cli, hosts, kills
from tests.helpers.kills import Rule
from zero.checkpoints.manager import Checkpoints
from zero.files.storage import gcs
from zero.run_directory import committed_steps

pytestmark = pytest.mark.timeout(1800)

JOB = (
    *cli.TINY,
    "training.gradient_accumulation_steps=1",
    "zero.emergency_steps=3",
    "zero.emergency_directory=memory",
    "hydra.run.dir=run",
)
RUN = Path("run")


def protect(host: int) -> list[Rule]:
    """Emergency checkpoint 9 of a host: before, half written, and in place but not yet with the next host."""
    name = rf"-9-{host}\.shards"
    return [
        Rule("open", rf"{name}\.tmp$", "kill before", host=host),
        Rule("os.rename", rf"{name}$", "kill before", host=host),
        Rule("os.rename", rf"{name}$", "kill after", host=host),
    ]


# The second mirror of a start comes before its first save; the first one is that of the start.
MIRROR = [
    Rule("os.rename", r"/place-run/config\.yaml$", "kill before", nth=2),
    Rule("os.rename", r"/place-run/metrics\.jsonl$", "kill before", nth=2),
    Rule("os.rename", r"/place-run/emergency_lineage$", "kill after", nth=2),
]
SAVE = [
    Rule("os.mkdir", r"/place/12\.", "kill before"),
    Rule("os.mkdir", r"/place/12\..*/", "kill after"),
    Rule("os.rename", r"/place/12$", "kill before"),
    Rule("os.rename", r"/place/12$", "kill after"),
]
START = [
    Rule("os.rename", r"/run/emergency_lineage$", "kill before"),
    Rule("os.rename", r"/place-run/emergency_lineage$", "kill before"),
    Rule("os.rename", r"/place-run/emergency_lineage$", "kill after"),
]
# In the bucket: a pattern of the name of an object; before or after it is sent; for the how manieth time.
Moments: TypeAlias = list[tuple[str, Literal["before", "after"], int]]
SAVE_IN_BUCKET: Moments = [
    ("place/12[./]", "before", 1),
    ("place/12[./]", "after", 3),
    (r"place/12/commit_success\.txt", "before", 1),
    (r"place/12/commit_success\.txt", "after", 1),
]
MIRROR_IN_BUCKET: Moments = [
    (r"place-run/config\.yaml", "before", 2),
    (r"place-run/metrics\.jsonl", "before", 2),
    (r"place-run/emergency_lineage", "after", 2),
]


@dataclass
class Run:
    """A run on one host or more, which the same command starts each time."""

    workplace: Path
    place: Path | str  # of its checkpoints
    arguments: tuple[str, ...]
    count: int = 1  # hosts

    def start(self) -> list[subprocess.Popen[str]]:
        """One process per host."""
        own = (f"distributed.cpu_devices={2 // self.count}", f"training.batch_size={16 // self.count}")
        arguments = ("--resume=auto", *JOB, *self.arguments, *own)
        if self.count == 1:
            return [cli.start(self.workplace, *arguments)]
        memory = {host: [f"zero.emergency_directory=memory-{host}"] for host in range(self.count)}
        return hosts.start([self.workplace] * self.count, *arguments, own=memory)

    def killed(self, rule: Rule) -> None:
        """Starts the run and asserts that it was killed at the moment."""
        with cli.customized(kills.at(rule)):
            processes = self.start()
        victim = processes[rule.host]
        others = [process for process in processes if process is not victim]
        done = cli.finish(victim, 600)
        for process in others:
            process.kill()
            cli.finish(process)
        assert done.returncode == -signal.SIGKILL, (rule, done.stderr)

    def finish(self) -> list[subprocess.CompletedProcess[str]]:
        """Starts the run, which ends by itself."""
        done = [cli.finish(process, 600) for process in self.start()]
        assert [one.returncode for one in done] == [0] * self.count, [one.stderr for one in done]
        return done

    def leaves(self) -> dict[str, np.ndarray]:
        """The state at the last step, whole."""
        with Checkpoints(self.place, None) as checkpoints:
            return {name: checkpoints.read(12, name) for name in checkpoints.meta(12)["shapes"]}

    def check(self, undisturbed: "Run") -> None:
        """Compares with a run that was left alone."""
        assert cli.metrics(self.workplace / RUN) == cli.metrics(undisturbed.workplace / RUN)
        steps = committed_steps(self.place)  # 9 was saved where it was restored, and the oldest may be gone
        assert steps[-1] == 12 and set(steps) <= {3, 6, 9, 12}
        got, expected = self.leaves(), undisturbed.leaves()
        assert got.keys() == expected.keys()
        for name, leaf in got.items():
            np.testing.assert_array_equal(leaf, expected[name], err_msg=name)
        assert list(self.workplace.glob("memory*/*/*")) == []


def on_disk(tmp_path: Path, count: int = 1) -> Run:
    place = cli.make_workplace(tmp_path) / "place"
    return Run(tmp_path, place, (f"data.checkpoint_directory={place}",), count)


@contextmanager
def in_bucket(tmp_path: Path) -> Iterator[tuple[Run, bucket.Proxy]]:
    cli.make_workplace(tmp_path)
    train, validation = (tmp_path / path for path in cli.INDICES)
    keys = (f"data.index_path_train={train}", f"data.index_path_validation={validation}")
    with bucket.serving() as server:
        proxy = bucket.Proxy(server, 0)
        with (
            bucket.disturbed(proxy) as address,
            patch.dict(os.environ, {"STORAGE_EMULATOR_HOST": address, "TENSORSTORE_GCS_HTTP_URL": address}),
        ):
            gcs.client.cache_clear()
            arguments = (f"data.bucket_path={bucket.BUCKET}", "data.checkpoint_directory=place", *keys)
            yield Run(tmp_path, f"gs://{bucket.BUCKET}/place", arguments), proxy


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = on_disk(tmp_path_factory.mktemp("undisturbed"))
    run.finish()
    return run


@pytest.mark.slow
def test_kills_on_disk(tmp_path: Path, undisturbed: Run) -> None:
    run = on_disk(tmp_path)
    for rule in [*protect(0), *START, *MIRROR, *SAVE]:
        run.killed(rule)
    run.finish()
    run.check(undisturbed)


@pytest.mark.slow
def test_kills_in_the_bucket(tmp_path: Path, undisturbed: Run) -> None:
    with in_bucket(tmp_path) as (run, proxy):
        for rule in protect(0):
            run.killed(rule)
        for pattern, when, nth in [*MIRROR_IN_BUCKET, *SAVE_IN_BUCKET]:
            (process,) = run.start()
            proxy.strike = bucket.Strike(pattern, when, process.kill, nth)
            assert cli.finish(process, 600).returncode == -signal.SIGKILL, (pattern, when)
        proxy.strike = None
        run.finish()
        run.check(undisturbed)


@pytest.mark.slow
def test_kills_on_two_hosts(tmp_path: Path) -> None:
    """One of two hosts is killed, the other as a launcher does it; the other has what a neighbour has sent."""
    (tmp_path / "calm").mkdir()
    (tmp_path / "killed").mkdir()
    calm, run = on_disk(tmp_path / "calm", 2), on_disk(tmp_path / "killed", 2)
    calm.finish()
    for rule in [*protect(0), *protect(1), *START, *MIRROR, *SAVE]:
        run.killed(rule)
    run.finish()
    run.check(calm)
