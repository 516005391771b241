"""Started by test_plan.py: plans a step on 8 virtual CPU devices, takes it, and prints both as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import zero
from tests.config.composing import compose
from zero.commands.modes import check
from zero.inference.generate import generate
from zero.job.job import make_job, place_model
from zero.job.sizes import load_sizes
from zero.models.config import GPTConfig
from zero.planning.compile import compile_step, evaluation_arguments, sampling_arguments, step_arguments
from zero.planning.config import Request
from zero.run.step_programs import split_batch
from zero.training.host_rows import HostRows
from zero.training.programs import make_inference

SIZE = GPTConfig(embedding_dim=384, vocab_size=2048, num_head=8, block_size=64, dropout=0.0, N=4, vocab_chunks=2)


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


zero.use_cpu_devices(8)
small = ("data.max_context=64", "training.sample_tokens=0", "zero.remat=full")  # a loop over layers compiles faster
overrides = ("mode=plan", "plan.topology=cpu", *small, *sys.argv[1:])
config: Any = check(compose(*overrides), load_sizes())
request = Request(config, SIZE, micro_batch=1)
row = compile_step(request)

job = make_job(config, place_model(config, SIZE))  # as training does
key = np.asarray(jax.random.key_data(jax.random.key(0)))
state = job.programs.start(job.programs.init(np.stack([key] * 8)))
batch = split_batch(np.ones((8, 64), np.int32), HostRows.here(job.model.axis))
lowered = job.programs.step.lower(state, batch)
is_same = lowered.as_text() == job.programs.step.lower(*step_arguments(job, 1, 64)).as_text()
step = lowered.compile()
jax.block_until_ready(state)
live = sum(x.nbytes for x in jax.live_arrays()) // 8
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
state, metrics = step(state, batch)
jax.block_until_ready((state, metrics))
grown = (resident("VmHWM") - before) // 8


def shapes(arguments: Any) -> Any:
    return [(x.shape, x.dtype) for x in jax.tree.leaves(arguments) if hasattr(x, "shape")]


# What training passes to the programs that it pauses for.
params, tokens, extra = evaluation_arguments(job, request)
is_same &= shapes((params, tokens, extra)) == shapes((state.params, batch.tokens, batch.extra))
inference = make_inference(job.model)
recorded: list[Any] = []


def extend(params: Any, state: Any, keys: Any, count: int) -> Any:
    recorded.append(shapes((params, state, keys)))
    return state, np.zeros((8, 1 + count), np.int32)


shapes_only: Any = {"prefill": lambda *args: inference.prefill.lower(*args).out_info, "extend": extend}
not_compiled = inference._replace(**shapes_only)
for _ in generate(not_compiled, state.params, [np.zeros(1, np.int32)], 16, seed=1, chunk=16):  # as at an evaluation
    pass
is_same &= recorded == [shapes(sampling_arguments(job, inference, 16))]
print(json.dumps({"row": row, "is_same": is_same, "live": live, "grown": grown}))
