"""The rows of a global batch that a host's devices compute, and that the host therefore reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from zero.partition.collectives.axis import Axis


@dataclass(frozen=True)
class HostRows:
    """The rows of a global batch that this host reads for its devices.

    The batch is cut equally, in the order of its rows, among the groups of devices that take the same rows. A host
    reads the rows of its devices' groups. Hosts that share a group read the same rows, and one of them counts these.

    >>> axis = Axis.with_tensor_groups("batch", 8, 4)  # two groups of four; a host has two devices
    >>> host_rows = HostRows.of_devices(axis, [0, 0, 1, 1, 2, 2, 3, 3], host=1)
    >>> host_rows.groups, host_rows.counted_groups, host_rows.split(np.arange(6)).tolist()
    ((0,), (), [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]])

    Attributes:
      count: the groups that share a batch.
      group_of_device: the group of each device of this host, in the order of pmap.
      counted_groups: those that this host counts: the first device of their group is its own.
    """

    count: int
    group_of_device: tuple[int, ...]
    counted_groups: tuple[int, ...]

    @classmethod
    def of_devices(cls, axis: Axis, hosts: Sequence[int], host: int) -> HostRows:
        """The rows of `host`, on this axis; `hosts` has the host of each device, in pmap's order."""
        group_of_position = axis.row_group_of_device()
        positions = [position for position, its_host in enumerate(hosts) if its_host == host]
        groups = axis.row_groups()
        counted = tuple(number for number, group in enumerate(groups) if group[0] in positions)
        return cls(len(groups), tuple(group_of_position[position] for position in positions), counted)

    @classmethod
    def here(cls, axis: Axis, devices: Sequence[jax.Device] | None = None) -> HostRows:
        """The rows of this process, on an axis of these devices.

        By default the axis is in pmap's own order, process by process, and each process has as many devices in it.
        """
        if devices is None:
            processes = jax.process_count()
            hosts = np.arange(processes).repeat(axis.size // processes).tolist()
        else:
            hosts = [device.process_index for device in devices]
        return cls.of_devices(axis, hosts, jax.process_index())

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The groups whose rows this host reads, in order."""
        return tuple(sorted(set(self.group_of_device)))

    @cached_property
    def _index_of_device(self) -> list[int]:
        return [self.groups.index(group) for group in self.group_of_device]

    def split(self, rows: np.ndarray) -> np.ndarray:
        """This host's rows `(R, ...)`, group by group, as `(devices, R / groups, ...)` for a pmap."""
        return rows.reshape(len(self.groups), -1, *rows.shape[1:])[self._index_of_device]

    def split_global(self, rows: np.ndarray) -> np.ndarray:
        """The same from the rows of all hosts."""
        return rows.reshape(self.count, -1, *rows.shape[1:])[list(self.group_of_device)]

    def numbers(self, rows: int) -> np.ndarray:
        """The index in the global batch of each of this host's rows."""
        size = rows // len(self.groups)
        return (np.asarray(self.groups)[:, None] * size + np.arange(size)).ravel()

    def is_counted(self, rows: int) -> np.ndarray:
        """Which of its rows this host counts, for sums over hosts in which each row counts once."""
        return np.isin(self.groups, self.counted_groups).repeat(rows // len(self.groups))


def split_rows(x: Any, axis: Axis) -> np.ndarray:
    """Rows `(rows, ...)` of a global batch as `(devices, rows per group, ...)`, for all devices of an axis.

    >>> split_rows(np.arange(4), Axis.with_tensor_groups("batch", 4, 2)).tolist()
    [[0, 1], [0, 1], [2, 3], [2, 3]]
    """
    return HostRows.of_devices(axis, [0] * axis.size, 0).split(np.asarray(x))
