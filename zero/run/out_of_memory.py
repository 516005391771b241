"""The error message when a device runs out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from zero.base.errors import UserError, first_line
from zero.hosts.startup import device_memory

GIB = 2**30


@contextmanager
def named_out_of_memory(program: str, state_bytes: int) -> Iterator[None]:
    """Adds the program and its state to the error if a device runs out of memory within the block.

    Args:
      program: its name in the message.
      state_bytes: bytes of the state per device.

    Raises:
      UserError: a device is out of memory; another start would fail in the same way.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise UserError(
            f"out of memory: {program} does not fit in the {device_memory() / GIB:.2f} GiB of a device, of which the "
            f"state takes {state_bytes / GIB:.2f} ({first_line(error)}). To need less, set zero.remat=nested, "
            "zero.offload=activations, more training.gradient_accumulation_steps, +memory=4-bytes or +memory=host, or "
            "use more devices; mode=plan plan.topology=local compares them"
        ) from error
