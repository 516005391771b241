"""A learned bias of scores for each bucket of distance, in each layer (T5, arXiv 1910.10683, section 2.1)."""

from __future__ import annotations

import flax.linen as nn
import jax

from zero.models.attention.scores import T5_BUCKETS
from zero.models.axes import PER_HEAD, Role, named
from zero.models.parametrization import Initial
from zero.models.positions.kind import PositionKind
from zero.partition.model_parallel import ModelParallel


def bias_by_bucket(config: Initial, module: nn.Module, row_group: ModelParallel) -> jax.Array:
    """The biases of this device's heads, `(C, H)`: a parameter of the module."""
    start = nn.initializers.normal(config.start.bucket_bias(config, T5_BUCKETS))
    init = named(start, "buckets", PER_HEAD, role=Role.COEFFICIENTS)
    return row_group.part(module.param("relative_bias", init, (T5_BUCKETS, config.num_head)), 1)


T5 = PositionKind(bias=bias_by_bucket)
