"""Counts what each host of a run asks and tells per start, step, save, resume and emergency copy, with many processes.

    python benchmarks/many_hosts.py --hosts 2 4 8 16

Each host is a process with one virtual device. It does what a run does between hosts, with the run's own functions, but
computes nothing: it joins, agrees on the configuration, opens a corpus in a bucket without reading its rows, agrees at
each step, saves a state of one leaf, keeps an emergency copy, and restores both. The bucket is on loopback, and each
host reaches it through a proxy of its own, which counts the requests. A host counts its calls of jax's key-value store,
the bytes of their texts, barriers, and all-reduces between hosts; heartbeats, which come by the clock, are left out.

For each phase and count a line: host 0, and the mean and the largest of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

REPOSITORY = Path(__file__).parents[1]
STEPS = 5
PLACE = "gs://bucket/work"
CALLS = (
    *("blocking_key_value_get", "key_value_delete", "key_value_dir_get", "key_value_increment", "key_value_set"),
    *("key_value_try_get", "wait_at_barrier", "get_live_nodes"),
)
COUNTS = ("messages", "barriers", "bytes", "all_reduces", "requests", "list", "stat", "read", "write", "delete")


def work(host: int, hosts: int, port: int, mark: Any, folder: Path) -> None:
    """What one host does; `mark` begins a phase."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import zero
    from zero.checkpoints.emergency import EmergencyCheckpoints
    from zero.checkpoints.manager import Checkpoints
    from zero.corpus.format.shards import RowFormat
    from zero.corpus.reading.loader import Batching, Loader
    from zero.hosts import agreement, startup, watchdog
    from zero.hosts.same_configuration import check_same_configuration
    from zero.run.identity import _check_hosts

    def open_corpus() -> None:
        batching = Batching(8 * hosts, (host,), hosts)
        loader = Loader(f"{PLACE}/corpus/it.index", batching, RowFormat(4, 2**16), on_one_host=agreement.on_host_0)
        _check_hosts(loader.contents)

    mark("start")
    keys = {"start_minutes": None, "stall_minutes": None, "join_minutes": 30.0, "compilation_cache": None}
    startup.start(
        1,
        f"127.0.0.1:{port}",
        hosts,
        host,
        overlap_gathers=False,
        **keys,  # type: ignore[arg-type]
    )
    check_same_configuration({f"section.key_{number}": number for number in range(300)}, {})
    agreement.check_shared("data.checkpoint_directory", f"{PLACE}/saved-{hosts}")
    axis = zero.Axis("zero", (1, hosts))
    layout = zero.make_layout({"w": jax.ShapeDtypeStruct((16 * hosts, 4), jnp.float32)}, hosts)
    target = zero.global_shapes(layout, axis)["w"]
    whole = np.arange(64 * hosts, dtype=np.float32).reshape(-1, 4)
    state = {"w": jax.make_array_from_callback(whole.shape, target.sharding, lambda index: whole[index])}
    open_corpus()
    mark("emergency copies at a start")
    copies = EmergencyCheckpoints(folder / f"memory-{host}", f"{PLACE}/saved", list, {}, layout, axis)
    mark("orbax at a start")
    checkpoints = Checkpoints(f"{PLACE}/saved-{hosts}", keep=3)
    mark("step")
    any_host = agreement.AnyHost(lag=1)
    for step in range(STEPS):
        any_host(step, False, False)
    mark("emergency copy")
    parts = zero.from_global(state, layout, axis)
    copies.save(3, parts, {})
    copies._pool.submit(lambda: None).result()
    mark("save")
    checkpoints.save(1, state, layout, {})
    checkpoints.wait()
    mark("second save")
    checkpoints.save(2, state, layout, {})
    checkpoints.wait()
    mark("left out")
    checkpoints.__exit__(None, None, None)
    agreement.wait_for_all()
    mark("resume")
    with Checkpoints(f"{PLACE}/saved-{hosts}", keep=3) as again:
        restored = again.restore(again.choose(None), layout, axis)
        np.testing.assert_array_equal(restored["w"].addressable_shards[0].data, whole[16 * host : 16 * (host + 1)])
        mark("save after a resume")
        again.save(4, state, layout, {})
        again.wait()
    mark("resume from emergency copies")
    assert copies.restore([copies.lineage], after=2) is not None
    mark("left out")
    agreement.wait_for_all()
    watchdog.ending_together()


def run_host(job: dict[str, Any]) -> None:
    """Does the work of one host, and writes what it counts to a file."""
    from jax._src.lib import _jax  # the client's class; it has no public name

    from zero.hosts import agreement

    events = open(job["events"], "w", buffering=1)  # noqa: SIM115 -- open until the process ends
    lock = threading.Lock()

    def note(kind: str, name: str, size: int = 0) -> None:
        with lock:
            events.write(json.dumps([time.monotonic(), kind, name, size]) + "\n")

    def counted(name: str) -> Any:
        call = getattr(_jax.DistributedRuntimeClient, name)

        def counting(client: Any, *values: Any, **options: Any) -> Any:
            answer = call(client, *values, **options)
            key = str(values[0] if values else next(iter(options.values()), ""))
            if not key.startswith("zero/heartbeat"):
                sent = len(str(values[1])) if name == "key_value_set" else 0
                note(name, key, sent + (0 if answer is None else len(str(answer))))
            return answer

        return counting

    def all_reduce() -> Any:
        note("all_reduce", "")
        return sum_parts()

    for name in CALLS:
        setattr(_jax.DistributedRuntimeClient, name, counted(name))
    sum_parts = agreement._sum
    setattr(agreement, "_sum", all_reduce)  # noqa: B010
    work(job["host"], job["hosts"], job["port"], lambda phase: note("mark", phase), Path(job["folder"]))


def run_hosts(jobs: list[dict[str, Any]]) -> None:
    """Runs each host in a process forked from this one, which saves each of them the seconds of imports."""
    import gcsfs  # noqa: F401
    import orbax.checkpoint  # noqa: F401

    import zero.checkpoints.orbax_buckets
    import zero.checkpoints.orbax_commit
    import zero.run.train  # noqa: F401

    numbers = {}
    for host, job in enumerate(jobs):
        number = os.fork()
        if number == 0:
            os.environ.update(job["environment"])
            os.dup2(os.open(job["log"], os.O_WRONLY | os.O_CREAT), 1)
            os.dup2(1, 2)
            run_host(job)
            sys.stdout.flush()
            os._exit(0)
        numbers[number] = host
    statuses = [0] * len(jobs)
    while numbers:
        number, status = os.wait()
        statuses[numbers.pop(number)] = os.waitstatus_to_exitcode(status)
    print(json.dumps(statuses))


@contextmanager
def bucket_with_corpus(folder: Path, shards: int) -> Iterator[str]:
    """The address of a storage server with a corpus of so many shards."""
    import pytest

    from tests.helpers import bucket
    from tests.helpers.shards import write_corpus

    write_corpus(folder / "corpus", [16] * shards)
    with bucket.serving() as address, pytest.MonkeyPatch.context() as patch:
        bucket.use(patch, address)
        bucket.upload(folder / "corpus", f"{PLACE}/corpus")
        yield address


def kind_of_request(method: str, path: str) -> str:
    """What a request to Google's storage does."""
    if method != "GET":
        return {"POST": "write", "PUT": "write", "DELETE": "delete"}.get(method, method)
    if re.search(r"/o\?", path):
        return "list"
    return "read" if "alt=media" in path else "stat"


def counts_of(hosts: int, address: str, folder: Path) -> dict[str, list[Counter[str]]]:
    """For each phase, what each host counts."""
    from tests.helpers.bucket import Proxy, disturbed
    from tests.helpers.hosts import free_port

    port = free_port()
    with ExitStack() as stack:
        proxies: list[Any] = []
        jobs: list[dict[str, Any]] = []
        for host in range(hosts):
            proxies.append(Proxy(address, budget=0))
            url = stack.enter_context(disturbed(proxies[-1]))
            stem = folder / f"{hosts}-{host}"
            jobs.append(
                {
                    "environment": {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url},
                    "log": f"{stem}.log",
                    "events": f"{stem}.events",
                    "folder": str(folder / str(hosts)),
                    "host": host,
                    "hosts": hosts,
                    "port": port,
                }
            )
        done = subprocess.run(
            [sys.executable, __file__, "--run"],
            input=json.dumps(jobs),
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    for job, status in zip(jobs, json.loads(done.stdout.splitlines()[-1]), strict=True):
        if status != 0:
            raise RuntimeError(Path(job["log"]).read_text()[-3000:])
    by_phase: dict[str, list[Counter[str]]] = defaultdict(list)
    for proxy, job in zip(proxies, jobs, strict=True):
        events = [*map(json.loads, Path(job["events"]).read_text().splitlines())]
        for phase, counter in phases(events, proxy.requests).items():
            by_phase[phase].append(counter)
    return by_phase


def phases(events: list[Any], requests: list[tuple[float, str, str]]) -> dict[str, Counter[str]]:
    """What a host counts in each phase; of steps the mean."""
    marks = [(when, name) for when, kind, name, _ in events if kind == "mark"]
    counted: dict[str, Counter[str]] = {name: Counter() for _, name in marks}

    def phase_at(when: float) -> Counter[str]:
        return counted[[name for at, name in marks if at <= when][-1]]

    for when, kind, name, size in events:
        if kind == "mark":
            continue
        counter = phase_at(when)
        counter["messages"] += kind != "all_reduce"
        counter["barriers"] += kind == "wait_at_barrier"
        counter["all_reduces"] += kind == "all_reduce"
        counter["bytes"] += size
        counter[f"{kind} {re.sub('[0-9]+', 'N', name)}"] += 1
    for when, method, path in requests:
        counter = phase_at(when)
        counter["requests"] += 1
        counter[kind_of_request(method, path)] += 1
        counter[f"{method} {re.sub('[0-9a-f]{16,}|[0-9]+', 'N', path)[:120]}"] += 1
    counted["step"] = Counter({name: count / STEPS for name, count in counted["step"].items()})
    return counted


def main() -> None:
    if sys.argv[1:] == ["--run"]:
        run_hosts(json.load(sys.stdin))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--details", action="store_true", help="each key of the store and each kind of request too")
    options = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    folder = Path(tempfile.mkdtemp(prefix="many-hosts-"))
    with bucket_with_corpus(folder, max(options.hosts)) as address:
        for hosts in options.hosts:
            for phase, counters in counts_of(hosts, address, folder).items():
                details = sorted({name for counter in counters for name in counter} - {*COUNTS})
                for name in (*COUNTS, *(details if options.details else [])):
                    first, *others = [counter[name] for counter in counters]
                    if first or any(others):
                        row = (hosts, phase, name, first, round(sum(others) / len(others), 2), max(others))
                        print(*row, sep="\t", flush=True)


if __name__ == "__main__":
    main()
