"""What several slices of TPUs send each other: bytes and seconds, read from programs of the TPU compiler."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from zero.costs.between_slices import bytes_between_slices
from zero.costs.predict import BETWEEN_SLICES, TimedPart, predict
from zero.costs.topology import find_devices
from zero.hosts.speeds import SPEEDS
from zero.partition.collectives.arrays import sum_copies_of_array
from zero.partition.collectives.axis import Axis
from zero.partition.collectives.ordering import in_order
from zero.partition.pmapped import pmap

ELEMENTS = 2**20  # of float32, in the sum of a shard


@cache
def program(slices: int) -> tuple[str, list[Any]]:
    """Weights are gathered and gradients scattered within a slice; the copies of a shard are summed between slices."""
    pytest.importorskip("libtpu")
    devices = find_devices(f"{slices}xv5e-4")
    axis = Axis("zero", (slices, 4))
    groups, copies = axis.groups(4), axis.groups(slices, apart=4)

    def step(x: jax.Array, shard: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights = lax.all_gather(shard, axis.name, axis_index_groups=groups, tiled=True)
        grads = lax.psum_scatter(x.T @ jnp.tanh(x @ weights), axis.name, axis_index_groups=groups, tiled=True)
        return lax.psum(grads, axis.name, axis_index_groups=copies), lax.psum(x.sum(), axis.name)

    arguments = [jax.ShapeDtypeStruct((len(devices), rows, 2048), jnp.float32) for rows in (256, 512)]
    return pmap(step, axis.name, devices).lower(*arguments).compile().as_text(), devices


@pytest.mark.parametrize("slices", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_only_the_sum_of_copies_leaves_a_slice(slices: int) -> None:
    text, _ = program(slices)
    in_a_ring = 2 * (slices - 1) / slices * 4 * ELEMENTS
    assert in_a_ring <= bytes_between_slices(text) < in_a_ring + 4096  # and the sum of a number


@pytest.mark.parametrize(("dtype", "bytes_each"), [("bfloat16", 2), ("int8", 1 + 4 / 256)])
def test_narrow_sums_of_copies(dtype: str, bytes_each: float) -> None:
    """Two slices send each other what a ring would, in two or in one byte, and a scale for 256 elements of int8."""
    pytest.importorskip("libtpu")
    devices = find_devices("2xv5e-4")
    axis = Axis("zero", (2, 4), copies_dtype=dtype)
    step = pmap(lambda shard: sum_copies_of_array(shard, axis), axis.name, devices)
    shard = jax.ShapeDtypeStruct((len(devices), 1024, ELEMENTS // 1024), jnp.float32)
    text = step.lower(shard).compile().as_text()
    assert bytes_between_slices(text) == pytest.approx(bytes_each * ELEMENTS, rel=1e-3)


def test_seconds_between_slices() -> None:
    """The network between slices takes as long as its bandwidth says; nothing runs beside this sum."""
    text, devices = program(2)
    predicted = predict(text, devices)
    assert predicted is not None
    expected = bytes_between_slices(text) / SPEEDS["TPU v5 lite"].between_slices
    assert predicted.by_part[TimedPart(BETWEEN_SLICES, "update")] == pytest.approx(expected, rel=0.05)
    assert predicted.exposed_seconds >= predicted.by_part[TimedPart(BETWEEN_SLICES, "update")]


def test_one_slice_sends_nothing_beyond() -> None:
    step = jax.pmap(in_order(lambda x: lax.psum(x, "zero")), "zero")
    assert bytes_between_slices(step.lower(jnp.ones((8, 4))).compile().as_text()) == 0


def test_lists_of_devices_in_several_slices() -> None:
    """A transfer among all devices of two slices is written with jax's ids of the devices."""
    text = (
        "ENTRY %main (p: f32[]) -> f32[] {\n"
        "  %send = (f32[8,128]{1,0}, u32[], token[]) send(%x, %token), channel_id=1, is_host_transfer=true, "
        'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        '_xla_host_transfer_rendezvous="all_to_all.3_0",_xla_megascale_target={{100000,100001,200000,200001}},'
        '_xla_megascale_transfer_type="ALL_TO_ALL"}\n'
        "}\n"
    )
    assert bytes_between_slices(text) == 4 * 8 * 128 / 2
    with pytest.raises(ValueError, match=r"a transfer between slices is not understood: .*SOMETHING"):
        bytes_between_slices(text.replace("ALL_TO_ALL", "SOMETHING"))
