"""What the devices of several slices send each other over the data-center network, in XLA's notation.

XLA for TPU compiles the program of one slice. What a collective exchanges with other slices is a send and a receive of
the host's runtime (Megascale), which share a rendezvous. The part within the slice stays a collective of its own.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from zero.costs.hlo import Instruction, computations, runs_of, sizes_of

_RUNTIME = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_KIND = re.compile(r'_xla_megascale_transfer_type="([^"]*)"')
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}')
_DEVICES = re.compile(r"_xla_megascale_target=\{\{([\d,]+)\}")  # of one group, by jax's ids
_IDS_PER_SLICE = 100_000  # device 3 of slice 0 is 100003
# Bytes that a device sends for an operand of one byte, of as many slices; a ring sends an all-reduce twice.
_SENT = {
    "ALL_REDUCE": lambda slices: 2 * (slices - 1) / slices,
    "REDUCE_SCATTER": lambda slices: (slices - 1) / slices,
    "ALL_TO_ALL": lambda slices: (slices - 1) / slices,
    "ALL_GATHER": lambda slices: slices - 1,
}


class Crossing(NamedTuple):
    """What one device sends to other slices in one run of an instruction."""

    rendezvous: str
    sent: float


def rendezvous_of(instruction: Instruction) -> str | None:
    """The rendezvous of a send to other slices, or of a receive from them; None for all else."""
    if instruction.op not in ("send", "recv") or _RUNTIME not in instruction.rest:
        return None
    match = _RENDEZVOUS.search(instruction.rest)
    if match is None:
        return None
    return match[1]


def crossing_of(instruction: Instruction) -> Crossing | None:
    """What a send to other slices sends; None for all else.

    Raises:
      ValueError: the kind of transfer or the slices cannot be read.
    """
    rendezvous = rendezvous_of(instruction)
    if rendezvous is None or instruction.op != "send":
        return None
    kind = _KIND.search(instruction.rest)
    slices = _slices_of(instruction.rest)
    if kind is None or kind[1] not in _SENT or slices is None:
        raise ValueError(f"a transfer between slices is not understood: {instruction.rest[:900]}")
    operand_bytes = sizes_of(instruction.result)[0]
    return Crossing(rendezvous, operand_bytes * _SENT[kind[1]](slices))


def _slices_of(rest: str) -> int | None:
    if match := _SLICES.search(rest):
        return _count(match[1])
    if match := _DEVICES.search(rest):
        return len({int(device) // _IDS_PER_SLICE for device in match[1].split(",")})
    return None


def _count(numbers: str) -> int:
    """How many numbers a list such as `1,2,5:8` has.

    >>> _count("1,2,5:8")
    6
    """
    count = 0
    for part in numbers.split(","):
        first, _, last = part.partition(":")
        count += int(last or first) - int(first) + 1
    return count


def bytes_between_slices(text: str) -> float:
    """Bytes that one device sends to other slices in one run of a compiled program."""
    bodies, entry = computations(text)
    total = 0.0
    for name, runs in runs_of(bodies, entry).items():
        for instruction in bodies[name]:
            crossing = crossing_of(instruction)
            if crossing is not None:
                total += runs * crossing.sent
    return total
