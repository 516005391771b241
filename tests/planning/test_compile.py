"""The compiler for TPU takes a step on slices of every generation, small ones and large ones."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import zero
from zero.commands.cli import compose
from zero.costs.topology import find_devices, prepare_environment
from zero.hosts import xla_options
from zero.hosts.xla_options import for_tpu, without_groups
from zero.planning.compile import compile_step, options_of
from zero.planning.config import Request
from zero.planning.table import verdict

SLICES = ("v3-32", "v4-64", "v5e-64", "v5e-256", "v5p-64", "v6e-16", "v6e-256", "tpu7x:4x4x4")


@pytest.mark.parametrize("topology", ["v5e-16", "v5e:4x8"])
def test_exchanges_beside_products(topology: str) -> None:
    """An all-to-all of a loop, which may run beside a product, is compiled with the options of a run."""
    prepare_environment(topology)
    devices = find_devices(topology)

    def layers(x: jax.Array) -> Any:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            return x + x @ x, lax.all_to_all(x, "shards", 0, 0, tiled=True)

        return lax.scan(layer, x, None, length=4)

    shape = jax.ShapeDtypeStruct((len(devices), 512, 512), jnp.bfloat16)
    lowered = jax.pmap(layers, axis_name="shards", devices=devices).lower(shape)
    text = lowered.compile(for_tpu(devices[0].device_kind, len(devices), overlap_gathers=True)).as_text()
    assert ("all-to-all-start" in text) == (len(devices) <= 16)


@pytest.mark.parametrize("key", ["zero.stage=3", "zero.context_shards=4", "zero.overlap_gathers=false"])
def test_a_plan_has_the_options_of_a_run(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slice whose options depend on its chips and on the groups of the run."""
    monkeypatch.setattr(xla_options, "_tpus_of_this_machine", lambda: ("TPU v6 lite", 8))
    monkeypatch.setattr(xla_options, "_slices_of_the_job", lambda: 1)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    config, _ = compose(["mode=plan", "plan.topology=v6e-16", "model.size=bytes", key])
    xla_options.set_before_start(config.zero.overlap_gathers, "tpu", 2, config.zero.in_groups)
    of_plan = options_of(config.zero, find_devices("v6e-16"))
    assert of_plan is not None
    assert os.environ["LIBTPU_INIT_ARGS"].split() == [
        f"--{name}={str(value).lower()}" for name, value in (of_plan | xla_options.STACKS).items()
    ]


@pytest.mark.parametrize("shape", [(768, 12, 64), (12, 64, 768), (50257, 768)])
def test_gradients_travel_on_sparsecores(shape: tuple[int, ...]) -> None:
    """Whichever dimension of a leaf is split: libtpu ends where the parts of an all-to-all are not the first one."""
    prepare_environment("v6e-16")
    devices = find_devices("v6e-16")
    axis = zero.Axis("batch", (1, 16), exchanges=True)
    layout = zero.make_layout({"w": jax.ShapeDtypeStruct(shape, jnp.float32)}, 16)

    def scatter(tree: Any) -> Any:
        return zero.scatter_sum(jax.tree.map(lambda x: 2 * x, tree), layout, axis)

    lowered = jax.pmap(scatter, "batch", devices=devices).lower({"w": jax.ShapeDtypeStruct((16, *shape), jnp.float32)})
    options: Any = for_tpu("TPU v6 lite", 16, overlap_gathers=True) | without_groups("TPU v6 lite", 16)
    assert 'async_execution_thread="sparsecore"' in lowered.compile(options).as_text()


@pytest.mark.parametrize(
    ("topology", "keys"),
    [
        *(pytest.param(name, (), marks=pytest.mark.wide) for name in ("v5e:4x8", "v6e-64", "2xv5e-16")),
        pytest.param("v5e-64", ("zero.context_shards=4",), marks=pytest.mark.wide),
        pytest.param("v6e-16", ("zero.context_shards=4",), marks=pytest.mark.wide),
        pytest.param(
            "v6e-16", ("model.override.embedding_dim=780", "model.override.num_head=12"), marks=pytest.mark.wide
        ),
        pytest.param("2xv5e-16", ("zero.replicas=1",), marks=pytest.mark.wide),
        *(pytest.param(name, (), marks=pytest.mark.slow) for name in SLICES),
    ],
)
def test_steps_are_compiled(topology: str, keys: tuple[str, ...]) -> None:
    """A small model at stage 3, whose gradients are scattered as the slice has it."""
    small = ("model.size=bytes", "training.sample_tokens=0", "zero.remat=full")
    config, size = compose(["mode=plan", f"plan.topology={topology}", *small, *keys])
    prepare_environment(topology)
    assert compile_step(Request(config, size, 1).with_changes(stage=3))["fits"]


def test_what_the_compiler_refuses_on_the_host_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that needs more of its host's memory than the compiler accepts is a row, no error.

    A v6e-8 has two hosts of four devices.
    """

    def refuse(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("Ran out of memory in memory space host. Used 133.50G of 128.00G host.")

    monkeypatch.setattr("zero.planning.compile.compiled_unless_decided", refuse)
    config, size = compose(["mode=plan", "plan.topology=v6e-8", "model.size=bytes", "training.sample_tokens=0"])
    prepare_environment("v6e-8")
    row = compile_step(Request(config, size, 1).with_changes(stage=3))
    assert not row["fits"] and row["host_bytes"] == 133.5 * 2**30
    assert verdict(row) == "does not fit in the memory of a host by 22.00 GiB"
