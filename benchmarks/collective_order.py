# python benchmarks/collective_order.py [--rounds 1000] [--plain] [--flag]
#
# Eight virtual CPU devices run a loop that gathers, and beside it a gather that does not use the loop's result. With
# --plain, without zero, devices meet in different collectives within a few rounds, and the process aborts
# ("Unexpected number of participants") or a result is silently wrong. --flag adds the flag of `zero.use_cpu_devices`,
# which does not help here. Without both, the function is wrapped in `zero.in_order`, and all rounds agree with NumPy.
# Takes about four minutes on two busy cores. Status 0: all rounds were right.
"""Independent collectives on XLA's CPU backend meet each other; `zero.in_order` keeps them apart."""

import argparse
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import zero
from zero.partition.virtual_devices import IN_ORDER

DEVICES = 8
ROWS = 4096  # enough for XLA to split the loop's addition over threads, so that the loop is started, then left


def step(x: jax.Array, w: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """Per device: x (ROWS, 64), w (layers, 8), y (32, 32)."""

    def layer(carry: tuple[jax.Array, jax.Array], w: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        return (carry[0] + 1, jnp.maximum(carry[1], jax.lax.all_gather(w, "devices", tiled=True))), None

    (_, x), _ = jax.lax.scan(layer, (jnp.float32(0), x), w)
    beside = jax.lax.all_gather((y @ y)[0, :8], "devices", tiled=True)
    # More results than needed: XLA reuses their buffers inside the loop, and not the one of the gather beside it,
    # which would make it wait by accident.
    unused = [(x[i] + i).astype(jnp.int32) for i in range(8)] + [jnp.sin(x[i, i]) for i in range(16)]
    return beside, x, *unused, *[x[i, i].astype(jnp.int32) for i in range(8)], *[x[i, i] > 0 for i in range(4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--flag", action="store_true")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if given.flag:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {IN_ORDER}"
    program = jax.pmap(step if given.plain or given.flag else zero.in_order(step), axis_name="devices")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((DEVICES, ROWS, 64), np.float32)
    w = rng.standard_normal((DEVICES, 12, 8), np.float32)
    y = rng.integers(-3, 4, (DEVICES, 32, 32)).astype(np.float32)  # whose products are exact
    largest = np.maximum(x, w.transpose(1, 0, 2).reshape(12, 64).max(0))
    beside = (y @ y)[:, 0, :8].reshape(64)
    wrong = 0
    for _ in range(given.rounds):
        got = jax.device_get(program(x, w, y)[:2])
        wrong += not (np.array_equal(got[0], np.tile(beside, (DEVICES, 1))) and np.array_equal(got[1], largest))
    print(f"{given.rounds} rounds, {wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
