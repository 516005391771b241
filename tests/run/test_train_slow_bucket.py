"""A whole run from a bucket behind a slow line: it waits for the line, and for nothing else."""

from pathlib import Path

import numpy as np
import pytest

from tests.helpers import bucket, cli
from tests.helpers.shards import npy, write_tar
from zero.record.metrics_file import read_metrics

pytestmark = pytest.mark.slow
SHARDS, ROWS, ROW_TOKENS, BATCH = 24, 32, 4096, 16  # rows are longer than the context: much data for little to compute
STEPS = SHARDS * ROWS // BATCH
SHARD_BYTES = ROWS * ROW_TOKENS * 2
LATENCY = 0.1


def upload_corpus(tmp_path: Path) -> str:
    generator = np.random.default_rng(0)
    lines = []
    for shard in range(SHARDS):
        rows = generator.integers(0, 200, (ROWS, ROW_TOKENS), np.uint16)
        write_tar(tmp_path / "slow" / f"{shard}.tar", {"rows.input_id.npy": npy(rows)})
        lines.append(f"{shard}.tar # {ROWS} rows\n")
    (tmp_path / "slow" / "it.index").write_text("".join(lines))
    bucket.upload(tmp_path / "slow", f"gs://{bucket.BUCKET}/slow")
    return f"gs://{bucket.BUCKET}/slow/it.index"


def test_a_slow_line(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`data_wait` is the share of a step beyond what the program takes: near zero with latency alone."""
    bucket.use(monkeypatch, server)
    index = upload_corpus(tmp_path)
    waits: dict[float, np.ndarray] = {}
    steps: dict[float, np.ndarray] = {}
    of_line: dict[float, float] = {}  # seconds
    for bandwidth in (1e9, 0.25e6):
        proxy = bucket.Proxy(server, budget=0)
        proxy.latency, proxy.bandwidth = LATENCY, bandwidth
        with bucket.disturbed(proxy) as address:
            bucket.use(monkeypatch, address)
            name = f"run-{bandwidth:.0f}"
            done = cli.Forks(tmp_path).run(
                *cli.TINY,
                f"hydra.run.dir={name}",
                f"data.index_path_train={index}",
                "data.index_path_validation=null",
                f"data.checkpoint_directory={tmp_path}/checkpoints-{name}",
                "data.shuffle_shards=4",
                f"training.batch_size={BATCH}",
                f"training.total_steps={STEPS}",
            )
        assert done.returncode == 0, done.stderr
        lines = [line for line in read_metrics(tmp_path / name / "metrics.jsonl") if "step_time" in line]
        steps[bandwidth] = np.array([line["step_time"] for line in lines])
        waits[bandwidth] = steps[bandwidth] * [line["data_wait"] for line in lines]
        of_line[bandwidth] = proxy.read_bytes / bandwidth
    fast, slow = waits
    assert waits[fast].sum() < 0.3 * steps[fast].sum()  # reads that answer late are hidden
    assert waits[slow].sum() > 0.3 * steps[slow].sum()
    of_buffers = 4 * SHARD_BYTES / slow + LATENCY  # all streams may begin one together
    assert waits[slow].max() < of_buffers + 1
    assert steps[slow].sum() < of_line[slow] + 1  # the line is never idle while a step waits
