"""Started by test_planning.py: plans a step on 8 virtual CPU devices, takes it, and prints both as JSON."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from hydra import compose, initialize_config_dir

from zero.models.gpt import GPTConfig
from zero.runtime.build import make_job
from zero.runtime.config.configuration import check, load_sizes
from zero.runtime.planning.planning import Request, compile_step, step_arguments
from zero.runtime.run.run import split_rows

CONF = Path(__file__).parents[3] / "conf"
SIZE = GPTConfig(embedding_dim=384, vocab_size=2048, num_head=8, block_size=64, dropout=0.0, N=4, vocab_chunks=2)


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


jax.config.update("jax_num_cpu_devices", 8)
with initialize_config_dir(str(CONF), version_base="1.3"):
    composed = compose("config", ["plan.topology=cpu", "data.max_context=64", *sys.argv[1:]])
config = check(composed, load_sizes(CONF / "model_config.yaml"))
row = compile_step(Request(config, SIZE, micro_batch=1))

job = make_job(config, SIZE)  # as training does
key = np.asarray(jax.random.key_data(jax.random.key(0)))
state = job.programs.start(job.programs.init(np.stack([key] * 8)))
batch = split_rows(np.ones((8, 64), np.int32), 0)
lowered = job.programs.step.lower(state, batch)
is_same = lowered.as_text() == job.programs.step.lower(*step_arguments(job, 1, 64)).as_text()
step = lowered.compile()
jax.block_until_ready(state)
live = sum(x.nbytes for x in jax.live_arrays()) // 8
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
state, metrics = step(state, batch)
jax.block_until_ready((state, metrics))
print(json.dumps({"row": row, "is_same": is_same, "live": live, "grown": (resident("VmHWM") - before) // 8}))
