"""Two hosts of one run, over gloo: joined, stopped together, resumed elsewhere, and ended together when one is lost."""

import json
import os
import re
import resource
import shutil
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import cli, hosts, kills
from tests.helpers.shards import npy, write_tar
from zero.corpus.format.index_files import read_index
from zero.hosts.same_configuration import source_digest
from zero.record.metrics_file import read_metrics, read_resumes
from zero.record.run_files import saved_config, saved_steps

# Two hosts of two devices each, and a global batch of 16.
TWO = (
    *cli.TINY,
    "training.staged_warmup_steps=0",
    "training.gradient_accumulation_steps=1",
    "training.batch_size=8",
    "distributed.cpu_devices=2",
)


STOP_ONE = """
import os, signal, sys
import jax
import zero.run.feature_table as table
from zero.run.feature import Feature
from zero.run.features import verify

class Stop(Feature):
    name = "stop_one"

    def due(self, now):
        return now.step == 7

    def do(self, run, now, line):
        print("devices:", [verify._name(place) for place in range(jax.device_count())], file=sys.stderr)
        if jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

table.FEATURES = {Stop: lambda config, run: Stop(), **table.FEATURES}
"""


def start_hosts(workplace: Path, *arguments: str) -> list[cli.Fork]:
    return hosts.start_forked([workplace] * 2, *TWO, *arguments)


def test_both_hosts_stop_together(workplace: Path, lasting: cli.Lasting) -> None:
    """Both hosts stop at the step at which one is told to, and one host continues."""
    job = ("training.evaluation_frequency=12",)
    with cli.customized(STOP_ONE):
        done = hosts.finish(start_hosts(workplace, *job, "hydra.run.dir=stopped"))
    assert [one.returncode for one in done] == [75, 75], [one.stderr for one in done]
    (by_other,) = re.findall(r"stopped by another host; step (\d+) is saved", done[0].stderr)
    (by_signal,) = re.findall(r"stopped by SIGTERM; step (\d+) is saved", done[1].stderr)
    assert by_other == by_signal == str(saved_steps(workplace / "stopped")[-1])
    assert 7 <= int(by_other) < 12
    for one in done:  # which `verify.every` names
        (names,) = re.findall(r"^devices: (.*)", one.stderr, re.M)
        assert re.findall(r" of host (\d)", names) == ["0", "0", "1", "1"]
    assert (workplace / "stopped" / "main_zero.1.log").read_text().count("stopped by SIGTERM") == 1
    assert (workplace / "stopped" / "main_zero.log").read_text().count("stopped by another host") == 1

    lasting.train("calm", *cli.TINY, *job)  # in two micro-batches, as the resumed one from now on
    lasting.train("stopped", "--resume", "distributed.cpu_devices=8", "training.gradient_accumulation_steps=2")
    assert saved_config(workplace / "stopped").training.batch_size == 16  # per host: 8 on each of the two before
    got, expected = (read_metrics(workplace / run / "metrics.jsonl") for run in ("stopped", "calm"))
    assert [line["samples_checksum"] for line in got] == [line["samples_checksum"] for line in expected]
    for key in ("train/loss", "learning_rate"):
        np.testing.assert_allclose([line[key] for line in got], [line[key] for line in expected], rtol=1e-5)


CLOCKS_APART = """
import sys, time
own = time.time
number, hour = [int(a.partition("=")[2]) for a in sys.argv if a.startswith("distributed.process_id=")][0], 3600
time.time = lambda: own() + (number - 0.5) * hour
"""
SWAPPED = CLOCKS_APART.replace("(number - 0.5)", "(0.5 - number)")


@pytest.mark.slow
def test_clocks_an_hour_apart(workplace: Path) -> None:
    """Hosts whose clocks differ train as others; so does a resume by a host 0 whose clock is an hour ahead."""
    job = ("training.evaluation_frequency=4", "data.keep_checkpoints=2")
    with cli.customized(CLOCKS_APART + STOP_ONE):
        done = hosts.finish(start_hosts(workplace, *job, "hydra.run.dir=apart"))
    assert [one.returncode for one in done] == [75, 75], [one.stderr for one in done]
    for code, name, resume in ((SWAPPED, "apart", ["--resume"]), ("", "together", [])):
        with cli.customized(code):
            done = hosts.finish(start_hosts(workplace, *job, *resume, f"hydra.run.dir={name}"))
        assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    got, expected = (read_metrics(workplace / name / "metrics.jsonl") for name in ("apart", "together"))
    for key in ("samples_checksum", "train/loss"):
        assert [line[key] for line in got] == [line[key] for line in expected]
    assert saved_steps(workplace / "apart")[-1] == saved_steps(workplace / "together")[-1]
    times = [line["wall_time"] for line in got]
    assert times == sorted(times) and min(line["goodput/restarts"] for line in got) >= 0
    assert 0.9 < sum(value for key, value in got[-1].items() if key.startswith("goodput/")) < 1.1


NAN_ON_ONE = """
from tests.helpers import faulty_device
faulty_device.install(3, faulty_device.nan_in_some_steps)
"""


@pytest.mark.slow
def test_nan_on_one_host(workplace: Path) -> None:
    """Both hosts skip the steps in which one has a NaN, as one process with these devices does."""
    with cli.customized(NAN_ON_ONE):
        done = hosts.finish(start_hosts(workplace, "hydra.run.dir=two-with-nan"))
        assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
        alone = ("training.batch_size=16", "distributed.cpu_devices=4", "hydra.run.dir=one-with-nan")
        cli.Forks(workplace).check(*cli.later_values(*TWO, *alone))
    two, one = (cli.metrics(workplace / run) for run in ("two-with-nan", "one-with-nan"))
    skipped = [line["skipped_steps"] for line in two]
    assert 0 < skipped[-1] < len(two) and skipped == [line["skipped_steps"] for line in one]
    for key in ("train/loss", "validation/loss"):
        values, expected = ([line[key] for line in lines if key in line] for lines in (two, one))
        np.testing.assert_allclose(values, expected, rtol=1e-5)


@pytest.mark.slow
def test_tensor_groups_on_two_hosts(workplace: Path) -> None:
    """Tensor groups on two hosts train as one process without groups.

    With samples, evaluations and a checkpoint; one of them continues with other groups.
    """
    job = ("data.max_context=30", "training.sample_tokens=8")
    groups = ("zero.tensor_shards=3", "distributed.cpu_devices=3", "zero.stage=3")
    done = hosts.finish(start_hosts(workplace, *job, *groups, "hydra.run.dir=groups"))
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    alone = ("training.staged_warmup_steps=0", "training.gradient_accumulation_steps=1", "hydra.run.dir=alone")
    calm = cli.run(workplace, *cli.TINY, *job, *alone)
    assert calm.returncode == 0, calm.stderr
    got, expected = (read_metrics(workplace / run / "metrics.jsonl") for run in ("groups", "alone"))
    assert [line["samples_checksum"] for line in got] == [line["samples_checksum"] for line in expected]
    for key in ("train/loss", "validation/loss"):
        values, others = ([line[key] for line in lines if key in line] for lines in (got, expected))
        np.testing.assert_allclose(values, others, rtol=1e-5)


@pytest.mark.slow
def test_named_sets_on_two_hosts(workplace: Path) -> None:
    """Two hosts evaluate named sets, during training and after it, as one host does; the total is that of the list.

    The batches of the total end within the second set, among the rows of the first host.
    """
    train, text = cli.INDICES
    named, listed = (
        f"data.index_path_validation={value}" for value in (f"{{a: {text}, b: {train}}}", f"[{text},{train}]")
    )
    rows = sum(shard.rows for shard in read_index(workplace / text))
    assert 0 < -rows % 16 < 8  # of the second set, in the last batch of the list
    steps = -(-rows // 16)
    job = ("training.total_steps=2", "training.warmup_steps=1", f"training.maximum_evaluation_steps={steps}")
    done = hosts.finish(start_hosts(workplace, *job, named, "hydra.run.dir=two"))
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    forks, alone = cli.Forks(workplace), ("training.staged_warmup_steps=0", "training.gradient_accumulation_steps=1")
    one, merged = (
        cli.metrics(forks.train(name, *cli.TINY, *job, *alone, index))[-1]
        for name, index in (("one", named), ("merged", listed))
    )
    two = cli.metrics(workplace / "two")[-1]
    keys = {key for key in two if key.startswith("validation/")}
    assert keys == {f"validation/{name}{key}" for name in ("", "a/", "b/") for key in ("loss", "bits_per_byte")}
    assert {key: two[key] for key in keys} == pytest.approx({key: one[key] for key in keys}, rel=1e-5)
    assert two["validation/loss"] == pytest.approx(merged["validation/loss"], rel=1e-5)

    score = ("mode=evaluate", "model.model_path=two")
    done = hosts.finish(hosts.start([workplace] * 2, *score, "distributed.cpu_devices=2", "hydra.run.dir=scored-two"))
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    found = json.loads((workplace / "scored-two" / "evaluation.json").read_text())
    expected = forks.evaluate("scored-one", "model.model_path=two")
    assert {*found["sets"]} == {"a", "b"}
    for left, right in ((found, expected), *((found["sets"][name], expected["sets"][name]) for name in "ab")):
        assert left["tokens"] == right["tokens"] and left["loss"] == pytest.approx(right["loss"], rel=1e-6)


@pytest.mark.slow
def test_context_groups_on_two_hosts(workplace: Path) -> None:
    """Context groups on two hosts train as one process without groups."""
    job = ("data.max_context=32", "training.sample_tokens=8")
    groups = ("zero.context_shards=2", "zero.stage=3")
    done = hosts.finish(start_hosts(workplace, *job, *groups, "hydra.run.dir=context"))
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    alone = ("training.staged_warmup_steps=0", "training.gradient_accumulation_steps=1", "hydra.run.dir=whole")
    calm = cli.run(workplace, *cli.TINY, *job, *alone)
    assert calm.returncode == 0, calm.stderr
    got, expected = (read_metrics(workplace / run / "metrics.jsonl") for run in ("context", "whole"))
    assert [line["samples_checksum"] for line in got] == [line["samples_checksum"] for line in expected]
    for key in ("train/loss", "validation/loss"):
        values, others = ([line[key] for line in lines if key in line] for lines in (got, expected))
        np.testing.assert_allclose(values, others, rtol=1e-5)


@pytest.mark.slow
def test_experts_on_two_hosts(workplace: Path) -> None:
    """Experts on two hosts train as one process that has all of them.

    With samples, evaluations and a checkpoint, with which one process goes on.
    """
    job = ("model.size=test_experts", "training.sample_tokens=8")
    groups = ("zero.expert_shards=4", "zero.stage=3")
    done = hosts.finish(start_hosts(workplace, *job, *groups, "hydra.run.dir=experts"))
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    alone = ("training.staged_warmup_steps=0", "training.gradient_accumulation_steps=1")
    calm = cli.run(workplace, *cli.TINY, *job, *alone, "hydra.run.dir=all_experts")
    assert calm.returncode == 0, calm.stderr
    got, expected = (read_metrics(workplace / run / "metrics.jsonl") for run in ("experts", "all_experts"))
    assert [line["samples_checksum"] for line in got] == [line["samples_checksum"] for line in expected]
    for key in ("train/loss", "validation/loss", "dropped_share", "router_entropy"):
        values, others = ([line[key] for line in lines if key in line] for lines in (got, expected))
        assert len(values) == len(others) > 0
        np.testing.assert_allclose(values, others, rtol=1e-5)
    resumed = cli.run(workplace, "--resume", "hydra.run.dir=experts", "zero.expert_shards=1", "training.total_steps=14")
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.slow
def test_optimizer_in_the_memory_of_two_hosts(workplace: Path, lasting: cli.Lasting) -> None:
    """Two hosts whose memory has the optimizer's state train as one process, and are resumed to the bit."""
    job = ("zero.fused_update=true", "zero.remat=full", "zero.offload=optimizer")
    done = hosts.finish(start_hosts(workplace, *job, "distributed.cpu_devices=4", "hydra.run.dir=streamed"))
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    whole = cli.metrics(workplace / "streamed")
    alone = lasting.train("streamed_alone", *cli.TINY, *job, "training.gradient_accumulation_steps=1")
    for got, expected in zip(whole, cli.metrics(alone), strict=True):
        assert got == pytest.approx(expected, rel=2e-6)

    shutil.copytree(workplace / "streamed", workplace / "halved")
    shutil.rmtree(workplace / "halved/checkpoints/12")
    done = hosts.finish(hosts.start_forked([workplace] * 2, "--resume", "hydra.run.dir=halved"))
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    assert read_resumes(workplace / "halved" / "metrics.jsonl") == [6]
    assert cli.metrics(workplace / "halved") == whole


@pytest.mark.wide
def test_failed_save_ends_both_hosts(workplace: Path) -> None:
    """A save that fails on one host ends both with the reason."""
    job = ("training.total_steps=4000", "data.save_every=1", "hydra.run.dir=full")
    processes = hosts.start([workplace] * 2, *TWO, *job)  # whose stderr is no file, which the limit would end as well
    hosts.wait_for_step(workplace / "full", 3, processes)  # the checkpoint of step 1 is complete
    resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE, (20_000, 20_000))  # its disk is full
    done = hosts.finish(processes)
    assert [one.returncode for one in done] == [1, 1], [one.stderr for one in done]
    refusal = f"error: {workplace}/full/checkpoints: the checkpoint could not be written: .*File too large"
    assert re.search(refusal, done[1].stderr), done[1].stderr
    assert re.search(rf"host 1 of 2 \({socket.gethostname()}\) ended: {refusal}", done[0].stderr), done[0].stderr
    reported = re.findall(r"checkpoint (\d+) saved", done[0].stderr)
    assert str(saved_steps(workplace / "full")[-1]) == reported[-1]


@pytest.mark.slow
def test_slurm(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm needs no configuration, and hosts agree on the run directory."""
    monkeypatch.setenv("SLURM_JOB_ID", str(np.random.default_rng().integers(4096)))  # of which the port is made
    monkeypatch.setenv("SLURM_STEP_NODELIST", "localhost")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    processes = []
    for host in range(2):
        monkeypatch.setenv("SLURM_PROCID", str(host))
        monkeypatch.setenv("SLURM_LOCALID", str(host))
        job = (*cli.TINY, "training.total_steps=4", "training.batch_size=8", "distributed.cpu_devices=4")
        processes.append(cli.start(workplace, *job))
        time.sleep(1.1 * (host == 0))  # the default run directory has the second of its start in its name
    done = hosts.finish(processes)
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    assert "8 cpu devices, 4 of this host" in done[1].stderr
    (run,) = [path.parent for path in (workplace / "runs").rglob("metrics.jsonl")]
    assert sorted(path.name for path in run.glob("*.log")) == ["main_zero.1.log", "main_zero.log"]
    assert list(run.parent.iterdir()) == [run]


OTHER_CODE = """
import sys
import zero.hosts.same_configuration
if "distributed.process_id=2" in sys.argv:
    zero.hosts.same_configuration.source_digest = lambda package: "other"
"""


def test_configurations_must_be_equal(workplace: Path) -> None:
    """Hosts with another configuration, or other code of zero, are named, with the keys.

    Also keys that would let both wait for each other, or end in a C++ stack, and a model of the same name.
    """
    own = {
        1: ("training.peak_learning_rate=0.5", "training.evaluation_frequency=5"),
        2: ("training.evaluation_frequency=5", "seed=7", "model.size=test_vq"),
    }
    job = (*cli.TINY, "hydra.run.dir=different", "distributed.cpu_devices=1")
    with cli.customized(OTHER_CODE):
        processes = hosts.start_forked([workplace] * 3, *job, own=own)
    done = hosts.finish(processes)
    assert [one.returncode for one in done] == [2, 2, 2], [one.stderr for one in done]
    for one in done:
        lines = [line for line in one.stderr.splitlines() if line.startswith("error: ")]
        for expected in (
            'error: model.size: host 0 has "test", host 2 has "test_vq"; all hosts need the same value',
            "error: seed: host 0 has 0, host 2 has 7; all hosts need the same value",
            "error: training.evaluation_frequency: host 0 has 6, hosts 1, 2 have 5; all hosts need the same value",
            "error: training.peak_learning_rate: host 0 has 0.003, host 1 has 0.5; all hosts need the same value",
        ):
            assert expected in lines, one.stderr
        assert not any("process_id" in line for line in lines)
        code = (
            r"error: zero's code \(by a digest of its files\): host 0 has \"\w{12}\", host 2 has \"other\"; all hosts"
        )
        assert any(re.match(code, line) for line in lines), one.stderr
    assert not (workplace / "different" / "metrics.jsonl").exists()


def test_a_start_that_hangs_ends(forks: cli.Forks) -> None:
    """A reader that never returns ends a run before its first step too, with the stacks."""
    index = forks.workplace / "never.index"
    os.mkfifo(index)
    done = forks.run(*cli.TINY, f"data.index_path_train={index}", "distributed.start_minutes=0.1")
    assert done.returncode == 1, done.stderr
    assert "host 0 of 1" in done.stderr and "has made no progress for distributed.start_minutes=0.1" in done.stderr
    assert "stacks of the threads of host 0:" in done.stderr


def test_digest_of_code(tmp_path: Path) -> None:
    """It depends on names and contents of modules, and on nothing else of a folder."""
    (tmp_path / "part").mkdir()
    module = tmp_path / "part" / "one.py"
    module.write_text("x = 1")
    first = source_digest(tmp_path)
    (tmp_path / "part" / "one.pyc").write_text("compiled")
    os.utime(module, (1, 1))
    assert source_digest(tmp_path) == first
    module.write_text("x = 2")
    second = source_digest(tmp_path)
    module.rename(tmp_path / "one.py")
    assert len({first, second, source_digest(tmp_path)}) == 3


@pytest.mark.slow
def test_hosts_without_progress_end(tmp_path: Path) -> None:
    """Hosts that make no progress, as a shard is never read, log where they are and end."""
    write_corpus(tmp_path, bad=None)
    with cli.customized(kills.at(kills.Rule("open", r"/\d\.tar$", "block", nth=20))):  # heartbeats are sent meanwhile
        processes = start_hosts(
            tmp_path,
            "data.index_path_train=train.index",
            "data.index_path_validation=validation.index",
            "data.shuffle_shards=4",
            "training.total_steps=400",
            "training.evaluation_frequency=400",
            "distributed.stall_minutes=1",
            "hydra.run.dir=run",
        )
        done = hosts.finish(processes)
    assert [one.returncode for one in done] == [1, 1], [one.stderr for one in done]
    for host, one in enumerate(done):
        assert "has made no progress for distributed.stall_minutes=1" in one.stderr, one.stderr
        assert f"stacks of the threads of host {host}:" in one.stderr and "in loop" in one.stderr, one.stderr
    assert "in loop" in (tmp_path / "run" / "main_zero.1.log").read_text()


def write_corpus(directory: Path, bad: int | None) -> None:
    """Nine shards of 64 rows, one of them cut."""
    rows = np.random.default_rng(0).integers(1, 256, (64, cli.CONTEXT), np.uint8)
    names = [f"{number}.tar" for number in range(9)]
    for name in names:
        write_tar(directory / name, {"0.input_id.npy": npy(rows)})
    (directory / "train.index").write_text("".join(f"{name} # 64 rows\n" for name in names))
    (directory / "validation.index").write_text("3.tar # 64 rows\n")
    if bad is not None:
        (directory / f"{bad}.tar").write_bytes((directory / f"{bad}.tar").read_bytes()[:1000])


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "first"), [(1, 0), (4, 1)])
def test_failing_host_ends_the_run(tmp_path: Path, bad: int, first: int) -> None:
    """A host that fails ends the run with its reason."""
    write_corpus(tmp_path, bad)  # a shard that one host reads when the run is under way
    processes = start_hosts(
        tmp_path,
        "training.total_steps=400",
        "training.evaluation_frequency=400",
        "training.staged_warmup_steps=0",
        "data.index_path_train=train.index",
        "data.index_path_validation=validation.index",
        "data.shuffle_shards=4",
        "hydra.run.dir=run",
    )
    done = hosts.finish(processes)
    assert [one.returncode for one in done] == [2, 2], [one.stderr for one in done]
    assert f"shard {bad}.tar is truncated or damaged" in done[first].stderr
    assert "Traceback" not in done[first].stderr
    reason = f"host {first} of 2 ({socket.gethostname()}) ended: error: shard {bad}.tar is truncated"
    assert reason in done[1 - first].stderr


@pytest.mark.slow
def test_hosts_with_own_disks_resume(tmp_path: Path) -> None:
    """Hosts with disks of their own resume from checkpoints that they share."""
    places = [cli.make_workplace(tmp_path / name) for name in ("here", "there")]
    ends = []
    for steps in (4, 8):  # nobody names the run directory, and only the first host has one
        job = (
            "--resume=auto", *cli.TINY, "training.batch_size=8", "distributed.cpu_devices=4",
            f"training.total_steps={steps}", f"data.checkpoint_directory={tmp_path}/shared",
        )  # fmt: skip
        done = hosts.finish(hosts.start(places, *job))
        assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
        ends.append(done)
    assert all("resumed from step 4 of" in one.stderr for one in ends[1])
    (run,) = [path.parent for path in (tmp_path / "here" / "runs").rglob("metrics.jsonl")]
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == list(range(1, 9))


def test_unshared_disk_is_reported(tmp_path: Path) -> None:
    """Checkpoints on a disk that hosts do not share are reported."""
    places = [cli.make_workplace(tmp_path / name) for name in ("here", "there")]
    own = {host: [f"data.checkpoint_directory={place}/checkpoints"] for host, place in enumerate(places)}
    processes = hosts.start_forked(places, *cli.TINY, "hydra.run.dir=run", "distributed.cpu_devices=2", own=own)
    done = hosts.finish(processes)
    said = "data.checkpoint_directory: 1 of 2 hosts do not see"
    assert any(said in one.stderr for one in done) and all(one.returncode for one in done), done
