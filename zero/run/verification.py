"""`training.verify_every`: ends a run in which two devices do not compute the same."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from zero.errors import Unavailable, UserError
from zero.partition.collectives.axis import Axis
from zero.partition.global_arrays import pmap_devices
from zero.partition.layout import PyTree
from zero.training.verification import group_size, suspects

_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


class Verifier:
    """Compares what devices compute after every so many steps.

    Args:
      program: `Programs.verify`.
      axis: the pmap axis.
      every: steps; None: never.

    Raises:
      UserError: devices that are GPUs may compute the same sum in another order each time.
    """

    def __init__(self, program: Any, axis: Axis, every: int | None) -> None:
        if (
            every is not None
            and jax.default_backend() == "gpu"
            and _DETERMINISTIC not in os.environ.get("XLA_FLAGS", "")
        ):
            raise UserError(f"training.verify_every={every} on GPU needs XLA_FLAGS={_DETERMINISTIC}, or null")
        self._program, self._axis, self._every = program, axis, every

    def is_due(self, step: int) -> bool:
        """Whether devices are compared after this step."""
        return self._every is not None and step % self._every == 0

    def check(self, step: int, weights: PyTree, tokens: jax.Array | np.ndarray) -> None:
        """Compares the results of neighbours. If they differ, a second neighbour repeats them, to find the device.

        All hosts call it with the weights after this step and the rows of their devices, and all raise alike.

        Raises:
          Unavailable: a device is faulty.
        """
        results = {0: self._results(weights, tokens, 0)}
        if not suspects(results, self._axis)[0]:
            return
        results[1] = self._results(weights, tokens, 1)
        groups, is_certain = suspects(results, self._axis)
        names = [" and ".join(map(_name, group)) for group in groups]
        if not is_certain:
            found = f"{' or '.join(names)} is wrong, and which one could not be told: both repeat their results"
        elif group_size(self._axis) == self._axis.size:
            found = f"{names[0]} did not repeat its own result"
        else:
            found = f"{', '.join(names)} computed what other devices did not"
        raise Unavailable(
            f"step {step}: {found}. training.verify_every={self._every} compares losses and gradients of the same rows "
            "bit for bit: the device, its memory or a link is faulty. This state is not saved: replace the device, and "
            "--resume from the checkpoint before"
        )

    def _results(self, weights: PyTree, tokens: jax.Array | np.ndarray, first: int) -> np.ndarray:
        firsts = np.full(jax.local_device_count(), first, np.int32)
        return np.asarray(self._program(weights, tokens, firsts))


def _name(place: int) -> str:
    device = pmap_devices()[place]
    return f"{device} of host {device.process_index}"
