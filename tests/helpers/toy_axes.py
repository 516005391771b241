"""Axes of trees that no model has made, by the names of their leaves."""

from typing import Any

import jax
import numpy as np

from zero.models.axes import CHUNKS, EMBED, EXPERT, LAYERS, MLP, VOCAB, Axes, Role, leaf_name
from zero.models.config import HEAD, STACKS, VOCABULARY

_ROLES = {VOCABULARY: Role.EMBEDDING, HEAD: Role.HEAD, "positions": Role.POSITIONS, "norm": Role.LAST_NORM}


def toy_axes(*trees: Any) -> dict[str, Axes]:
    """Leaves named kernel, vocabulary and head are matrices, of each expert if they have a further dimension."""
    leaves = [leaf for tree in trees for leaf in jax.tree_util.tree_leaves_with_path(tree)]
    return {leaf_name(path): _axes([key.key for key in path], np.ndim(leaf)) for path, leaf in leaves}


def _axes(path: list[str], ndim: int) -> Axes:
    if path[-1] == "kernel":
        layers = (LAYERS,) if path[0] in STACKS else ()
        return Axes((*layers, *(EXPERT,) * (ndim - len(layers) - 2), EMBED, MLP))
    role = _ROLES.get(path[0], _ROLES.get(path[-1]))
    if role in (Role.EMBEDDING, Role.HEAD):
        return Axes((*(CHUNKS,) * (ndim - 2), VOCAB, EMBED), role)
    return Axes(("channels",) * (1 if role is Role.LAST_NORM else ndim), role or Role.COEFFICIENTS)
