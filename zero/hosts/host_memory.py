"""Memory of TPU hosts, for values offloaded between the forward and the backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from zero.hosts.speeds import SPEEDS

# GB of a machine per chip. Sources: of v5p, v6e and TPU7x cloud.google.com/tpu/docs/tpu7x (448, 720 and 960 GB for four
# chips); of v5e the machine types ct5lp-hightpu-1t to -8t (48 GB for one chip, 384 for eight); of v4 the type
# ct4p-hightpu-4t (407 GB for four); of v2 and v3 what a v3-8 shows (335 GB for four).
# cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus lists such types.
PER_CHIP = {
    "TPU v2": 335e9 / 4,
    "TPU v3": 335e9 / 4,
    "TPU v4": 407e9 / 4,
    "TPU v5 lite": 48e9,
    "TPU v5": 448e9 / 4,
    "TPU v6 lite": 720e9 / 4,
    "TPU7x": 960e9 / 4,
}
SHARE = 0.8  # of this memory; the rest is for the system, the data and the copies of a checkpoint that is being saved


def share_of_host(device_kind: str) -> float:
    """Bytes of the memory of a host per device of its chips that activations may take; infinite if not known.

    >>> share_of_host("TPU v5 lite"), share_of_host("cpu")
    (38400000000.0, inf)
    """
    if device_kind not in PER_CHIP:
        return math.inf
    return SHARE * PER_CHIP[device_kind] / SPEEDS[device_kind].devices


def host_memory(devices: Sequence[Any]) -> int | None:
    """Bytes of the memory of one host that activations may take; None if it is not known.

    Args:
      devices: of a whole slice, as jax describes them.
    """
    kind = devices[0].device_kind
    if kind not in PER_CHIP:
        return None
    hosts = len({device.process_index for device in devices})
    return int(share_of_host(kind) * len(devices) / hosts)
