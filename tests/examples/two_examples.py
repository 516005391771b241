"""One of two processes of four CPU devices each; `test_examples.py` gives its number, a port and a folder.

Every sharded example of the folder continues from its checkpoint `NAME.two`, twice, and writes its losses beside it.
"""

import importlib.util
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

import zero

process, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_disable_most_optimizations", True)  # compiles quickly
jax.config.update("jax_cpu_collectives_implementation", "gloo")
zero.use_cpu_devices(4)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)

for checkpoint in sorted(folder.glob("*.two")):
    spec = importlib.util.spec_from_file_location(checkpoint.stem, folder / f"{checkpoint.stem}_sharded.py")
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses = [loss for steps in (15, 20) for loss in example.train(steps, checkpoint, resume=True)[0]]
    (folder / f"{checkpoint.stem}.losses{process}").write_text(" ".join(map(str, losses)))
print("done")
