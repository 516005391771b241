"""Checks that devices agree: neighbors repeat each other's micro-batch, and the results are compared.

A result is a checksum of the bits of the loss and of the gradient of every parameter, before any sum over devices.
Weights are gathered as in a step, layer by layer at stage 3, and no more than one layer's gradient exists. The devices
of a tensor, context or expert group compute together: whole groups are compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zero.partition.checksums import checksum
from zero.partition.collectives.axis import Axis
from zero.partition.layout import PyTree
from zero.training.sharded_gpt import ShardedGPT

TAP = "tap"  # the collection of variables to which checksums flow in place of gradients


def verify(weights: PyTree, tokens: jax.Array, first: jax.Array, *, model: ShardedGPT, micro_batches: int) -> jax.Array:
    """Two results of each device, uint32 `(2, N)`: for the rows of the group `first` further on, and of the next group.

    Per device: shards of weights, int32 tokens `(R, T)` of which the first micro-batch is computed, without dropout,
    and `first`, 0 or 1. The result is the same on every device. Call inside pmap.
    """
    tapped = _Tapped(**{field.name: getattr(model, field.name) for field in dataclasses.fields(model)})
    axis = model.axis
    own_rows = tokens[: len(tokens) // micro_batches]
    groups = np.asarray(compared_groups(axis))
    rows_of_turns = []
    for turn in range(3):
        pairs = list(zip(groups.ravel().tolist(), np.roll(groups, turn, axis=0).ravel().tolist(), strict=True))
        rows_of_turns.append(lax.ppermute(own_rows, axis.name, pairs))
    rows = jnp.stack(rows_of_turns)
    variables = tapped.gather_params(weights)
    taps = {name: {TAP: _zeros(name, params, model)} for name, params in model.split(weights)[0].items()}

    def compute(rows: jax.Array) -> jax.Array:  # in a loop, or XLA would compute the same rows once
        def loss_of(taps: PyTree) -> jax.Array:
            return tapped.sum_scored(tapped.scores({**variables, TAP: taps}, rows, None).losses_BT, rows)

        return checksum(jax.value_and_grad(loss_of)(taps))

    return lax.all_gather(lax.map(compute, lax.dynamic_slice_in_dim(rows, first, 2)), axis.name, axis=1)


def compared_groups(axis: Axis) -> list[list[int]]:
    """Positions on the pmap axis of the devices that compute together, group by group.

    >>> compared_groups(Axis.with_tensor_groups("batch", 4, 2)), compared_groups(Axis("batch", (1, 2)))
    ([[0, 1], [2, 3]], [[0], [1]])
    """
    if axis.expert > 1:
        return axis.groups(axis.expert) or [list(range(axis.size))]
    return axis.row_groups()


def suspects(results: Mapping[int, np.ndarray], axis: Axis) -> tuple[list[list[int]], bool]:
    """The groups of devices with a wrong result, by their places on the pmap axis, and whether that is certain.

    A result is wrong if most groups that computed these rows have another one. It is uncertain if there is a tie, for
    example with two groups that each repeat their own result.

    Args:
      results: by their `first` what `verify` has returned.

    >>> suspects({0: np.asarray([[5, 6, 7], [6, 0, 5]])}, Axis("batch", (1, 3)))  # rows 2, by devices 1 and 2
    ([[1], [2]], False)
    >>> suspects({0: np.asarray([[5, 6, 7], [6, 0, 5]]), 1: np.asarray([[6, 0, 5], [7, 5, 6]])}, Axis("batch", (1, 3)))
    ([[1]], True)
    """
    groups = compared_groups(axis)
    votes: list[dict[bytes, set[int]]] = [{} for _ in groups]  # of the rows of each group: who has which result
    for first, result in results.items():
        for turn, device_sums in enumerate(result, start=first):
            for group, group_sums in enumerate(np.asarray(device_sums)[groups]):
                votes[(group + turn) % len(groups)].setdefault(group_sums.tobytes(), set()).add(group)
    wrong = set[int]()
    unsure = set[int]()
    for by_result in votes:
        most = max(map(len, by_result.values()))
        minority = [voters for voters in by_result.values() if len(voters) < most]
        if len(by_result) - len(minority) == 1:
            wrong.update(*minority)
        else:
            unsure.update(*by_result.values())
    is_certain = bool(wrong) or len(unsure) == 1
    return [groups[group] for group in sorted(wrong or unsure)], is_certain


def _zeros(name: str, params: PyTree, model: ShardedGPT) -> jax.Array:
    stack = jax.tree.leaves(params)[0].shape[:1] if name in model.config.stacked else ()
    return jnp.zeros((*stack, 2), jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Tapped(ShardedGPT):
    """The model, in which each part that owns parameters has a tap."""

    def _lift(self, module_class: type[nn.Module], name: str) -> type[nn.Module]:
        tapped = nn.map_variables(module_class, ["params", TAP], _tap, mutable=False)
        return super()._lift(tapped, name)


def _tap(variables: PyTree) -> PyTree:
    return {"params": _pass_through(variables["params"], variables[TAP][TAP])}


@jax.custom_vjp
def _pass_through(full: PyTree, tap: jax.Array) -> PyTree:
    """`full`, the checksum of whose gradient flows to `tap`, in two halves that float32 holds and adds exactly."""
    return full


def _halves(_: None, grads: PyTree) -> tuple[PyTree, jax.Array]:
    arrays = [x for x in jax.tree.leaves(grads) if x.dtype != jax.dtypes.float0]  # as rounded weights have no gradient
    total = checksum(arrays)
    return grads, jnp.stack([total >> 16, total & 0xFFFF]).astype(jnp.float32)


_pass_through.defvjp(lambda full, tap: (full, None), _halves)
