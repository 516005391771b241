"""Under `jax.shard_map`: the same updates, state in and out, and a checkpoint that pmap reads."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zero
from tests.partition.exact_training import local_grads, make_params, train

OPTIMIZERS = {
    "clipped adamw": optax.chain(zero.across_shards(optax.clip_by_global_norm(0.5)), optax.adamw(0.1)),
    "adafactor": zero.across_shards(optax.adafactor(0.1, min_dim_size_to_factor=3)),
    "muon": zero.across_shards(optax.contrib.muon(0.1)),
    "lamb": zero.across_shards(optax.lamb(0.1)),
    "noise": optax.chain(zero.across_shards(optax.add_noise(0.01, 0.55, key=jax.random.key(0))), optax.adam(0.1)),
    "hyperparameters": optax.inject_hyperparams(optax.lion)(0.1),
}
MESHES = {
    "one axis": (("data",), (8,), P()),
    "two axes": (("data", "model"), (4, 2), P()),
    "model first": (("model", "data"), (2, 4), P()),
    "cut by model": (("data", "model"), (4, 2), P("model")),
    "cut along both": (("data", "model"), (4, 2), P(None, "model")),
}


def make_mesh(name: str, kind: AxisType) -> Mesh:
    names, sizes, _ = MESHES[name]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))


def place(tree: Any, mesh: Mesh, spec: P) -> Any:
    def one(x: Any) -> jax.Array:
        fits = np.ndim(x) >= len(spec) and np.shape(x)[len(spec) - 1 :][:1] in ((), (24,), (10,))
        return jax.device_put(x, NamedSharding(mesh, spec if fits else P()))

    return jax.tree.map(one, tree)


def grads_for(mesh: Mesh, step: int) -> Any:
    """`(data, ...)`: as `local_grads` of eight devices, whose mean they have."""
    data = mesh.shape["data"]
    return jax.tree.map(lambda g: g.reshape(data, 8 // data, *g.shape[1:]).mean(1), local_grads(step))


def shapes_of(params: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)


def programs(tx: zero.ShardedOptimizer, mesh: Mesh, params: Any, spec: P) -> tuple[Any, Any]:
    on_mesh = jax.tree.map(lambda x: x.sharding.spec, params)
    grads = jax.tree.map(lambda one: P("data", *one), on_mesh, is_leaf=lambda x: isinstance(x, P))
    state = zero.specs(tx.init(shapes_of(params)), mesh)
    shard_map: Any = partial(jax.shard_map, mesh=mesh, check_vma=False)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(zero.local(jax.tree.map(lambda g: g[0], grads)), state, params)
        return optax.apply_updates(params, updates), state

    init = jax.jit(shard_map(tx.init, in_specs=(on_mesh,), out_specs=state))
    specs = {"in_specs": (on_mesh, state, grads), "out_specs": (on_mesh, state)}
    return init, jax.jit(shard_map(step, **specs), donate_argnums=(0, 1))


def run(name: str, mesh: Mesh, tx: zero.ShardedOptimizer, start: Any = None, steps: range = range(3)) -> Any:
    spec = MESHES[name][2]
    params = place(make_params() if start is None else start[0], mesh, spec)
    init, step = programs(tx, mesh, params, spec)
    state = init(params) if start is None else zero.to_devices(start[1], like=tx.init(shapes_of(params)), devices=mesh)
    for i in steps:
        grads = grads_for(mesh, i)
        grads = jax.tree.map(
            lambda g, p: jax.device_put(g, NamedSharding(mesh, P("data", *p.sharding.spec))), grads, params
        )
        params, state = step(params, state, grads)
    return params, state


@pytest.mark.parametrize(
    ("mesh_name", "kind"),
    [
        pytest.param(
            *(name, kind),
            id=f"{name}-{kind}",
            marks=pytest.mark.slow
            if number % 2 != of
            else ()
            if name in ("one axis", "cut by model")
            else pytest.mark.wide,
        )
        for number, name in enumerate(MESHES)
        for of, kind in enumerate((AxisType.Auto, AxisType.Explicit))
    ],
)
def test_shard_map_equals_pmap(mesh_name: str, kind: AxisType) -> None:
    """A run under shard_map equals one under pmap, and each reads the state of the other."""
    mesh = make_mesh(mesh_name, kind)
    # A norm over parameters that another axis cuts is that of a part only.
    name = "hyperparameters" if "cut" in mesh_name else "clipped adamw"
    tx, for_pmap = (zero.shard_optimizer(OPTIMIZERS[name], axis) for axis in ("data", "batch"))
    params, state = run(mesh_name, mesh, tx)
    expected, right = train(for_pmap, make_params())
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y[0], rtol=1e-6, atol=1e-6), params, expected)
    saved = zero.to_host(state, like=tx.init(shapes_of(params)))
    wanted = zero.to_host(right)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), saved, wanted)
    assert [x.dtype for x in jax.tree.leaves(saved)] == [x.dtype for x in jax.tree.leaves(wanted)]

    again = zero.to_devices(saved, like=tx.init(shapes_of(params)), devices=mesh)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim) and x.dtype == y.dtype
    jax.tree.map(np.testing.assert_array_equal, again.slices, state.slices)
    whole = jax.tree.map(np.asarray, params)
    continued, _ = run(mesh_name, mesh, tx, (whole, wanted), range(3, 5))
    direct, _ = run(mesh_name, mesh, tx, None, range(5))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), continued, direct)


BESIDE_PMAP = ("clipped adamw", "hyperparameters")  # of the test above


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.slow if name in BESIDE_PMAP else () if name == "noise" else pytest.mark.wide
        )
        for name in OPTIMIZERS
    ],
)
def test_optimizers_under_shard_map(name: str) -> None:
    mesh = make_mesh("one axis", AxisType.Explicit)
    tx, for_pmap = (zero.shard_optimizer(OPTIMIZERS[name], axis) for axis in ("data", "batch"))
    params, state = run("one axis", mesh, tx)
    expected, right = train(for_pmap, make_params())
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[0]), params, expected)
    saved, wanted = zero.to_host(state), zero.to_host(right)
    jax.tree.map(assert_same, saved, wanted)
    jax.tree.map(
        assert_same, zero.to_host(zero.to_devices(saved, like=tx.init(shapes_of(params)), devices=mesh)), saved
    )


def assert_same(x: Any, y: Any) -> None:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    x, y = (jax.random.key_data(one) if is_key else one for one in (x, y))
    np.testing.assert_array_equal(x, y)


def test_padding_inside_model_parts() -> None:
    """Padding inside the parts of another mesh axis is removed.

    Five rows for each of two devices on the model axis, padded to eight over four on the data axis.
    """
    mesh = make_mesh("cut by model", AxisType.Explicit)
    params = place({"w": np.arange(10, dtype=np.float32)}, mesh, P("model"))
    tx = zero.shard_optimizer(optax.adam(0.1), "data")
    whole = optax.adam(0.1).init(params)[0]._replace(mu=jax.tree.map(np.asarray, params)), optax.EmptyState()
    state = zero.to_devices(whole, like=tx.init(shapes_of(params)), devices=mesh)
    assert state.slices[0].mu["w"].tolist() == [0, 1, 2, 3, 4, 0, 0, 0, 5, 6, 7, 8, 9, 0, 0, 0]
    assert state.slices[0].mu["w"].sharding.spec == P(("model", "data"))
    jax.tree.map(np.testing.assert_array_equal, zero.to_host(state), whole)


def test_check_vma_is_refused() -> None:
    """Varying axes that jax tracks are refused in one line.

    Autodiff has summed the gradients of replicated parameters there: a mean would be eight times too large.
    """
    mesh = make_mesh("one axis", AxisType.Explicit)
    tx, layout = zero.shard_optimizer(optax.adam(0.1), "data"), zero.make_layout({"w": np.ones(16, np.float32)}, 8)
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("data")))
    params = place({"w": np.ones(16, np.float32)}, mesh, P())

    def mean(p: Any, x: jax.Array) -> Any:
        return zero.scatter_mean(jax.grad(lambda p: jnp.sum(p["w"]) * x[0])(p), layout, "data")

    runs: dict[str, Any] = {
        "scatter_mean": mean,
        "init": lambda p, x: tx.init(p),
        "gather": lambda p, x: zero.gather(zero.shard(p, layout, "data"), layout, "data"),
        "in_order": zero.in_order(lambda p, x: jax.lax.psum(x, "data")),
    }
    for fn in runs.values():
        with pytest.raises(ValueError, match=r"^pass jax.shard_map\(..., check_vma=False\): "):
            jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")))(params, x)
    found: Any = jax.shard_map(mean, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
    assert jax.jit(found)(params, x)["w"].tolist() == [1] * 16


def test_mistakes_with_meshes_are_named() -> None:
    mesh, params = make_mesh("two axes", AxisType.Auto), make_params()
    tx = zero.shard_optimizer(optax.adam(0.1), "batch")
    with pytest.raises(ValueError, match=r"axis_name .* is 'batch': .* of the mesh, one of \['data', 'model'\]"):
        zero.specs(tx.init(params), mesh)
    tx = zero.shard_optimizer(optax.adam(0.1), "data")
    with pytest.raises(ValueError, match=r"leaf w: P\('data',\) cuts it along 'data', the axis_name of the optimizer"):
        zero.specs(tx.init(place({"w": np.ones(24)}, mesh, P("data"))), mesh)
    cut = place({"w": np.ones((3, 24), np.float32)}, mesh, P(None, "model"))
    state = zero.to_devices(optax.adam(0.1).init(cut), like=tx.init(cut), devices=mesh)
    of_eight = zero.make_layout(params, 8)
    for leave in (zero.global_shapes, partial(zero.to_devices, params), partial(zero.to_host, params)):
        with pytest.raises(ValueError, match=r"8 shards, but axis 'data' of the mesh has 4 .*make_layout\(tree, 4\)"):
            leave(of_eight, "data", mesh)
        with pytest.raises(ValueError, match=r"axis of the mesh, one of \['data', 'model'\], got 'batch'"):
            leave(of_eight, "batch", mesh)
    stacked = jax.pmap(tx.init, "data")(jax.tree.map(lambda x: np.stack([x] * 8), params))
    with pytest.raises(ValueError, match="know their mesh: leave devices= out"):
        zero.to_host(stacked, devices=mesh)
    of_part = tx.init({"w": np.ones((3, 12), np.float32)})  # as inside shard_map, where shardings are not known
    with pytest.raises(ValueError, match=r"leaf 0/mu/w: expected the global array .* with their shardings"):
        zero.to_host(state, like=of_part)
    local = place(np.zeros(8, np.float32), make_mesh("one axis", AxisType.Auto), P("data"))
    differs: Any = jax.shard_map(
        lambda x: x[0] + jax.lax.axis_index("data"),
        mesh=local.sharding.mesh,
        in_specs=P("data"),
        out_specs=P(),
        check_vma=False,
    )
    one = zero.to_devices(
        optax.inject_hyperparams(optax.sgd)(0.1).init(params),
        like=zero.shard_optimizer(optax.inject_hyperparams(optax.sgd)(0.1), "data").init(params),
        devices=local.sharding.mesh,
    )
    one.slices.hyperparams["learning_rate"] = differs(local)
    with pytest.raises(ValueError, match=r"leaves differ between devices .*: hyperparams/learning_rate"):
        zero.to_host(one)


@pytest.mark.parametrize("mesh_name", ["one axis", "two axes"])
def test_other_slices_as_global_arrays(mesh_name: str) -> None:
    """Other slices are saved and restored as global arrays.

    An average of the parameters: stored as it is, whole on the host, and back.
    """
    mesh, params = make_mesh(mesh_name, AxisType.Explicit), make_params()
    layout = zero.make_layout(params, mesh.shape["data"])
    shapes = zero.global_shapes(layout, "data", mesh)
    specs = jax.tree.map(lambda x: x.sharding.spec, shapes)
    shard: Any = jax.shard_map(
        lambda p: zero.shard(p, layout, "data"), mesh=mesh, in_specs=P(), out_specs=specs, check_vma=False
    )
    ema = jax.jit(shard)(place(params, mesh, P()))
    stored = zero.to_global(ema, layout, "data", mesh)
    jax.tree.map(np.testing.assert_array_equal, zero.to_host(stored, layout, "data", mesh), params)
    for back in (zero.from_global(stored, layout, "data", mesh), zero.to_devices(params, layout, "data", mesh)):
        for x, y, shape in zip(*map(jax.tree.leaves, (back, ema, shapes)), strict=True):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim) and x.shape == shape.shape
            np.testing.assert_array_equal(x, y)
    with pytest.raises(ValueError, match=r"leaf b: expected the global array .* got \(8, .* on the host"):
        zero.to_global(jax.tree.map(lambda x: np.broadcast_to(x, (8, *x.shape)), params), layout, "data", mesh)


def test_restored_state_compiles_nothing() -> None:
    """State that was restored compiles nothing again."""
    mesh = make_mesh("two axes", AxisType.Explicit)
    tx = zero.shard_optimizer(optax.adam(0.1), "data")
    params = place(make_params(), mesh, P())
    init, step = programs(tx, mesh, params, P())
    state = init(params)
    grads = jax.tree.map(lambda g: jax.device_put(g, NamedSharding(mesh, P("data"))), grads_for(mesh, 0))
    for _ in range(2):
        params, state = step(params, state, grads)
    compiled = step._cache_size()
    step(params, zero.to_devices(zero.to_host(state), like=tx.init(shapes_of(params)), devices=mesh), grads)
    assert step._cache_size() == compiled


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_state_of_one_device(kind: AxisType) -> None:
    """The state of one device is whole under shard_map, on a mesh of either type, and also as the slice of a pmap."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(kind,))
    tx, params = zero.shard_optimizer(optax.adam(0.1), "data"), make_params()
    init, _ = programs(tx, mesh, place(params, mesh, P()), P())
    state = jax.tree.map(lambda x: x + 0, init(place(params, mesh, P())))
    saved = zero.to_host({"opt_state": state, "step": zero.to_devices(np.int32(3), devices=mesh)})
    assert saved["opt_state"][0].mu["w"].shape == (13, 24) and saved["step"] == 3
    stacked = jax.pmap(tx.init, "data", devices=jax.devices()[:1])(jax.tree.map(lambda x: x[None], params))
    whole = zero.to_host(jax.tree.map(lambda x: x[0], stacked))
    jax.tree.map(np.testing.assert_array_equal, whole, zero.to_host(stacked))
    with pytest.raises(ValueError, match="one device's slice"):
        jax.tree.map(lambda x: np.asarray(x)[0], stacked)
