"""Text from a key-value cache against recomputing the whole text for each token, and against transformers.

    python benchmarks/sample.py [--tokens 512]
    python benchmarks/sample.py --size bytes_vq --tokens 10000

Greedy, one text, one CPU device, float32, a GPT-2 of 11M parameters with random weights, which transformers makes and
zero reads. The programs are compiled first and take turns; medians are printed. Needs the extra `huggingface`.
Second form: the speed of a size of conf/model_config.yaml with random weights in the first thousand tokens of a text,
in each thousand after, and in the last.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import torch as PyTorch
import transformers

from zero.exchange.warm_start import warm_start
from zero.inference.generate import generate
from zero.job.sizes import load_sizes
from zero.models.config import GPTConfig
from zero.models.gpt import GPT
from zero.partition.collectives.axis import Axis
from zero.training.inference import Sampling
from zero.training.programs import make_inference
from zero.training.sharded_gpt import ShardedGPT

CONFIG = GPTConfig(384, 256, 6, 1024, 0.0, 6, alibi_attn=False, norm_epsilon=1e-5)
PROMPT = np.asarray([0, 1, 2], np.int32)


def print_rates(config: GPTConfig, count: int) -> None:
    model, chunk = ShardedGPT(config, Axis("zero", (1, 1)), 0), 250
    params = jax.pmap(lambda data: model.init(jax.random.wrap_key_data(data)), "zero")(np.zeros((1, 2), np.uint32))
    inference = make_inference(model, Sampling(temperature=0.8))
    next(generate(inference, params, [PROMPT], count, seed=0, chunk=chunk))  # compiled for this length
    times = [time.perf_counter()]
    for _ in generate(inference, params, [PROMPT], count, seed=0, chunk=chunk):
        times.append(time.perf_counter())
    thousands = times[:: 1000 // chunk]
    rates = [1000 / (after - before) for before, after in pairwise(thousands)]
    print("tokens/s of each thousand: " + ", ".join(f"{rate:,.0f}" for rate in rates))
    print(f"first thousand {rates[0]:,.0f}, last {rates[-1]:,.0f}: {rates[-1] / rates[0]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", help="an entry of conf/model_config.yaml, whose rate of sampling is printed instead")
    arguments = parser.parse_args()
    count = arguments.tokens
    if arguments.size:
        print_rates(load_sizes()[arguments.size], count)
        return
    model = ShardedGPT(CONFIG, Axis("zero", (1, 1)), 0)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=CONFIG.vocab_size, n_positions=CONFIG.block_size, n_embd=CONFIG.embedding_dim,
            n_layer=CONFIG.N, n_head=CONFIG.num_head, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(Path(folder) / "hf")
        params = warm_start(str(Path(folder) / "hf"), model)
    inference = make_inference(model, Sampling(temperature=0))
    whole = jax.tree.map(lambda x: x[0], params)

    @jax.jit
    def recompute(tokens: jax.Array, position: jax.Array) -> jax.Array:
        hidden, _ = GPT(CONFIG).apply({"params": whole}, tokens[None], None, method="hidden")
        table = whole["vocabulary"]["table"].reshape(-1, CONFIG.embedding_dim)[: CONFIG.vocab_size]
        return tokens.at[position].set(jnp.argmax(hidden[0, position - 1] @ table.T))

    def cached() -> np.ndarray:
        return list(generate(inference, params, [PROMPT], count, seed=0, chunk=16))[-1][0][: len(PROMPT) + count]

    def without() -> np.ndarray:
        tokens = jnp.pad(jnp.asarray(PROMPT), (0, count))
        for position in range(len(PROMPT), len(PROMPT) + count):
            tokens = recompute(tokens, position)
        return np.asarray(tokens)

    def torch() -> np.ndarray:
        prompt = PyTorch.as_tensor(PROMPT[None].astype(np.int64))
        with PyTorch.inference_mode():
            text = theirs.generate(
                prompt,
                attention_mask=PyTorch.ones_like(prompt),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
            )
        return text[0].numpy()

    programs: dict[str, Any] = {"cache": cached, "recomputing": without, "transformers": torch}
    np.testing.assert_array_equal(cached(), without())
    same = int((cached() == torch()).cumprod().sum()) - len(PROMPT)
    print(f"the first {same} of {count} tokens are those of transformers")
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(arguments.rounds):
        for name, program in programs.items():
            started = time.perf_counter()
            program()
            seconds[name].append(time.perf_counter() - started)
    for name, times in seconds.items():
        ratio = median(a / b for a, b in zip(times, seconds["cache"], strict=True))
        print(f"{name:<12} {count / median(times):8,.0f} tokens/s  {ratio:6.2f} times the cache's time")


if __name__ == "__main__":
    main()
