"""How long a collective takes on the links of a TPU slice, given the coordinates of its devices on the torus.

Sources: benchmarks/measured/predicted-time.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from zero.hosts.speeds import HOP, Speed


def places_of(devices: Sequence[Any]) -> list[tuple[int, ...]]:
    """For each device of a slice the coordinates of its chip, then the core on it."""
    return [(*device.coords, device.core_on_chip) for device in devices]


def collective_seconds(
    kind: str,
    sent: float,
    group: Sequence[int],
    places: Sequence[tuple[int, ...]],
    speed: Speed,
    *,
    is_ring: bool = False,
) -> float:
    """Seconds of a collective on an idle network, of all groups of its devices at once.

    Each dimension of the torus that a group spans carries its share of the bytes, over a line once, over a ring in both
    directions. An all-to-all takes as long as the links in the middle of the longest dimension, which half of all bytes
    cross. Groups that lie between each other on a line share its links, as do the cores of a chip that are in different
    groups.

    Args:
      kind: as XLA names it: "all-gather", "all-reduce", "reduce-scatter", "all-to-all" or "collective-permute".
      sent: bytes that a device sends.
      group: numbers of the devices of one group.
      places: of all devices of the program, as `places_of` has them.
      speed: of the generation.
      is_ring: whether one ring leads through all devices of a group, in both directions.
    """
    members = [places[device] for device in group]
    chips = {place[:-1] for place in members}
    if len(chips) == 1:  # the cores of a chip share its memory
        return 2 * sent / speed.memory
    rates = []  # bytes per second of each dimension
    crossings = []  # bytes on a middle link of each dimension, over `sent`
    hops = 0.0
    sizes = extents(places, speed.dims)
    rings = [size % speed.ring == 0 for size in sizes]
    if speed.dims == 3:  # linked by optical switches, all dimensions or none
        rings = [all(rings)] * 3
    for dim, is_linked in enumerate(rings):
        positions = sorted({chip[dim] for chip in chips})
        extent = positions[-1] - positions[0] + 1
        if len(positions) > 1:
            between = math.ceil(extent / len(positions))
            is_whole = is_linked and len(positions) * between == sizes[dim]
            directions = 2 if is_whole else 1
            rates.append(speed.link * directions / between)
            crossings.append(len(positions) / 4 * len(members) / (len(members) - 1))
            hops += (extent - 1) / directions
    if kind == "all-to-all":  # of all cores of a chip, each with bytes of its own
        seconds = speed.devices * max(sent * part / rate for part, rate in zip(crossings, rates, strict=True))
    else:
        rate = sum(rates)
        if is_ring:
            rate = min(rate, 2 * speed.link)
        seconds = sent / rate * speed.devices * len(chips) / len(members)
    rounds = 2 if kind == "all-reduce" else 1
    return seconds + rounds * hops * HOP


def extents(places: Sequence[tuple[int, ...]], dims: int) -> list[int]:
    """The size of the torus in each dimension.

    >>> extents([(0, 0), (1, 0), (2, 0)], 2)
    [3, 1]
    """
    return [1 + max(positions) for positions in list(zip(*places, strict=True))[:dims]]
