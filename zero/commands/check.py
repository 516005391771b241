"""Is my program ready? `python -m zero.commands.check train.py optimizer create_params` says so before you change it.

It loads the program without running it as `__main__`, and takes two names from it: an optax transform, and the
parameters, or a function without arguments that makes them. They may be in a train state that has them as `params`, or
in a tuple or dict beside the state of the optimizer. Nothing is computed: the program of each device is only traced, on
a host without accelerators as well. If a program makes both inside a function, write
`print(check.examine(tx, params, 8).text)` there.

`python -m zero.commands.check train.py train_step arguments --topology v5e-16` prints `zero.plan` of a step instead:
its memory, traffic and seconds on TPUs that need not be there. `arguments` is a tuple, or a function that returns one.
While the program is loaded, `jax.devices()` are as many CPUs as the slice has devices, so it can make its own mesh.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero
from zero.base.errors import UserError
from zero.costs.absent_devices import NotPlannable
from zero.costs.formula import PREFIX, gpus


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


def _shapes(optimizer: optax.GradientTransformation, made: Any) -> Any:
    """The shapes of parameters that a program holds, or makes, alone, in a train state or beside the optimizer's."""
    shapes = jax.eval_shape(made) if callable(made) else made
    if hasattr(shapes, "params"):
        return shapes.params
    parts: list[Any] = []
    if isinstance(shapes, Mapping):
        parts = list(shapes.values())
    elif isinstance(shapes, (tuple, list)):
        parts = list(shapes)
    for part in parts:
        if any(other is not part and _is_state_of(optimizer, part, other) for other in parts):
            return part
    return shapes


def _is_state_of(optimizer: optax.GradientTransformation, params: Any, state: Any) -> bool:
    """Whether a tree has the form of the optimizer's state for these parameters."""
    try:
        made = jax.eval_shape(optimizer.init, params)
    except (AttributeError, KeyError, TypeError, ValueError):  # a random key or a counter, which no optimizer takes
        return False
    return _form(made) == _form(state)


def _form(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
    """The structure of a tree and the shapes of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [np.shape(leaf) for leaf in leaves]


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise SystemExit(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _create_cpus(topology: str, exact: bool) -> None:
    """Gives jax as many CPUs as a slice, or nodes of GPUs, have devices; `exact` is that of `zero.plan`."""
    zero.plan  # noqa: B018  # says which package is missing, if one is
    asked: AbstractContextManager[None] = nullcontext()
    if exact:
        from zero.costs.kernel_cycles import asked_for_kernel_cycles  # Here, because only plans need its packages.

        asked = asked_for_kernel_cycles(topology)
    with asked:
        jax.config.update("jax_platforms", "cpu")
        devices = gpus(topology) if topology.startswith(PREFIX) else zero.topology(topology)
    zero.use_cpu_devices(len(devices))


def _plan(module: ModuleType, options: argparse.Namespace) -> int:
    """Prints the plan of a step: 0 if it fits, 1 if it does not."""
    for name in (options.name, options.made_from):
        if not hasattr(module, name):
            raise SystemExit(
                f"{options.program} has no {name!r} at its top level. If it is created inside a function, write there: "
                f"print(zero.plan(step, *arguments, topology={options.topology!r}))"
            )
    made = getattr(module, options.made_from)
    try:
        arguments = made() if callable(made) else made
        step = getattr(module, options.name)
        plan = zero.plan(step, *arguments, topology=options.topology, exact=options.exact)
    except (UserError, NotPlannable) as error:
        raise SystemExit(str(error)) from error
    print(plan)
    if options.save is not None:
        plan.save(options.save)
        print(options.save)
    return 0 if plan.fits else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 if the program is ready, 1 if its optimizer would be refused."""
    parser = argparse.ArgumentParser(
        prog="python -m zero.commands.check", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("program", type=Path, help="the Python file")
    parser.add_argument("name", help="the name of its optax transform; with --topology of its training step")
    parser.add_argument(
        "made_from",
        help="the name of its parameters, of a train state, or of a function that returns one of them; with --topology "
        "of the step's arguments, a tuple, or of a function that returns it",
    )
    parser.add_argument("--devices", type=int, default=8, help="the number of devices to plan for")
    parser.add_argument("--topology", help="a TPU slice such as v5e-16, or gpu:h100x8: what a step costs there")
    parser.add_argument(
        "--exact", action="store_true", help="with --topology: the time of Pallas kernels is the compiler's estimate"
    )
    parser.add_argument("--save", type=Path, help="with --topology: a page with the schedule of the step")
    options = parser.parse_args(arguments)
    if options.topology is None and (options.exact or options.save is not None):
        parser.error("--exact and --save need --topology")
    if options.topology is not None:
        try:
            _create_cpus(options.topology, options.exact)
        except (ModuleNotFoundError, UserError) as error:
            raise SystemExit(str(error)) from error
    module = _load(options.program)
    if options.topology is not None:
        return _plan(module, options)
    for name in (options.name, options.made_from):
        if not hasattr(module, name):
            raise SystemExit(
                f"{options.program} has no {name!r} at its top level. If it is created inside a function, write there: "
                f"from zero.commands import check; print(check.examine(optimizer, params, {options.devices}).text)"
            )
    optimizer = getattr(module, options.name)
    report = examine(optimizer, _shapes(optimizer, getattr(module, options.made_from)), options.devices)
    print(report.text)
    return 0 if report.refusal is None else 1


if __name__ == "__main__":
    sys.exit(main())
