"""Tensor groups: devices that compute on the same rows with different parts of the parameters. Called inside pmap.

Inside attention and MLP a device has all positions of its rows and a part of the heads or of the MLP's width. Around
them, at norms and dropout, it has the whole width and a part of the positions. Positions are gathered before attention
and MLP and reduce-scattered after; each is the other's derivative. Gradients are those of the sum of the losses of all
devices, so only one device of a group may count a loss.

Sources: Megatron-LM, arXiv 1909.08053, section 3; sequence parallelism, arXiv 2205.05198, section 4.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from zero.partition.collectives.axis import Axis
from zero.partition.model_parallel import Draw, ModelParallel


@dataclasses.dataclass(frozen=True)
class TensorGroup(ModelParallel):
    """This device's tensor group, on an axis made by `Axis.with_tensor_groups`.

    `make_layout` with `tensor` and `tensor_dim` cuts leaves; `gather` and `fully_shard` then give each device its part.

    >>> import numpy as np; import zero
    >>> n = jax.local_device_count()
    >>> axis = Axis.with_tensor_groups("batch", n, 2)
    >>> group = TensorGroup(axis)
    >>> params = {"in": np.ones((3, 4 * n), np.float32), "out": np.ones((4 * n, 3), np.float32)}
    >>> layout = zero.groups.make_grouped_layout(params, n, tensor=2, tensor_dim={"in": -1, "out": -2}.get)
    >>> def mlp(x):  # (rows, positions, 3), the positions of this device
    ...     part = zero.gather(zero.shard(params, layout, axis), layout, axis)
    ...     return group.sum_positions(jax.nn.relu(group.gather_positions(x) @ part["in"]) @ part["out"])
    >>> y = jax.pmap(mlp, "batch")(np.ones((n, 1, 5, 3), np.float32))
    >>> y.shape == (n, 1, 5, 3) and bool((y == 12 * n).all())
    True

    Attributes:
      axis: the pmap axis; tensor groups are its groups along the first phase.
      cuts_positions: whether each device has only a part of the positions outside of attention and MLP. Otherwise all
        devices of a group compute all of them: only for inference, since gradients would be wrong.
    """

    axis: Axis
    cuts_positions: bool = True

    @property
    def size(self) -> int:
        return self.axis.tensor

    @property
    def _groups(self) -> list[list[int]] | None:
        return self.axis.groups(self.size, apart=self.axis.shards // self.size)

    def for_positions(self, positions: int) -> TensorGroup:
        """The same group for rows of this many positions, which are cut if they divide."""
        return dataclasses.replace(self, cuts_positions=positions % self.size == 0)

    def with_all_positions(self) -> TensorGroup:
        return dataclasses.replace(self, cuts_positions=False)

    def rank(self) -> jax.Array:
        """The index of this device in its group."""
        return self.axis.shard_index() // (self.axis.shards // self.size)

    def part_size(self, size: int) -> int:
        """The size of a part: a whole number of shards, so the last parts contain the padding."""
        return -(-size // self.axis.shards) * (self.axis.shards // self.size)

    def first(self, part_size: int) -> jax.Array:
        return self.rank() * part_size

    def part(self, x: jax.Array, dim: int) -> jax.Array:
        part = x.shape[dim] // self.size
        return lax.dynamic_slice_in_dim(x, self.first(part), part, dim)

    def stream_numbers(self, first: jax.Array | int, count: int) -> jax.Array | int:
        if not self.cuts_positions:
            return first
        return first + self.first(count)

    def stream_positions(self, x_BT: jax.Array) -> jax.Array:
        if not self.cuts_positions:
            return x_BT
        return self.part(x_BT, 1)

    def of_positions(self, draw: Draw, shape: tuple[int, ...]) -> jax.Array:
        return self.of_heads(draw, shape) if self.cuts_positions else draw(shape)

    def gather_positions(self, x_BTD: jax.Array) -> jax.Array:
        if not self.cuts_positions:
            return x_BTD
        return lax.all_gather(x_BTD, self.axis.name, axis=1, tiled=True, axis_index_groups=self._groups)

    def sum_positions(self, x_BTD: jax.Array) -> jax.Array:
        name = self.axis.name
        groups = self._groups
        if not self.cuts_positions:
            return lax.psum(x_BTD, name, axis_index_groups=groups)
        return lax.psum_scatter(x_BTD, name, scatter_dimension=1, tiled=True, axis_index_groups=groups)

    def stack(self, x: jax.Array) -> jax.Array:
        return lax.all_gather(x, self.axis.name, axis_index_groups=self._groups)

    def zero_if_duplicate(self, x_BT: jax.Array) -> jax.Array:
        share = -(-x_BT.shape[1] // self.size)
        is_own_T = jnp.arange(x_BT.shape[1]) // share == self.rank()
        return jnp.where(is_own_T[None], x_BT, jnp.zeros((), x_BT.dtype))
