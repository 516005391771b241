"""Plans of programs that zero did not write."""

import os
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import mesh_utils
from jax.experimental import pallas as pl

import zero
from zero.base.errors import UnknownTopology, UserError
from zero.costs import program_plan
from zero.costs.holders import Holder
from zero.hosts.speeds import SPEEDS

LAYERS, WIDTH, ROWS, DEVICES = 4, 512, 256, 8

pytest.importorskip("libtpu")


def loss(params: Any, batch: jax.Array) -> jax.Array:
    def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ kernel), None

    return (jax.lax.scan(layer, batch, params["layers"])[0] ** 2).mean()


def training_step(layers: int = LAYERS, width: int = WIDTH) -> tuple[Callable[..., Any], Any]:
    """A pmapped step of a sharded AdamW, as a user writes it, and the shapes of its arguments."""
    tx = zero.shard_optimizer(optax.adamw(1e-3), axis_name="batch")

    @partial(jax.pmap, axis_name="batch", donate_argnums=(0, 1))
    def train_step(params: Any, state: Any, batch: jax.Array) -> Any:
        grads = zero.local(jax.grad(loss)(params, batch))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"layers": jax.ShapeDtypeStruct((DEVICES, layers, width, width), jnp.float32)}
    state = jax.eval_shape(jax.vmap(tx.init, axis_name="batch", axis_size=DEVICES), params)
    return train_step, (params, state, jax.ShapeDtypeStruct((DEVICES, ROWS, width), jnp.float32))


@pytest.fixture(scope="module")
def planned() -> zero.Plan:
    step, arguments = training_step()
    return zero.plan(step, *arguments, topology="v5e-8")


def test_traffic_equals_the_formula(planned: zero.Plan) -> None:
    """A reduce-scatter of gradients and a gather of updates: each device sends 7/8 of the parameters."""
    sent = {cost.kind: cost.bytes for cost in planned.collectives if cost.bytes > 1000}
    expected = LAYERS * WIDTH * WIDTH * 4 * 7 // 8
    assert sent == {"all-gather": expected, "reduce-scatter": expected}
    assert planned.exposed_seconds == pytest.approx(sum(cost.exposed_seconds for cost in planned.collectives))


def test_holders_are_named_by_argument(planned: zero.Plan) -> None:
    """Parameters are whole, moments are slices."""
    held = {holder.name: holder.bytes for holder in planned.holders}
    parameters = LAYERS * WIDTH * WIDTH * 4
    assert held["argument 0['layers']"] == parameters
    assert held["argument 1.slices[0].mu['layers']"] == parameters // DEVICES
    assert planned.fits and 0.8 < sum(held.values()) / planned.peak_bytes <= 1.0
    assert not any(name.startswith(("sharded_optimizer.py", "stages.py")) for name in held)


def test_time_is_the_sum_of_the_timeline(planned: zero.Plan) -> None:
    ((program, runs),) = planned.programs
    core = [times * event.seconds for event, times in program.timeline.runs() if event.lane == "TensorCore"]
    assert runs == 1 and planned.seconds == pytest.approx(sum(core))
    products = 3 * 2 * LAYERS * ROWS * WIDTH * WIDTH - 2 * ROWS * WIDTH * WIDTH  # no gradient of the batch
    assert planned.flops == pytest.approx(products, rel=0.2)
    assert planned.utilization == pytest.approx(planned.flops / (planned.seconds or 0) / 197e12)
    assert planned.mfu(DEVICES * planned.flops) == pytest.approx(planned.utilization)


def test_programs_add_up(planned: zero.Plan) -> None:
    step = planned + 3 * planned
    assert step.seconds == pytest.approx(4 * (planned.seconds or 0)) and step.peak_bytes == planned.peak_bytes
    assert [cost.runs for cost in step.collectives] == [4 * cost.runs for cost in planned.collectives]
    assert planned.dollars(steps=1000, dollars_per_device_hour=3.6) == pytest.approx(8 * (planned.seconds or 0))
    with pytest.raises(ValueError, match="expected plans for the same devices"):
        planned + program_plan.dataclasses.replace(planned, topology="v5e-4")


def test_compare_shows_what_moved(planned: zero.Plan) -> None:
    other = program_plan.dataclasses.replace(planned, peak_bytes=2 * planned.peak_bytes, collectives=())
    text = planned.compare(other)
    assert "(+100.0%)" in text and "all-gather: 0.00367 -> 0 GB (-100.0%)" in text


def test_a_program_that_does_not_fit_says_what_would_have_to_go() -> None:
    step, arguments = training_step(layers=40, width=8192)
    refused = zero.plan(step, *arguments, topology="v5e-8")
    assert not refused.fits and refused.seconds is None
    assert sum(holder.bytes for holder in refused.holders) == pytest.approx(refused.peak_bytes, rel=0.02)
    assert Holder("argument 0['layers']", 40 * 8192 * 8192 * 4) in refused.holders
    assert any(holder.name.startswith("test_program_plan.py:") for holder in refused.holders)
    assert "does not fit. The largest arrays:\n" in str(refused) and "10.000 GiB  argument 0" in str(refused)


def test_a_mesh_of_a_topology() -> None:
    """The reduction over the shards of a contraction, of a program that is partitioned by its compiler."""
    mesh = jax.sharding.Mesh(np.reshape(zero.topology("v5e-8"), (2, 4))[:, ::-1], ("data", "model"))

    def sharded(*axes: str | None) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

    def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return x @ kernel

    step = jax.jit(product, in_shardings=(sharded("data", "model"), sharded("model")), out_shardings=sharded("data"))
    shapes = jax.ShapeDtypeStruct((2048, 1024), jnp.float32), jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    found = zero.plan(step, *shapes, topology="v5e-8")
    assert found.devices == 8 and "argument" not in found.holders[0].name
    assert {holder.name for holder in found.holders} >= {"x", "kernel"}
    reduced = sum(cost.bytes for cost in found.collectives)
    assert reduced == 2 * 1024 * 512 * 4 * 3 // 4  # an all-reduce over four devices


def spread(devices: Any, *axes: str | None) -> jax.sharding.NamedSharding:
    mesh = jax.sharding.Mesh(np.reshape(devices, (2, 4)), ("data", "model"))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


def test_a_mesh_of_virtual_cpus_is_replaced() -> None:
    """A program that makes its mesh of `jax.devices()`, with its arrays on CPUs: as if it were made on the slice."""
    whole = jax.sharding.PartitionSpec()

    def step_on(devices: Any) -> tuple[Any, ...]:
        inner = spread(devices, "data")

        def product(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = jax.lax.with_sharding_constraint(x @ kernel, inner)
            mean = jax.shard_map(
                lambda y: jax.lax.pmean(y, "data"), mesh=inner.mesh, in_specs=inner.spec, out_specs=whole
            )
            return mean(y), kernel + 1

        shapes = (
            jax.ShapeDtypeStruct((2048, 1024), jnp.float32, sharding=spread(devices, "data", "model")),
            jax.ShapeDtypeStruct((1024, 512), jnp.float32, sharding=spread(devices, "model")),
        )
        return jax.jit(product, donate_argnums=1), *shapes

    step, *shapes = step_on(jax.devices())
    found = zero.plan(step, *shapes, topology="v5e-8")
    in_place = mesh_utils.create_device_mesh((2, 4), zero.topology("v5e-8"))
    expected = zero.plan(*step_on(in_place), topology="v5e-8")
    assert found.seconds == expected.seconds and found.peak_bytes == expected.peak_bytes
    assert found.collectives == expected.collectives and len(found.collectives) > 0
    assert expected.unknowns == () and "the order of devices on a TPU: here that of jax.make_mesh" in found.unknowns
    elsewhere = zero.plan(step, *shapes, topology="v6e-8")  # what jax has in its cache is as it was
    assert elsewhere.device_kind == "TPU v6 lite" and elsewhere.unknowns == found.unknowns


@pytest.mark.parametrize("topology", ["v4-16", "2xv5e-4"])
def test_a_mesh_whose_neighbors_are_on_different_hosts(topology: str) -> None:
    """Of two hosts, and of two slices: the gathers of one group cross between the slices."""
    devices = np.reshape(zero.topology(topology), (2, 4)).T.flatten()
    halves, whole = spread(devices, None, "data"), spread(devices)  # "data" has every other device
    step = jax.jit(lambda x: x + 1, in_shardings=halves, out_shardings=whole)
    found = zero.plan(step, jax.ShapeDtypeStruct((1 << 10, 1 << 10), jnp.float32), topology=topology)
    assert found.devices == 8 and found.seconds is not None
    assert sum(cost.bytes for cost in found.collectives) == 1 << 21


def test_arrays_on_several_devices_keep_their_shardings() -> None:
    x = jax.device_put(jnp.ones((1 << 10, 1 << 10)), spread(jax.devices(), "data", "model"))
    with jax.set_mesh(x.sharding.mesh):
        found = zero.plan(jax.jit(lambda x: x.sum()), x, topology="v5e-8")
    assert Holder("x", (1 << 22) // DEVICES) in found.holders


def test_the_time_of_a_kernel_of_others_is_called_a_guess() -> None:
    """It has no cycles: the time of its arrays, or of the operations that its author notes if that is longer."""

    def doubled(x: jax.Array, flops: int) -> jax.Array:
        def kernel(read: Any, written: Any) -> None:
            written[...] = 2 * read[...]

        cost = pl.CostEstimate(flops=flops, bytes_accessed=0, transcendentals=0)
        return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), cost_estimate=cost)(x)

    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    step = jax.jit(doubled, static_argnums=1)
    short, long = (zero.plan(step, x, flops, topology="v5e-1") for flops in (1, 197_000_000_000))
    assert short.guessed_seconds == pytest.approx(2 * (1 << 20) / SPEEDS["TPU v5 lite"].memory)
    assert long.guessed_seconds == pytest.approx(1e-3) and 0.9 < long.guessed_seconds / (long.seconds or 0) <= 1
    assert "a guess   " in str(long) and "the operations that they note" in str(long)
    with pytest.raises(UserError, match=r"exact=True: this process has loaded the TPU compiler before"):
        zero.plan(step, x, 1, topology="v5e-1", exact=True)
    assert "dump" not in os.environ.get("LIBTPU_INIT_ARGS", "")  # processes that start later have their own compilers


def test_a_loop_that_its_data_end_is_counted_once() -> None:
    """As in `jax.random.gamma`: the compiler knows no number of iterations."""

    def until(x: jax.Array, limit: float) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() < limit, lambda x: x @ x, x)

    found = zero.plan(jax.jit(until), jax.ShapeDtypeStruct((1024, 1024), jnp.float32), 3.0, topology="v5e-1")
    (unknown,) = (sentence for sentence in found.unknowns if "loop" in sentence)
    assert unknown.startswith("how often a loop runs that its data end, test_program_plan.py:")
    assert found.flops == pytest.approx(2 * 1024**3, rel=0.01) and (found.seconds or 0) > 5e-6


def test_a_wrapper_of_a_jitted_function() -> None:
    """As of Equinox and Haliax: it has no name, it tells arrays from constants, what it lowers is an attribute."""

    def triple(settings: dict[str, Any], x: jax.Array) -> jax.Array:
        return settings["times"] * x

    class Wrapper:
        __wrapped__ = staticmethod(triple)

        def lower(self, settings: dict[str, Any], x: jax.Array) -> Any:
            assert isinstance(x, jax.Array)
            return types.SimpleNamespace(lowered=jax.jit(partial(triple, settings)).lower(x))

        def __call__(self) -> None: ...

    found = zero.plan(Wrapper(), {"times": 3, "name": "x"}, jnp.ones((512, 512)), topology="v5e-1")
    assert found.name == "triple" and found.peak_bytes == pytest.approx(2 << 20, rel=0.1)


def test_a_random_key_and_a_chip_alone() -> None:
    found = zero.plan(jax.jit(jax.random.normal, static_argnums=1), jax.random.key(0), (512, 512), topology="v5e-1")
    assert found.devices == 1 and found.peak_bytes >= 1 << 20


@pytest.mark.parametrize(
    ("topology", "says"),
    [
        ("v9-8", "topology=v9-8: expected one of v2, v3"),
        ("v5e-7", "topology=v5e-7: expected v5e- and a number that is a power of two"),
        ("v5e", "topology=v5e: expected a slice such as v3-32"),
    ],
)
def test_unknown_topologies(topology: str, says: str) -> None:
    with pytest.raises(UnknownTopology, match=says):
        zero.plan(jax.pmap(jnp.sin), jax.ShapeDtypeStruct((8,), jnp.float32), topology=topology)


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero.costs.topology.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnknownTopology, match=r"the TPU compiler \(libtpu\) is not installed.*--plan|\[plan\]"):
        zero.topology("v5e-8")


def test_mistakes_are_named() -> None:
    step, (params, state, batch) = training_step()
    with pytest.raises(ValueError, match=r"argument 2 has the shape \(4, 256, 512\): expected 8 in dimension 0"):
        zero.plan(step, params, state, jax.ShapeDtypeStruct((4, *batch.shape[1:]), batch.dtype), topology="v5e-8")
    with pytest.raises(TypeError, match=r"expected a function made by jax.pmap or jax.jit, got int"):
        zero.plan(3, topology="v5e-8")
    with pytest.raises(
        ValueError, match=r"the program is for 1 CPU, the topology has 8 devices: make its mesh of zero"
    ):
        zero.plan(lambda x: x + 1, jnp.ones(4), topology="v5e-8")
    of_v5e = jax.sharding.SingleDeviceSharding(zero.topology("v5e-1")[0])
    with pytest.raises(ValueError, match="the program is for 1 TPU v5 lite, the topology has 1 devices: make its mesh"):
        zero.plan(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32, sharding=of_v5e), topology="v6e-1")


def test_a_jax_that_hides_the_arguments_of_pmap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero.partition.pmapped.NEEDED", frozenset({"axis_name", "somewhere_else"}))
    with pytest.raises(RuntimeError, match=r"hides somewhere_else of a pmapped function"):
        zero.plan(jax.pmap(jnp.sin), jax.ShapeDtypeStruct((8,), jnp.float32), topology="v5e-8")


def test_static_and_donated_arguments_are_those_of_the_program() -> None:
    """An argument in front that is not an array moves neither the axes nor the donation of the others."""

    @partial(jax.pmap, axis_name="i", static_broadcasted_argnums=0, in_axes=(None, 0, None), donate_argnums=1)
    def scale(times: int, x: jax.Array, offset: jax.Array) -> jax.Array:
        return jax.lax.psum(times * x + offset, "i")

    x, offset = jax.ShapeDtypeStruct((8, 1 << 20), jnp.float32), jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    found = zero.plan(scale, 3, x, offset, topology="v5e-8")
    held = {holder.name: holder.bytes for holder in found.holders}
    assert held["argument 1"] == held["argument 2"] == 4 << 20
    assert found.peak_bytes < 14 << 20  # the result takes the place of x
