"""Text from a key-value cache against recomputing the whole text for each token, and against transformers.

    python benchmarks/sample.py [--tokens 512]

Greedy, one text, one CPU device, float32, a GPT of 10.7M parameters with random weights. Both programs of zero are
compiled before they are timed; they and transformers take turns, and medians are printed.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from zero.models.gpt import GPT, GPTConfig
from zero.partition.collectives import Axis
from zero.runtime.inference import generate
from zero.training.inference import Sampling
from zero.training.programs import make_inference
from zero.training.step import ShardedGPT

CONFIG = GPTConfig(embedding_dim=384, vocab_size=256, num_head=6, block_size=1024, dropout=0.0, N=6)
PROMPT = np.asarray([0, 1, 2], np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    count = arguments.tokens
    model = ShardedGPT(CONFIG, Axis("zero", (1, 1)), 0)
    params = jax.pmap(model.init, "zero")(jax.random.split(jax.random.key(0), 1))
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

    programs: dict[str, Any] = {"cache": cached, "recomputing": without}
    np.testing.assert_array_equal(cached(), without())
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
