"""Stages 2 and 3 through `fully_shard` against plain data parallelism: the same bits, on modules and on functions."""

import re
from functools import cache, partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero

AXES = {
    "eight": zero.Axis("batch", (1, 8)),
    "three": zero.Axis("batch", (1, 3)),
    "one": zero.Axis("batch", (1, 1)),
    "two phases": zero.Axis("batch", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7)),
    "hybrid": zero.Axis("batch", (2, 4)),
}

LAST_BIT = (
    2.5e-7  # XLA may contract the polynomial of a random normal differently in two programs (it does in jax 0.12)
)


class Layer(nn.Module):
    """A residual layer with awkward widths, as it stands in a scan."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.Dense(x.shape[-1])(nn.tanh(nn.Dense(13)(x))), None


class Model(nn.Module):
    """Layers under `nn.scan` and `nn.remat`, between a projection that is alone and a parameter of its own."""

    layer: Any = Layer
    dense: Any = nn.Dense

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.dense(10, name="project")(x)
        scan = nn.scan(nn.remat(self.layer), variable_axes={True: 0}, split_rngs={"params": True}, length=2)
        return scan(name="layers")(x, None)[0]


def make_batch(devices: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(devices, 4, 5)).astype(np.float32)


def make_layout(shards: int) -> zero.Layout:
    shapes = jax.eval_shape(Model().init, jax.random.key(0), jnp.zeros((4, 5)))["params"]
    return zero.make_layout(shapes, shards, stacked=["layers"])


def sharded_model(layout: zero.Layout, axis: zero.Axis, **dtypes: Any) -> Model:
    layer = zero.fully_shard(Layer, layout.at("layers"), axis, **dtypes)
    return Model(layer, zero.fully_shard(nn.Dense, layout.at("project"), axis, **dtypes))


def square_sum(y: Any) -> jax.Array:
    return jnp.sum(jnp.square(y))


@cache
def reference(axis: zero.Axis, layout: zero.Layout) -> Any:
    """Shards of the parameters, and of the summed gradient, of plain data parallelism."""

    def run(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: square_sum(Model().apply({"params": p}, x)))(params)
        return zero.shard(params, layout, axis), zero.scatter_sum(grads, layout, axis)

    batch = make_batch(axis.size)
    params = Model().init(jax.random.key(0), batch[0])["params"]
    return jax.pmap(run, "batch", in_axes=(None, 0))(params, batch)


def assert_same(got: Any, expected: Any, rtol: float = 0) -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=rtol, atol=0, err_msg=str(path))


def initial(model: Model, batch: np.ndarray) -> Any:
    return jax.pmap(lambda x: model.init(jax.random.key(0), x)["params"], "batch")(batch)


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param("three", 3, marks=pytest.mark.wide),
        pytest.param("eight", 2, marks=pytest.mark.wide),
        # All axes lift functions, and modules lift their methods, below.
        pytest.param("hybrid", 2, marks=pytest.mark.slow),
        *(pytest.param(name, 3, marks=pytest.mark.slow) for name in ("one", "eight", "two phases")),
    ],
)
def test_lifted_model_equals_plain_data_parallelism(name: str, stage: int) -> None:
    axis = AXES[name]
    layout = make_layout(axis.shards)
    model = sharded_model(layout, axis)

    def grads_of(params: Any, x: jax.Array) -> Any:
        gathered = {"gathered": zero.gather(params, layout, axis)} if stage == 2 else {}

        def loss(params: Any) -> jax.Array:
            return square_sum(model.apply({"params": params, **gathered}, x))

        return jax.grad(loss)(params)

    batch = make_batch(axis.size)
    params, expected = reference(axis, layout)
    assert_same(jax.pmap(grads_of, "batch")(params, batch), expected)
    assert_same(initial(model, batch), params, rtol=LAST_BIT)


@pytest.mark.optimized
@pytest.mark.parametrize(("name", "stage"), [("two phases", 2), ("two phases", 3), ("one", 3), ("hybrid", 2)])
def test_lifted_function_equals_plain_data_parallelism(name: str, stage: int) -> None:
    axis = AXES[name]
    params = {"w": np.random.default_rng(1).normal(size=(5, 13)).astype(np.float32), "b": np.zeros(13, np.float32)}
    layout = zero.make_layout(params, axis.shards)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ params["w"] + params["b"][None]))

    def run(x: jax.Array) -> Any:
        shards = zero.shard(params, layout, axis)
        lifted = zero.fully_shard(loss, layout, axis)
        given = {"gathered": zero.gather(shards, layout, axis)} if stage == 2 else {}
        plain = zero.scatter_sum(jax.grad(loss)(params, x), layout, axis)
        return jax.grad(lambda shards: lifted(shards, x, **given))(shards), plain, lifted(shards, x), loss(params, x)

    grads, expected, value, expected_value = jax.pmap(run, "batch")(make_batch(axis.size))
    assert_same(grads, expected)
    assert_same(value, expected_value)


@pytest.mark.optimized
def test_stage_3_memory() -> None:
    """Stage 3 holds one gathered layer at a time.

    What the compiled gradient needs besides arguments and results grows by less than the layers that are added.
    """
    axis = AXES["eight"]

    def temporaries(layers: int) -> int:
        shapes = {"layers": {"w": jax.ShapeDtypeStruct((layers, 256, 256), jnp.float32)}}
        layout = zero.make_layout(shapes, 8, stacked=["layers"])
        layer = zero.fully_shard(lambda params, x: jnp.tanh(x @ params["w"]), layout.at("layers"), axis)

        def loss(shards: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(jax.checkpoint(lambda x, p: (layer(p, x), None)), x, shards["layers"])[0])

        stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), layout.shard_shapes())
        lowered = jax.pmap(jax.grad(loss), "batch").lower(stacked, jax.ShapeDtypeStruct((8, 4, 256), jnp.float32))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    one_layer = 4 * 256 * 256
    assert temporaries(12) - temporaries(4) < 8 * one_layer / 4


@pytest.mark.optimized
@pytest.mark.parametrize("method", ["encode", "__call__"])
def test_methods(method: str) -> None:
    class Two(nn.Module):
        def setup(self) -> None:
            self.dense = nn.Dense(3)

        def encode(self, x: jax.Array) -> jax.Array:
            return self.dense(x)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.encode(x) * 2

    x = make_batch(8)
    layout = zero.make_layout(jax.eval_shape(Two().init, jax.random.key(0), x[0])["params"], 8)
    model = zero.fully_shard(Two, layout, "batch", methods=["encode", "__call__"])()
    shards = jax.pmap(lambda x: model.init(jax.random.key(0), x), "batch")(x)
    got = jax.pmap(lambda v, x: model.apply(v, x, method=method), "batch")(shards, x)
    plain = Two().apply(Two().init(jax.random.key(0), x[0]), x[0], method=method)
    np.testing.assert_array_equal(got[0], plain)


@pytest.mark.optimized
@pytest.mark.parametrize(("stage", "gathers"), [(2, 1), (3, 2)])
def test_collectives_of_the_compiled_gradient(stage: int, gathers: int) -> None:
    """Gathered as the table of stages says, and scattered once: what is known to be zero must not travel."""
    layout = zero.make_layout({"layers": {"w": np.ones((4, 512, 1024), np.float32)}}, 8, stacked=["layers"])
    layer: Any = zero.fully_shard(lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T, layout.at("layers"), "batch")

    def step(shards: Any, x: jax.Array) -> Any:
        def loss(shards: Any) -> jax.Array:
            full = zero.gather(shards, layout, "batch") if stage == 2 else {"layers": None}
            block = jax.checkpoint(lambda x, layers: (layer(layers[0], x, gathered=layers[1]), None))
            return jnp.sum(jax.lax.scan(block, x, (shards["layers"], full["layers"]))[0])

        return jax.grad(loss)(shards)

    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), jnp.float32), layout.shard_shapes())
    compiled = jax.pmap(step, "batch").lower(stacked, jax.ShapeDtypeStruct((8, 4, 512), jnp.float32)).compile()
    names = ("all-gather", "reduce-scatter", "all-reduce")
    counts = {name: len(re.findall(rf" {name}\(", compiled.as_text())) for name in names}
    assert counts == {"all-gather": gathers, "reduce-scatter": 1, "all-reduce": 0}


def test_dtypes() -> None:
    """Whole parameters are bfloat16; shards and their gradients stay float32."""
    axis = AXES["eight"]
    layout = make_layout(8)
    model = sharded_model(layout, axis, dtype=jnp.bfloat16, wire_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
    seen = []

    def loss(params: Any, x: jax.Array) -> jax.Array:
        y: Any = model.apply({"params": params}, x.astype(jnp.bfloat16))
        seen.append(y.dtype)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    batch = make_batch(8)
    params, expected_grads = reference(axis, layout)
    grads = jax.pmap(jax.grad(loss), "batch")(params, batch)
    assert seen == [jnp.bfloat16]
    assert_same(initial(model, batch), params, rtol=1e-5)  # made in float32, not rounded to what is gathered
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, atol=0.03 * float(jnp.max(jnp.abs(y))))


@pytest.mark.parametrize("wire_dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_gradients(stage: int, wire_dtype: Any) -> None:
    """Of the sum over devices of sum(w^4) / 12 the product of the Hessian and ones is w^2 times the devices."""
    axis = AXES["two phases"]
    params: Any = {"w": np.random.default_rng(1).integers(-8, 9, (13, 6)).astype(np.float32), "s": np.float32(3)}
    layout = zero.make_layout(params, axis.shards)
    lifted = zero.fully_shard(
        lambda params: sum(jnp.sum(jnp.square(jnp.square(x))) for x in jax.tree.leaves(params)) / 12,
        layout,
        axis,
        wire_dtype=wire_dtype,
    )

    def run(_: jax.Array) -> Any:
        shards = zero.shard(params, layout, axis)
        given = {"gathered": zero.gather(shards, layout, axis)} if stage == 2 else {}

        def slope(shards: Any) -> jax.Array:
            grads = jax.grad(lambda s: lifted(s, **given))(shards)
            return jax.tree.reduce(jnp.add, jax.tree.map(jnp.sum, grads))

        return zero.gather(jax.grad(slope)(shards), layout, axis)

    got = jax.pmap(run, "batch")(np.zeros(8))
    for name, x in params.items():
        np.testing.assert_allclose(got[name][0], 8 * np.square(x), rtol=1e-2 if wire_dtype else 1e-6)


def test_forward_mode_is_refused() -> None:
    layout = zero.make_layout({"w": np.ones(13)}, 8)
    lifted = zero.fully_shard(lambda params: jnp.sum(params["w"] ** 2), layout, "batch")
    with pytest.raises(TypeError, match="forward-mode"):
        jax.pmap(lambda w: jax.jvp(lifted, ({"w": w},), ({"w": w},)), "batch").lower(np.ones((8, 2), np.float32))


class WeightNormed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.WeightNorm(nn.Dense(13))(x)


class SpectrallyNormed(nn.Module):
    update_stats: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.SpectralNorm(nn.Dense(13))(x, update_stats=self.update_stats)


@pytest.mark.parametrize(
    ("module", "stage"),
    [
        pytest.param(WeightNormed(), 3, marks=pytest.mark.wide),
        (SpectrallyNormed(update_stats=True), 2),
        pytest.param(SpectrallyNormed(), 3, marks=pytest.mark.wide),
        pytest.param(WeightNormed(), 2, marks=pytest.mark.slow),
        pytest.param(SpectrallyNormed(), 2, marks=pytest.mark.slow),
        pytest.param(SpectrallyNormed(update_stats=True), 3, marks=pytest.mark.slow),
    ],
)
def test_modules_with_mapped_variables(module: Any, stage: int) -> None:
    """Modules that map variables themselves compute the same on shards.

    Values, gradients and statistics, which are whole.
    """
    x = make_batch(8)
    variables = dict(module.init(jax.random.key(0), x[0]))
    params = variables.pop("params")
    layout = zero.make_layout(params, 8)
    options = {"update_stats": module.update_stats} if isinstance(module, SpectrallyNormed) else {}
    sharded = zero.fully_shard(type(module), layout, "batch")(**options)

    def value_and_grads(module: Any, params: Any, given: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            y, updated = module.apply({"params": params, **variables, **given}, x, mutable=["batch_stats"])
            return square_sum(y), (y, updated)

        (_, aux), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return grads, aux

    def run(x: jax.Array) -> Any:
        made = sharded.init(jax.random.key(0), x)["params"]
        shards = zero.shard(params, layout, "batch")
        given = {"gathered": zero.gather(shards, layout, "batch")} if stage == 2 else {}
        plain, aux = value_and_grads(module, params, {}, x)
        got = value_and_grads(sharded, shards, given, x)
        return (made, *got), (shards, zero.scatter_sum(plain, layout, "batch"), aux)

    got, expected = jax.pmap(run, "batch")(x)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_unlifted_method() -> None:
    """A method that is not lifted makes whole parameters, which a lifted one refuses by their shape."""

    class Two(nn.Module):
        def setup(self) -> None:
            self.dense = nn.Dense(13)

        def encode(self, x: jax.Array) -> jax.Array:
            return self.dense(x)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dense(x) * 2

    x = make_batch(8)
    layout = zero.make_layout(jax.eval_shape(Two().init, jax.random.key(0), x[0])["params"], 8)
    model = zero.fully_shard(Two, layout, "batch", methods=["encode"])()
    whole = jax.pmap(lambda x: model.init(jax.random.key(0), x), "batch")(x)  # through __call__
    with pytest.raises(
        ValueError, match=r"leaf dense/bias: expected a shard of \(2,\), got \(13,\).* use zero.shard if"
    ):
        jax.pmap(lambda v, x: model.apply(v, x, method="encode"), "batch").lower(whole, x)


def test_shapes_are_checked() -> None:
    layout = zero.make_layout({"w": np.ones((13, 6), np.float32)}, 8)
    whole, slices = {"w": np.ones((8, 13, 6), np.float32)}, {"w": np.ones((8, 2, 6), np.float32)}
    of_shards: list[Any] = [zero.gather, zero.global_norm]
    of_wholes: list[Any] = [zero.shard, zero.scatter_sum, zero.scatter_mean]
    for fn in of_shards:
        with pytest.raises(
            ValueError, match=r"leaf w: expected a shard of \(2, 6\), got \(13, 6\).* use zero.shard if"
        ):
            jax.pmap(lambda x, fn=fn: fn(x, layout, "batch"), "batch").lower(whole)
    for fn in of_wholes:
        with pytest.raises(ValueError, match=r"leaf w: expected the whole array, \(13, 6\), got \(2, 6\)"):
            jax.pmap(lambda x, fn=fn: fn(x, layout, "batch"), "batch").lower(slices)


def test_argument_shapes_are_checked() -> None:
    """The shapes of arguments are checked."""
    layout = zero.make_layout({"w": np.ones((13, 6), np.float32)}, 8)
    slices, whole = {"w": np.ones((8, 2, 6), np.float32)}, {"w": np.ones((8, 13, 6), np.float32)}
    lifted: Any = zero.fully_shard(lambda params: jnp.sum(params["w"]), layout, "batch")
    with pytest.raises(ValueError, match=r"leaf w: expected the whole array, \(13, 6\), got \(2, 6\)"):
        jax.pmap(lambda s: lifted(s, gathered=s), "batch").lower(slices)
    with pytest.raises(ValueError, match=r"leaf w: expected a shard of \(2, 6\), got \(13, 6\)"):
        jax.pmap(lambda s, w: lifted(w, gathered=w), "batch").lower(slices, whole)
    with pytest.raises(ValueError, match=r"leaf w: expected a shard of \(2, 6\), got \(13, 6\)"):
        jax.pmap(lambda s, w: lifted(s, gradients=w), "batch").lower(slices, whole)


@pytest.mark.parametrize("wire_dtype", [jnp.bfloat16, jnp.int8])
def test_strict_dtype_promotion(wire_dtype: Any) -> None:
    """Where jax refuses to mix dtypes, nothing here mixes them."""
    params = {"w": np.ones((13, 6), np.float32), "h": np.ones((9,), jnp.bfloat16), "s": np.float32(1)}
    layout = zero.make_layout(params, 8)
    lifted = zero.fully_shard(
        lambda params: sum(jnp.sum(x) for x in jax.tree.leaves(params)), layout, "batch", dtype=jnp.bfloat16
    )

    def run(_: jax.Array) -> Any:
        shards = zero.shard(params, layout, "batch")
        means = zero.scatter_mean(params, layout, "batch", wire_dtype=wire_dtype, reduce_dtype=jnp.float32)
        sums = zero.scatter_sum(params, layout, "batch", wire_dtype=wire_dtype)
        full = zero.gather(shards, layout, "batch", wire_dtype=wire_dtype)
        return jax.grad(lifted)(shards), means, sums, full, zero.global_norm(shards, layout, "batch")

    with jax.numpy_dtype_promotion("strict"):
        grads, means, _, full, norm = jax.pmap(run, "batch")(np.zeros(8))
    np.testing.assert_allclose(norm, np.sqrt(13 * 6 + 9 + 1), rtol=1e-6)
    np.testing.assert_allclose(full["w"], 1)
    np.testing.assert_allclose(np.asarray(means["w"]).reshape(-1)[: 13 * 6], 1)
    np.testing.assert_allclose(np.asarray(grads["w"]).reshape(-1)[: 13 * 6], 8)


def test_instance_of_a_module() -> None:
    """An instance is lifted as its class is, with its fields; bound ones and other libraries' are refused."""
    x = make_batch(8)
    layout = zero.make_layout(jax.eval_shape(nn.Dense(3).init, jax.random.key(0), x[0])["params"], 8)
    of_class = zero.fully_shard(nn.Dense, layout, "batch")(3, use_bias=True, name="head")
    of_instance = zero.fully_shard(nn.Dense(3, use_bias=True, name="head"), layout, "batch")
    assert of_instance.name == "head"

    def run(module: Any, x: jax.Array) -> Any:
        return module.init_with_output(jax.random.key(0), x)

    found, expected = (jax.pmap(partial(run, module), "batch")(x) for module in (of_instance, of_class))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    with pytest.raises(TypeError, match="this Dense is bound to its parameters already"):
        zero.fully_shard(nn.Dense(3).bind({"params": {}}), layout, "batch")
    with pytest.raises(TypeError, match=r"a Linear of equinox: pass params, static = eqx.partition\(model"):
        zero.fully_shard(eqx.nn.Linear(5, 3, key=jax.random.key(0)), layout, "batch")
    with pytest.raises(TypeError, match=r"flax.linen modules and functions of parameters, got the class dict"):
        zero.fully_shard(dict, layout, "batch")
