"""Measures how the work of a run grows with each of its sizes, at n, 2n, 4n and 8n.

    python benchmarks/growth.py
    python benchmarks/growth.py --hosts 8 32 128 --devices 256 2048 16384
    python benchmarks/growth.py --compile v5e-8 v5e-64 v5e-256 4xv5e-256 8xv5e-256

First form: the table of `GROWTHS`. Each entry counts something that no load of the machine changes (calls of Python,
requests to a bucket, lines of a program) and should be flat or grow with n; the CPU seconds and the peak of Python's
memory stand beside it. `tests/benchmarks/test_growth.py` compares the counts.

Second form: what hosts tell each other by jax's key-value store, with clients in one process: equal texts once, and
different ones by one question to the store and by one per host; and the layout, the axis and the places of rows of a
Llama 3.1 405B in float32 on so many devices, four of them on a host. Third form: the compiler's time for a small step
on slices of several sizes. Seconds are of the CPU; those of the store are of all clients together.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.setdefault("JAX_PLATFORMS", "cpu")

DEVICES_OF_HOST = 4
LARGEST: dict[str, Any] = {"embedding_dim": 16384, "num_head": 128, "N": 126, "mlp_dim": 53248}  # Llama 3.1 405B
TEXT = "x" * 64
TIMEOUT = 600_000  # milliseconds


SHARDS_OF_FOLDER = 4


class Growth(NamedTuple):
    """Something that grows with a size of a run.

    Attributes:
      of: the size.
      what: the work.
      smallest: n.
      prepare: from the size to the work. It returns its count, unless the unit is calls.
      most: how much the count may grow from n to 8n: 1 is flat, 8 grows with n.
      unit: of the count.
    """

    of: str
    what: str
    smallest: int
    prepare: Callable[[int], Callable[[], Any]]
    most: float
    unit: str = "calls"


def calls_of(work: Callable[[], Any]) -> int:
    """The calls of functions during some work, in Python and in C."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


class CountedBucket:
    """A bucket in memory that counts its requests, in place of Google's."""

    def __init__(self, objects: dict[str, bytes]):
        self.objects = objects
        self.requests: Counter[str] = Counter()

    def stat(self, url: str | Path) -> Any:
        from zero.files.storage.objects import ObjectStat

        self.requests["stat"] += 1
        if str(url) not in self.objects:
            raise FileNotFoundError(url)
        return ObjectStat(len(self.objects[str(url)]), 1, None)

    def list_stats(self, directory: str | Path, is_deep: bool) -> dict[str, Any]:
        from zero.files.storage.objects import ObjectStat

        below = [url for url in self.objects if url.startswith(f"{directory}/")]
        found = [url for url in below if is_deep or "/" not in url.removeprefix(f"{directory}/")]
        self.requests["list"] += max(1, -(-len(found) // 1000))  # pages of a thousand objects
        return {url: ObjectStat(len(self.objects[url]), 1, None) for url in found}

    def read(self, url: str | Path, known: Any) -> bytes:
        self.requests["read"] += 1
        return self.objects[str(url)]


def requests_of_start(folders: int, hosts: int) -> int:
    """The requests to a bucket of all hosts that open a corpus, up to its first batch."""
    from zero.corpus.format.shards import RowFormat
    from zero.corpus.reading.loader import Batching, Loader
    from zero.files.storage.stores import STORES

    shards = [f"gs://bucket/corpus/{i}/{j}.tar" for i in range(folders) for j in range(SHARDS_OF_FOLDER)]
    bucket = CountedBucket(dict.fromkeys(shards, b""))
    bucket.objects["gs://bucket/index/a.index"] = "\n".join(f"{shard} # 256 rows" for shard in shards).encode()
    answers: dict[str, Any] = {}

    def first(name: str, look: Callable[[], Any], /) -> Any:
        answers[name] = look()
        return answers[name]

    def other(name: str, look: Callable[[], Any], /) -> Any:
        return answers[name]

    google = STORES["gs"]
    STORES["gs"] = bucket  # type: ignore[assignment]
    try:
        for host in range(hosts):
            batching = Batching(8 * hosts, (host,), hosts)
            on_one_host = other if host else first
            Loader("gs://bucket/index/a.index", batching, RowFormat(8, 9), on_one_host=on_one_host).identity  # noqa: B018
    finally:
        STORES["gs"] = google
    return bucket.requests.total()


def requests_of_columns(hosts: int) -> int:
    """The requests to a bucket of all hosts that find a reference's values and check a teacher's, of as many folders.

    Each host lists no folder, or the requests are the square of the hosts.
    """
    import numpy as np

    from zero.corpus.format.index_files import read_index
    from zero.corpus.reading.contents import contents_of
    from zero.files.storage.stores import STORES
    from zero.hosts import agreement
    from zero.run import reference, teacher

    shards = [f"gs://bucket/corpus/{i}/0.tar" for i in range(hosts)]
    index = "gs://bucket/index/a.index"
    text = "".join(f"{shard} # 2 rows\n" for shard in shards)
    bucket = CountedBucket(dict.fromkeys(shards, b"") | {index: text.encode()})
    position: Any = SimpleNamespace(base={"checksum": 1}, global_rows=2)
    inputs: Any = SimpleNamespace(scores={})
    job: Any = SimpleNamespace(model=None, objective=SimpleNamespace(example=SimpleNamespace(texts=2)))

    def work() -> None:
        reference._index_values(index, inputs, job, position, None)
        teacher._check(index, described, 4, 2, 300)

    google = STORES["gs"]
    STORES["gs"] = bucket  # type: ignore[assignment]
    try:
        with (
            patch.object(reference, "score_identity", lambda scores, model: {}),
            patch.object(agreement, "sum_over_hosts", lambda *numbers: [*numbers]),
        ):
            listed = read_index(index)
            contents = [*contents_of(listed)]
            described: Any = SimpleNamespace(contents=contents, positions=4, count=2, largest=0)
            path = reference._place(index, listed, inputs, job, position)
            bucket.objects[path] = reference._encoded(np.zeros((2 * hosts, 2), np.float32))
            bucket.requests.clear()
            on_hosts(hosts, work)
    finally:
        STORES["gs"] = google
    return bucket.requests.total()


def told_of_emergency_copies(hosts: int) -> int:
    """The bytes that the store sends to each host that looks for emergency checkpoints; one has lost its own."""
    from zero.checkpoints.emergency import Emergency, find_whole

    texts: dict[str, set[str]] = {}
    told = [0] * hosts
    found: list[dict[int, int]] = [{}] * hosts
    barrier = threading.Barrier(hosts)

    def look(host: int) -> None:
        def union(name: str, mine: Iterable[str]) -> set[str]:
            texts.setdefault(name, set()).update(mine)
            barrier.wait()
            told[host] += sum(map(len, texts[name]))
            return texts[name]

        on_disk = {(Emergency("0123456789abcdef", step), owner) for step in (5, 6) for owner in (host, host - 1)}
        held = {(checkpoint, owner % hosts) for checkpoint, owner in on_disk if host != 1}
        found[host] = {checkpoint.step: holder for checkpoint, holder in find_whole(held, host, union).items()}

    on_all([None] * hosts, lambda host, _: look(host))
    assert found == [dict.fromkeys((5, 6), host + (host == 1)) for host in range(hosts)]
    assert min(told) == max(told)
    return told[0]


def first_ranges(shards: int) -> Callable[[], None]:
    from zero.corpus.reading.order import Order

    order = Order((256,) * shards, 16, 1, 0, None)

    def work() -> None:
        for stream in range(16):
            buffer = next(order.buffers(stream, 0))
            assert order.first_rows[buffer.ranges[0].shard] % 256 == 0

    return work


def opened_index(shards: int) -> Callable[[], Any]:
    from zero.corpus.format.index_files import read_index
    from zero.corpus.preparing.corpus_files import index_text

    folder = Path(tempfile.mkdtemp())
    names = [f"{number}.tar" for number in range(shards)]
    for name in names:
        (folder / name).touch()
    index = folder / "a.index"
    listed = [{"name": name, "rows": 256} for name in names]
    index.write_bytes(index_text(str(index), str(folder), "train", {"tokens": 0, "documents": 0, "shards": listed}))
    return lambda: read_index(index)


def mixed_rows(corpora: int) -> Callable[[], Any]:
    from zero.corpus.reading.order import Mixture, exact_weights

    mixture = Mixture(exact_weights([number / (corpora * (corpora + 1) / 2) for number in range(1, corpora + 1)]), 16)
    mixture.counts(0, 0)
    return lambda: mixture.counts(3, 10**6, 64)


def far_rows(millions: int) -> Callable[[], None]:
    from zero.corpus.reading.order import Mixture, Order, exact_weights

    mixture = Mixture(exact_weights([0.58565179, 0.28421973, 0.13012848]), 16)
    mixture.counts(0, 0)
    order = Order((256,) * 64, 16, 1, None, None)

    def work() -> None:
        mixture.counts(3, millions * 10**6, 64)
        next(order.buffers(3, millions * 1024))  # whole epochs

    return work


def layout_of(layers: int, devices: int, vocabulary: int) -> Callable[[], None]:
    from zero.job.sizes import load_sizes
    from zero.partition.collectives.axis import Axis
    from zero.training.sharded_gpt import ShardedGPT

    def work() -> None:
        size = dataclasses.replace(load_sizes()["bytes"], N=layers, vocab_size=vocabulary)
        assert ShardedGPT(size, Axis("zero", (1, devices)), 3).layout.shards == devices

    work()
    return work


def groups_of(devices: int) -> Callable[[], int]:
    from zero.partition.collectives.axis import Axis

    return lambda: sum(len(group) for group in Axis("zero", (2, devices // 2)).groups(devices // 2) or ())


def lines_of_update(leaves: int) -> Callable[[], int]:
    """The lines of the traced program of a sharded update."""
    import jax
    import jax.numpy as jnp
    import optax

    import zero

    tx = zero.shard_optimizer(optax.adamw(1e-3), "batch")
    params = {f"{number:05}": jnp.zeros((8, 3)) for number in range(leaves)}

    def update(grads: Any) -> Any:
        return tx.update(zero.local(grads), tx.init(params), params)[0]

    return lambda: len(str(jax.make_jaxpr(update, axis_env=[("batch", 8)])(params)).splitlines())


def kept_checkpoints(checkpoints: int) -> Callable[[], Any]:
    from zero.checkpoints.retention import Retention, Saved

    saved = {step: Saved(1 / (1 + step), 60.0 * step) for step in range(checkpoints)}
    retention = Retention(3, every=1, saved=lambda: saved)
    infos = [SimpleNamespace(step=step) for step in saved]
    return lambda: retention.should_preserve(infos, context=None)


def metrics_of(lines: int) -> Callable[[], Any]:
    """A report's look at a run of so many lines of 30 metrics."""
    from zero.record.history import read_history

    path = Path(tempfile.mkdtemp(), "metrics.jsonl")
    names = [f"train/metric_{number}" for number in range(29)]
    with path.open("w") as file:
        for step in range(1, lines + 1):
            file.write(json.dumps({"step": step} | {name: step / (1 + len(name)) for name in names}) + "\n")
    return lambda: read_history(path)


def runs_of(count: int) -> Callable[[], Any]:
    """What `--resume` reads among so many runs of a checkpoint each."""
    from zero.record.run_files import CONFIG_FILE, LAYOUT_FILE
    from zero.record.starts import note_start, start_now
    from zero.run.find_run import newest_run

    root = Path(tempfile.mkdtemp())
    runs = [root / f"2026-01-01/{number}" for number in range(count)]
    for run in runs:
        (run / "checkpoints/8").mkdir(parents=True)
        (run / CONFIG_FILE).write_text("data:\n  checkpoint_directory: checkpoints\n  bucket_path: null\n")
        (run / LAYOUT_FILE).touch()
        note_start(run, start_now(0), [])
    note_start(runs[0], start_now(0), [runs[0]])

    def look() -> None:
        assert newest_run(root) == runs[0]

    return look


class CountedStore:
    """A host's client of jax's key-value store, which counts requests and answers. The texts are those of all hosts."""

    def __init__(self, texts: dict[str, str]):
        self.texts = texts
        self.requests = 0
        self.told = 0  # bytes

    def key_value_set(self, key: str, text: str, allow_overwrite: bool = False) -> None:
        self.requests += 1
        self.texts[key] = text

    def wait_at_barrier(self, name: str, milliseconds: int) -> None:
        self.requests += 1

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        self.requests += 1
        self.told += len(self.texts[key])
        return self.texts[key]

    def key_value_dir_get(self, directory: str) -> list[tuple[str, str]]:
        self.requests += 1
        found = [(key, text) for key, text in self.texts.items() if key.startswith(directory)]
        self.told += sum(len(key) + len(text) for key, text in found)
        return found


def on_hosts(hosts: int, work: Callable[[], None]) -> CountedStore:
    """The store after each host has done some work, host 0 first."""
    import jax

    from zero.hosts import agreement

    client = CountedStore({})
    with (
        patch.object(jax, "process_count", lambda: hosts),
        patch.object(agreement, "coordination_client", lambda: client),
    ):
        for host in range(hosts):
            agreement._calls.clear()
            with patch.object(jax, "process_index", lambda host=host: host):
                work()
    return client


def agree_at_start() -> None:
    """What hosts tell each other through the store before their first step, if they agree."""
    from zero.hosts import agreement
    from zero.hosts.same_configuration import check_same_configuration

    check_same_configuration({f"section.key_{number}": TEXT for number in range(100)}, {})
    agreement.check_shared("data.checkpoint_directory", "gs://bucket/checkpoints")
    assert agreement.reports("contents of the data", None) == {}
    assert agreement.left_by_hosts("peers", TEXT)(0) == TEXT


GROWTHS = (
    Growth(
        "hosts",
        "requests of all hosts to open a corpus of 8 folders",
        4,
        lambda n: lambda: requests_of_start(8, n),
        8,
        "requests",
    ),
    Growth(
        "folders", "requests of 4 hosts to open a corpus", 8, lambda n: lambda: requests_of_start(n, 4), 8, "requests"
    ),
    Growth(
        "hosts", "told to each about emergency copies", 8, lambda n: lambda: told_of_emergency_copies(n), 1.1, "bytes"
    ),
    Growth("shards", "an index file on a disk", 250, opened_index, 8),
    Growth("shards", "the first shuffle buffers of 16 streams", 10_000, first_ranges, 1.05),
    Growth("corpora", "the corpora of 64 rows", 4, mixed_rows, 8.5),
    Growth("rows", "a position after n million rows", 1000, far_rows, 1.05),
    Growth("layers", "the layout of a model", 8, lambda n: layout_of(n, 64, 512), 1.05),
    Growth("vocabulary", "the layout of a model", 512, lambda n: layout_of(8, 64, n), 1.05),
    Growth("devices", "the layout of a model", 64, lambda n: layout_of(8, n, 512), 1.05),
    Growth("devices", "the groups of an axis in two copies", 64, groups_of, 8, "members"),
    Growth("leaves", "the update of shard_optimizer(adamw)", 64, lines_of_update, 8, "lines"),
    Growth("checkpoints", "which of them are kept", 1000, kept_checkpoints, 8),
    Growth("steps", "a report's look at the metrics", 1000, metrics_of, 8.5),
    Growth("runs", "the newest of them, for --resume", 16, runs_of, 8.5),
    Growth(
        "hosts and folders", "requests of all for columns", 4, lambda n: lambda: requests_of_columns(n), 8, "requests"
    ),
    Growth(
        "hosts", "agreement of all at a start", 8, lambda n: lambda: on_hosts(n, agree_at_start).requests, 8, "messages"
    ),
    Growth("hosts", "the same", 8, lambda n: lambda: on_hosts(n, agree_at_start).told, 8, "bytes"),
)


def counts(growth: Growth) -> list[int]:
    """The counts at n, 2n, 4n and 8n."""
    found = []
    for factor in (1, 2, 4, 8):
        work = growth.prepare(growth.smallest * factor)
        found.append(calls_of(work) if growth.unit == "calls" else int(work()))
    return found


def costs(growth: Growth) -> list[tuple[float, float]]:
    """CPU milliseconds and the peak of Python's memory in MiB at n, 2n, 4n and 8n."""
    found = []
    for factor in (1, 2, 4, 8):
        work = growth.prepare(growth.smallest * factor)
        begin = time.process_time()
        work()
        seconds = time.process_time() - begin
        work = growth.prepare(growth.smallest * factor)
        tracemalloc.start()
        work()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        found.append((1000 * seconds, peak / 2**20))
    return found


def print_table() -> None:
    print("| size | work | n | count at n, 2n, 4n, 8n | should | CPU ms | MiB |")
    print("|---|---|---|---|---|---|---|")
    for growth in GROWTHS:
        counted = ", ".join(f"{count:,}" for count in counts(growth))
        measured_costs = costs(growth)
        seconds = ", ".join(f"{ms:.1f}" for ms, _ in measured_costs)
        memory = ", ".join(f"{mib:.1f}" for _, mib in measured_costs)
        should = "n" if growth.most > 2 else "flat"
        row = (growth.of, growth.what, f"{growth.smallest:,}", f"{counted} {growth.unit}", should, seconds, memory)
        print(f"| {' | '.join(row)} |", flush=True)


@contextmanager
def measured(name: str) -> Iterator[None]:
    begin = time.process_time()
    yield
    print(f"{name:60} {time.process_time() - begin:8.2f} CPU s", flush=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def on_all(clients: list[Any], run: Callable[[int, Any], Any]) -> None:
    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tell(hosts: int) -> None:
    """Hosts tell each other a text, in both ways."""
    from jax._src.lib import _jax  # the service behind jax.distributed, which has one client per process

    port = free_port()
    service = _jax.get_distributed_runtime_service(f"127.0.0.1:{port}", hosts)
    clients = [
        _jax.get_distributed_runtime_client(f"127.0.0.1:{port}", host, init_timeout=600) for host in range(hosts)
    ]
    on_all(clients, lambda host, client: client.connect())

    def by_questions(host: int, client: Any) -> None:
        client.key_value_set(f"questions/{host}", TEXT)
        texts = [client.blocking_key_value_get(f"questions/{other}", TIMEOUT) for other in range(hosts)]
        assert texts == [TEXT] * hosts

    def at_once(host: int, client: Any) -> None:
        client.key_value_set(f"once/{host}", TEXT)
        client.wait_at_barrier("once", TIMEOUT)
        assert len(client.key_value_dir_get("once/")) == hosts

    def equal_texts(host: int, client: Any) -> None:  # as `agreement.union` does
        client.key_value_set("equal/digest", TEXT, True)
        client.key_value_set(f"equal-arrived/{host}", "1")
        client.wait_at_barrier("equal", TIMEOUT)
        assert len(client.key_value_dir_get("equal/")) == 1

    with measured(f"{hosts} hosts tell each other a text that all have"):
        on_all(clients, equal_texts)
    with measured(f"{hosts} hosts tell each other a text, by one question"):
        on_all(clients, at_once)
    with measured(f"{hosts} hosts tell each other a text, by one per host"):
        on_all(clients, by_questions)
    on_all(clients, lambda host, client: client.shutdown())
    service.shutdown()


def arrange(devices: int) -> None:
    """Shapes, layout, axis and rows of the largest published model."""
    from zero.job.sizes import load_sizes
    from zero.partition.collectives.axis import Axis
    from zero.training.host_rows import HostRows
    from zero.training.sharded_gpt import ShardedGPT

    size = dataclasses.replace(load_sizes()["llama3_70b"], **LARGEST)
    with measured(f"axis of {devices} devices in two copies, its groups"):
        axis = Axis("zero", (2, devices // 2))
        axis.groups(devices // 2)
        axis.groups(2, apart=devices // 2)
    with measured(f"layout of {size.N} layers on {devices} devices"):
        layout = ShardedGPT(size, axis, 3).layout
    assert layout.shards == axis.shards
    with measured(f"rows of one of {devices // DEVICES_OF_HOST} hosts"):
        hosts = [position // DEVICES_OF_HOST for position in range(devices)]
        HostRows.of_devices(axis, hosts, host=1)


def compile_on(topology: str) -> None:
    """Compiles a small step for slices that are not there."""
    from zero.commands.cli import compose
    from zero.costs.topology import prepare_environment
    from zero.planning.compile import compile_step
    from zero.planning.config import Request

    overrides = (
        "mode=plan",
        "plan.exact=true",
        f"plan.topology={topology}",
        "model.size=bytes",
        "training.sample_tokens=0",
    )
    config, size = compose([*overrides, "zero.remat=full"])
    prepare_environment(topology)
    begin = time.process_time()
    row = compile_step(Request(config, size, 1))
    print(json.dumps({"topology": topology, "CPU s": round(time.process_time() - begin, 1), "fits": row["fits"]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="*", default=[])
    parser.add_argument("--devices", type=int, nargs="*", default=[])
    parser.add_argument("--compile", nargs="+", metavar="TOPOLOGY")
    parser.add_argument("--of", help=argparse.SUPPRESS)  # one topology, in a process of its own
    options = parser.parse_args()
    if options.of:
        compile_on(options.of)
        return
    if options.compile:
        for topology in options.compile:
            subprocess.run([sys.executable, __file__, "--of", topology], check=True)
        return
    if not options.hosts and not options.devices:
        print_table()
    for hosts in options.hosts:
        tell(hosts)
    for devices in options.devices:
        arrange(devices)


if __name__ == "__main__":
    main()
