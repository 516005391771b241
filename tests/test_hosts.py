"""Two hosts of one run, over gloo: what happens to the other when one fails."""

import socket
import time
from pathlib import Path

import numpy as np
import pytest

from tests import cli
from tests.runtime.test_loader import npy, write_tar

pytestmark = pytest.mark.timeout(300)


def write_corpus(directory: Path, bad: int) -> None:
    """Nine shards of 64 rows, one of them cut."""
    rows = np.random.default_rng(0).integers(1, 256, (64, cli.CONTEXT), np.uint8)
    names = [f"{number}.tar" for number in range(9)]
    for name in names:
        write_tar(directory / name, {"0.input_id.npy": npy(rows)})
    (directory / "train.index").write_text("".join(f"{name} # 64 rows\n" for name in names))
    (directory / "validation.index").write_text("3.tar # 64 rows\n")
    (directory / f"{bad}.tar").write_bytes((directory / f"{bad}.tar").read_bytes()[:1000])


@pytest.mark.parametrize(("bad", "first"), [(1, 0), (0, 1)])
def test_a_host_that_fails_takes_the_run_down_with_a_message(tmp_path: Path, bad: int, first: int) -> None:
    write_corpus(tmp_path, bad)  # a shard that one host reads when the run is under way
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        cli.start(
            tmp_path,
            *cli.TINY,
            "training.total_steps=400",
            "training.evaluation_frequency=400",
            "training.staged_warmup_steps=0",
            "training.gradient_accumulation_steps=1",
            "data.index_path_train=train.index",
            "data.index_path_validation=validation.index",
            "data.window=4",
            "distributed.cpu_devices=2",
            f"distributed.coordinator_address=127.0.0.1:{port}",
            "distributed.num_processes=2",
            f"distributed.process_id={host}",
            f"hydra.run.dir=run{host}",
            f"data.checkpoint_directory={tmp_path}/checkpoints",
        )
        for host in range(2)
    ]
    try:
        ends: dict[int, float] = {}
        while len(ends) < 2:
            for host, process in enumerate(processes):
                if host not in ends and process.poll() is not None:
                    ends[host] = time.monotonic()
            time.sleep(0.05)
    finally:
        done = [cli.finish(process) for process in processes]
    assert all(one.returncode not in (0, 75) for one in done)
    assert f"error: shard {bad}.tar is truncated or damaged" in done[first].stderr
    assert "Traceback" not in done[first].stderr
    said = ("the first host to fail says why", "another task died; see the other task logs")
    assert any(words in done[1 - first].stderr for words in said), done[1 - first].stderr
    assert abs(ends[0] - ends[1]) < 20  # jax alone: until its barrier times out, 300 s
