"""Decides which leaf is split along which dimension: host arithmetic on shapes, stored as frozen data.

A layout is made once, from the shapes of the plain model; collectives, checkpoints and memory tables follow it. It
contains no devices. "Axis" means the pmap axis; arrays have dimensions.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations_with_replacement
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero.base.text_table import in_columns
from zero.partition.moves import AllGather, AllToAll, Move, Slice

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Split:
    """One dimension of a leaf, padded with zeros and cut into equal parts."""

    dim: int
    size: int
    shards: int

    @property
    def shard_size(self) -> int:
        return -(-self.size // self.shards)

    @property
    def padding(self) -> int:
        """Elements appended so that the dimension divides evenly. They start as zeros; updates may change them."""
        return self.shard_size * self.shards - self.size

    def positions(self, shard: jax.Array | int) -> jax.Array:
        """The positions of a shard's elements along the dimension, int32; padding has positions of `size` or more."""
        return shard * self.shard_size + jnp.arange(self.shard_size, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """The entry of one leaf: its whole logical shape, how it is split, and how a device gathers it.

    Attributes:
      path: path of the leaf in its tree.
      shape: shape of the whole array, without padding.
      dtype: dtype of the shard.
      splits: dimensions of which each device holds a part; empty if every device holds the whole array.
      stacked: whether the first dimension counts layers (`nn.scan`); it is never split.
      moves: moves from the shard to the array that a device computes with; by default an all-gather for each split.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    splits: tuple[Split, ...]
    stacked: bool = False
    moves: tuple[Move, ...] = ()

    def __post_init__(self) -> None:
        moves = self.moves or tuple(AllGather(split.dim, split.shards) for split in self.splits)
        object.__setattr__(self, "moves", moves)

    @property
    def name(self) -> str:
        return "/".join(self.path)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        return self._with_sizes(lambda split: split.size + split.padding)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return self._with_sizes(lambda split: split.shard_size)

    @property
    def is_cut(self) -> bool:
        """Whether the moves join only some of the shards, because a tensor group computes with parts."""
        return bool(self.splits) and math.prod(move.over for move in self.moves) < self.splits[0].shards

    @property
    def moved_shape(self) -> tuple[int, ...]:
        """The shape of a shard after the moves, with padding."""
        shape = list(self.shard_shape)
        for move in self.moves:
            match move:
                case AllGather(dim, over):
                    shape[dim] *= over
                case Slice(dim, over):
                    shape[dim] //= over
                case AllToAll(split, concat, over):
                    shape[split] //= over
                    shape[concat] *= over
        return tuple(shape)

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        """The shape that a device computes with. A part keeps its padding, so that all parts have one size."""
        if self.is_cut:
            return self.moved_shape
        return tuple(map(min, self.moved_shape, self.shape))

    def is_padded(self, shape: Sequence[int]) -> bool:
        """Whether the leaf has this shape, padding included, on some number of devices.

        >>> leaf = LeafLayout(("w",), (15,), np.dtype(np.float32), ())
        >>> leaf.is_padded((15,)), leaf.is_padded((16,)), leaf.is_padded((17,)), leaf.is_padded((14,))
        (True, True, False, False)
        """
        sizes = list(zip(shape, self.shape, strict=False))
        differing = [(padded, size) for padded, size in sizes if padded != size]
        if len(shape) != len(self.shape) or len(differing) > 1:
            return False
        most_shards = math.prod(self.shape)
        return all(
            any(padded % shards == 0 and 0 < padded - size < shards for shards in range(2, most_shards + 1))
            for padded, size in differing
        )

    def _with_sizes(self, size: Callable[[Split], int]) -> tuple[int, ...]:
        shape = list(self.shape)
        for split in self.splits:
            shape[split.dim] = size(split)
        return tuple(shape)


@dataclasses.dataclass(frozen=True)
class Layout:
    """One `LeafLayout` per leaf of a tree. Hashable; `print` shows a table.

    >>> print(make_layout({"w": jax.ShapeDtypeStruct((5, 12), jnp.float32)}, shards=4))
    60 elements in 1 leaves over 4 shards: 60 bytes per device, 0 elements of padding, 0 elements in 0 leaves whole ...
    leaf  dtype    whole  split  shard  padding  gathered  by
    w     float32  5x12   dim 1  5x3    0        5x12      AllGather(dim=1, over=4, apart=1)
    """

    treedef: Any
    leaves: tuple[LeafLayout, ...]
    shards: int

    def map(self, fn: Callable[..., Any], *trees: PyTree) -> PyTree:
        """`fn(leaf_layout, *leaves)` over trees of this structure.

        Raises:
          ValueError: a tree does not have the structure of the layout.
        """
        columns = [self.leaves_of(tree) for tree in trees]
        return self.treedef.unflatten([fn(leaf, *column) for leaf, *column in zip(self.leaves, *columns, strict=True)])

    def leaves_of(self, tree: PyTree) -> list[Any]:
        """The leaves of a tree of this structure.

        Raises:
          ValueError: the tree has another structure.
        """
        try:
            return self.treedef.flatten_up_to(tree)
        except ValueError as error:
            differences = self.differences(tree) or f"its containers differ: {error}"
            raise ValueError(f"the layout was made for a different tree: {differences}") from error

    def differences(self, tree: PyTree, *, may_lack: bool = False) -> str:
        """The leaves that this tree lacks, and those that the layout lacks; empty if the names are the same."""
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        paths = [path_of(keys) for keys, _ in flat]
        expected = [leaf.path for leaf in self.leaves]
        name_of = dict(zip(paths, names_of(paths), strict=True)) | dict(zip(expected, names_of(expected), strict=True))
        lacking = [name_of[path] for path in expected if path not in paths]
        unknown = [name_of[path] for path in paths if path not in expected]
        if may_lack and not unknown:
            return ""
        parts = (("lacks", lacking), ("has, unexpectedly,", unknown))
        return "; ".join(f"it {verb} {_some(names)}" for verb, names in parts if names)

    def gathered_of(self, tree: PyTree) -> list[Any]:
        """The leaves of a tree as they are gathered: whole arrays, or parts if tensor groups cut them.

        Raises:
          ValueError: a leaf has another shape, or the tree another structure.
        """
        leaves = self.leaves_of(tree)
        for leaf, x in zip(self.leaves, leaves, strict=True):
            if np.shape(x) != leaf.gathered_shape:
                expected = "the whole array" if leaf.gathered_shape == leaf.shape else "a device's part"
                raise ValueError(f"leaf {leaf.name}: expected {expected}, {leaf.gathered_shape}, got {np.shape(x)}")
        return leaves

    def shards_of(self, tree: PyTree) -> list[Any]:
        """The leaves of a tree of shards; raises like `gathered_of`."""
        leaves = self.leaves_of(tree)
        for leaf, x in zip(self.leaves, leaves, strict=True):
            if np.shape(x) != leaf.shard_shape:
                hint = ""
                if np.shape(x) == leaf.shape:
                    hint = (
                        "; this is the whole array: use zero.shard if it is the same on all devices, "
                        "zero.scatter_mean for gradients"
                    )
                raise ValueError(f"leaf {leaf.name}: expected a shard of {leaf.shard_shape}, got {np.shape(x)}{hint}")
        return leaves

    def check_numbers(self) -> None:
        """Raises TypeError if a leaf's dtype has no sum or norm."""
        for leaf in self.leaves:
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise TypeError(f"leaf {leaf.name}: a typed key of jax.random cannot be summed: leave it out")

    def shapes(self) -> PyTree:
        """Whole shapes, as `jax.ShapeDtypeStruct`."""
        return self.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))

    def shard_shapes(self) -> PyTree:
        """Shapes of the shards of one device, as `jax.ShapeDtypeStruct`."""
        return self.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shard_shape, leaf.dtype))

    def at(self, name: str) -> Layout:
        """The layout of the top-level subtree `name`; of one layer, without the layer dimension, if it is stacked.

        Raises:
          KeyError: the tree has no such subtree.
        """
        tree = self.map(lambda leaf: leaf)
        if not isinstance(tree, Mapping) or name not in tree:
            names = sorted(tree) if isinstance(tree, Mapping) else f"a {type(tree).__name__}"
            raise KeyError(f"the layout has no subtree {name!r}; it has {names}")
        leaves, treedef = jax.tree.flatten(tree[name])
        return Layout(treedef, tuple(_one_layer(leaf) for leaf in leaves), self.shards)

    def only(self, names: Iterable[str]) -> Layout:
        """The layout of these top-level subtrees."""
        tree = self.map(lambda leaf: leaf)
        leaves, treedef = jax.tree.flatten({name: tree[name] for name in names})
        return Layout(treedef, tuple(leaves), self.shards)

    def without(self, names: Iterable[str]) -> Layout:
        """The layout of nested dicts without the leaves of these names, and without what they leave empty."""
        left_out = {*names}
        if not left_out:
            return self
        tree: dict[str, Any] = {}
        for leaf in self.leaves:
            if leaf.name in left_out:
                continue
            within = tree
            for part in leaf.path[:-1]:
                within = within.setdefault(part, {})
            within[leaf.path[-1]] = leaf
        leaves, treedef = jax.tree.flatten(tree)
        return Layout(treedef, tuple(leaves), self.shards)

    def whole(self) -> Layout:
        """The layout of stage 0: every leaf whole on every device, except leaves that tensor groups cut."""
        return dataclasses.replace(self, leaves=tuple(map(_unsplit, self.leaves)))

    def without_parts(self) -> Layout:
        """The same shards, gathered whole."""
        return dataclasses.replace(self, leaves=tuple(dataclasses.replace(leaf, moves=()) for leaf in self.leaves))

    def bytes_per_device(self) -> int:
        return sum(math.prod(leaf.shard_shape) * leaf.dtype.itemsize for leaf in self.leaves)

    def __str__(self) -> str:
        wholes = [leaf for leaf in self.leaves if not leaf.splits]
        elements = sum(math.prod(leaf.shape) for leaf in self.leaves)
        padding = sum(math.prod(leaf.padded_shape) for leaf in self.leaves) - elements
        lines = [
            f"{elements:,} elements in {len(self.leaves)} leaves over {self.shards} shards: "
            f"{self.bytes_per_device():,} bytes per device, {padding:,} elements of padding, "
            f"{sum(math.prod(leaf.shape) for leaf in wholes):,} elements in {len(wholes)} leaves whole on every device"
        ]
        rows = [("leaf", "dtype", "whole", "split", "shard", "padding", "gathered", "by")]
        for name, leaf in zip(names_of([leaf.path for leaf in self.leaves]), self.leaves, strict=True):
            whole, shard, gathered = map(_times, (leaf.shape, leaf.shard_shape, leaf.gathered_shape))
            split = [f"dim {leaf.splits[0].dim}", str(leaf.splits[0].padding)] if leaf.splits else ["-", "-"]
            moves = " ".join(map(str, leaf.moves)) or "-"
            rows.append((name or "(root)", leaf.dtype.name, whole, split[0], shard, split[1], gathered, moves))
        return "\n".join([*lines, *in_columns(rows, str.ljust)])


def make_layout(tree: PyTree, shards: int, *, stacked: Iterable[str] = ()) -> Layout:
    """Decides, from shapes only, along which dimension each leaf is split over `shards` devices.

    Chooses the first of the dimensions with the least padding; the first, because a shard is then contiguous in memory
    (docs/decisions/collectives.md). A leaf with fewer elements than there are shards stays whole on every device;
    `print(layout)` names it. Splitting a leaf along one of its own dimensions, instead of flattening it, keeps `ndim`
    masks and factored optimizers meaningful and spares the TPU a change of tiling.

    Args:
      tree: arrays or `jax.ShapeDtypeStruct`s with whole shapes, such as `jax.eval_shape(model.init, ...)`.
      shards: the number of devices that one copy is spread over.
      stacked: top-level subtrees whose leaves carry a leading layer dimension (`nn.scan`), which is never split.

    Raises:
      TypeError: a leaf is not an array but a function or a string.
      ValueError: `shards` is not positive, or a stacked name matches no leaf.

    >>> import jax, jax.numpy as jnp
    >>> layout = make_layout({"w": jax.ShapeDtypeStruct((5, 12), jnp.float32), "b": jnp.zeros(3)}, shards=4)
    >>> layout.shard_shapes()["w"].shape, layout.shard_shapes()["b"].shape
    ((5, 3), (3,))
    """
    return make_grouped_layout(tree, shards, stacked=stacked)


def make_grouped_layout(
    tree: PyTree,
    shards: int,
    *,
    stacked: Iterable[str] = (),
    tensor: int = 1,
    tensor_dim: Callable[[str], int | None] = lambda name: None,
    expert: int = 1,
    is_expert: Callable[[str], bool] = lambda name: False,
) -> Layout:
    """`make_layout` for devices in groups, which compute with parts of some leaves.

    Args:
      tree, shards, stacked: as for `make_layout`.
      tensor: size of a tensor group; divides `shards`.
      tensor_dim: maps the name of a leaf ("blocks/query/kernel") to the dimension that tensor groups cut, counted from
        the last one, or to None. That dimension is split, and a device gathers one of `tensor` parts.
      expert: size of an expert group; divides `shards`.
      is_expert: whether the first dimension of the leaf with this name (after the layers) counts experts, which expert
        groups divide among their devices. Another dimension is split.

    Raises:
      TypeError: as `make_layout`.
      ValueError: as `make_layout`; or `shards` does not divide into groups, or `expert` does not divide a leaf's
        experts.
    """
    if shards < 1:
        raise ValueError(f"shards must be at least 1, got {shards}")
    for kind, size in (("tensor", tensor), ("expert", expert)):
        if size < 1 or shards % size:
            raise ValueError(f"shards {shards} do not divide into {kind} groups of {size}")
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = tuple(stacked)
    paths = [path_of(keys) for keys, _ in flat]
    for name in names:
        if not any(path[:1] == (name,) for path in paths):
            subtrees = ", ".join(dict.fromkeys(path[0] for path in paths if path)) or "no leaf"
            raise ValueError(f"stacked names {name!r}, but no leaf lies under it; the tree has {subtrees}")
    leaves = []
    for path, (_, leaf) in zip(paths, flat, strict=True):
        if not hasattr(leaf, "shape") and not isinstance(leaf, bool | int | float | complex):
            kind = "a function" if callable(leaf) else f"a {type(leaf).__name__}"
            raise TypeError(
                f"leaf {'/'.join(path)}: expected an array or its shape, got {kind}, {leaf!r}: keep it outside of the "
                "tree"
            )
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"leaf {'/'.join(path)}: a typed key of jax.random cannot be cut: keep it outside of the tree, or as "
                "jax.random.key_data(key)"
            )
        name = "/".join(path)
        shape = np.shape(leaf)
        is_stacked = bool(path) and path[0] in names
        split = None
        moves = tuple[Move, ...]()
        first = int(is_stacked)
        cut = tensor_dim(name) if tensor > 1 else None
        if cut is not None:
            split = Split(range(len(shape))[cut], shape[cut], shards)
            moves = (AllGather(split.dim, shards // tensor),)
        elif expert > 1 and is_expert(name):
            if len(shape) > first and shape[first] % expert:
                raise ValueError(f"leaf {name}: {shape[first]} experts do not divide into {expert} parts")
            split = _choose_split(shape, first, shards, keeps_first=True)
            moves = (Slice(first, expert),)
            if split:
                moves = (AllToAll(first, split.dim, expert), AllGather(split.dim, shards // expert, apart=expert))
        else:
            split = _choose_split(shape, first, shards)
        dtype = np.dtype(jnp.result_type(leaf))
        leaves.append(LeafLayout(path, shape, dtype, (split,) if split else (), is_stacked, moves))
    return Layout(treedef, tuple(leaves), shards)


def derive_layout(fn: Callable[[PyTree], PyTree], layout: Layout) -> Layout:
    """The layout of `fn(tree)` from the layout of `tree`; with `fn = tx.init`, the layout of the optimizer state.

    A leaf of the result is split like the leaf of the tree whose path is part of its path (`mu/dense/kernel`), if the
    shapes are equal. Every other leaf is whole. Nothing is computed.

    >>> layout = make_layout({"w": jax.ShapeDtypeStruct((5, 12), np.float32)}, shards=4)
    >>> state = derive_layout(lambda tree: {"count": np.int32(0), "mu": tree}, layout)
    >>> [(leaf.name, leaf.shard_shape) for leaf in state.leaves]
    [('count', ()), ('mu/w', (5, 3))]
    """
    return follow_layout(jax.eval_shape(fn, layout.shapes()), layout)


def follow_layout(tree: PyTree, layout: Layout) -> Layout:
    """The layout of a tree whose leaves follow those of another tree, as in `derive_layout`."""
    by_path = {leaf.path: leaf for leaf in layout.leaves}
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = []
    for keys, x in flat:
        path = path_of(keys)
        model = source_of(path, x.shape, by_path)
        splits, stacked = (model.splits, model.stacked) if model else ((), False)
        leaves.append(LeafLayout(path, x.shape, x.dtype, splits, stacked))
    return Layout(treedef, tuple(leaves), layout.shards)


def path_of(keys: Sequence[Any]) -> tuple[str, ...]:
    """The path of a leaf, from the keys that `jax.tree_util` gives."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def names_of(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """The name of each leaf; names that slashes inside keys would make equal are spelled differently.

    >>> names_of([("a/b",), ("a", "b"), ("c", "d")])
    ["['a/b']", "['a']['b']", 'c/d']
    """
    joined = ["/".join(path) for path in paths]
    counts = Counter(joined)
    return [name if counts[name] == 1 else _in_brackets(path) for name, path in zip(joined, paths, strict=True)]


def _in_brackets(path: Sequence[str]) -> str:
    return "".join(f"[{key!r}]" for key in path)


def named_leaves(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """The leaves of a tree with their names for messages.

    >>> named_leaves({"a": {"b": 1}, "a/b": 2}), named_leaves(3)
    ([("['a']['b']", 1), ("['a/b']", 2)], [('(root)', 3)])
    """
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    names = names_of([path_of(keys) for keys, _ in flat])
    return [(name or "(root)", x) for name, (_, x) in zip(names, flat, strict=True)]


def source_of(
    path: tuple[str, ...], shape: tuple[int, ...], by_path: Mapping[tuple[str, ...], LeafLayout]
) -> LeafLayout | None:
    """The leaf of a tree whose split a leaf in the result of `derive_layout` inherits."""
    parts = [path[start:stop] for start, stop in combinations_with_replacement(range(len(path) + 1), 2)]
    same = [by_path[part] for part in parts if part in by_path and by_path[part].shape == shape]
    # The longest matching path is the leaf itself, a shorter one a leaf of the same name.
    return max(same, key=lambda leaf: len(leaf.path), default=None)


def match_layout(tree: PyTree, *layouts: Layout) -> Layout:
    """The layout of a tree whose leaves, by path, are a subset of the layouts' leaves.

    Raises:
      ValueError: no layout has a leaf with that path.
    """
    if jax.tree.structure(tree) == layouts[0].treedef:
        return layouts[0]
    by_path: dict[tuple[str, ...], LeafLayout] = {}
    for layout in reversed(layouts):  # the first layout that has a leaf decides
        by_path |= {leaf.path: leaf for leaf in layout.leaves}
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path_of(keys) for keys, _ in flat]
    unknown = [path for path in paths if path not in by_path]
    if unknown:
        first, *known = names_of([unknown[0], *by_path])
        raise ValueError(
            f"the layout was made for a tree without leaf {first or '(root)'}; it has {_some(known) or 'none'}"
        )
    return Layout(treedef, tuple(by_path[path] for path in paths), layouts[0].shards)


def _choose_split(shape: tuple[int, ...], first: int, shards: int, *, keeps_first: bool = False) -> Split | None:
    """The split; None if there are fewer elements than shards, or no dimension to split."""
    candidates = [Split(dim, size, shards) for dim, size in enumerate(shape) if dim >= first + keeps_first]
    if shards == 1 or math.prod(shape[first:]) < shards or not candidates:
        return None
    return min(candidates, key=lambda split: (split.padding / split.size, split.dim))


def _one_layer(leaf: LeafLayout) -> LeafLayout:
    if not leaf.stacked:
        return leaf
    splits = tuple(map(_one_dim_less, leaf.splits))
    moves = tuple(map(_one_dim_less, leaf.moves))
    return dataclasses.replace(leaf, shape=leaf.shape[1:], splits=splits, stacked=False, moves=moves)


def _one_dim_less(entry: Any) -> Any:
    """A split or move for an array without its first dimension."""
    dims = {name: getattr(entry, name) - 1 for name in ("dim", "split", "concat") if hasattr(entry, name)}
    return dataclasses.replace(entry, **dims)


def _unsplit(leaf: LeafLayout) -> LeafLayout:
    if leaf.is_cut or not leaf.splits:
        return leaf
    slices = tuple(Slice(move.split, move.over) for move in leaf.moves if isinstance(move, AllToAll))
    return dataclasses.replace(leaf, splits=(), moves=slices)


def _some(names: Sequence[str]) -> str:
    return ", ".join(name or "(root)" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
