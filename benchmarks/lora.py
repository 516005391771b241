# python benchmarks/lora.py [--rounds 10] [--method lora|dora] [--remat none|full]
"""A step of LoRA beside PyTorch with PEFT: the same folder, adapters, rows and optimizer, one process each.

Both processes have all cores, and take steps in turn. A Llama of 5M parameters in float32, 4 rows of 256 tokens, rank 8
on all products of layers, AdamW. PyTorch has its fused attention and AdamW, and checkpoints layers with `--remat full`;
zero has one device at stage 3. Prints the medians of seconds and of CPU seconds per step, the peaks of resident memory
with all imports, and their ratios; losses must agree to 1e-4. Takes a minute, on an idle
machine. Needs `pip install -e '.[test]'`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, LAYERS, HEADS, KEY_HEADS, MLP, VOCABULARY = 256, 4, 8, 4, 688, 4096
CONTEXT, ROWS, RANK, ALPHA, RATE, DECAY = 256, 4, 8, 16, 1e-3, 0.1
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]


def rows(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, VOCABULARY, (ROWS, CONTEXT), np.int32)


def make(place: Path, method: str) -> None:
    """A folder of transformers with random weights, and one of PEFT with random adapters for it."""
    import peft
    import transformers

    shape: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS}
    heads: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "rms_norm_eps": 1e-5}
    transformers.set_seed(0)
    config = transformers.LlamaConfig(**shape, **heads, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(place / "base")
    options: dict[str, Any] = {"init_lora_weights": False, "use_dora": method == "dora"}
    adapters = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MODULES, task_type="CAUSAL_LM", **options)
    peft.get_peft_model(model, adapters).save_pretrained(str(place / "adapters"))


def zero_step(place: Path, method: str, remat: str) -> Callable[[int], float]:
    import jax
    import jax.numpy as jnp

    import zero
    from zero.hosts.startup import keep_freed_memory

    keep_freed_memory()  # as main_zero.py does
    from zero.exchange.peft_folder import peft_adapters, read_peft
    from zero.exchange.warm_start import warm_start
    from zero.models.attention.dense import query_block
    from zero.models.config import GPTConfig
    from zero.models.families import FAMILIES
    from zero.training.batch import Batch
    from zero.training.optimizers.optimizer import adamw
    from zero.training.parts import StepOptions
    from zero.training.programs import make_programs
    from zero.training.sharded_gpt import ShardedGPT
    from zero.training.tuning import Tuning

    llama: dict[str, Any] = {**FAMILIES["llama"], "kv_heads": KEY_HEADS, "mlp_dim": MLP, "N": LAYERS}
    size = GPTConfig(WIDTH, VOCABULARY, HEADS, CONTEXT, 0.0, **llama)
    tuning = Tuning(peft_adapters(place / "adapters", size))
    options: Any = {"tuning": tuning, "remat": remat, "query_block": query_block("auto", "cpu")}
    model = ShardedGPT(size, zero.Axis("zero", (1, 1)), 3, **options)
    programs = make_programs(
        model, adamw(DECAY, axes=model.axes), StepOptions(lambda step: jnp.float32(RATE)), jax.devices()[:1]
    )
    frozen = warm_start(str(place / "base"), model.base)
    state = programs.start(read_peft(place / "adapters", model))

    def step(number: int) -> float:
        nonlocal state
        state, metrics = programs.step(state, Batch(rows(number)[None], np.zeros(1, np.int32)), frozen)
        return float(metrics["loss"])

    return step


def peft_step(place: Path, method: str, remat: str) -> Callable[[int], float]:
    import peft
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = peft.PeftModel.from_pretrained(
        auto.from_pretrained(place / "base"), str(place / "adapters"), is_trainable=True
    )
    model.train()
    if remat == "full":
        model.gradient_checkpointing_enable()
    trained = [x for x in model.parameters() if x.requires_grad]
    groups: Any = [
        {"params": [x for x in trained if x.ndim > 1], "weight_decay": DECAY},
        {"params": [x for x in trained if x.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, fused=True)

    def step(number: int) -> float:
        tokens = torch.tensor(rows(number)).long()
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


SIDES = {"zero": zero_step, "peft": peft_step}


def serve(side: str, place: Path, method: str, remat: str) -> None:
    """Takes a step for each line of standard input, and answers with its times, its loss and the peak in KiB."""
    step = SIDES[side](place, method, remat)
    for line in sys.stdin:
        began, began_cpu = time.perf_counter(), time.process_time()
        loss = step(int(line))
        times = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - began_cpu}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({**times, "loss": loss, "peak": peak}), flush=True)


def compare(method: str, remat: str, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), method)
        command = [sys.executable, __file__, "--method", method, "--remat", remat, "--place", name, "--side"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = {side: subprocess.Popen([*command, side], **pipes) for side in SIDES}
        answers: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        try:
            for number in range(rounds + 2):
                for side, process in processes.items():
                    assert process.stdout is not None
                    print(number, file=process.stdin, flush=True)
                    answers[side].append(json.loads(process.stdout.readline()))
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
    one, other = ([answer["loss"] for answer in found] for found in answers.values())
    np.testing.assert_allclose(one, other, rtol=1e-4)
    table = {}
    for side, found in answers.items():
        seconds, cpu = (statistics.median(answer[key] for answer in found[2:]) for key in ("seconds", "cpu"))
        table[side] = seconds, cpu, found[-1]["peak"] / 2**20
        first = found[0]["cpu"]  # compiles
        print(f"{side:5} {seconds:.3f} s, {cpu:.3f} CPU s per step, first {first:.1f} CPU s, {table[side][2]:.2f} GiB")
    ratios = [ours / theirs for ours, theirs in zip(table["zero"], table["peft"], strict=True)]
    print(
        f"{method}, remat {remat}: zero / PEFT {ratios[0]:.2f} in time, {ratios[1]:.2f} in CPU time, "
        f"{ratios[2]:.2f} in memory"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--method", choices=("lora", "dora"), default="lora")
    parser.add_argument("--remat", choices=("none", "full"), default="none")
    parser.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        serve(given.side, given.place, given.method, given.remat)
    else:
        compare(given.method, given.remat, given.rounds)
