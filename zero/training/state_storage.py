"""The training state as whole arrays for checkpoints, and its checksums, for each place of storage between steps."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from zero.base.errors import UserError
from zero.partition.checksums import examine
from zero.partition.collectives.axis import Axis
from zero.partition.global_arrays import axis_and_devices, from_global, global_shapes, to_global
from zero.partition.host_blocks import HOST, IN_FLIGHT, to_devices
from zero.partition.layout import Layout, LeafLayout, PyTree
from zero.training.parts import TrainState
from zero.training.streamed_update import StreamedState, layers_of, rest_of, with_layers


@dataclasses.dataclass(frozen=True)
class OnDevices:
    """The state is on the devices.

    Attributes:
      layout: of the whole state.
      axis: the pmap axis.
    """

    layout: Layout
    axis: Axis

    @property
    def device_bytes(self) -> int:
        """Bytes of the state per device between steps."""
        return self.layout.bytes_per_device()

    @property
    def host_bytes(self) -> int:
        """Bytes of the state in host memory between steps, per device."""
        return 0

    @property
    def moving_bytes(self) -> int:
        """Bytes per device of the blocks in transit between host and device during a step."""
        return 0

    def shapes(self) -> TrainState:
        """Shapes of the state of one device, as `jax.ShapeDtypeStruct`."""
        shapes: TrainState = self.layout.shard_shapes()
        return shapes

    def targets(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and shardings of the whole arrays, which a restore fills leaf by leaf."""
        return self.layout.leaves_of(global_shapes(self.layout, self.axis))

    def check_conversion(self, layout: Layout, origin: str) -> None:
        """Raises UserError if a state of `origin` in this layout cannot be converted to the other layout."""

    def to_global(self, state: TrainState) -> PyTree:
        """Whole arrays, which share the memory of the state; `from_global` gives it back."""
        return to_global(state, self.layout, self.axis, donate=True)

    def from_global(self, whole: PyTree) -> TrainState:
        """The state of whole arrays, which are donated."""
        state: TrainState = from_global(whole, self.layout, self.axis, donate=True)
        return state

    def examine(self, state: TrainState) -> tuple[dict[str, int], list[str]]:
        """Like `zero.partition.checksums.examine`."""
        return examine(state, self.layout, self.axis)


@dataclasses.dataclass(frozen=True)
class LayersOnHost(OnDevices):
    """The layers' optimizer state is in host memory, in blocks of `size` layers (`StreamedState`).

    A checkpoint holds whole stacks, as it does otherwise. They are put together and cut on the host, one after the
    other, so that it holds one of them twice and no more.

    Attributes:
      size: layers of a block.
    """

    size: int

    @cached_property
    def _rest(self) -> Layout:
        """The layout of the state without its blocks."""
        tree: TrainState = self.layout.map(lambda leaf: leaf)
        leaves, treedef = jax.tree.flatten(tree._replace(opt_state=rest_of(tree.opt_state)))
        return Layout(treedef, tuple(leaves), self.layout.shards)

    @cached_property
    def _stacks(self) -> Layout:
        """The layout of the stacks on the host."""
        tree: TrainState = self.layout.map(lambda leaf: leaf)
        leaves, treedef = jax.tree.flatten(layers_of(tree.opt_state))
        return Layout(treedef, tuple(leaves), self.layout.shards)

    @cached_property
    def _block(self) -> Layout:
        """The layout of one block."""
        leaves = (dataclasses.replace(leaf, shape=(self.size, *leaf.shape[1:])) for leaf in self._stacks.leaves)
        return dataclasses.replace(self._stacks, leaves=tuple(leaves))

    @property
    def _blocks(self) -> int:
        return self._stacks.leaves[0].shape[0] // self.size

    @property
    def device_bytes(self) -> int:
        return self._rest.bytes_per_device()

    @property
    def host_bytes(self) -> int:
        return self._stacks.bytes_per_device()

    @property
    def moving_bytes(self) -> int:
        return min(self._blocks, 1 + IN_FLIGHT) * self._block.bytes_per_device()

    def shapes(self) -> TrainState:
        state: TrainState = self._rest.shard_shapes()
        blocks = (self._block.shard_shapes(),) * self._blocks
        return state._replace(opt_state=StreamedState(state.opt_state, blocks))

    def targets(self) -> list[jax.ShapeDtypeStruct]:
        on_host = {leaf.path for leaf in self._stacks.leaves}

        def place(leaf: LeafLayout, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            if leaf.path not in on_host:
                return x
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind(HOST))

        return [place(leaf, x) for leaf, x in zip(self.layout.leaves, super().targets(), strict=True)]

    def check_conversion(self, layout: Layout, origin: str) -> None:
        if self.layout != layout:
            raise UserError(
                f"{origin}: the state has other dtypes, and the devices convert them; resume once with "
                "zero.offload=none, or with the dtypes of the checkpoint"
            )

    def to_global(self, state: TrainState) -> PyTree:
        streamed: Any = state.opt_state
        rest: TrainState = to_global(state._replace(opt_state=streamed.rest), self._rest, self.axis, donate=True)
        shapes = self._stacks.leaves_of(global_shapes(self._stacks, self.axis))
        blocks = [self._stacks.leaves_of(block) for block in streamed.blocks]
        stacks = [_joined(shape, of_leaf) for shape, *of_leaf in zip(shapes, *blocks, strict=True)]
        return rest._replace(opt_state=with_layers(rest.opt_state, self._stacks.treedef.unflatten(stacks)))

    def from_global(self, whole: PyTree) -> TrainState:
        state: TrainState = whole._replace(opt_state=rest_of(whole.opt_state))
        state = from_global(state, self._rest, self.axis, donate=True)
        stacks = self._stacks.leaves_of(layers_of(whole.opt_state))
        cut = [self._cut(x) for x in stacks]
        blocks = tuple(self._stacks.treedef.unflatten(leaves) for leaves in zip(*cut, strict=True))
        return state._replace(opt_state=StreamedState(state.opt_state, blocks))

    def examine(self, state: TrainState) -> tuple[dict[str, int], list[str]]:
        streamed: Any = state.opt_state
        sums, not_finite = examine(state._replace(opt_state=streamed.rest), self._rest, self.axis)
        bad = dict.fromkeys(not_finite)
        for number, block in enumerate(streamed.blocks):
            of_block, not_finite = examine(to_devices(block), self._block, self.axis, first=number * self.size)
            for name, checksum in of_block.items():
                sums[name] = (sums.get(name, 0) + checksum) % 2**32
            bad |= dict.fromkeys(not_finite)
        names = [leaf.name for leaf in self.layout.leaves]
        return {name: sums[name] for name in names}, [name for name in names if name in bad]

    def _cut(self, x: jax.Array) -> list[jax.Array]:
        """The blocks of a whole array in host memory, as `StreamedState` holds them; the array is deleted."""
        on, ordered = axis_and_devices(self.layout, self.axis, None)
        local = [device for device in ordered if device.process_index == jax.process_index()]
        sharding = NamedSharding(Mesh(np.asarray(local), (on.name,)), PartitionSpec(on.name), memory_kind=HOST)
        of_device = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
        blocks: list[jax.Array] = []
        for first in range(0, x.shape[0], self.size):
            parts = [_on_host(of_device[device][None, first : first + self.size], device) for device in local]
            shape = (len(local), *parts[0].shape[1:])
            blocks.append(jax.make_array_from_single_device_arrays(shape, sharding, parts))
        jax.block_until_ready(blocks)
        x.delete()
        return blocks


def _joined(shape: jax.ShapeDtypeStruct, blocks: list[jax.Array]) -> jax.Array:
    """The whole array of this shape and place, in host memory, from its blocks, which are deleted."""
    parts: dict[jax.Device, list[np.ndarray]] = {}
    for block in blocks:
        for shard in block.addressable_shards:
            parts.setdefault(shard.device, []).append(np.asarray(shard.data)[0])
    joined = [_on_host(np.concatenate(of_device), device) for device, of_device in parts.items()]
    sharding = shape.sharding.with_memory_kind(HOST)
    whole = jax.make_array_from_single_device_arrays(shape.shape, sharding, joined)
    jax.block_until_ready(whole)
    for block in blocks:
        block.delete()
    return whole


def _on_host(x: np.ndarray, device: jax.Device) -> jax.Array:
    return jax.device_put(x, SingleDeviceSharding(device, memory_kind=HOST))
