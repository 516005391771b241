"""A signal at any moment: one line, or a checkpoint and status 75; disturbed runs equal one that was not disturbed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import cli
from zero.record.metrics_file import read_metrics, read_resumes
from zero.record.run_files import saved_steps


@pytest.fixture(scope="module")
def workplace(workplace: Path) -> Path:
    """With a validation set whose evaluation takes a second."""
    index = workplace / cli.INDICES[1]
    lines = []
    for number in range(6):
        for line in index.read_text().splitlines():
            if line.startswith("#"):
                continue
            shard, _, rows = line.partition(" ")
            copy = Path(shard).with_name(f"copy-{number}-{Path(shard).name}")
            shutil.copy(index.parent / shard, index.parent / copy)
            lines.append(f"{copy} {rows}\n")
    index.with_name("long.index").write_text("".join(lines))
    return workplace


@pytest.fixture(scope="module")
def undisturbed(lasting: cli.Lasting) -> Path:
    return lasting.train("undisturbed", *cli.TINY)


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = read_metrics(run / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in cli.CLOCKED} for line in lines]


def signalled(process: subprocess.Popen[str] | cli.Fork, number: int, is_time: Callable[[], bool]) -> Any:
    """What became of a process that got a signal as soon as it was time."""
    while process.poll() is None and not is_time():
        time.sleep(0.01)
    process.send_signal(number)
    return cli.finish(process)


def has_begun(process: subprocess.Popen[str]) -> bool:
    """Whether the program handles signals; before, on a busy machine for long, Python itself starts."""
    mask = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return bool(mask) and bool(int(mask[0], 16) & 1 << signal.SIGTERM - 1)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("start", signal.SIGINT),
        ("imports", signal.SIGTERM),
        pytest.param("imports", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_stop_before_the_first_step(workplace: Path, moment: str, number: int) -> None:
    """A run that is stopped before there is anything to save ends with one line."""
    run = workplace / f"early-{moment}-{number}"
    process = cli.start(workplace, *cli.TINY, "data.wandb_project=zero", f"hydra.run.dir={run.name}")
    # The run directory is made before the modules of training are imported.
    done = signalled(process, number, run.exists if moment == "imports" else lambda: has_begun(process))
    if "Exception ignored in" in done.stderr:
        # An exception in a callback of the garbage collector is lost, aloud: a timer ends the process, amid a bar, or
        # the run begins before and stops as it does for any signal.
        assert done.returncode in (128 + number, 75), done.stderr
        assert ("error: interrupted" if done.returncode != 75 else "step 0 is saved") in done.stderr
        return
    assert done.returncode == 128 + number, done.stderr
    assert done.stderr.endswith("error: interrupted\n")
    assert "Traceback" not in done.stderr


def test_interruption_inside_a_library() -> None:
    """An interruption that a library turned into an error of its own is still an interruption."""
    program = """
import os, signal
from zero.commands.cli import errors_in_lines, interrupt

signal.signal(signal.SIGTERM, interrupt)
with errors_in_lines():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:  # as omegaconf does
        None.flags
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "error: interrupted\n")


SIGNAL_IN_COMPILATION = """
import os, signal, threading
from zero.run import step_programs

def compile_with_signal(*arguments, compile=step_programs.compile_unless_stopped):
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM]).start()
    return compile(*arguments)

step_programs.compile_unless_stopped = compile_with_signal
"""


@pytest.mark.wide
def test_a_compilation_is_not_waited_for(forks: cli.Forks, lasting: cli.Lasting, undisturbed: Path) -> None:
    """Nor are steps lost: the resumed run is the undisturbed one."""
    run = forks.workplace / "compiling"
    with cli.customized(SIGNAL_IN_COMPILATION):
        done = forks.run(*cli.TINY, "hydra.run.dir=compiling", "zero.remat=dots")  # a program that takes seconds
    assert done.returncode == 75, done.stderr
    assert "first step with" not in done.stderr and "step 0 is saved" in done.stderr
    assert saved_steps(run) == [0] and not (run / "metrics.jsonl").exists()
    lasting.check("--resume", "hydra.run.dir=compiling", "zero.remat=auto")
    assert metrics(run) == metrics(undisturbed)


@pytest.mark.slow  # the test above stops during the first compilation
def test_stop_during_a_compilation(forks: cli.Forks) -> None:
    """Steps before a compilation that is not waited for are logged."""
    job = (
        "training.staged_warmup_steps=3",
        "training.warmup_train_context=8",
        "training.log_frequency=100",
        "zero.remat=dots",
    )
    process = forks.start(*cli.TINY, *job, "hydra.run.dir=second_length")
    log = forks.workplace / "second_length" / "main_zero.log"
    while not (log.exists() and log.read_text().count("compiling the step") == 2):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    done = process.finish()
    assert done.returncode == 75 and "step 3 is saved" in done.stderr, done.stderr
    assert re.search(r"first step with .* was compiled\n", done.stderr)
    (line,) = metrics(forks.workplace / "second_length")
    assert (line["step"], line["sequence_length"]) == (3, 8)


@pytest.mark.wide  # test_train_loop.py and tests/run/test_features.py have what is pending after it
def test_stop_during_an_evaluation(forks: cli.Forks, lasting: cli.Lasting) -> None:
    """An evaluation is broken off, and run again after the resume."""
    job = (
        *cli.TINY,
        "data.index_path_validation=corpus/index/long.index",
        "training.maximum_evaluation_steps=100000",
        "training.evaluation_frequency=12",
    )
    long = lasting.train("long", *job)
    run = forks.workplace / "evaluating"
    path = run / "metrics.jsonl"
    process = forks.start(*job, "hydra.run.dir=evaluating")
    done = signalled(process, signal.SIGTERM, lambda: path.exists() and '"step": 11' in path.read_text())
    assert done.returncode == 75 and "step 12 is saved" in done.stderr, done.stderr
    assert "validation/loss" not in metrics(run)[-1]
    lasting.check("--resume", "hydra.run.dir=evaluating")
    assert metrics(run) == metrics(long) and "validation/loss" in metrics(run)[-1]
    assert "nothing to do" in lasting.check("--resume", "hydra.run.dir=evaluating").stderr


@pytest.mark.slow  # the spinning processes take most of it
def test_run_on_busy_cores(forks: cli.Forks, undisturbed: Path) -> None:
    """A run beside spinning processes writes the same.

    Bit for bit: virtual CPU devices used to abort there. Every stage and mode: test_train_on_busy_cores.py.
    """
    run, expected = forks.workplace / "busy", metrics(undisturbed)
    with cli.spinning(1 + (os.cpu_count() or 1), seconds=300) as spinning:
        done = forks.run(*cli.TINY, "hydra.run.dir=busy")
        assert done.returncode == 0 and metrics(run) == expected, done.stderr
        shutil.rmtree(run / "checkpoints" / "12")  # as if the machine had been lost before
        done = forks.run("--resume", "hydra.run.dir=busy")
        assert done.returncode == 0 and metrics(run) == expected, done.stderr
        assert read_resumes(run / "metrics.jsonl") == [6]
        assert [process.poll() for process in spinning] == [None] * len(spinning)  # none had ended early


@pytest.mark.wide  # hosts/test_signals.py has the streams
def test_shutdown_closes_the_log_pipe(workplace: Path) -> None:
    """A machine that shuts down ends the reader of the log first.

    `| tee log` ends at once, the terminal hangs up, and SIGTERM means one stop, not two.
    """
    job = (*cli.TINY, "training.total_steps=4000", "training.evaluation_frequency=4000", "hydra.run.dir=unheard")
    metrics_file = workplace / "unheard" / "metrics.jsonl"
    process = cli.start(workplace, *job)
    while not (metrics_file.exists() and '"step": 8' in metrics_file.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    at = len(read_metrics(metrics_file))
    while len(read_metrics(metrics_file)) < at + 3:  # it goes on
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(900) == 75
    finally:
        process.kill()
    assert saved_steps(workplace / "unheard") == [metrics(workplace / "unheard")[-1]["step"]]


DIVERGING = """
import jax
from zero.run import train as training

def diverging(config, size, make=training.make_job):
    job = make(config, size)
    whole_step = job.programs.step.__wrapped__

    def step(state, batch, frozen):
        state, metrics = whole_step(state, batch, frozen)
        is_bad = (jax.lax.axis_index("zero") == 3) & (state.clock == 7)
        table = state.params["vocabulary"]["table"]
        params = {**state.params, "vocabulary": {"table": table + is_bad * 1e-6}}
        return state._replace(params=params), metrics

    step = jax.pmap(step, "zero", donate_argnums=0, out_axes=(0, None))
    return job._replace(programs=job.programs._replace(step=step))

training.make_job = diverging
"""


@pytest.mark.wide  # partition/test_sharded_state_door.py names the leaf
def test_differing_replicas_stop_the_run(forks: cli.Forks) -> None:
    """Replicas that differ stop the run with the name of the leaf, and are not saved."""
    with cli.customized(DIVERGING):
        job = ("zero.stage=0", "training.maximum_evaluation_steps=0", "hydra.run.dir=diverged")
        done = forks.run(*cli.TINY, *job)
    assert done.returncode == 1, done.stderr  # which launchers repeat
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: step 12: leaves differ") and "params/vocabulary/table" in error
    assert "--resume continues from the previous checkpoint" in error
    assert saved_steps(forks.workplace / "diverged") == [6]


def test_damaged_checkpoint_is_passed_over(lasting: cli.Lasting, undisturbed: Path) -> None:
    """A damaged checkpoint is named and passed over."""
    run = lasting.workplace / "damaged"
    shutil.copytree(undisturbed, run)
    largest = max((run / "checkpoints" / "12").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    done = lasting.run("--resume", "hydra.run.dir=damaged", "data.resume_step=12")
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: checkpoint "), done.stderr
    assert "seconds_to_first_step" in read_metrics(run / "metrics.jsonl")[0]
    done = lasting.check("--resume", "hydra.run.dir=damaged")
    assert f"{run}/checkpoints, step 12" in done.stderr and "trying the previous one" in done.stderr
    assert "resumed from step 6" in done.stderr
    assert metrics(run) == metrics(undisturbed) and saved_steps(run) == [6, 12]
    assert (run / "checkpoints" / "12.damaged").is_dir()
