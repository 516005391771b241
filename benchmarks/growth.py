"""Measures how the work of a host before its first step grows with the number of hosts and of devices.

    python benchmarks/growth.py [--hosts 8 32 128] [--devices 256 2048 16384]
    python benchmarks/growth.py --compile v5e-8 v5e-64 v5e-256 4xv5e-256 8xv5e-256

First form: what hosts tell each other by jax's key-value store, with clients in one process, by one question to the
store and by one per host; and the layout, the axis and the places of rows of a Llama 3.1 405B in float32 on so many
devices, four of them on a host. Second form: the compiler's time for a small step on slices of several sizes. Seconds
are of the CPU; those of the store are of all clients together.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

DEVICES_OF_HOST = 4
LARGEST: dict[str, Any] = {"embedding_dim": 16384, "num_head": 128, "N": 126, "mlp_dim": 53248}  # Llama 3.1 405B
TEXT = "x" * 64
TIMEOUT = 600_000  # milliseconds


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
    from zero.plan.compile import compile_step
    from zero.plan.config import Request
    from zero.plan.topology import prepare_environment

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
    parser.add_argument("--hosts", type=int, nargs="*", default=[8, 32, 128])
    parser.add_argument("--devices", type=int, nargs="*", default=[256, 2048, 16384])
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
    for hosts in options.hosts:
        tell(hosts)
    for devices in options.devices:
        arrange(devices)


if __name__ == "__main__":
    main()
