"""Training steps on one GPU: seconds, MFU and memory of `python main_zero.py`, beside transformers with torch.compile.

    python benchmarks/one_gpu.py [--rows smollm3-3b ...] [--keys "zero.remat=mlp"] [--sequences 4] [--steps 30]

Each row is a run of its own on random tokens, which is ended once it has logged so many steps; its seconds are the
median over all logged lines but the first two. A peer has the same shapes, float32 weights under bfloat16 autocast,
fused AdamW and clipping, and recomputes its layers. A row that takes longer than --seconds, or ends by itself, is
recorded with the last lines of its output.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
LOGGED_EVERY = 5
KEYS = (
    f"data.corpus=synthetic data.wandb_project=null training.log_frequency={LOGGED_EVERY} training.warmup_steps=10 "
    "training.staged_warmup_steps=0 training.total_steps=1000 training.evaluation_frequency=1000 "
    "training.maximum_evaluation_steps=0 training.sample_tokens=0 training.peak_learning_rate=1e-4 "
    "training.end_learning_rate=1e-5"
)
MEMORY_SHARE = "0.92"  # of the GPU, for jax's allocator
HOST_GIB = "110"  # that jax may take of the host's memory, by default 64
STREAMED = "model.attention=kernel zero.fused_update=true zero.remat=full"


@dataclass(frozen=True)
class Row:
    """A model of conf/models, sequences of so many tokens, and further keys."""

    size: str
    sequences: int
    context: int
    keys: str = ""
    is_peer: bool = False


ROWS = {
    "qwen2.5-0.5b": Row("qwen2_5_0_5b", 8, 2048, "model.attention=kernel"),
    "qwen2.5-0.5b, transformers": Row("qwen2_5_0_5b", 8, 2048, is_peer=True),
    "smollm3-3b": Row("smollm3_3b", 2, 4096, "model.attention=kernel"),
    "smollm3-3b, blockwise": Row("smollm3_3b", 2, 4096, "model.attention=blockwise"),
    "smollm3-3b, stored mlp": Row("smollm3_3b", 2, 4096, "model.attention=kernel zero.remat=mlp"),
    "smollm3-3b, transformers": Row("smollm3_3b", 2, 4096, is_peer=True),
    "llama3-8b, 4 bytes": Row("llama3_8b", 2, 4096, "model.attention=kernel +memory=4-bytes"),
    "llama3-8b, fused": Row("llama3_8b", 1, 8192, "model.attention=kernel +memory=fused"),
    "llama3-8b, optimizer on the host": Row("llama3_8b", 2, 4096, f"{STREAMED} zero.offload=optimizer"),
    "smollm3-3b, fused": Row("smollm3_3b", 2, 4096, STREAMED),
    "smollm3-3b, optimizer on the host": Row("smollm3_3b", 2, 4096, f"{STREAMED} zero.offload=optimizer"),
    "smollm3-3b, 16 sequences": Row("smollm3_3b", 16, 4096, "model.attention=kernel"),
    "smollm3-3b, 16 sequences on the host": Row(
        "smollm3_3b", 16, 4096, "model.attention=kernel zero.offload=activations"
    ),
    "smollm3-3b, int8_all": Row("smollm3_3b", 2, 4096, "model.attention=kernel zero.product_dtype=int8_all"),
    "smollm3-3b, float8": Row("smollm3_3b", 2, 4096, "model.attention=kernel zero.product_dtype=float8"),
}


@dataclass
class Measured:
    """Figures that a run has logged; `failure` has the last lines of its output where there are none."""

    seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_gib: float | None = None
    first_step: float | None = None  # seconds from the start to the first line
    losses: list[float] = field(default_factory=list)
    failure: str | None = None


def trained(row: Row, keys: str, steps: int, limit: float) -> Measured:
    """A run of `main_zero.py`, which is killed when it has logged the steps."""
    with tempfile.TemporaryDirectory() as place, (Path(place) / "printed").open("w+") as printed:
        command = [sys.executable, "main_zero.py", *KEYS.split(), f"hydra.run.dir={place}/run"]
        command += [f"model.size={row.size}", f"data.max_context={row.context}", *row.keys.split(), *keys.split()]
        command += [f"training.batch_size={row.sequences}", "distributed.compilation_cache=null"]
        memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": MEMORY_SHARE, "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": HOST_GIB}
        environment = os.environ | memory
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=printed, stderr=printed, start_new_session=True
        )
        started = time.monotonic()
        metrics = Path(place, "run", "metrics.jsonl")
        lines: list[dict[str, Any]] = []
        first: float | None = None
        while process.poll() is None and time.monotonic() - started < limit and len(lines) <= steps // LOGGED_EVERY:
            time.sleep(0.5)
            if metrics.exists():
                lines = [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line[-1] == "\n"]
            if lines and first is None:
                first = time.monotonic() - started
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        printed.seek(0)
        text = printed.read()
    steady = lines[2:]
    if not steady:
        return Measured(failure=text[-3000:])
    seconds = statistics.median(line["step_time"] for line in steady)
    peak = steady[-1].get("peak_memory")
    return Measured(
        seconds=seconds,
        tokens_per_second=row.sequences * row.context / seconds,
        mfu=statistics.median(line["mfu"] for line in steady) if "mfu" in steady[-1] else None,
        peak_gib=None if peak is None else peak / 2**30,
        first_step=first,
        losses=[line["train/loss"] for line in lines],
    )


def peer(row: Row, steps: int) -> Measured:
    """The same model of transformers, compiled by torch."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from zero.exchange.architecture_table import architecture_of
    from zero.exchange.hf_config import write_config
    from zero.job.sizes import load_sizes

    size = load_sizes()[row.size]
    config = write_config(architecture_of(size), size)
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        made = AutoConfig.for_model(**{key: value for key, value in config.items() if key != "architectures"})
        model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa", dtype=torch.float32)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, size.vocab_size, (row.sequences, row.context), device="cuda")
    forward = torch.compile(model)
    begun = time.monotonic()
    times, losses = [], []
    first = 0.0
    for step in range(steps):
        torch.cuda.synchronize()
        started = time.monotonic()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.monotonic() - started)
        losses.append(float(loss.detach()))
        if step == 0:
            first = time.monotonic() - begun
    seconds = statistics.median(times[3:])
    return Measured(
        seconds=seconds,
        tokens_per_second=row.sequences * row.context / seconds,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30,
        first_step=first,
        losses=losses[::LOGGED_EVERY],
    )


def peer_in_a_process(name: str, steps: int, limit: float) -> Measured:
    """The peer of a row in a process of its own, whose memory nobody else holds."""
    command = [sys.executable, __file__, "--peer", name, "--steps", str(steps)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
    except subprocess.TimeoutExpired:
        return Measured(failure=f"not done after {limit:.0f} s")
    if done.returncode:
        return Measured(failure=done.stderr[-3000:])
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--keys", default="", help="further keys of the runs")
    parser.add_argument("--sequences", type=int, help="in place of those of the rows")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=120.0, help="that a row may take")
    parser.add_argument("--record", type=Path, default=Path("one_gpu.jsonl"))
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        print(json.dumps(asdict(peer(ROWS[given.peer], given.steps))))
        return
    for name in given.rows:
        row = ROWS[name]
        if given.sequences is not None:
            row = replace(row, sequences=given.sequences)
        if row.is_peer:
            measured = peer_in_a_process(name, given.steps, given.seconds)
        else:
            measured = trained(row, given.keys, given.steps, given.seconds)
        with given.record.open("a") as record:
            record.write(json.dumps({"row": name, "further": given.keys, **asdict(row), **asdict(measured)}) + "\n")
        if measured.seconds is None:
            print(f"{name}: failed\n{measured.failure}", flush=True)
            continue
        share = "" if measured.mfu is None else f", MFU {measured.mfu:.1%}"
        peak = "" if measured.peak_gib is None else f", peak {measured.peak_gib:.2f} GiB"
        begin = f"first step after {measured.first_step:.0f} s, "
        begin += f"losses {measured.losses[0]:.3f} to {measured.losses[-1]:.3f}"
        speed = f"{measured.seconds:.4f} s, {measured.tokens_per_second:,.0f} tokens/s"
        print(f"{name}, {row.sequences} x {row.context} {given.keys}: {speed}{share}{peak}, {begin}", flush=True)


if __name__ == "__main__":
    main()
