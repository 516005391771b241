"""Slice, gather and reduce-scatter of one array against numpy, over every kind of axis and awkward sizes."""

import dataclasses
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.experimental.topologies import get_topology_desc

import zero
from zero.costs.hlo import collectives
from zero.hosts.xla_options import OVERLAP_ON_TPU
from zero.partition.collectives.arrays import gather_array, scatter_sum_array, slice_array

AXES = {
    "one": zero.Axis("batch", (1, 1)),
    "three": zero.Axis("batch", (1, 3)),
    "eight": zero.Axis("batch", (1, 8)),
    "two phases": zero.Axis("batch", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7)),
    "three phases": zero.Axis("batch", (1, 2, 2, 2)),
    "hybrid": zero.Axis("batch", (2, 4)),
    "hybrid, shuffled": zero.Axis("batch", (4, 2), (5, 2, 0, 7, 1, 3, 6, 4)),
    "hybrid, two phases": zero.Axis("batch", (2, 2, 2), (0, 4, 1, 5, 2, 6, 3, 7)),
}
SOME = ("three", "two phases", "hybrid, two phases")  # each kind; test_against_numpy has all
SOME_AXES = [pytest.param(axis, id=name, marks=() if name in SOME else pytest.mark.wide) for name, axis in AXES.items()]
# Around 8 and around 3; smaller than 8; a scalar.
SHAPES = [(7,), (8,), (9,), (13, 3), (3, 25), (2, 5, 4), (), (1,), (2,)]


@pytest.mark.parametrize("axis", AXES.values(), ids=AXES)
def test_against_numpy(axis: zero.Axis) -> None:
    rng = np.random.default_rng(0)
    full = [rng.integers(-8, 9, (axis.size, *shape)).astype(np.float32) for shape in SHAPES]
    layout = zero.make_layout([x[0] for x in full], axis.shards)

    @partial(jax.pmap, axis_name="batch")
    def run(full: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        sums = [scatter_sum_array(x, leaf, axis) for x, leaf in zip(full, layout.leaves, strict=True)]
        back = [gather_array(x, leaf, axis) for x, leaf in zip(sums, layout.leaves, strict=True)]
        index = axis.shard_index()
        return sums, back, [slice_array(x, leaf, index) for x, leaf in zip(back, layout.leaves, strict=True)]

    for leaf, x, sums, back, slices in zip(layout.leaves, full, *run(full), strict=True):
        assert sums.shape == (axis.size, *leaf.shard_shape)
        np.testing.assert_array_equal(back, np.broadcast_to(x.sum(0), x.shape))  # the sum, on every device
        np.testing.assert_array_equal(slices, sums)  # padding included: it is zero
    assert sorted(set(axis.shard_of_device())) == list(range(axis.shards))


@pytest.mark.parametrize("axis", SOME_AXES)
def test_trees_and_means(axis: zero.Axis) -> None:
    """Trees give the same as single arrays, and a mean is a sum divided by the number of devices."""
    rng = np.random.default_rng(1)
    full = {str(i): rng.integers(-8, 9, (axis.size, *shape)).astype(np.float32) for i, shape in enumerate(SHAPES)}
    layout = zero.make_layout({name: x[0] for name, x in full.items()}, axis.shards)

    @partial(jax.pmap, axis_name="batch")
    def run(full: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        mean = zero.scatter_mean(full, layout, axis)
        return mean, zero.gather(mean, layout, axis)

    mean, whole = run(full)
    for name, x in full.items():
        np.testing.assert_allclose(whole[name], np.broadcast_to(x.mean(0), x.shape), rtol=1e-6)
        assert mean[name].shape[1:] == layout.shard_shapes()[name].shape


@pytest.mark.parametrize("axis", [AXES["three"], AXES["eight"], AXES["two phases"], AXES["hybrid"]], ids=str)
def test_narrow_wire_rounds_once_a_phase(axis: zero.Axis) -> None:
    """256 + 1 is not a bfloat16: sums in bfloat16 would lose the ones."""
    x = np.ones((axis.size, 48), np.float32)
    x[0] = 256
    (leaf,) = zero.make_layout(x[0], axis.shards).leaves
    scatter = partial(scatter_sum_array, leaf=leaf, axis=axis, wire_dtype=jnp.bfloat16)
    sums = jax.pmap(scatter, "batch")(x)
    assert sums.dtype == jnp.float32
    rounding = 0 if len(axis.shape) == 2 else 2.0**-8
    np.testing.assert_allclose(sums, 255 + axis.size, rtol=rounding)


HYBRID = [name for name in AXES if name.startswith("hybrid")]


@pytest.mark.parametrize("name", HYBRID)
@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_copies_send_narrow_sums(name: str, wire: str) -> None:
    """What copies send each other is rounded, within its bound, and all get the same bits."""
    axis = dataclasses.replace(AXES[name], copies_dtype=wire)
    rng = np.random.default_rng(3)
    shapes = [(131, 100), (2701,), (2, 5, 1064), (9,), ()]
    full = [rng.normal(size=(axis.size, *shape)).astype(np.float32) * 10.0 ** (4 * i) for i, shape in enumerate(shapes)]
    full.append(rng.integers(-9, 9, (axis.size, 24)).astype(np.int32))
    layout = zero.make_layout([x[0] for x in full], axis.shards)
    scatter = partial(zero.scatter_sum, layout=layout, axis=axis)
    exact = jax.pmap(partial(scatter, axis=AXES[name]), "batch")(full)
    program = jax.pmap(scatter, "batch")
    copies = np.argsort(axis.shard_of_device(), kind="stable").reshape(axis.shards, axis.replicas)
    for leaf, expected, sums in zip(layout.leaves, exact, program(full), strict=True):
        found = np.asarray(sums)
        assert (found[copies[:, :1]] == found[copies]).all()
        is_small = wire == "int8" and found[0].size < 256 * axis.replicas
        if not leaf.splits or leaf.dtype == np.int32 or is_small:
            np.testing.assert_array_equal(found, expected)
            continue
        largest = np.abs(full[int(leaf.name)]).sum(0).max()
        steps = axis.replicas * 2.0**-8 if wire == "bfloat16" else 2 / 254
        error = np.abs(found - expected).max()
        assert 0 < error <= steps * largest * (1 + 1e-5)
    text = program.lower(full).as_text()
    assert ("xbf16>" if wire == "bfloat16" else "xi8>") in text


@pytest.mark.parametrize("axis", SOME_AXES)
def test_int8_error_bound(axis: zero.Axis) -> None:
    """The error of int8 on the wire is within its bound."""
    rng = np.random.default_rng(2)
    shapes = [(13, 100), (700,), (2, 5, 64), (3,), ()]
    # Blocks of very different size: a common scale would lose the small ones.
    full = [rng.normal(size=(axis.size, *shape)).astype(np.float32) * 10.0 ** (4 * i) for i, shape in enumerate(shapes)]
    layout = zero.make_layout([x[0] for x in full], axis.shards)

    @partial(jax.pmap, axis_name="batch")
    def run(full: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        sums = zero.scatter_sum(full, layout, axis, wire_dtype=jnp.int8)
        first = zero.shard(full, layout, axis)
        return (
            zero.gather(sums, layout, axis),
            zero.gather(first, layout, axis),
            zero.gather(first, layout, axis, wire_dtype=jnp.int8),
        )

    for leaf, x, sums, exact, gathered in zip(layout.leaves, full, *run(full), strict=True):
        error = np.abs(sums[0] - x.sum(0))
        assert np.max(error) <= np.abs(x).max(axis=tuple(range(1, x.ndim))).sum() / 254 * (1 + 1e-5)
        if not leaf.splits:  # what is whole is all-reduced as it is
            assert np.max(error) == 0
        elif x[0].size > axis.size:  # a block of one number may come back exact
            assert np.max(error) > 0
        assert np.max(np.abs(gathered - exact)) <= np.max(np.abs(exact)) / 254 * (1 + 1e-5)
        assert gathered.dtype == sums.dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.complex64])
def test_dtypes_of_sums(dtype: jnp.dtype) -> None:
    """bfloat16 and float16 are summed in float32, other dtypes in their own."""
    x = jnp.ones((8, 16), dtype)
    (leaf,) = zero.make_layout(x[0], 8).leaves
    axis = AXES["eight"]
    sums = jax.pmap(partial(scatter_sum_array, leaf=leaf, axis=axis), "batch")(x)
    assert sums.dtype == (jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype)
    np.testing.assert_array_equal(sums, jnp.full((8, 2), 8, sums.dtype))
    half = jax.pmap(partial(gather_array, leaf=leaf, axis=axis, dtype=jnp.float16), "batch")(jnp.ones((8, 2)))
    assert half.dtype == jnp.float16 and half.shape == (8, 16)


def test_gradient_of_gather() -> None:
    """A gradient through gather is the sum of gradients."""
    (leaf,) = zero.make_layout(jnp.zeros(13), 8).leaves
    axis = AXES["eight"]
    weights = np.arange(8.0 * 13).reshape(8, 13).astype(np.float32)

    def loss(shard_x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(gather_array(shard_x, leaf, axis) * weights)

    grads = jax.pmap(jax.grad(loss), "batch")(jnp.ones((8, 2)), weights)
    np.testing.assert_array_equal(grads.reshape(-1)[:13], weights.sum(0))
    np.testing.assert_array_equal(grads.reshape(-1)[13:], 0)


def test_phases_compile_to_reduce_scatters() -> None:
    """Phases follow the torus and compile to real reduce-scatters."""
    devices: Any = get_topology_desc(topology_name="v3:4x4", platform="tpu").devices
    torus = zero.Axis.from_devices("batch", devices)
    assert torus.shape == (1, 4, 4, 2)  # two dimensions of chips, two cores a chip
    assert torus.phases(32) == [(2, 1), (4, 2), (4, 8)]
    for size, apart in torus.phases(32):
        for group in torus.groups(size, apart) or []:
            places = [(*devices[i].coords, devices[i].core_on_chip) for i in group]
            assert sum(len(set(column)) > 1 for column in zip(*places, strict=True)) == 1
            assert len(set(places)) == size

    def count(axis: zero.Axis, name: str) -> int:
        layout = zero.make_layout({"w": jax.ShapeDtypeStruct((512, 1024), jnp.float32)}, 32)
        scatter = jax.pmap(lambda tree: zero.scatter_sum(tree, layout, axis), "batch", devices=devices)
        compiled = scatter.lower({"w": jax.ShapeDtypeStruct((32, 512, 1024), jnp.float32)}).compile()
        return compiled.as_text().count(f" {name}(")

    flat = zero.Axis("batch", (1, 32))
    assert (count(torus, "reduce-scatter"), count(torus, "all-reduce")) == (3, 0)
    assert count(flat, "reduce-scatter") == 0


@pytest.mark.parametrize("axis", SOME_AXES)
def test_sums_by_exchange(axis: zero.Axis) -> None:
    """An exchange and a sum on each device give the sums of a reduce-scatter."""
    rng = np.random.default_rng(3)
    full = {"w": rng.normal(size=(axis.size, 13, 5)), "v": rng.normal(size=(axis.size, 40)), "s": np.ones(axis.size)}
    full = {name: x.astype(np.float32) for name, x in full.items()}
    layout = zero.make_layout({name: x[0] for name, x in full.items()}, axis.shards)

    def scatter(on: zero.Axis) -> Any:
        return jax.pmap(lambda tree: zero.scatter_sum(tree, layout, on), "batch")(full)

    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        scatter(dataclasses.replace(axis, exchanges=True)),
        scatter(axis),
    )


@pytest.mark.parametrize("exchanges", [False, True])
def test_largest_exchange_is_first(exchanges: bool) -> None:
    """Each waits for the one before; sums of a whole slice keep the order of leaves."""
    shapes = {"a": (512, 1024), "b": (1024, 1024), "c": (520, 1024)}
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    axis, layout = zero.Axis("batch", (1, 8), exchanges=exchanges), zero.make_layout(tree, 8)
    traced = jax.make_jaxpr(lambda tree: zero.scatter_sum(tree, layout, axis), axis_env=[("batch", 8)])(tree)
    sent = [eqn for eqn in traced.eqns if eqn.primitive.name in ("all_to_all", "reduce_scatter")]
    order = ["b", "c", "a"] if exchanges else ["a", "b", "c"]
    assert [eqn.invars[0].aval.size for eqn in sent] == [tree[name].size for name in order]
    waiting = [eqn for eqn in traced.eqns if eqn.primitive.name == "optimization_barrier" and len(eqn.invars) == 2]
    part = {leaf.path[0]: leaf.shard_shape for leaf in layout.leaves}
    expected = [(shapes["c"], part["b"]), (shapes["a"], part["c"])] if exchanges else []
    assert [tuple(var.aval.shape for var in eqn.invars) for eqn in waiting] == expected


@pytest.mark.parametrize(("small_first", "order"), [(False, "cab"), (True, "cba")])
def test_equal_exchanges(small_first: bool, order: str) -> None:
    """The first of equal leaves is sent first, where SparseCores gather the last one."""
    shapes = {"a": (512, 1024), "b": (512, 1024), "c": (520, 1024)}
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    axis = zero.Axis("batch", (1, 8), exchanges=True, small_first=small_first)
    layout = zero.make_layout(tree, 8)

    def scatter(tree: Any) -> Any:
        factors = {"a": 2.0, "b": 3.0, "c": 5.0}
        return zero.scatter_sum({name: x * factors[name] for name, x in tree.items()}, layout, axis)

    traced = jax.make_jaxpr(scatter, axis_env=[("batch", 8)])(tree)
    made = {var: eqn for eqn in traced.eqns for var in eqn.outvars}

    def name_of(var: Any) -> str:
        while made[var].primitive.name != "mul":
            var = made[var].invars[0]
        return {2.0: "a", 3.0: "b", 5.0: "c"}[float(made[var].invars[1].val)]

    assert "".join(name_of(eqn.invars[0]) for eqn in traced.eqns if eqn.primitive.name == "all_to_all") == order


@pytest.mark.parametrize("axis", SOME_AXES)
def test_ordered_scatters(axis: zero.Axis) -> None:
    """In an order of their own, scatters of large leaves beside small ones give the same bits."""
    rng = np.random.default_rng(4)
    shapes = {"a": (513, 520), "b": (5,), "c": (1030, 257), "d": (7, 3)}
    full = {name: rng.normal(size=(axis.size, *shape)).astype(np.float32) for name, shape in shapes.items()}
    layout = zero.make_layout({name: x[0] for name, x in full.items()}, axis.shards)

    def scatter(on: zero.Axis) -> Any:
        return jax.pmap(lambda tree: zero.scatter_sum(tree, layout, on), "batch")(full)

    ordered = dataclasses.replace(axis, orders_scatters=True)
    jax.tree.map(np.testing.assert_array_equal, scatter(ordered), scatter(axis))


def test_order_of_scatters_over_phases() -> None:
    """The largest is first, and those over the second phase wait for all over the first but not for each other."""
    shapes = {"a": (512, 1024), "b": (1024, 1024), "c": (520, 1024)}
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    axis, layout = zero.Axis("batch", (1, 2, 4), orders_scatters=True), zero.make_layout(tree, 8)
    traced = jax.make_jaxpr(lambda tree: zero.scatter_sum(tree, layout, axis), axis_env=[("batch", 8)])(tree)
    sent = [eqn.invars[0].aval.shape for eqn in traced.eqns if eqn.primitive.name == "reduce_scatter"]
    halves = {name: (rows // 2, columns) for name, (rows, columns) in shapes.items()}
    assert sent == [*(shapes[name] for name in "bca"), *(halves[name] for name in "bca")]
    waiting = [eqn for eqn in traced.eqns if eqn.primitive.name == "optimization_barrier" and len(eqn.invars) == 2]
    first = [(shapes["c"], halves["b"]), (shapes["a"], halves["c"])]
    second = [(halves[name], halves["a"]) for name in "bca"]
    assert [tuple(var.aval.shape for var in eqn.invars) for eqn in waiting] == [*first, *second]


@pytest.mark.parametrize("small_first", [False, True])
def test_small_leaves_are_gathered_first(small_first: bool) -> None:
    """A large leaf is gathered after the small ones, if the axis says so, and all are whole."""
    rng = np.random.default_rng(0)
    full = {name: rng.normal(size=size).astype(np.float32) for name, size in (("a", 2**18 + 8), ("b", 8), ("c", 16))}
    axis, layout = zero.Axis("batch", (1, 8), small_first=small_first), zero.make_layout(full, 8)

    def gathered(_: jax.Array) -> Any:
        return zero.gather(zero.shard(full, layout, axis), layout, axis)

    traced = jax.make_jaxpr(gathered, axis_env=[("batch", 8)])(0)
    sizes = [eqn.invars[0].aval.size for eqn in traced.eqns if eqn.primitive.name == "all_gather"]
    large, small = 2**15 + 1, 3
    assert sizes == ([small, large] if small_first else [large, small])
    waiting = [eqn for eqn in traced.eqns if eqn.primitive.name == "optimization_barrier" and len(eqn.invars) == 2]
    assert [tuple(var.aval.size for var in eqn.invars) for eqn in waiting] == [(large, 24)] * small_first
    for name, whole in jax.pmap(gathered, "batch")(np.zeros(8)).items():
        np.testing.assert_array_equal(whole[5], full[name])


@pytest.mark.wide  # compiled for TPU
def test_exchange_runs_beside_products() -> None:
    """On TPU products run between the start and the done of an exchange, but not beside a scatter of a whole slice.

    What is exchanged is computed before, not in the order of its parts.
    """
    devices: Any = get_topology_desc(topology_name="v5e:2x2", platform="tpu").devices
    layout = zero.make_layout({"w": jax.ShapeDtypeStruct((512, 1024), jnp.float32)}, 4)

    def compiled(axis: zero.Axis) -> str:
        def step(tree: Any, x: jax.Array) -> Any:
            return zero.scatter_sum(tree, layout, axis), x @ x

        scatter = jax.pmap(step, "batch", devices=devices)
        shapes = (
            {"w": jax.ShapeDtypeStruct((4, 512, 1024), jnp.float32)},
            jax.ShapeDtypeStruct((4, 2048, 2048), "bfloat16"),
        )
        lowered = scatter.lower(*shapes)
        cut = r"(%\d+) = stablehlo.optimization_barrier .*\n *(%\d+) = stablehlo.reshape \1 .*\n.*all_to_all\"\(\2\)"
        barriers = re.findall(cut, lowered.as_text())
        assert len(barriers) == axis.exchanges
        text: str = lowered.compile(dict.fromkeys(OVERLAP_ON_TPU, True)).as_text()
        return text

    exchanged, reduced = (compiled(zero.Axis("batch", (1, 4), exchanges=exchanges)) for exchanges in (True, False))
    (found,) = collectives(exchanged)
    assert found.kind == "all-to-all" and found.is_hidden
    assert found.sent == 4 * 512 * 1024 * 3 // 4  # not its operand as well, which its start holds
    assert not any(one.is_hidden for one in collectives(reduced))


def test_phases_go_inside_hosts_first() -> None:
    hosts: Any = [SimpleNamespace(process_index=i // 4) for i in range(8)]
    axis = zero.Axis.from_devices("batch", hosts)
    assert axis.shape == (1, 4, 2)
    assert axis.phases(8) == [(2, 1), (4, 2)]
    assert axis.groups(4, apart=2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert axis.groups(2) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(ValueError, match="7 devices do not fill a grid of"):
        zero.Axis.from_devices("batch", hosts[:7])


PARTS = {"w": (8, 5), "small": (16,), "padded": (13, 3), "uncut": (9,)}
CUT = {"w": -2, "small": -1, "padded": -2}


@pytest.mark.parametrize("wire_dtype", [None, jnp.int8])
@pytest.mark.parametrize(("tensor", "replicas"), [(2, 1), (4, 1), (8, 1), (2, 2)])
def test_gather_and_sum_of_parts(tensor: int, replicas: int, wire_dtype: Any) -> None:
    """Parts of tensor groups are gathered and summed over the devices that have the same part."""
    axis = zero.Axis.with_tensor_groups("batch", 8, tensor, replicas)
    rng = np.random.default_rng(0)
    full = {name: rng.integers(-8, 9, shape).astype(np.float32) for name, shape in PARTS.items()}
    layout = zero.groups.make_grouped_layout(full, axis.shards, tensor=tensor, tensor_dim=CUT.get)
    ranks = np.arange(8) % tensor

    @partial(jax.pmap, axis_name="batch")
    def run(factor: jax.Array) -> Any:
        parts = zero.gather(zero.shard(full, layout, axis), layout, axis, wire_dtype=wire_dtype)
        return parts, zero.scatter_sum(jax.tree.map(lambda x: factor * x, parts), layout, axis, wire_dtype=wire_dtype)

    factors = rng.integers(1, 5, 8).astype(np.float32)
    parts, sums = run(factors)
    for leaf in layout.leaves:
        (name,), (split,) = leaf.path, leaf.splits
        padded = np.pad(full[name], [(0, split.padding), *[(0, 0)] * (full[name].ndim - 1)])
        assert leaf.is_cut == (name in CUT)
        expected = [np.split(padded, tensor)[rank] for rank in ranks] if leaf.is_cut else [full[name]] * 8
        close = partial(np.testing.assert_allclose, atol=0 if wire_dtype is None else 1.5, err_msg=name)
        close(parts[name], expected)
        assert parts[name].shape[1:] == leaf.gathered_shape
        # Devices of one rank add up to the sum of their part; a leaf that is not cut is summed over all.
        of_rank = [factors[ranks == rank].sum() if leaf.is_cut else factors.sum() for rank in ranks]
        slices = np.split(padded, split.shards)
        close(sums[name], [slices[axis.shard_of_device()[i]] * of_rank[i] for i in range(8)])


def test_optimizer_sees_whole_leaves() -> None:
    """An optimizer sees whole leaves of a layout with parts."""
    axis = zero.Axis.with_tensor_groups("batch", 8, 2)
    params = {"w": np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)}
    layout = zero.groups.make_grouped_layout(params, 8, tensor=2, tensor_dim=lambda name: -1)
    tx = zero.on_shards(zero.across_shards(optax.contrib.muon(0.1)), layout, axis)

    def update(_: jax.Array) -> Any:
        shards = zero.shard(params, layout, axis)
        return tx.update(shards, tx.init(shards), shards)[0]

    got = zero.to_host(jax.pmap(zero.in_order(update), "batch")(np.zeros(8)), layout, axis)["w"]
    whole = optax.contrib.muon(0.1)
    expected, _ = whole.update(params, whole.init(params), params)
    np.testing.assert_allclose(got, expected["w"], rtol=1e-4, atol=1e-5)


def test_axis_errors() -> None:
    """An axis that does not fit the devices is refused with the reason."""
    with pytest.raises(ValueError, match="8 devices do not make 1 copies of groups of 3"):
        zero.Axis.with_tensor_groups("batch", 8, 3)
    with pytest.raises(ValueError, match=r"the first phase of \(1, 4, 2\) must be of tensor=2"):
        zero.Axis("batch", (1, 4, 2), tensor=2)
    with pytest.raises(ValueError, match="tensor=2 with context=2; expected one of them to be 1"):
        zero.Axis("batch", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7), tensor=2, context=2)
    with pytest.raises(ValueError, match="8 devices do not make context groups of 3"):
        zero.Axis("batch", (1, 8), context=3)
    with pytest.raises(ValueError, match="shards 8 do not divide into tensor groups of 3"):
        zero.groups.make_grouped_layout(jnp.zeros(16), 8, tensor=3)
    with pytest.raises(ValueError, match=r"axis 'batch': shape is \(replicas, phase"):
        zero.Axis("batch", (8,))
    with pytest.raises(ValueError, match=r"devices must be a permutation of 0\.\.3"):
        zero.Axis("batch", (1, 4), (0, 1, 2, 2))
    with pytest.raises(ValueError, match=r"no phases of \(1, 8\) make groups of 4, 2 apart"):
        zero.Axis("batch", (1, 8)).phases(4, apart=2)
    layout = zero.make_layout(jnp.zeros(16), 8)
    with pytest.raises(ValueError, match="the layout has 8 shards, but axis 'batch' spreads a copy over 4: make it"):
        jax.pmap(lambda x: zero.shard(x, layout, "batch"), "batch")(jnp.zeros((4, 16)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("axis", [AXES["three"], AXES["hybrid"]], ids=["three", "hybrid"])
def test_only_floats_travel_in_another_dtype(axis: zero.Axis, dtype: Any) -> None:
    """Imaginary parts, large integers and booleans would be lost."""
    tree: dict[str, Any] = {
        "c": (np.arange(13) * (1 + 1e-3j)).astype(np.complex64),
        "n": np.arange(13) * 1001,
        "b": np.arange(13) > 4,
    }
    layout = zero.make_layout(tree, axis.shards)
    numbers = {name: tree[name] for name in "cn"}
    number_layout = zero.make_layout(numbers, axis.shards)

    def run(_: jax.Array) -> Any:
        shards = zero.shard(tree, layout, axis)
        gathered = zero.gather(shards, layout, axis, dtype=jnp.bfloat16, wire_dtype=dtype)
        narrow: Any = {"wire_dtype": dtype, "reduce_dtype": jnp.float32}
        sums = zero.scatter_sum(numbers, number_layout, axis, **narrow)
        return gathered, zero.gather(sums, number_layout, axis)

    gathered, sums = jax.pmap(run, "batch")(np.zeros(axis.size))
    for name, x in tree.items():
        np.testing.assert_array_equal(gathered[name][0], x)
    for name, x in numbers.items():
        np.testing.assert_allclose(sums[name][0], x * axis.size, rtol=1e-6)


def test_padding_does_not_change_scales() -> None:
    """Padding does not change the scale of its block."""
    layout = zero.make_layout({"w": np.ones(13, np.float32)}, 8)

    def run(x: jax.Array) -> jax.Array:
        return zero.gather({"w": x}, layout, "batch", wire_dtype=jnp.int8)["w"]

    shards = np.arange(16, dtype=np.float32).reshape(8, 2)
    shards[6, 1], shards[7] = np.nan, 1e9
    np.testing.assert_allclose(jax.pmap(run, "batch")(shards)[0], np.arange(13), atol=13 / 254)
