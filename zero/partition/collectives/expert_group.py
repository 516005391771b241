"""Expert groups: devices with different rows, each of which computes some experts for all of these rows. Inside pmap.

Each device puts the tokens of its rows into places, the same number for every expert. One `all_to_all` sends the places
to the devices of their experts, another one returns the outputs. Each is the other's derivative.

Source: GShard, arXiv 2006.16668, section 3.3.
"""

from __future__ import annotations

import dataclasses

import jax
from jax import lax

from zero.partition.collectives.axis import Axis
from zero.partition.model_parallel import ExpertParallel


@dataclasses.dataclass(frozen=True)
class ExpertGroup(ExpertParallel):
    """This device's expert group, on an axis made by `Axis.with_expert_groups`.

    `make_layout` with `expert` and `is_expert` places the experts; `gather` and `fully_shard` then give each device its
    experts.

    >>> import jax.numpy as jnp; import numpy as np; import zero
    >>> n = jax.local_device_count()
    >>> axis = Axis.with_expert_groups("batch", n, 2)
    >>> group = ExpertGroup(axis)
    >>> params = {"w": np.ones((4, n, 3), np.float32) * np.arange(4).reshape(4, 1, 1)}  # 4 experts
    >>> layout = zero.groups.make_grouped_layout(params, n, expert=2, is_expert=lambda name: True)
    >>> def experts(x):  # (rows, experts, places, n), the rows of this device
    ...     own = zero.gather(zero.shard(params, layout, axis), layout, axis)
    ...     return group.from_experts(jnp.einsum("becd,edf->becf", group.to_experts(x), own["w"]))
    >>> jax.pmap(experts, "batch")(np.ones((n, 1, 4, 5, n), np.float32))[0, 0, :, 0, 0].tolist() == [0, n, 2 * n, 3 * n]
    True
    """

    axis: Axis

    @property
    def size(self) -> int:
        return self.axis.expert

    def to_experts(self, x_BECD: jax.Array) -> jax.Array:
        """Per device: `(rows, experts, ...)` in, `(size * rows, experts / size, ...)` out."""
        return lax.all_to_all(x_BECD, self.axis.name, 1, 0, tiled=True, axis_index_groups=self.axis.groups(self.size))

    def from_experts(self, x_BECD: jax.Array) -> jax.Array:
        return lax.all_to_all(x_BECD, self.axis.name, 0, 1, tiled=True, axis_index_groups=self.axis.groups(self.size))

    def most(self, x: jax.Array) -> jax.Array:
        return lax.pmax(x, self.axis.name)
