"""Plans for GPUs without a compiler: memory and traffic of a step by formula."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.extend.core import jaxprs_in_params

from zero.base.errors import UnknownTopology
from zero.costs.hlo import Collective

PREFIX = "gpu:"
# jax's name of each kind
KINDS = {
    "a100": "NVIDIA A100-SXM4-40GB",
    "a100-80g": "NVIDIA A100-SXM4-80GB",
    "b200": "NVIDIA B200",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "l4": "NVIDIA L4",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "t4": "Tesla T4",
}
PER_NODE = 8
_KIND_OF = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "all_to_all": "all-to-all",
}


@dataclass(frozen=True)
class Gpu:
    """A GPU that is not present, with the attributes of a `jax.Device` that a job reads."""

    id: int
    process_index: int  # one process per node
    device_kind: str
    platform: str = "gpu"


def gpus(topology: str) -> list[Gpu]:
    """The devices of `gpu:KINDxCOUNT`, in nodes of eight.

    Raises:
      UnknownTopology: there is no such kind or number.

    >>> [(gpu.device_kind, gpu.process_index) for gpu in gpus("gpu:h100x16")[6:9:2]]
    [('NVIDIA H100 80GB HBM3', 0), ('NVIDIA H100 80GB HBM3', 1)]
    """
    match = re.fullmatch(rf"{PREFIX}([\w-]+?)x(\d+)", topology)
    if match is None or match[1] not in KINDS or not int(match[2]):
        raise UnknownTopology(
            f"topology={topology}: expected gpu:KINDxCOUNT, such as gpu:h100x8, with a KIND of {', '.join(KINDS)}"
        )
    return [Gpu(number, number // PER_NODE, KINDS[match[1]]) for number in range(int(match[2]))]


def collectives_of(jaxpr: Any, devices: int, times: int = 1) -> Iterator[Collective]:
    """The collectives of a traced step that runs this often, as if computation hid them: a lower bound on time."""
    for eqn in jaxpr.eqns:
        inner = list(jaxprs_in_params(eqn.params))
        if eqn.primitive.name in _KIND_OF:
            groups = eqn.params["axis_index_groups"] or [list(range(devices))]
            size = len(groups[0])
            kind = _KIND_OF[eqn.primitive.name]
            operand_bytes = sum(math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in eqn.invars)
            # In a ring: a gather sends the own shard k - 1 times, a sum each of k parts twice, the others once.
            passes = {"all-gather": size - 1.0, "all-reduce": 2 * (size - 1) / size}.get(kind, (size - 1) / size)
            listed = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)
            yield Collective(kind, round(times * operand_bytes * passes), f"replica_groups={{{listed}}}", True)
        elif eqn.primitive.name == "cond":
            branches = [list(collectives_of(branch, devices, times)) for branch in inner]
            yield from max(branches, key=lambda branch: sum(collective.sent for collective in branch))
        else:
            for sub in inner:
                yield from collectives_of(sub, devices, times * eqn.params.get("length", 1))
