"""Which leaf is split where: properties that hold for any shapes, and the choices that were made."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zero

pytestmark = pytest.mark.quick

SHAPES = st.lists(st.integers(1, 40), max_size=4).map(tuple)


def of(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@given(st.lists(SHAPES, max_size=4), st.integers(1, 33))
@settings(max_examples=200, deadline=None)
def test_any_tree_is_split_evenly(shapes: list[tuple[int, ...]], shards: int) -> None:
    layout = zero.make_layout([of(shape) for shape in shapes], shards)
    assert hash(layout) == hash(zero.make_layout([of(shape) for shape in shapes], shards))
    for leaf, shape in zip(layout.leaves, shapes, strict=True):
        assert leaf.shape == shape
        if not leaf.splits:
            assert leaf.shard_shape == leaf.padded_shape == shape
            assert shards == 1 or math.prod(shape) < shards
            continue
        (split,) = leaf.splits
        assert 0 <= split.padding < shards
        assert split.shard_size * shards == split.size + split.padding == leaf.padded_shape[split.dim]
        assert leaf.shard_shape[split.dim] == split.shard_size
        waste = [(-size % shards) / size for size in shape]
        assert waste[split.dim] == min(waste)
    assert layout.bytes_per_device() == 4 * sum(math.prod(leaf.shard_shape) for leaf in layout.leaves)
    assert str(len(shapes)) in str(layout)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple), st.integers(1, 33))
@settings(max_examples=100, deadline=None)
def test_split_of_stacked_leaf(shape: tuple[int, ...], shards: int) -> None:
    """A stacked leaf is split as one of its layers."""
    stacked = zero.make_layout({"blocks": [of(shape)]}, shards, stacked=["blocks"])
    layer = zero.make_layout([of(shape[1:])], shards)
    assert [leaf.shard_shape for leaf in stacked.at("blocks").leaves] == [leaf.shard_shape for leaf in layer.leaves]
    assert stacked.leaves[0].shard_shape == (shape[0], *layer.leaves[0].shard_shape)


@pytest.mark.parametrize(
    ("shape", "shards", "shard_shape"),
    [
        ((16, 24), 8, (2, 24)),  # both divide: the first
        ((25, 16), 8, (25, 2)),  # no padding before the place
        ((7, 9), 8, (1, 9)),  # 1 of 7 wasted, not 7 of 9
        ((5,), 8, (5,)),  # fewer elements than shards: whole
        ((), 8, ()),
        ((0, 3), 8, (0, 3)),
        ((16, 24), 1, (16, 24)),
    ],
)
def test_choice_of_the_dimension(shape: tuple[int, ...], shards: int, shard_shape: tuple[int, ...]) -> None:
    assert zero.make_layout(of(shape), shards).leaves[0].shard_shape == shard_shape


def test_layout_table() -> None:
    """The printed layout shows which leaves are split, padded or whole."""
    layout = zero.make_layout({"w": of((13, 3)), "b": of((3,))}, 8)
    assert str(layout).splitlines() == [
        "42 elements in 2 leaves over 8 shards: 36 bytes per device, 9 elements of padding, "
        "3 elements in 1 leaves whole on every device",
        "leaf  dtype    whole  split  shard  padding  gathered  by",
        "b     float32  3      -      3      -        3         -",
        "w     float32  13x3   dim 0  2x3    3        13x3      AllGather(dim=0, over=8, apart=1)",
    ]


def table(layout: zero.Layout) -> list[str]:
    """The rows of leaves, with single spaces."""
    return [" ".join(line.split()) for line in str(layout).splitlines()[2:]]


def test_layout_table_of_groups() -> None:
    """The printed layout shows the moves of groups and the shape that they lead to."""
    tree = {"layers": {"experts": of((2, 8, 5, 3)), "few": of((2, 4)), "query": of((2, 16, 24))}}
    experts: Any = {"expert": 2, "is_expert": lambda name: "query" not in name}
    layout = zero.groups.make_grouped_layout(tree, 8, stacked=["layers"], **experts)
    exchanged = "AllToAll(split=1, concat=2, over=2) AllGather(dim=2, over=4, apart=2)"
    query = "layers/query float32 2x16x24 {} AllGather(dim={}, over={}, apart=1)"
    assert table(layout) == [
        f"layers/experts float32 2x8x5x3 dim 2 2x8x1x3 3 2x4x5x3 {exchanged}",
        "layers/few float32 2x4 - 2x4 - 2x2 Slice(dim=1, over=2)",
        query.format("dim 1 2x2x24 0 2x16x24", 1, 8),
    ]
    assert table(layout.at("layers"))[0].endswith(
        "8x1x3 3 4x5x3 AllToAll(split=0, concat=1, over=2) AllGather(dim=1, over=4, apart=2)"
    )
    assert table(layout.whole())[:2] == [
        "layers/experts float32 2x8x5x3 - 2x8x5x3 - 2x4x5x3 Slice(dim=1, over=2)",
        "layers/few float32 2x4 - 2x4 - 2x2 Slice(dim=1, over=2)",
    ]
    dim_of: Any = {"layers/query": -1}.get
    tensor = zero.groups.make_grouped_layout(tree, 8, stacked=["layers"], tensor=2, tensor_dim=dim_of)
    assert table(tensor)[2] == query.format("dim 2 2x16x3 0 2x16x12", 2, 4)
    assert table(tensor.whole())[2] == table(tensor)[2]  # each part is where it is computed
    assert tensor.without_parts().leaves[2].gathered_shape == (2, 16, 24)


def test_whole_splits_nothing() -> None:
    layout = zero.make_layout({"w": of((16, 24))}, 8).whole()
    assert layout.shards == 8
    assert layout.shard_shapes()["w"].shape == (16, 24)


def test_mistakes_are_named() -> None:
    layout = zero.make_layout({"w": of((16, 24))}, 8)
    with pytest.raises(ValueError, match="shards must be at least 1, got 0"):
        zero.make_layout({}, 0)
    with pytest.raises(ValueError, match="stacked names 'blocks', but no leaf lies under it"):
        zero.make_layout({"w": of((3,))}, 8, stacked=["blocks"])
    with pytest.raises(KeyError, match=r"no subtree 'blocks'; it has \['w'\]"):
        layout.at("blocks")
    with pytest.raises(ValueError):
        layout.map(lambda leaf, x: x, {"v": 1})


@pytest.mark.parametrize(
    "tx",
    [optax.adamw(0.1), optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2), optax.inject_hyperparams(optax.lion)(0.1)],
)
@pytest.mark.parametrize("shards", [1, 3, 8])
def test_split_of_elementwise_state(tx: Any, shards: int) -> None:
    """State of an elementwise optimizer is split like its parameters."""
    tree = {"blocks": {"w": of((4, 13, 24)), "b": of((4, 24))}, "mu": of((9,)), "w": of((9, 3)), "s": of(())}
    layout = zero.make_layout(tree, shards, stacked=["blocks"])
    derived = zero.derive_layout(tx.init, layout)
    on_shards = jax.eval_shape(tx.init, layout.shard_shapes())
    assert jax.tree.map(np.shape, derived.shard_shapes()) == jax.tree.map(np.shape, on_shards)


def test_factored_state_is_whole() -> None:
    """Factored state is whole where it has another shape."""
    layout = zero.make_layout({"w": of((256, 128)), "b": of((256,))}, 8)
    state = zero.derive_layout(optax.adafactor(0.1).init, layout)
    shapes = {leaf.name.partition("/")[2]: leaf.shard_shape for leaf in state.leaves}
    assert shapes["v_row/w"] == (128,) and shapes["v_col/w"] == (256,)
    assert shapes["v/b"] == (32,)
