"""Blocks of arrays in host memory ("pinned_host"), which a device can read and write.

`jax.pmap` neither takes arguments from there nor returns results to it. So the inputs of a pmapped program are moved to
the devices before the call, and its results are moved away after it, both while other programs run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from zero.partition.layout import PyTree

HOST, DEVICE = "pinned_host", "device"
IN_FLIGHT = 2  # blocks besides the current one: one moving to the devices, one moving back


def to_host(tree: PyTree) -> PyTree:
    """Copies arrays from devices to the memory of their hosts; returns before the copy is complete."""
    return _moved(tree, HOST)


def to_devices(tree: PyTree) -> PyTree:
    """The inverse of `to_host`."""
    return _moved(tree, DEVICE)


def _moved(tree: PyTree, memory: str) -> PyTree:
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind(memory), tree))


def taken(tree: PyTree) -> PyTree:
    """`to_devices`, which also frees the host's copy."""
    moved = to_devices(tree)
    for x in jax.tree.leaves(tree):
        x.delete()  # frees its memory once it has been read
    return moved


class HostQueue:
    """Moves blocks to the host, and lets the caller run only a few blocks ahead of the devices.

    Otherwise programs for all blocks would start at once, and the devices would hold all blocks.
    """

    def __init__(self) -> None:
        self._last: PyTree = None

    def put(self, block: PyTree) -> PyTree:
        """The block in host memory; waits until the previous call's block is there."""
        moved = to_host(block)
        jax.block_until_ready(self._last)
        self._last = moved
        return moved


def in_reverse(blocks: Sequence[PyTree]) -> Iterator[tuple[int, PyTree]]:
    """The index of each block and the block on the devices, last first, while the next one is moving.

    The host frees each block once it is taken.
    """
    coming: Any = taken(blocks[-1])
    for number in reversed(range(len(blocks))):
        block = coming
        coming = taken(blocks[number - 1]) if number else None
        yield number, block
