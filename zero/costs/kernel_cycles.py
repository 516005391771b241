"""Cycles of Pallas kernels, which the TPU compiler estimates but writes into a program's text only on request.

A kernel's estimate is that of its instructions as often as its grid runs them, with each branch taken, and without
waits for memory. A grid whose indices data decide (scalar prefetch) counts as one run. The compiler reads the option
once in a process, when it is loaded.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from zero.base.errors import UserError
from zero.costs import hlo
from zero.costs.kernels import product_seconds
from zero.costs.topology import slice_shape, slices_in
from zero.hosts.speeds import Speed

# Of others libtpu 0.0.42 and 0.0.52 end the process. Source: benchmarks/measured/predicted-time.md
_GENERATIONS = ("v5e", "v5p", "v6e")
_VARIABLE = "LIBTPU_INIT_ARGS"
_OPTION = "--xla_jf_dump_static_llo_profile_to="  # a directory, where it writes the same estimates


@contextmanager
def asked_for_kernel_cycles(topology: str) -> Iterator[None]:
    """A compiler that is loaded inside writes them into the texts of programs; processes started later do not.

    Raises:
      UserError: the compiler has no estimates for this topology, or there is none of this name.
    """
    if slice_shape(slices_in(topology)[1]).partition(":")[0] not in _GENERATIONS:
        generations = ", ".join(_GENERATIONS)
        raise UserError(f"exact=True: the TPU compiler estimates kernels for {generations} alone, not for {topology}")
    before = os.environ.get(_VARIABLE)
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    os.environ[_VARIABLE] = f"{before or ''} {_OPTION}{directory}".strip()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def check_kernel_cycles(bodies: hlo.Bodies, speed: Speed) -> None:
    """Raises a `UserError` if kernels have none, because the compiler was loaded before it was asked for them."""
    if any(kernel.cycles is None for kernel in unknown_kernels(bodies, speed)):
        raise UserError(
            "exact=True: this process has loaded the TPU compiler before, and did not ask for the cycles of kernels. "
            "Call zero.plan(..., exact=True) before zero.topology and before other plans, or run "
            "python -m zero.commands.check with --exact"
        )


def unknown_kernels(bodies: hlo.Bodies, speed: Speed) -> list[hlo.Instruction]:
    """Pallas kernels of whose products nothing is known but what their authors note."""
    instructions = [instruction for body in bodies.values() for instruction in body]
    return [x for x in instructions if hlo.is_kernel(x) and product_seconds(x, speed) is None]
