# python benchmarks/steps_ahead.py [--steps 2000] [--plain]
#
# Eight virtual CPU devices run steps that the host dispatches without waiting for a result. With --plain jax keeps its
# own settings: XLA hangs after a few dozen steps and ends the process a minute later ("Termination timeout"), also on
# an idle machine. `zero.use_cpu_devices` gives it a pool that is large enough. Status 0: all steps ran.
"""Steps dispatched ahead use up XLA's threads on virtual CPU devices, unless its pool is larger."""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parents[1]))
import zero

DEVICES = 8


def step(x: jax.Array) -> jax.Array:
    """Per device: x (64, 64)."""
    for _ in range(4):
        x = jax.lax.pmean(x @ x / 64, "devices")
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if given.plain:
        jax.config.update("jax_num_cpu_devices", DEVICES)
    else:
        zero.use_cpu_devices(DEVICES)
    program = jax.pmap(step, axis_name="devices", donate_argnums=0)
    x = jnp.ones((DEVICES, 64, 64))
    for _ in range(given.steps):
        x = program(x)
    assert (x == 1).all(), "the mean of ones is one"
    print(f"{given.steps} steps")


if __name__ == "__main__":
    main()
