"""The pmap axis and its groups."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Axis:
    """A pmap axis and its groups.

    The devices of the axis form a grid of shape `(replicas, phase, phase, ...)`. State is split over the phases and
    replicated across the first dimension (hybrid sharding). A reduce-scatter takes the phases in order, one collective
    each, and a gather takes them in reverse. So the row-major position inside the phases is the number of a device's
    shard, for slices, collectives and the mesh of global arrays.

    Attributes:
      name: the `axis_name` of the pmap.
      shape: `(replicas, *phases)`; its product is the size of the axis.
      devices: positions on the pmap axis in row-major order of the grid; by default 0, 1, 2, ...
      tensor: size of a tensor group, whose devices compute on the same rows with different parts of the parameters. If
        more than 1, the first phase is along these groups (see `with_tensor_groups`): a part is gathered over the
        other phases.
      expert: size of an expert group, whose devices compute with different experts. If more than 1, the last phase is
        along these groups: the shards of experts are exchanged in it.
      sums_copies: whether a reduce-scatter also sums over the copies. Otherwise call `stages.sum_copies`: once per step
        costs less than once per layer and micro-batch.
      context: size of a context group: neighbors on the pmap axis that compute different positions of the same rows.
        It does not change how state is split.
      exchanges: whether a reduce-scatter is an all-to-all and a sum on each device. XLA for TPU runs an all-to-all
        beside matrix products, and a reduce-scatter only where SparseCores take it (v6e, TPU7x). Sums differ in the
        order of their terms. They wait for each other as with `orders_scatters`.
      orders_scatters: whether scatters of large leaves wait for each other, the largest first, and all over the first
        phase before those over the next. Over the lines of a v6e XLA otherwise ends a layer with the largest ones,
        beside nothing.
      small_first: whether gathers of large leaves wait for the gather of small ones, which is joined. Where SparseCores
        gather the large ones it otherwise waits for all of them, and computation with it.
      copies_dtype: the dtype in which gradients are sent between copies of the state: "bfloat16", or "int8" in blocks
        of 256 with a scale; None: their own.

    Raises:
      ValueError: `shape` has no phase, `devices` is not a permutation of the positions on the axis, the first phase is
        not of size `tensor`, or the last one not of size `expert`; the devices do not divide into context groups; or
        two kinds of groups are requested.

    >>> Axis("batch", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7)).shard_of_device()
    (0, 4, 1, 5, 2, 6, 3, 7)
    """

    name: str
    shape: tuple[int, ...]
    devices: tuple[int, ...] = ()
    tensor: int = 1
    sums_copies: bool = True
    context: int = 1
    expert: int = 1
    exchanges: bool = False
    small_first: bool = False
    orders_scatters: bool = False
    copies_dtype: str | None = None

    def __post_init__(self) -> None:
        size = math.prod(self.shape)
        if len(self.shape) < 2 or size < 1:
            raise ValueError(f"axis {self.name!r}: shape is (replicas, phase, ...), got {self.shape}")
        object.__setattr__(self, "devices", self.devices or tuple(range(size)))
        if sorted(self.devices) != list(range(size)):
            raise ValueError(f"axis {self.name!r}: devices must be a permutation of 0..{size - 1}, got {self.devices}")
        if self.tensor > 1 and self.tensor != self.shape[1]:
            raise ValueError(f"axis {self.name!r}: the first phase of {self.shape} must be of tensor={self.tensor}")
        if self.tensor > 1 < self.context:
            raise ValueError(
                f"axis {self.name!r}: tensor={self.tensor} with context={self.context}; expected one of them to be 1"
            )
        if size % self.context:
            raise ValueError(f"axis {self.name!r}: {size} devices do not make context groups of {self.context}")
        if self.expert > 1 and (self.expert != self.shape[-1] or self.tensor > 1 or self.context > 1):
            raise ValueError(
                f"axis {self.name!r}: the last phase of {self.shape} must be of expert={self.expert}, without "
                f"tensor or context groups"
            )

    @classmethod
    def with_tensor_groups(cls, name: str, size: int, tensor: int, replicas: int = 1) -> Axis:
        """Tensor groups of neighbors on the pmap axis; copies of the state are on neighbors too.

        >>> Axis.with_tensor_groups("batch", 8, 2).groups(2, apart=4)
        [[0, 1], [2, 3], [4, 5], [6, 7]]

        Raises:
          ValueError: `size` does not divide into copies of whole tensor groups.
        """
        if size % (replicas * tensor):
            raise ValueError(f"axis {name!r}: {size} devices do not make {replicas} copies of groups of {tensor}")
        grid = np.arange(size).reshape(replicas, -1, tensor).swapaxes(1, 2)
        return cls(name, grid.shape, tuple(grid.ravel().tolist()), tensor)

    @classmethod
    def with_expert_groups(cls, name: str, size: int, expert: int, replicas: int = 1) -> Axis:
        """Expert groups of neighbors on the pmap axis; copies of the state are on neighbors too.

        >>> Axis.with_expert_groups("batch", 8, 2).groups(2)
        [[0, 1], [2, 3], [4, 5], [6, 7]]

        Raises:
          ValueError: `size` does not divide into copies of whole expert groups.
        """
        if size % (replicas * expert):
            raise ValueError(f"axis {name!r}: {size} devices do not make {replicas} copies of groups of {expert}")
        return cls(name, (replicas, size // (replicas * expert), expert), expert=expert)

    @classmethod
    def across_slices(cls, name: str, size: int, slices: int, replicas: int = 1) -> Axis:
        """Copies of the state that span several slices: one phase within a slice, and one between slices.

        So a reduce-scatter sends each slice's sums between slices, and a gather begins between slices.

        >>> Axis.across_slices("batch", 8, 2).phases(8)
        [(2, 1), (4, 2)]
        >>> Axis.across_slices("batch", 8, 2).groups(2)
        [[0, 4], [1, 5], [2, 6], [3, 7]]

        Args:
          name: the `axis_name` of the pmap.
          size: devices of the pmap, with the devices of a slice next to each other.
          slices: the number of slices, of equal size.
          replicas: copies of the state, each on whole slices.

        Raises:
          ValueError: the devices do not divide into slices, or the slices into copies.
        """
        if size % slices or slices % replicas:
            raise ValueError(f"axis {name!r}: {size} devices in {slices} slices do not make {replicas} copies")
        grid = np.arange(size).reshape(replicas, slices // replicas, -1).swapaxes(1, 2)
        return cls(name, grid.shape, tuple(grid.ravel().tolist()))

    @classmethod
    def from_devices(cls, name: str, devices: Sequence[jax.Device]) -> Axis:
        """One phase along each dimension of a TPU slice's torus, or inside hosts and then across them.

        Over groups along one dimension a TPU runs reduce-scatters; over a whole slice it runs an all-reduce.

        Args:
          name: the `axis_name` of the pmap.
          devices: devices of the pmap, in its order.

        Raises:
          ValueError: the devices do not fill a grid.
        """
        if all(hasattr(device, "coords") for device in devices):
            places = [(*device.coords, device.core_on_chip) for device in devices]
        else:
            hosts = [device.process_index for device in devices]
            places = [(hosts[:i].count(host), host) for i, host in enumerate(hosts)]
        sizes = tuple(len(set(column)) for column in zip(*places, strict=True))
        if math.prod(sizes) != len(devices) or len(set(places)) != len(devices):
            raise ValueError(f"axis {name!r}: {len(devices)} devices do not fill a grid of {sizes}")
        phases = tuple(size for size in sizes if size > 1) or (1,)
        return cls(name, (1, *phases), tuple(sorted(range(len(devices)), key=places.__getitem__)))

    @classmethod
    def with_tensor_lines(cls, name: str, devices: Sequence[jax.Device], tensor: int) -> Axis:
        """Tensor groups along one dimension of a TPU slice's torus, so that gathers lie along the other dimensions.

        A group has all cores of consecutive chips; if it spans a dimension, its links form a ring. It may span several
        hosts.

        Args:
          name: the `axis_name` of the pmap.
          devices: devices of the pmap, in its order.
          tensor: devices of a group.

        Raises:
          ValueError: the devices do not fill a grid, or no dimension of it divides into such groups.
        """
        places = [(*device.coords, device.core_on_chip) for device in devices]
        *sizes, cores = (len(set(column)) for column in zip(*places, strict=True))
        if math.prod(sizes) * cores != len(devices) or len(set(places)) != len(devices):
            raise ValueError(f"axis {name!r}: {len(devices)} devices do not fill a grid of {(*sizes, cores)}")
        chips = tensor // cores
        dims = [dim for dim, size in enumerate(sizes) if size % max(chips, 1) == 0 and size > 1]
        if tensor % cores or not dims:
            raise ValueError(
                f"axis {name!r}: no dimension of {tuple(sizes)} chips with {cores} cores divides into tensor groups "
                f"of {tensor}"
            )
        line = max(dims, key=lambda dim: (sizes[dim] == chips, sizes[dim]))
        others = [dim for dim in range(len(sizes)) if dim != line]

        def place(position: int) -> tuple[int, ...]:
            """The group's coordinates along the other dimensions and along its line, then the device's index in it."""
            where = places[position]
            return (*(where[dim] for dim in others), where[line] // chips, where[line] % chips, where[-1])

        grid = np.asarray(sorted(range(len(devices)), key=place)).reshape(-1, tensor).T
        return cls(name, (1, *grid.shape), tuple(grid.ravel().tolist()), tensor)

    @property
    def size(self) -> int:
        """The number of devices on the pmap axis."""
        return math.prod(self.shape)

    @property
    def row_group(self) -> int:
        """The number of devices that take the same rows."""
        return self.tensor * self.context

    @property
    def replicas(self) -> int:
        """The number of copies of the state."""
        return self.shape[0]

    @property
    def shards(self) -> int:
        """The number of devices per copy."""
        return math.prod(self.shape[1:])

    def groups(self, over: int, apart: int = 1) -> list[list[int]] | None:
        """`axis_index_groups` of `over` devices each, in the order of their shards, which are `apart`.

        None if one group has all devices in order. `groups(replicas, shards)` are the copies of each shard.

        >>> Axis("batch", (1, 8)).groups(4, apart=2)
        [[0, 2, 4, 6], [1, 3, 5, 7]]
        """
        rows = self._grouped(over, apart).tolist()
        return None if rows == [list(range(self.size))] else rows

    def _grouped(self, over: int, apart: int) -> np.ndarray:
        return np.asarray(self.devices).reshape(-1, over, apart).swapaxes(1, 2).reshape(-1, over)

    def phases(self, over: int, apart: int = 1) -> list[tuple[int, int]]:
        """`over` and `apart` of each phase of such groups, in the order of a gather: the last phase first.

        >>> Axis("batch", (1, 2, 4)).phases(8)
        [(4, 1), (2, 4)]

        Raises:
          ValueError: no phases of the grid make such groups.
        """
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        dims = zip(self.shape, strides, strict=True)
        phases = [(size, stride) for size, stride in dims if apart <= stride < apart * over]
        if math.prod(size for size, _ in phases) != over:
            raise ValueError(f"axis {self.name!r}: no phases of {self.shape} make groups of {over}, {apart} apart")
        return phases[::-1]

    def row_groups(self) -> list[list[int]]:
        """Positions on the pmap axis of the devices that take the same rows; the first rows of a batch come first.

        >>> Axis("batch", (1, 2, 3), (0, 2, 4, 1, 3, 5), tensor=2).row_groups()
        [[0, 1], [2, 3], [4, 5]]
        """
        if self.tensor == 1:
            return self.context_groups()
        return sorted(self._grouped(self.tensor, self.shards // self.tensor).tolist(), key=min)

    def row_group_of_device(self) -> tuple[int, ...]:
        """For each position on the pmap axis, the index of its group in `row_groups`."""
        numbers = np.empty(self.size, int)
        for number, group in enumerate(self.row_groups()):
            numbers[group] = number
        return tuple(numbers.tolist())

    def context_groups(self) -> list[list[int]]:
        """Positions on the pmap axis of the devices of each context group."""
        return np.arange(self.size).reshape(-1, self.context).tolist()

    def shard_of_device(self) -> tuple[int, ...]:
        """The shard of each position on the pmap axis."""
        shards = np.empty(self.size, int)
        shards[list(self.devices)] = np.arange(self.size) % self.shards
        return tuple(shards.tolist())

    def shard_index(self) -> jax.Array:
        """This device's shard. Call inside pmap."""
        return jnp.asarray(self.shard_of_device())[lax.axis_index(self.name)]


AxisLike = str | Axis


def as_axis(axis: AxisLike, size: int | None = None) -> Axis:
    """The axis; a name means one group of `size` devices, or inside pmap of all its devices."""
    if isinstance(axis, Axis):
        return axis
    return Axis(axis, (1, lax.axis_size(axis) if size is None else size))


def check_shards(axis: Axis, shards: int) -> None:
    """Raises ValueError if a layout with this number of shards was made for another axis."""
    if axis.shards != shards:
        raise ValueError(
            f"the layout has {shards} shards, but axis {axis.name!r} spreads a copy over {axis.shards}: make it by "
            f"zero.make_layout(tree, {axis.shards})"
        )


def check_untracked(x: Any) -> None:
    """Raises in `jax.shard_map` with `check_vma=True`, where jax tracks the axes over which `x` varies.

    There autodiff sums the gradients of replicated values, and a further sum is N times too large.
    """
    kind = getattr(jax.typeof(x), "manual_axis_type", jax.typeof(x))
    if getattr(kind, "varying", None) or getattr(kind, "vma", None):  # depends on the version of jax
        raise ValueError(
            "pass jax.shard_map(..., check_vma=False): under check_vma=True, its default, jax itself sums the "
            "gradients of replicated values over devices, and zero would do it again"
        )


def ring_pairs(rings: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Source and target of a `ppermute` in which each device sends to the next one of its ring.

    >>> ring_pairs([[0, 1, 2], [3, 4]])
    [(0, 1), (1, 2), (2, 0), (3, 4), (4, 3)]
    """
    pairs: list[tuple[int, int]] = []
    for ring in rings:
        pairs += zip(ring, [*ring[1:], ring[0]], strict=True)
    return pairs
