"""The run as a whole: killed, stopped, resumed, forked, and long. Real processes and real signals."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import zero
from tests.helpers import cli
from zero.checkpoints.manager import Checkpoints
from zero.hosts.signals import stop_requests, unanswered
from zero.job.sizes import load_sizes
from zero.record.metrics_file import read_metrics, read_resumes
from zero.record.run_files import saved_steps
from zero.training.optimizers.optimizer import adamw
from zero.training.sharded_gpt import ShardedGPT
from zero.training.step import state_layout

SIZE = load_sizes()["test"]
LAST = 40
STAGED = ("training.staged_warmup_steps=6", "training.warmup_train_context=8")
JOB = (*cli.TINY, f"training.total_steps={LAST}", "training.evaluation_frequency=20", *STAGED)


@pytest.fixture(scope="module")
def calm(lasting: cli.Lasting) -> Path:
    """A shorter one, of the steps that runs of other files share."""
    return lasting.train("calm", *cli.TINY)


@pytest.fixture(scope="module")
def undisturbed(lasting: cli.Lasting) -> Path:
    """The run that the others are compared with; dropout, two contexts, two micro-batches, stage 3."""
    assert SIZE.dropout > 0
    return lasting.train("undisturbed", *JOB)


def state(run: Path, step: int) -> Any:
    axis = zero.Axis("zero", (1, 8))
    with Checkpoints(run / "checkpoints", None) as checkpoints:
        model = ShardedGPT(SIZE, axis, 3)
        return checkpoints.restore(step, state_layout(model, adamw(0.1, axes=model.axes)), axis)


def assert_same_run(run: Path, expected: Path) -> None:
    """Weights, optimizer, counters and metrics, bit for bit."""
    last = saved_steps(expected)[-1]
    assert saved_steps(run)[-1] == last == cli.metrics(expected)[-1]["step"]
    assert cli.metrics(run) == cli.metrics(expected)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(state(run, last)), jax.tree.leaves(state(expected, last)), strict=True
    ):
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


def interrupt(
    process: subprocess.Popen[str] | cli.Fork, run: Path, step: int, number: int
) -> subprocess.CompletedProcess[str]:
    """Sends a signal as soon as the run has logged a step."""
    while process.poll() is None:
        if (run / "metrics.jsonl").exists() and any(
            line["step"] >= step for line in read_metrics(run / "metrics.jsonl")
        ):
            process.send_signal(number)
            break
        time.sleep(0.005)
    return cli.finish(process, timeout=900)


@pytest.mark.slow
def test_killed_run(workplace: Path, undisturbed: Path) -> None:
    """A run that was killed in the middle ends as one that was not."""
    again = ("--resume=auto", *JOB, "hydra.run.dir=killed", "data.wandb_project=zero")  # what a launcher loops on
    run = workplace / "killed"
    killed = interrupt(cli.start(workplace, *again), run, 23, signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert saved_steps(run) == [20]
    wandb_id = (run / "wandb_run_id").read_text()

    done = cli.run(workplace, *again)
    assert done.returncode == 0, done.stderr
    assert read_resumes(run / "metrics.jsonl") == [20]
    assert_same_run(run, undisturbed)
    assert (run / "wandb_run_id").read_text() == wandb_id
    offline = [path.name for path in (run / "wandb").glob("offline-run-*")]
    assert len(offline) == 2 and all(name.endswith(wandb_id) for name in offline)


@pytest.mark.slow
def test_aborted_run(workplace: Path, undisturbed: Path) -> None:
    """A run that a library aborted ends as one that was not."""
    again = ("--resume=auto", *JOB, "hydra.run.dir=aborted")
    run = workplace / "aborted"
    aborted = interrupt(cli.start(workplace, *again), run, 23, signal.SIGABRT)
    assert aborted.returncode == -signal.SIGABRT, aborted.stderr
    assert saved_steps(run) == [20]

    done = cli.run(workplace, *again)
    assert done.returncode == 0, done.stderr
    assert read_resumes(run / "metrics.jsonl") == [20]
    assert_same_run(run, undisturbed)


def test_stopped_run(lasting: cli.Lasting, calm: Path) -> None:
    """A run that is told to stop saves, and ends after a resume as one that was not stopped."""
    run = lasting.workplace / "stopped"
    job = (*cli.TINY, "data.save_every=3", "hydra.run.dir=stopped")  # the second save waits for the first one
    stopped = interrupt(lasting.start(*job), run, 3, signal.SIGTERM)
    assert stopped.returncode == 75, stopped.stderr
    said = re.search(r"stopped by SIGTERM; step (\d+) is saved; continue with --resume", stopped.stderr)
    assert said is not None and 3 <= int(said[1]) < 12
    assert saved_steps(run)[-1] == int(said[1]) == cli.metrics(run)[-1]["step"]

    lasting.check("--resume", "hydra.run.dir=stopped")  # its configuration is remembered
    assert read_resumes(run / "metrics.jsonl") == [int(said[1])]
    assert_same_run(run, calm)


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.wide
def test_fork_of_a_run(lasting: cli.Lasting, calm: Path) -> None:
    """A fork sees the same samples, leaves the run alone, and is the newest run then."""
    before = contents(calm)
    fork = lasting.fork("calm", 6)
    assert contents(calm) == before
    assert read_resumes(fork / "metrics.jsonl") == [6] and saved_steps(fork) == [12]
    assert_same_run(fork, calm)

    # Checkpoints that lie outside the run directory would be those of the run itself.
    kept = f"data.checkpoint_directory={calm / 'checkpoints'}"
    done = lasting.run("--resume", "hydra.run.dir=calm", "data.resume_step=6", kept)
    assert done.returncode == 2 and "choose another data.checkpoint_directory" in done.stderr.splitlines()[-1]
    # The fork is resumed at its own newest step.
    done = lasting.run("--resume")
    assert done.returncode == 0 and "nothing to do: the run is at step 12 of 12" in done.stderr, done.stderr
    assert f"of this host; {fork}\n" in done.stderr


@pytest.mark.wide  # test_hosts.py continues a run on other devices, test_manager.py restores at other stages
def test_fork_sees_the_same_samples(forks: cli.Forks, undisturbed: Path) -> None:
    """A fork on other devices and at another stage sees the same samples."""
    before = contents(undisturbed)
    runs = forks.workplace / "runs"
    earlier = set(runs.rglob("metrics.jsonl"))
    elsewhere = ("distributed.cpu_devices=2", "zero.stage=1", "training.gradient_accumulation_steps=4")
    forks.check("--resume", "hydra.run.dir=undisturbed", "data.resume_step=20", *elsewhere)
    (fork,) = set(runs.rglob("metrics.jsonl")) - earlier
    assert contents(undisturbed) == before
    assert read_resumes(fork) == [20] and saved_steps(fork.parent) == [40]
    expected = cli.metrics(undisturbed)
    assert cli.metrics(fork.parent)[:20] == expected[:20]
    for got, line in zip(cli.metrics(fork.parent)[20:], expected[20:], strict=True):
        assert got.keys() == line.keys()
        for key, value in line.items():
            np.testing.assert_allclose(got[key], value, rtol=1e-3 if key == "gradient_norm" else 1e-5, err_msg=key)


@pytest.mark.slow
def test_fork_with_copies(forks: cli.Forks, undisturbed: Path) -> None:
    """Copies of the state continue from a state over all devices."""
    run = (
        "hydra.run.dir=undisturbed",
        "data.resume_step=20",
        f"data.checkpoint_directory={forks.workplace / 'copies'}",
    )
    forks.check("--resume", *run, "zero.replicas=2")
    expected = cli.metrics(undisturbed)
    fork = max((forks.workplace / "runs").rglob("metrics.jsonl"), key=lambda path: path.stat().st_mtime).parent
    for got, line in zip(cli.metrics(fork), expected, strict=True):
        np.testing.assert_allclose(got["train/loss"], line["train/loss"], rtol=1e-5)
    done = forks.run("--resume", f"hydra.run.dir={fork}", "zero.replicas=3")
    assert done.returncode == 2 and "zero.replicas=3: expected a divisor of 8" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_tensor_groups_in_every_mode(forks: cli.Forks) -> None:
    """Tensor groups train, evaluate, sample and continue as devices without groups."""
    job = (*cli.TINY, "data.max_context=30", "training.warmup_train_context=6", "training.staged_warmup_steps=2")
    groups = ("zero.tensor_shards=3", "distributed.cpu_devices=6")
    for run, options in (("alone", ()), ("groups", groups), ("stage0", (*groups, "zero.stage=0"))):
        forks.check(*job, *options, "training.sample_tokens=8", f"hydra.run.dir={run}")
    expected = cli.metrics(forks.workplace / "alone")
    for run in ("groups", "stage0"):
        for got, line in zip(cli.metrics(forks.workplace / run), expected, strict=True):
            assert got["train/loss"] == pytest.approx(line["train/loss"], rel=1e-5)
            assert got.get("validation/loss", 0) == pytest.approx(line.get("validation/loss", 0), rel=1e-5)
    found = []
    for run in ("alone", "groups"):
        use = (f"model.model_path={run}",)
        forks.check("mode=evaluate", "evaluate.replicate=false", *use, f"hydra.run.dir={run}/evaluate")
        loss = json.loads((forks.workplace / run / "evaluate" / "evaluation.json").read_text())["loss"]
        text = ("sample.prompt=[a,the]", "sample.tokens=12", "sample.temperature=0", f"hydra.run.dir={run}/sample")
        done = forks.run("mode=sample", "sample.replicate=false", *use, *text)
        found.append((pytest.approx(loss, rel=1e-5), done.stdout))
    assert found[0] == found[1]
    kept = f"data.checkpoint_directory={forks.workplace / 'fork'}"
    again = ("--resume", "hydra.run.dir=groups", "data.resume_step=6", kept, "distributed.cpu_devices=8")
    forks.check(*again, "zero.tensor_shards=1")
    fork = max((forks.workplace / "runs").rglob("metrics.jsonl"), key=lambda path: path.stat().st_mtime).parent
    assert cli.metrics(fork)[-1]["train/loss"] == pytest.approx(expected[-1]["train/loss"], rel=1e-5)
    done = forks.run(*again, "zero.tensor_shards=3")
    assert done.returncode == 2 and "zero.tensor_shards=3: expected a divisor of 8" in done.stderr


@pytest.mark.slow
def test_context_groups_in_every_mode(forks: cli.Forks) -> None:
    """Context groups train, evaluate, sample and continue as devices without groups.

    Also with fewer sequences than devices, and from groups of 4 to groups of 2.
    """
    few = ("training.batch_size=2", "training.gradient_accumulation_steps=1", "distributed.cpu_devices=8")
    job = (*cli.TINY, *few, "data.max_context=32", "training.sample_tokens=8")
    warmup = ("training.warmup_train_context=16", "training.staged_warmup_steps=2")
    alone = (*job, *warmup, "distributed.cpu_devices=2", "hydra.run.dir=context1")
    for run in (alone, (*job, *warmup, "zero.context_shards=4", "hydra.run.dir=context4")):
        forks.check(*run)
    expected, got = (cli.metrics(forks.workplace / run) for run in ("context1", "context4"))
    assert [line["samples_checksum"] for line in got] == [line["samples_checksum"] for line in expected]
    for one, line in zip(got, expected, strict=True):
        assert one["train/loss"] == pytest.approx(line["train/loss"], rel=1e-5)
        assert one.get("validation/loss", 0) == pytest.approx(line.get("validation/loss", 0), rel=1e-5)
    forks.check("mode=evaluate", "model.model_path=context4", "hydra.run.dir=context4/evaluate")
    kept = f"data.checkpoint_directory={forks.workplace / 'context2'}"
    again = ("--resume", "hydra.run.dir=context4", "data.resume_step=6", kept)
    forks.check(*again, "distributed.cpu_devices=4", "zero.context_shards=2")
    fork = max((forks.workplace / "runs").rglob("metrics.jsonl"), key=lambda path: path.stat().st_mtime).parent
    steps = {line["step"]: line["train/loss"] for line in expected}
    shared = [line for line in cli.metrics(fork) if line["step"] in steps]
    assert shared and all(line["train/loss"] == pytest.approx(steps[line["step"]], rel=1e-5) for line in shared)
    done = forks.run(*again, "distributed.cpu_devices=4", "zero.context_shards=3")
    assert done.returncode == 2 and "zero.context_shards=3: expected a divisor of half of the" in done.stderr


LONG = f"""
import sys
import threading
from pathlib import Path
import hydra
from tests.helpers import cli
from tests.config.composing import Only
from zero.models.config import GPTConfig
from zero.config.check import check
from zero.run.train import train

size = GPTConfig(embedding_dim=8, vocab_size=256, num_head=1, block_size=8, dropout=0.1, N=1)
with hydra.initialize_config_dir("{cli.MAIN.parent}/conf", version_base="1.3"):
    config = hydra.compose("config", [*cli.TINY, *sys.argv[1:]])
sys.exit(train(check(config, Only(size)), size, Path.cwd()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("steps", [400, 2000])
def test_more_devices_than_cores(workplace: Path, tmp_path: Path, steps: int) -> None:
    """Many steps run on more devices than cores."""
    arguments = (
        f"training.total_steps={steps}",
        "training.evaluation_frequency=2000",
        "training.log_frequency=100",
        "training.staged_warmup_steps=0",
        "training.batch_size=8",
        "training.gradient_accumulation_steps=1",
        "data.max_context=8",
        f"data.index_path_train={workplace}/{cli.INDICES[0]}",
        f"data.index_path_validation={workplace}/{cli.INDICES[1]}",
    )
    subprocess.run(
        [sys.executable, "-c", LONG, *arguments],
        cwd=tmp_path,
        env=cli.environment() | {"PYTHONPATH": str(cli.MAIN.parent)},
        check=True,
        timeout=900,
    )
    losses = [line["train/loss"] for line in cli.metrics(tmp_path)]
    assert len(losses) == steps // 100 and losses[-1] < losses[0] - 1


def test_lost_exception_of_a_signal() -> None:
    """A signal whose exception was lost is a stop request once there is something to save."""
    timer = threading.Timer(60, lambda: None)
    unanswered.append((signal.SIGTERM, timer))
    with stop_requests() as received:
        assert received == [signal.SIGTERM]
    assert timer.finished.is_set() and not unanswered
    with stop_requests() as received:
        assert received == []


def test_companions_are_no_second_signal() -> None:
    """A machine that shuts down hangs up a terminal and sends SIGTERM, in any order: one stop."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # beneath nohup it is ignored
    for numbers in ((signal.SIGHUP, signal.SIGTERM), (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)):
        with stop_requests() as received:
            for number in numbers:
                os.kill(os.getpid(), number)
            assert received == [*numbers]
    signal.signal(signal.SIGHUP, before)


def test_second_signal_stops_at_once() -> None:
    """A first signal is noted, and a second one stops at once."""
    before = signal.getsignal(signal.SIGTERM)
    with stop_requests() as received:
        assert not received
        os.kill(os.getpid(), signal.SIGINT)
        assert received == [signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) == before
    twice = (
        "with stop_requests(): os.kill(os.getpid(), 2); print('on', flush=True); os.kill(os.getpid(), 15); print('no')"
    )
    program = f"import os; from zero.hosts.signals import stop_requests\n{twice}"
    done = subprocess.run([sys.executable, "-c", program], cwd=cli.MAIN.parent, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "on\n"), done.stderr
