"""The wrapper against plain data parallelism: step time and bytes on the wire, for few large leaves to many small ones.

    python benchmarks/collectives.py

Adam on a million parameters in 1 to 1000 leaves, on eight virtual CPU devices of one process, then of two over gloo;
and Muon on 16 matrices, which the peer orthogonalizes on every device and the wrapper divides among them. The peer
reduces gradients with `lax.pmean` and updates the whole tree on every device. Both run in one process, one step each
in turn; medians. Takes 15 minutes on two cores, most of it to compile the peer's 1000 leaves. Bytes are those that a
device sends, from the compiled program: a ring all-reduce of n bytes over N devices sends 2 n (N - 1) / N, a
reduce-scatter or a gather half of that.
"""

from __future__ import annotations

import math
import os
import re
import socket
import subprocess
import sys
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import lax

import zero

DEVICES = 8
ELEMENTS = 1_000_000
LEAVES = (1, 10, 100, 1000)
STEPS = 11
SENT = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "all-to-all": 1}  # times n (N - 1) / N


def bytes_sent(compiled: str) -> float:
    """Megabytes that one device sends in a step."""
    total = 0.0
    pattern = r"= (.*?) (all-reduce|reduce-scatter|all-gather|all-to-all)(?:-start)?\("
    for result, name in re.findall(pattern, compiled):
        shapes = re.findall(r"f32\[([\d,]*)\]", result)
        elements = sum(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)
        whole = elements * (DEVICES if name == "reduce-scatter" else 1)
        total += SENT[name] * 4 * whole * (DEVICES - 1) / DEVICES
    return total / 1e6


def adam(leaves: int) -> tuple[float, float, float, float]:
    rows = ELEMENTS // leaves // 100
    params = {f"{i:04}": jnp.ones((rows, 100)) for i in range(leaves)}
    return compare(params, optax.adam(1e-3), optax.adam(1e-3))


def muon(leaves: int) -> tuple[float, float, float, float]:
    rng = np.random.default_rng(0)
    params = {f"{i:02}": rng.normal(size=(384, 384)).astype(np.float32) for i in range(leaves)}
    return compare(params, optax.contrib.muon(1e-3), zero.across_shards(optax.contrib.muon(1e-3)))


def compare(
    params: Any, plain: optax.GradientTransformation, right: optax.GradientTransformation
) -> tuple[float, float, float, float]:
    """Milliseconds a step and megabytes sent: plain, then wrapped."""
    local = jax.local_device_count()
    wrapped = zero.shard_optimizer(right, "batch")

    def step(tx: Any, mean: bool, params: Any, state: Any, key: jax.Array) -> Any:
        grads = jax.tree.map(lambda p: p * key, params)
        grads = lax.pmean(grads, "batch") if mean else zero.local(grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    steps: list[Any] = []
    carries: list[Any] = []
    times: tuple[list[float], list[float]] = ([], [])
    sent: list[float] = []
    for tx in (plain, wrapped):
        stacked = jax.pmap(lambda _: params, "batch")(jnp.ones(local))
        carries.append((stacked, jax.pmap(tx.init, "batch")(stacked)))
        one = partial(step, tx, tx is plain)
        steps.append(jax.pmap(one, "batch", donate_argnums=(0, 1)))
        sent.append(bytes_sent(steps[-1].lower(*carries[-1], jnp.ones(local)).compile().as_text()))
    for _ in range(STEPS + 2):
        for i, run in enumerate(steps):
            start = perf_counter()
            carries[i] = run(*carries[i], jnp.ones(local))
            jax.block_until_ready(carries[i])
            times[i].append(perf_counter() - start)
    return 1e3 * median(times[0][2:]), 1e3 * median(times[1][2:]), sent[0], sent[1]


def main() -> None:
    if len(sys.argv) == 1:
        print("optimizer  processes  leaves  plain ms  wrapped ms  ratio  plain MB  wrapped MB", flush=True)
        subprocess.run([sys.executable, __file__, "1", "0", "0"], check=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        workers = [subprocess.Popen([sys.executable, __file__, "2", str(i), port]) for i in range(2)]
        sys.exit(max(worker.wait() for worker in workers))
    processes, process, at = (int(arg) for arg in sys.argv[1:])
    zero.use_cpu_devices(DEVICES // processes)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{at}", processes, process)
    rows = [(adam, leaves) for leaves in LEAVES] + [(muon, 16)] * (processes == 1)
    for optimizer, leaves in rows:
        plain_ms, wrapped_ms, plain_mb, wrapped_mb = optimizer(leaves)
        if process == 0:
            print(
                f"{optimizer.__name__:9}  {processes:9}  {leaves:6}  {plain_ms:8.1f}  {wrapped_ms:10.1f}  "
                f"{wrapped_ms / plain_ms:5.2f}  {plain_mb:8.1f}  {wrapped_mb:10.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
