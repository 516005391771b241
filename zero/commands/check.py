"""Is my program ready? `python -m zero.commands.check train.py optimizer create_params` says so before you change it.

It loads the program without running it as `__main__`, and takes two names from it: an optax transform, and the
parameters, or a function without arguments that makes them, or a train state that has them as `params`. Nothing is
computed: the program of each device is only traced, on a host without accelerators as well. Where a program makes both
inside a function, `print(check.examine(tx, params, 8).text)` there says the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import zero


class Report(NamedTuple):
    """What sharding would do to an optimizer, as text, and why it would be refused, if so."""

    text: str
    refusal: str | None


def examine(optimizer: optax.GradientTransformation, params: Any, devices: int) -> Report:
    """Memory before and after, what stays whole on every device, and whether the optimizer is right on shards.

    >>> report = examine(optax.adam(1e-3), {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, 8)
    >>> print(report.text)
    optimizer state per device: 32,772 bytes replicated, 4,100 over 8 devices
    whole on every device: nothing
    gradients: one reduce-scatter and one gather of updates, in place of one all-reduce
    the optimizer works on slices unchanged
    """
    layout = zero.make_layout(params, devices)
    refusal = None
    state = "optimizer state per device: unknown"
    try:
        memory = zero.memory(params, optimizer, devices, compute_dtypes=[jnp.float32])
        before, after = (memory.rows[stage].state for stage in (0, 1))
        state = f"optimizer state per device: {before:,} bytes replicated, {after:,} over {devices} devices"
        _trace(optimizer, layout.shapes(), devices)
    except (ValueError, TypeError) as error:
        refusal = str(error).partition("\n--------")[0]
    wholes = [f"{leaf.name or '(root)'} {list(leaf.shape)}" for leaf in layout.leaves if not leaf.splits] or ["nothing"]
    verdict = "the optimizer works on slices unchanged" if refusal is None else f"refused: {refusal}"
    lines = [
        state,
        f"whole on every device: {', '.join(wholes)}",
        "gradients: one reduce-scatter and one gather of updates, in place of one all-reduce",
        verdict,
    ]
    return Report("\n".join(lines), refusal)


def _trace(optimizer: optax.GradientTransformation, params: Any, devices: int) -> None:
    """Raises what an update of the sharded optimizer would raise in the program."""
    tx = zero.shard_optimizer(optimizer, "devices")

    def step(params: Any) -> Any:
        return tx.update(zero.local(params), tx.init(params), params)

    jax.eval_shape(jax.vmap(step, in_axes=None, axis_name="devices", axis_size=devices), params)


def _shapes(made: Any) -> Any:
    """The shapes of parameters that a program holds, or makes, alone or in a train state."""
    shapes = jax.eval_shape(made) if callable(made) else made
    return getattr(shapes, "params", shapes)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 if the program is ready, 1 if its optimizer would be refused."""
    parser = argparse.ArgumentParser(
        prog="python -m zero.commands.check", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("program", type=Path, help="the Python file")
    parser.add_argument("optimizer", help="the name of its optax transform")
    parser.add_argument(
        "params", help="the name of its parameters, or of a function that returns them or a train state"
    )
    parser.add_argument("--devices", type=int, default=8, help="the number of devices to plan for")
    options = parser.parse_args(arguments)
    module = _load(options.program)
    for name in (options.optimizer, options.params):
        if not hasattr(module, name):
            raise SystemExit(
                f"{options.program} has no {name!r} at its top level. If it is created inside a function, write there: "
                f"from zero.commands import check; print(check.examine(optimizer, params, {options.devices}).text)"
            )
    report = examine(getattr(module, options.optimizer), _shapes(getattr(module, options.params)), options.devices)
    print(report.text)
    return 0 if report.refusal is None else 1


if __name__ == "__main__":
    sys.exit(main())
