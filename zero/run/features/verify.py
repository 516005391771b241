"""`verify.every`: ends a run if two devices disagree."""

from __future__ import annotations

import os
from dataclasses import dataclass

import jax
import numpy as np

from zero.base.errors import Unavailable, UserError
from zero.base.keys import at_least, key
from zero.partition.global_arrays import pmap_devices
from zero.partition.layout import PyTree
from zero.run.feature import Feature
from zero.run.run import Run
from zero.training.batch import Batch
from zero.training.verification import compared_groups, suspects

_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


class Verify(Feature):
    """Compares the results of neighboring devices every `verify.every` steps.

    Raises:
      UserError: on GPUs the order of sums may change between calls.
    """

    @dataclass(frozen=True)
    class Keys:
        every: int | None = key(
            None,
            at_least(1),
            "Every n steps, neighboring devices repeat each other's first micro-batch; if results differ, the run "
            "ends with status 1 and names the faulty device. null: off.",
            "Each time costs the gradients of two micro-batches: at 100 about 2 % with one micro-batch per step, 0.1 % "
            "with 16.",
            in_steps=True,
        )

    name = "verify"
    changes_nothing = True

    def __init__(self, keys: Keys, run: Run) -> None:
        self._every = keys.every
        self._program = run.job.programs.verify
        self._axis = run.axis
        is_gpu = jax.default_backend() == "gpu"
        if self._every is not None and is_gpu and _DETERMINISTIC not in os.environ.get("XLA_FLAGS", ""):
            raise UserError(f"verify.every={self._every} on GPU needs XLA_FLAGS={_DETERMINISTIC}, or null")

    def after_step(self, run: Run, step: int, batch: Batch) -> None:
        """Compares devices with the weights after this step and its sequences.

        Raises:
          Unavailable: a device is faulty.
        """
        if self._every is not None and step % self._every == 0:
            self.check(step, run.weights, batch.tokens)

    def check(self, step: int, weights: PyTree, tokens: jax.Array | np.ndarray) -> None:
        """Compares the results of neighbors. If they differ, a second neighbor repeats them to find the device.

        All hosts call it with the weights after this step and the rows of their devices, and all raise the same error.

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
            fault = f"{' or '.join(names)} is faulty, and it cannot be determined which: both repeat their results"
        elif len(compared_groups(self._axis)) == 1:
            fault = f"{names[0]} did not repeat its own result"
        else:
            fault = f"{', '.join(names)} computed a different result from other devices"
        raise Unavailable(
            f"step {step}: {fault}. verify.every={self._every} compares losses and gradients of the same rows bit for "
            "bit: the device, its memory or a link is faulty. This state is not saved: replace the device and "
            "--resume from the previous checkpoint"
        )

    def _results(self, weights: PyTree, tokens: jax.Array | np.ndarray, first: int) -> np.ndarray:
        firsts = np.full(jax.local_device_count(), first, np.int32)
        return np.asarray(self._program(weights, tokens, firsts))


def _name(place: int) -> str:
    device = pmap_devices()[place]
    return f"{device} of host {device.process_index}"
