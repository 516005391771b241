# python benchmarks/storm.py [--kills 100] [--steady] [--bucket] [--busy 0] [--seed 0]
# python benchmarks/storm.py --hosts 3 --hours 1 [--bucket]
# python benchmarks/storm.py --effects [--kills 100] [--hosts 2] [--seed 0] [--record storm.jsonl]
# python benchmarks/storm.py --placements [--kills 20] [--seed 0]
#
# A run is started repeatedly with `--resume=auto` and ended at random moments by SIGKILL or SIGTERM, with 1 process
# of 8 devices, 2 of 4, or 1 of 4, at stages 1 to 3. Once it has finished, it is compared with the same run
# undisturbed: the samples (a checksum over all rows in their order) exactly, losses to rounding. With --steady the
# devices stay the same, and all metrics and the state must be the same, bit for bit. With --bucket checkpoints are in
# a storage server behind a proxy that refuses requests at random, and sometimes the run directory is lost as well.
# With --busy N, N processes spin beside it.
#
# With --hosts N there are 1 to N processes, with faults drawn from FAULTS: killed, terminated or stopped, one or all; a
# full disk; a clock that jumps by a day; a host with another configuration, which all have to refuse; and between two
# starts the memory of a host is lost, with its emergency checkpoints. Every other run is in the bucket of --bucket.
#
# With --placements processes are killed whose groups of devices, or copies of the state, lie on several hosts, as often
# for each of PLACEMENTS; each run is compared, bit for bit, with an undisturbed one of the same placement.
#
# In these storms a fault comes at a random moment of the start or, twice as often, after a random number of steps. Each
# start is a line on stderr. Takes about half an hour on two quiet cores.
#
# With --effects short runs on 2 devices are killed before, within or after the first, second or third time that a
# feature writes (tests/helpers/effects.py), in turn on disk, in a bucket, with a teacher and with labelled answers.
# Metrics, samples and checkpoints must be the same, bit for bit, and the page of the report newer than the metrics.
# Each run that passed is a line of --record, and the same command continues after the last one. A kill takes about 5
# seconds of one core, on two hosts 20.
"""A run that is killed a hundred times ends like an undisturbed one."""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.helpers import bucket, cli, effects, hosts
from zero.checkpoints.manager import Checkpoints
from zero.files.appending import append
from zero.files.storage import gcs
from zero.record.metrics_file import read_metrics, read_resumes
from zero.record.run_files import CONFIG_FILE, checkpoint_directory, committed_steps, saved_config, saved_steps

SHAPES = ((1, 8), (2, 4), (1, 4))  # processes, devices of each


@dataclass(frozen=True)
class Placement:
    """Processes, devices of each, and the keys that place groups of devices on them."""

    processes: int
    devices: int
    keys: tuple[str, ...]


SHORT = "data.max_context=24"  # which divides over groups of 3 and 4
PLACEMENTS = {
    "a context group on two hosts": Placement(2, 2, ("zero.context_shards=4", SHORT)),
    "a tensor group on three hosts": Placement(3, 1, ("zero.tensor_shards=3", SHORT)),
    "a copy of the state on each of two hosts, as on slices": Placement(2, 2, ("zero.replicas=2",)),
}
HOSTS_SHAPES = ((1, 2), (2, 1), (3, 1))  # few devices: most of the time goes into starts
STAGES: tuple[int, ...] = (1, 2, 3)
Kills: TypeAlias = Counter[tuple[str, str, str]]
RUNS = {  # of --effects; the last two are on disk
    "bucket": effects.in_bucket,
    "disk": effects.on_disk,
    "teacher": effects.on_teacher,
    "labels": effects.on_labels,
}
TAKEN = "another process trains here"
MOST_KILLS = 12  # of one run, which then ends by itself
GLOBAL_ROWS, HOSTS_ROWS = 16, 12
MOST_SECONDS = 180  # in which all processes have to end after a signal, on a machine that may be busy
REFUSED = 0.05  # of the requests to the bucket
JOB = (
    *cli.TINY,
    "training.peak_learning_rate=1e-3",
    "training.gradient_accumulation_steps=1",
    "training.evaluation_frequency=10",
    "training.total_steps={steps}",
)
SILENT = "has (not responded|sent no heartbeat) for"  # of a host that got no turn on a machine with 30 times its load
WRONG = "training.peak_learning_rate=9"  # of one host
JUMPING_CLOCK = """
import time
began, real = time.time(), time.time
time.time = lambda: real() + 86_400 * (real() > began + 10)
"""


def send(number: signal.Signals) -> Callable[[list[subprocess.Popen[str]]], None]:
    def strike(victims: list[subprocess.Popen[str]]) -> None:
        for victim in victims:
            victim.send_signal(number)

    return strike


def fill_disk(victims: list[subprocess.Popen[str]]) -> None:
    for victim in victims:
        resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))


# Faults at a random moment. The last two exist from the start, and the run is killed as well.
FAULTS: dict[str, Callable[[list[subprocess.Popen[str]]], None]] = {
    "SIGKILL": send(signal.SIGKILL),
    "SIGTERM": send(signal.SIGTERM),
    "SIGSTOP": send(signal.SIGSTOP),
    "full disk": fill_disk,
    "clock": send(signal.SIGKILL),
    "configuration": send(signal.SIGKILL),
}


@dataclass
class Storm:
    """The fault in a run, and how the run ended."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)  # (one of FAULTS, what it hit)
    starts: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # (processes, devices, stage)
    seconds_to_end: dict[str, float] = field(default_factory=dict)  # the most after a signal while it trained
    finished: int = 0  # runs, each equal to the undisturbed one
    resumed: int = 0
    lost_directories: int = 0
    lost_memories: int = 0
    from_memory: int = 0  # resumes from emergency checkpoints
    refused_configurations: int = 0
    false_alarms: int = 0  # starts that ended because a busy machine held a host back
    refused: int = 0


def weather(
    place: Path,
    kills: int,
    steps: int,
    *,
    seed: int = 0,
    is_steady: bool = False,
    is_bucket: bool = False,
    busy: int = 0,
    most_hosts: int | None = None,
    hours: float | None = None,
    placement: Placement | None = None,
) -> Storm:
    """Runs undisturbed, then through a storm of so many kills or hours, and compares.

    With a placement all runs have it, and are equal bit for bit.

    Raises:
      AssertionError: the run lost something.
    """
    rng = random.Random(seed)
    storm = Storm()
    cli.make_workplace(place)
    job = tuple(argument.format(steps=steps) for argument in JOB)
    shapes: tuple[tuple[int, int], ...] = SHAPES
    stages: tuple[int, ...] = STAGES
    rows, faults = GLOBAL_ROWS, tuple(FAULTS)[:2]
    if most_hosts is not None:
        rows, faults, shapes, stages = HOSTS_ROWS, tuple(FAULTS), HOSTS_SHAPES[:most_hosts], STAGES[-1:]
        job += ("zero.emergency_steps=3", f"zero.emergency_directory={place}/memory-0", "distributed.cpu_devices=2")
    if placement is None:
        processes = [cli.start(place, *job, "hydra.run.dir=calm", f"training.batch_size={rows}")]
    else:
        is_steady = True
        rows, faults, shapes = HOSTS_ROWS, ("SIGKILL",), ((placement.processes, placement.devices),)
        job += placement.keys
        count, devices = shapes[0]
        processes = start(place, [*job, "hydra.run.dir=calm"], count, devices, STAGES[-1], rows // count, faults[0])
    calm, _ = finish(processes, [], "SIGKILL", lambda: False)
    assert all(one.returncode == 0 for one in calm), [one.stderr for one in calm]
    with ExitStack() as stack:
        spinning = stack.enter_context(cli.spinning(busy))
        proxy = bucket.Proxy(stack.enter_context(bucket.serving()), sys.maxsize, REFUSED, bucket.REFUSALS)
        address = stack.enter_context(bucket.disturbed(proxy))
        environment = {"STORAGE_EMULATOR_HOST": address, "TENSORSTORE_GCS_HTTP_URL": address}
        stack.enter_context(patch.dict(os.environ, environment))
        gcs.client.cache_clear()  # which an earlier test may have pointed elsewhere
        calm_startup = read_metrics(place / "calm" / "metrics.jsonl")[0]["seconds_to_first_step"]
        startup = {count: count * calm_startup for count, _ in shapes}  # seconds to the first step; followed below
        run, reported, began = place / "stormy0", 0, time.monotonic()
        while True:
            in_bucket = is_bucket or (most_hosts is not None and storm.finished % 2 == 1)
            count, devices = shapes[0] if is_steady else rng.choice(shapes)
            stage = 3 if is_steady else rng.choice(stages)
            fault = rng.choice(faults)
            victims = rng.choice((list(range(count)), [rng.randrange(count)]))
            is_over = storm.kills.total() >= kills if hours is None else time.monotonic() > began + 3600 * hours
            is_due = moment(rng, run, startup[count], min(steps // 2, max(12, steps // 5)))
            if is_over:
                fault, is_due = "SIGKILL", lambda: False
            storm.starts[count, devices, stage] += 1
            own = [*job, *(bucket_arguments(place, run) if in_bucket else ()), f"hydra.run.dir={run.name}"]
            processes = start(place, own, count, devices, stage, rows // count, fault)
            done, seconds = finish(processes, victims, fault, is_due)
            hit = phase(done[0].stderr)
            false_alarm = seconds is None and any(re.search(SILENT, one.stderr) for one in done)
            storm.false_alarms += false_alarm
            for one in () if false_alarm else done:
                check_end(one, fault if seconds is not None or fault == "configuration" else None, hit)
            storm.from_memory += any("resumed from the emergency checkpoint" in one.stderr for one in done)
            is_refused = any("all hosts need the same" in one.stderr for one in done)
            storm.refused_configurations += is_refused
            first = re.search(r"first step with sequences of \d+ tokens: ([\d.]+) s after the start", done[0].stderr)
            if first:
                startup[count] = float(first[1])
            if seconds is not None or is_refused:
                storm.kills[fault, "refused" if is_refused else hit] += 1
            if seconds is not None and hit == "training" and fault != "full disk":  # which is met at the next save
                assert seconds < MOST_SECONDS, [one.stderr[-3000:] for one in done]
                storm.seconds_to_end[fault] = max(storm.seconds_to_end.get(fault, 0.0), seconds)
            struck = f"{fault} of {victims} while {hit}" if seconds is not None or is_refused else "no fault"
            struck = "a false alarm" if false_alarm else struck
            what = f"{run.name}{' in the bucket' * in_bucket}, {count} x {devices} devices, stage {stage}: {struck}"
            status = [one.returncode for one in done]
            print(
                f"{storm.kills.total():3} {what}; status {status}, {steps_of(run)} lines", file=sys.stderr, flush=True
            )
            # A checkpoint that was reported as saved exists, or a newer one.
            said = [
                int(step) for one in done for step in re.findall(r"(?:checkpoint|step) (\d+)(?: is)? saved", one.stderr)
            ]
            reported = max([reported, *said])
            if (
                reported and (run / CONFIG_FILE).exists()
            ):  # else it was lost, and this start was killed before it was back
                assert saved_steps(run)[-1:] >= [reported], (reported, done)
            if all(one.returncode == 0 for one in done):
                with undisturbed(proxy):
                    compare(run, place / "calm", is_steady)
                storm.resumed += len(read_resumes(run / "metrics.jsonl"))
                storm.finished += 1
                if is_over:
                    break
                run, reported = place / f"stormy{storm.finished}", 0
            elif most_hosts is not None and rng.random() < 0.3:
                shutil.rmtree(place / f"memory-{rng.randrange(most_hosts)}", ignore_errors=True)
                storm.lost_memories += 1
            elif in_bucket and rng.random() < 0.2:
                shutil.rmtree(run, ignore_errors=True)
                storm.lost_directories += 1
        storm.refused = proxy.injected.total()
        assert all(process.poll() is None for process in spinning)
    return storm


def storm_of_effects(place: Path, kills: int, record: Path, *, seed: int = 0, count: int = 1) -> Kills:
    """Kills each run of `RUNS` in turn, at random moments while it writes.

    Args:
      record: a line for each run that has ended as the undisturbed one: its number and its kills. What it says of
        earlier storms with this seed and these hosts counts, and the runs go on from there.

    Returns:
      The kills by feature, moment and run.

    Raises:
      AssertionError: a run lost something, or ended otherwise than by its kill or as finished.
    """
    earlier = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    struck: Kills = Counter()
    number = 0
    for run_of in (line for line in earlier if (line["seed"], line["hosts"]) == (seed, count)):
        number = run_of["run"]
        struck.update(tuple(kill) for kill in run_of["kills"])
    with ExitStack() as all_calm:

        @cache
        def calm_run(kind: str) -> effects.Run:
            """The undisturbed run of a kind: in the bucket a run computes what it does on disk."""
            if kind == "bucket":
                return calm_run("disk")
            calm = all_calm.enter_context(RUNS[kind](place / f"calm-{kind}", count))
            calm.finish()
            if has_others(kind, count):
                followed = cli.finish(calm.follow(), effects.MOST_SECONDS)
                assert followed.returncode == 0, followed.stderr
            return calm

        while struck.total() < kills:
            number += 1
            kind = list(RUNS)[number % len(RUNS)]
            calm = calm_run(kind)  # before a bucket takes its place in the environment
            with RUNS[kind](place / str(number), count) as run, ExitStack() as stack:
                rng = random.Random(f"{seed}-{count}-{number}")
                beside = Beside(run, rng) if has_others(kind, count) else None
                if beside is not None:
                    stack.callback(beside.close)
                features = killed_at_random(run, rng, beside)
                if beside is not None:
                    beside.end_other_trainer()
                run.finish()  # which has nothing to do where it was finished
                if beside is not None:
                    features += beside.finish()
                    run.check_beside(calm)
                run.check(calm)
            shutil.rmtree(place / str(number))
            kills_of_run = [(feature, moment, kind) for feature, moment in features]
            struck.update(kills_of_run)
            line = {"seed": seed, "hosts": count, "run": number, "kills": kills_of_run}
            append(record, json.dumps(line).encode() + b"\n")
            print(f"{struck.total():3} run {number}, {kind}: {len(features)}", file=sys.stderr, flush=True)
    return struck


def has_others(kind: str, count: int) -> bool:
    """Whether others read and write beside a run."""
    return count == 1 and kind in ("disk", "bucket")


class Beside:
    """What others do beside a run: they read its checkpoints, or would write some, while it trains and is killed."""

    def __init__(self, run: effects.Run, rng: random.Random) -> None:
        self._run = run
        self._rng = rng
        self._struck: list[tuple[str, str]] = []
        self._other: cli.Fork | None = None
        self._follow()

    def _follow(self) -> None:
        """Starts a follower that is killed at its next line, or, one of three, that is not."""
        of_follower = [effect for effect in effects.BESIDE if effect.feature == "follow"]
        in_bucket = self._run.proxy is not None  # where requests are struck, and those of the run already are
        self._effect = None if in_bucket else self._rng.choice([*of_follower, None])
        self._follower = self._run.follow(self._effect)

    def act(self) -> None:
        """Between two starts of the run: follows again, averages, or has another trainer begin."""
        self.end_other_trainer()
        if self._follower.poll() is not None:
            self._after_end()
            self._follow()
        if committed_steps(self._run.place) and self._rng.random() < 0.3:
            effect = self._rng.choice([effect for effect in effects.BESIDE if effect.feature == "average"])
            done = self._run.average(effect)
            assert done.returncode == -signal.SIGKILL, done.stderr
            self._struck.append((effect.feature, effect.moment))
        if self._run.proxy is None and self._rng.random() < 0.3:
            self._other = self._run.other_trainer()

    def end_other_trainer(self) -> None:
        """Waits until the other trainer was refused or, if the run did not live meanwhile, was killed."""
        if self._other is None:
            return
        done = cli.finish(self._other, effects.MOST_SECONDS)
        self._other = None
        if done.returncode == -signal.SIGKILL:
            self._struck.append((effects.OTHER_TRAINER.feature, effects.OTHER_TRAINER.moment))
        else:
            assert done.returncode == 2 and TAKEN in done.stderr, done.stderr

    def close(self) -> None:
        """Ends what still lives, where the storm has found something."""
        for process in (self._follower, self._other):
            if process is not None:
                process.kill()
                process.finish()

    def _after_end(self) -> None:
        """Of a follower that was killed, or has scored all checkpoints of a run that was killed after its last step."""
        done = self._follower.finish()
        if done.returncode == 0:
            assert "the run has ended" in done.stderr, done.stderr
            return
        assert self._effect is not None and done.returncode == -signal.SIGKILL, done.stderr
        self._struck.append((self._effect.feature, self._effect.moment))

    def finish(self) -> list[tuple[str, str]]:
        """Has a follower score what is left, once the run has ended; what was killed beside the run."""
        while cli.finish(self._follower, effects.MOST_SECONDS).returncode != 0:
            self._after_end()
            self._effect = None
            self._follower = self._run.follow()
        return self._struck


def killed_at_random(run: effects.Run, rng: random.Random, beside: Beside | None = None) -> list[tuple[str, str]]:
    """Kills a run until it has finished, or `MOST_KILLS` times; the feature and moment of each."""
    struck: list[tuple[str, str]] = []
    while len(struck) < MOST_KILLS:
        if beside is not None:
            beside.act()
        is_start = not struck and bool(run.effects_of_start) and rng.random() < 0.5
        effect = rng.choice(run.effects_of_start if is_start else run.effects)
        nth = 1 if is_start else rng.choice((1, 1, 2, 3))
        victims = run.count if effect.feature == "protect" else 1  # host 0 writes all else
        done = run.attempt(effect, nth, rng.randrange(victims))
        if done.returncode == 0:
            break
        if beside is not None and done.returncode == 2 and TAKEN in done.stderr:
            continue  # the other trainer came first
        assert done.returncode == -signal.SIGKILL, (effect, nth, done.stderr)
        struck.append((effect.feature, effect.moment))
    return struck


def moment(rng: random.Random, run: Path, startup: float, most_steps: int) -> Callable[[], bool]:
    """Whether a random moment of the start has come, or twice as often a random number of steps is done."""
    until = time.monotonic() + rng.uniform(0, startup)
    steps = rng.randint(1, most_steps) + steps_of(run)
    return rng.choice([lambda: time.monotonic() > until, *[lambda: steps_of(run) >= steps] * 2])


def steps_of(run: Path) -> int:
    """The lines of metrics of a run: one per step and one per resume."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def bucket_arguments(place: Path, run: Path) -> tuple[str, ...]:
    """For a run whose checkpoints are in the bucket, where indices are not looked for."""
    train, validation = (place / path for path in cli.INDICES)
    indices = f"data.index_path_train={train}", f"data.index_path_validation={validation}"
    return f"data.bucket_path={bucket.BUCKET}", f"data.checkpoint_directory={run.name}", *indices


@contextmanager
def undisturbed(proxy: bucket.Proxy) -> Iterator[None]:
    """Stops refusing requests within: reading a state leaf by leaf would repeat hundreds of them."""
    proxy.rate, rate = 0.0, proxy.rate
    yield
    proxy.rate = rate


def start(
    place: Path, job: list[str], count: int, devices: int, stage: int, batch_size: int, fault: str
) -> list[subprocess.Popen[str]]:
    """The processes of one start, as a launcher makes them: the same line every time."""
    arguments = cli.later_values(
        "--resume=auto", *job, f"zero.stage={stage}",
        f"distributed.cpu_devices={devices}", f"training.batch_size={batch_size}",
    )  # fmt: skip
    own: dict[int, list[str]] = {host: [] for host in range(count)}
    if any(argument.startswith("zero.emergency_steps=") for argument in job):
        own = {host: [f"zero.emergency_directory={place}/memory-{host}"] for host in range(count)}
    if fault == "configuration" and count > 1:
        own[count - 1].append(WRONG)
    with cli.customized(JUMPING_CLOCK if fault == "clock" else ""):
        if count == 1:
            return [cli.start(place, *cli.later_values(*arguments, *own[0]))]
        return hosts.start([place] * count, *arguments, own=own)


def finish(
    processes: list[subprocess.Popen[str]], victims: list[int], fault: str, is_due: Callable[[], bool]
) -> tuple[list[subprocess.CompletedProcess[str]], float | None]:
    """Strikes after a while, and gives what came of all processes and how many seconds after it the last ended.

    Where a host is gone before the others have met it they would wait for it for minutes: these are killed, as a
    launcher does.
    """
    outputs = [ThreadPoolExecutor(1).submit(cli.finish, process, 1200) for process in processes]
    try:
        while not is_due() and not wait(outputs, timeout=0.05, return_when=FIRST_COMPLETED).done:
            pass
        sent = None
        if not any(output.done() for output in outputs):
            sent = time.monotonic()
            FAULTS[fault]([processes[victim] for victim in victims])
            stopped = victims if fault == "SIGSTOP" else []  # they end no more by themselves
            wait([output for host, output in enumerate(outputs) if host not in stopped], timeout=MOST_SECONDS)
            sent = time.monotonic() - sent
        else:
            wait(outputs, timeout=MOST_SECONDS)
    finally:
        for process in processes:
            process.kill()
    return [output.result() for output in outputs], sent


def check_end(done: subprocess.CompletedProcess[str], fault: str | None, hit: str) -> None:
    """Raises AssertionError where a process ended in a way that it should not, given the fault and what it hit."""
    expected = {0}
    if fault is not None:
        expected |= {75}
        if fault == "SIGTERM" and "finished at step" in done.stderr:  # in the last second, with all saved
            expected |= {128 + signal.SIGTERM}
        elif fault != "SIGTERM" or hit != "training":  # before there was anything to save; after another host
            expected |= {-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM, 1, -signal.SIGABRT}
    if "all hosts need the same" in done.stderr:
        expected = {2, -signal.SIGKILL}
    end = f"status {done.returncode}\n" + "\n".join(done.stderr.splitlines()[-30:])
    assert done.returncode in expected, end
    if done.returncode == 1:
        assert "this host exits too" in done.stderr or "File too large" in done.stderr, end


def phase(errors: str) -> str:
    """The phase in which a process ended, by its output."""
    if "first step with" in errors:
        return "training"
    return "compiling" if "of this host; " in errors else "starting"


def compare(stormy: Path, calm: Path, is_steady: bool) -> None:
    """Raises AssertionError where a run does not end as the other one did."""
    got, expected = ([strip(line) for line in read_metrics(run / "metrics.jsonl")] for run in (stormy, calm))
    if is_steady:
        assert got == expected
        for one, other in zip(leaves(stormy), leaves(calm), strict=True):
            np.testing.assert_array_equal(one, other)
    for key in ("step", "samples_checksum", "tokens_seen", "learning_rate", "skipped_steps"):
        assert [line[key] for line in got] == [line[key] for line in expected], key
    for key in ("train/loss", "validation/loss"):
        one, other = (np.asarray([line.get(key, np.nan) for line in lines]) for lines in (got, expected))
        np.testing.assert_allclose(one, other, rtol=1e-3, err_msg=key)


def strip(line: dict[str, Any]) -> dict[str, Any]:
    """Without what a clock measured."""
    return {key: value for key, value in line.items() if key not in cli.CLOCKED}


def leaves(run: Path) -> list[np.ndarray]:
    """The last state of a run, whole."""
    step = saved_steps(run)[-1]
    data = saved_config(run).data
    with Checkpoints(checkpoint_directory(run, data.bucket_path, data.checkpoint_directory), None) as checkpoints:
        return [checkpoints.read(step, name) for name in checkpoints.meta(step)["shapes"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--hosts", type=int, choices=(2, 3))
    parser.add_argument("--hours", type=float)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--effects", action="store_true")
    parser.add_argument("--placements", action="store_true")
    parser.add_argument("--record", type=Path, default=Path("storm.jsonl"))
    parser.add_argument("--steady", action="store_true")
    parser.add_argument("--bucket", action="store_true")
    parser.add_argument("--busy", type=int, default=0)
    given = parser.parse_args()
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)  # of each file that is not there
    with tempfile.TemporaryDirectory() as place:
        if given.effects:
            print(storm_of_effects(Path(place), given.kills, given.record, seed=given.seed, count=given.hosts or 1))
            return
        if given.placements:
            for number, (name, placement) in enumerate(PLACEMENTS.items()):
                kills = given.kills // len(PLACEMENTS)
                storm = weather(Path(place, str(number)), kills, given.steps, seed=given.seed, placement=placement)
                print(f"{name}: {storm}", flush=True)
            return
        storm = weather(
            Path(place),
            given.kills,
            given.steps,
            seed=given.seed,
            is_steady=given.steady,
            is_bucket=given.bucket,
            busy=given.busy,
            most_hosts=given.hosts,
            hours=given.hours,
        )
    print(storm)


if __name__ == "__main__":
    main()
