"""Blocks of arrays in the host's memory ("pinned_host"), which a device can read and write.

`jax.pmap` takes no argument from there, and returns none. So what a pmapped program needs is moved to the devices
before it is called, and what it returns is moved away after, both while other programs run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from zero.partition.layout import PyTree

HOST, DEVICE = "pinned_host", "device"
IN_FLIGHT = 2  # blocks beside the current one: one on its way to the devices, one on its way back


def to_host(tree: PyTree) -> PyTree:
    """A copy of arrays of devices in the memory of their hosts; returns before the copy is there."""
    return _moved(tree, HOST)


def to_devices(tree: PyTree) -> PyTree:
    """The inverse of `to_host`."""
    return _moved(tree, DEVICE)


def _moved(tree: PyTree, memory: str) -> PyTree:
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind(memory), tree))


def taken(tree: PyTree) -> PyTree:
    """`to_devices`, after which the host no longer holds what it held."""
    moved = to_devices(tree)
    for x in jax.tree.leaves(tree):
        x.delete()  # its memory is freed once it has been read
    return moved


class HostQueue:
    """Moves blocks to the host, and lets the caller run only a few blocks ahead of the devices.

    Otherwise programs would be started for all blocks at once, and the devices hold all of them.
    """

    def __init__(self) -> None:
        self._last: PyTree = None

    def put(self, block: PyTree) -> PyTree:
        """The block in the host's memory; waits until the block of the call before is there."""
        moved = to_host(block)
        jax.block_until_ready(self._last)
        self._last = moved
        return moved


def in_reverse(blocks: Sequence[PyTree]) -> Iterator[tuple[int, PyTree]]:
    """The number of each block and the block on the devices, last first, while the next one is on its way.

    The host no longer holds a block that was taken.
    """
    coming: Any = taken(blocks[-1])
    for number in reversed(range(len(blocks))):
        block = coming
        coming = taken(blocks[number - 1]) if number else None
        yield number, block
