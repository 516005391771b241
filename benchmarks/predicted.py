"""Published times of training steps against predictions for the most similar programs that zero compiles.

    python benchmarks/predicted.py [--runs mtj-6b zero-760m ...] [--texts DIRECTORY]
    python benchmarks/predicted.py --program step.txt --topology v6e-8 --measured 3.443 [--step llama3_8b 3 8192]

First form: compiles a step of zero for the slice of each run, without a TPU, and compares the predicted time (of
`zero/costs/predict.py`, as in mode=plan) with the published one. A compilation takes minutes of CPU; with
--texts the text of each program is kept in the directory, and read from there if it is there already. Second form: the
same for the text of any program that XLA has compiled for the slice, such as a step of another package
(benchmarks/maxtext_step.py); MFU is by zero's formula for a model of conf/model_config.yaml, sequences per device and
tokens per sequence. Nothing is
fitted: the constants are those of `zero/hosts/speeds.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from zero.commands.cli import composed
from zero.commands.modes import typed
from zero.costs.predict import predict
from zero.costs.topology import find_devices, prepare_environment
from zero.hosts.speeds import SPEEDS
from zero.job.job import make_job, place_model
from zero.job.sizes import load_sizes
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.planning.compile import options_of, step_arguments
from zero.planning.config import Request
from zero.training.flops import model_flops

# GPT-J's layers (mesh_transformer/layers.py).
GPT_J: dict[str, Any] = {
    "alibi_attn": False,
    "positions": "rotary",
    "rotary_fraction": 0.25,
    "parallel_residual": True,
    "tied": False,
    "qkv_bias": False,
    "out_bias": False,
}
GPT_2 = FAMILIES["gpt2"] | {"vocab_size": 50432, "block_size": 2048, "vocab_chunks": 12}


class Run(NamedTuple):
    """A published step.

    Attributes:
      source: where it was published.
      topology: the slice.
      size: the model: an entry of conf/model_config.yaml, or its fields.
      rows: sequences per device and micro-batch, or group of devices that take the same sequences.
      micro_batches: per step.
      context: tokens per sequence.
      keys: of the configuration.
      measured: seconds per step; below 1 with `is_mfu`, model FLOPs utilization.
      differs: how the program that is compiled differs from the published one.
    """

    source: str
    topology: str
    size: str | dict[str, Any]
    rows: int
    micro_batches: int
    context: int
    keys: tuple[str, ...]
    measured: float
    differs: str
    is_mfu: bool = False


MTJ = "kingoflolz/mesh-transformer-jax, README.md at 47ed7d7"
LEVANTER = "Levanter 1.0, docs/Levanter-1.0-Release.md"
DENSE = "model.attention=dense"  # as in programs of a v2 and v3 that were published
TENSOR = ("zero.tensor_shards=8", DENSE)
RUNS = {
    "mtj-2.7b": Run(
        MTJ,
        "v3-8",
        GPT_J | {"embedding_dim": 3072, "vocab_size": 256, "num_head": 24, "block_size": 2048, "dropout": 0.0, "N": 24},
        8,
        1,
        2048,
        (*TENSOR, "zero.stage=3"),
        1.094,
        "layers recomputed, activations in bfloat16",
    ),
    "mtj-4.8b": Run(
        MTJ,
        "v3-8",
        GPT_J | {"embedding_dim": 4096, "vocab_size": 256, "num_head": 32, "block_size": 2048, "dropout": 0.0, "N": 24},
        8,
        1,
        2048,
        (*TENSOR, "zero.stage=3"),
        2.051,
        "activations in bfloat16",
    ),
    "mtj-6b": Run(
        MTJ,
        "v3-32",
        GPT_J
        | {"embedding_dim": 4096, "vocab_size": 50400, "num_head": 16, "block_size": 2048, "dropout": 0.0, "N": 28},
        1,
        8,
        2048,
        (*TENSOR, "zero.stage=1"),
        3.373,
        "optimizer sharded over the copies, activations cut between the layers",
    ),
    "shmap-6.9b": Run(
        "fattorib/transformer_shmap, README.md and benchmark_tpu.py",
        "v3-32",
        {"embedding_dim": 4096, "vocab_size": 50304, "num_head": 16, "block_size": 1024, "dropout": 0.0, "N": 32}
        | {"alibi_attn": True},
        1,
        32,
        1024,
        (*TENSOR, "zero.stage=1"),
        6.47,
        "optimizer sharded over the copies, activations cut between the layers",
    ),
    "zero-124m": Run(
        "fattorib/ZeRO-transformer, README.md and src/models/GPT.py",
        "v2-8",
        "124m",
        2,
        32,
        1024,
        ("zero.stage=1", "zero.remat=none", DENSE),
        4.18,
        "layers in a loop, vocabulary in 6 parts that are recomputed",
    ),
    "zero-760m": Run(
        "fattorib/ZeRO-transformer, README.md",
        "v3-32",
        "760m",
        4,
        4,
        1024,
        ("zero.stage=1", DENSE),
        3.82,
        "the published time includes data and logging (at most); number of micro-batches not published",
    ),
    "lingvo-137b": Run(
        "tensorflow/lingvo, lingvo/tasks/lm/params/synthetic_packed_input.py",
        "v3-128",
        "dense_lm_137b",
        1,
        1,
        1024,
        (*TENSOR, "zero.stage=3", "optimizer=adafactor", "zero.gradient_dtype=bfloat16"),
        4.43,
        "GSPMD over two dimensions there, tensor groups of 8 and stage 3 here",
    ),
    "llama-8b": Run(
        "AI-Hypercomputer/tpu-recipes, Llama 3.1 8B on v6e-8 (MaxText)",
        "v6e-8",
        "llama3_8b",
        3,
        1,
        8192,
        ("zero.stage=3", "model.attention=kernel"),
        3.443,
        "MaxText keeps layer inputs and q, k, v on the host; here layers are recomputed",
    ),
    "levanter-6.7b": Run(
        LEVANTER,
        "v3-256",
        GPT_2 | {"embedding_dim": 4096, "num_head": 32, "dropout": 0.0, "N": 32},
        4,
        1,
        2048,
        ("zero.stage=3", DENSE),
        0.473,
        "GSPMD there; number of sequences not published (config/gpt2_7b.yaml has 1,024 per step)",
        is_mfu=True,
    ),
    "levanter-13b": Run(
        LEVANTER,
        "v3-256",
        GPT_2 | {"embedding_dim": 5120, "num_head": 40, "dropout": 0.0, "N": 40},
        4,
        1,
        2048,
        ("zero.stage=3", DENSE),
        0.544,
        "as above",
        is_mfu=True,
    ),
}


def request_of(run: Run) -> Request:
    """The step as a plan takes it."""
    keys = (f"plan.topology={run.topology}", f"training.gradient_accumulation_steps={run.micro_batches}", *run.keys)
    config: Any = typed(composed(["mode=plan", *keys, f"data.max_context={run.context}"]))
    size = load_sizes()[run.size] if isinstance(run.size, str) else GPTConfig(**run.size)
    return Request(config, size, run.rows)


def text_of(request: Request, file: Path | None) -> str:
    """The compiled step, from the file if it is there."""
    if file is not None and file.exists():
        return file.read_text()
    devices = find_devices(request.config.plan.topology)
    job = make_job(request.config, place_model(request.config, request.size, devices, request.rows))
    lowered = job.programs.step.lower(*step_arguments(job, request.rows, request.config.data.max_context))
    text: str = lowered.compile(options_of(request.config.zero, devices)).as_text()
    if file is not None:
        file.write_text(text)
    return text


def compare(run: Run, file: Path | None) -> tuple[float, float]:
    """Predicted and measured seconds per step."""
    request = request_of(run)
    devices = find_devices(run.topology)
    found = predict(text_of(request, file), devices)
    assert found is not None
    if not run.is_mfu:
        return found.seconds, run.measured
    group = request.config.zero.tensor_shards
    flops = model_flops(request.size, request.rows, run.context) / group
    return found.seconds, flops / (run.measured * SPEEDS[devices[0].device_kind].flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--texts", type=Path, help="directory of texts of compiled programs")
    parser.add_argument("--program", type=Path, help="text of a program, as compiled.as_text() gives it")
    parser.add_argument("--topology", help="slice of --program")
    parser.add_argument("--measured", type=float, help="seconds of --program")
    parser.add_argument("--step", nargs=3, metavar=("SIZE", "ROWS", "CONTEXT"), help="of --program, for its MFU")
    arguments = parser.parse_args()
    if arguments.program is not None:
        prepare_environment(arguments.topology)
        devices = find_devices(arguments.topology)
        found = predict(arguments.program.read_text(), devices)
        assert found is not None, "the compiler has written no cycles"
        parts = [f"{found.seconds:.3f} s predicted, {found.exposed_seconds:.3f} of them exposed"]
        if arguments.step:
            size, rows, context = arguments.step
            flops = model_flops(load_sizes()[size], int(rows), int(context))
            parts.append(f"MFU {flops / SPEEDS[devices[0].device_kind].flops / found.seconds:.1%}")
        if arguments.measured:
            parts.append(f"{found.seconds / arguments.measured - 1:+.0%} of measured")
        print("; ".join(parts))
        return
    prepare_environment("v3-8")
    print("| run | slice | measured | predicted | | differs |\n|---|---|---|---|---|---|", flush=True)
    errors = []
    for name in arguments.runs:
        run, file = RUNS[name], arguments.texts and arguments.texts / f"{name}.txt"
        predicted, measured = compare(run, file)
        errors.append(abs(predicted / measured - 1))
        ratio = predicted / measured - 1
        print(
            f"| {name} | {run.topology} | {measured:.3f} | {predicted:.3f} | {ratio:+.0%} | {run.differs} |", flush=True
        )
    print(f"\nmedian of |predicted / measured - 1|: {median(errors):.2f}")


if __name__ == "__main__":
    main()
