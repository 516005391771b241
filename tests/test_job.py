"""What is bound from a configuration before any device is used."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.config.composing import compose
from zero.base.errors import UserError
from zero.commands.modes import check
from zero.costs.topology import find_devices
from zero.hosts.speeds import SPEEDS
from zero.job.devices import exchanges_gradients, make_axis
from zero.job.job import make_job, place_model
from zero.job.memory import most_on_host, rates_of
from zero.job.sizes import load_sizes
from zero.training.activations import kinds_on_host
from zero.training.schedules import learning_rate


@pytest.mark.parametrize(("warmup", "total"), [(2, 5), (0, 1), (19, 20), (20, 100)])
def test_linear_end_of_short_runs(warmup: int, total: int) -> None:
    """A constant rate with a linear end reaches the end also in short runs."""
    keys = ("schedule=wsd", f"training.warmup_steps={warmup}", f"training.total_steps={total}")
    config = check(compose(*keys, "training.end_learning_rate=0"), load_sizes())
    rate = learning_rate(config.training, config.schedule)
    assert float(rate(total - 1)) == 0
    if total - warmup > 1:
        assert float(rate(total - 1 - max(1, total // 10))) == pytest.approx(3e-3)


@pytest.mark.parametrize(("size", "share"), [("bytes_mup", 64 / 192), ("bytes", 1.0)])
def test_rates_of_mup_matrices(size: str, share: float) -> None:
    """Matrices of a model in mup learn at their share of the rate."""
    config = check(compose(f"model.size={size}"), load_sizes())
    tx = make_job(config, place_model(config, load_sizes()[size])).tx
    params = {
        "blocks": {"query": {"kernel": jnp.zeros(3), "bias": jnp.zeros(3)}},
        "vocabulary": {"table": jnp.zeros(3)},
    }
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    np.testing.assert_allclose(updates["blocks"]["query"]["kernel"], share, rtol=1e-6)
    for update in (updates["blocks"]["query"]["bias"], updates["vocabulary"]["table"]):
        np.testing.assert_allclose(update, 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("attention", "lacks"), [("kernel", ["a kernel for this device and zero.compute_dtype"]), ("auto", [])]
)
def test_kernel_falls_back_to_auto(attention: str, lacks: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Where a kernel does not support the attention, this is logged once, and attention falls back to auto."""
    config = check(compose(f"model.attention={attention}"), load_sizes())
    model = place_model(config, load_sizes()["bytes"]).model
    said = [record.message for record in caplog.records if "kernel" in record.message]
    assert (model.kernel, model.blockwise_from, model.query_block) == (None, 512, 64)
    assert said == [f"model.attention=kernel does not support {x}; using model.attention=auto" for x in lacks]


@pytest.mark.parametrize(
    ("topology", "dtype", "is_said"),
    [
        ("v6e-8", "int8_all", True),
        ("v6e-8", "bfloat16", False),
        ("v5e-8", "int8_all", False),
        ("v5e-8", "float8", True),
        ("v4-8", "int8", True),
        ("tpu7x:2x2x1", "float8", False),
    ],
)
def test_products_that_hardly_pay(topology: str, dtype: str, is_said: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A run, and a plan of it, say where products in 8 bits are hardly faster than what rounding takes."""
    config: Any = check(compose(f"zero.product_dtype={dtype}", "model.size=llama3_8b"), load_sizes())
    place_model(config, load_sizes()["llama3_8b"], find_devices(topology))
    assert any(f"zero.product_dtype={dtype}" in record.message for record in caplog.records) == is_said


@pytest.mark.parametrize(
    ("topology", "size", "context", "kernel"),
    [
        ("v3-8", "1_1b", 1024, "tpu_v2"),
        ("v3-8", "1_1b", 256, None),
        ("v3-8", "llama3_8b", 2048, "tpu_v2"),  # each of its heads of keys four times
        ("v3-8", "llama3_8b", 4096, None),  # the gradient of one head's queries exceeds VMEM
        ("v5e-4", "llama3_8b", 8192, "tpu_v5e"),
        ("v3-8", "mistral_7b", 8192, None),  # in a window of 4,096
        ("v5e-4", "mistral_7b", 8192, "tpu_v5e"),
    ],
)
def test_kernels_of_tpus(topology: str, size: str, context: int, kernel: str | None) -> None:
    """A model has a kernel only where it computes the attention of training: estimates of memory count on it."""
    config = check(compose(f"model.size={size}", f"data.max_context={context}", "zero.stage=3"), load_sizes())
    model = place_model(config, load_sizes()[size], find_devices(topology)).model
    assert (model.kernel, model.query_block) == (kernel, None)


@pytest.mark.parametrize(
    ("kind", "sides", "expected"),
    [
        ("TPU v3", (4, 4), True),  # both cores of a chip send
        ("TPU v3", (8, 8), False),
        ("TPU v4", (2, 2, 4), True),
        ("TPU v4", (4, 4, 8), False),
        ("TPU v5 lite", (4, 4), True),
        ("TPU v5 lite", (4, 8), False),  # which would run beside nothing
        ("TPU v5 lite", (16, 16), False),
        ("TPU v5 lite", (1, 1), True),
        ("TPU v6 lite", (2, 4), False),  # SparseCores run its reduce-scatters
        ("TPU v6 lite", (4, 8), False),
        ("TPU v6 lite", (4, 4), True),  # but not those of a square
        ("TPU v6 lite", (8, 8), True),
        ("TPU v6 lite", (16, 16), False),
        ("TPU7x", (4, 4, 4), False),
        ("TPU v9", (2, 2), False),
    ],
)
def test_slices_that_exchange_gradients(kind: str, sides: tuple[int, ...], expected: bool) -> None:
    """An all-to-all may take twice as long as an all-reduce, which a long dimension exceeds."""
    devices = [SimpleNamespace(platform="tpu", device_kind=kind, coords=place) for place in np.ndindex(*sides)]
    assert exchanges_gradients(devices) == expected


@pytest.mark.parametrize(
    ("size", "topology", "rows", "exchanges", "phases"),
    [
        ("llama3_8b", "v4-256", 4, True, 1),
        ("llama3_8b", "v4-256", 1, False, 1),
        ("mixtral_8x7b", "v4-256", 4, False, 1),
        ("llama3_8b", "v6e-256", 16, False, 2),  # SparseCores scatter over lines, not over a square
        ("mixtral_8x7b", "v6e-256", 4, False, 2),
        ("llama3_8b", "v6e:8x16", 16, False, 1),
    ],
)
def test_scatters_of_large_slices(size: str, topology: str, rows: int, exchanges: bool, phases: int) -> None:
    """An exchange takes more than twice as long as an all-reduce there, and pays off where a layer hides it."""
    config = check(compose(f"model.size={size}", "zero.stage=3", "data.max_context=1024"), load_sizes())
    model = place_model(config, load_sizes()[size], find_devices(topology), rows).model
    assert (model.axis.exchanges, len(model.axis.shape) - 1) == (exchanges, phases)
    assert model.axis.orders_scatters == (phases > 1)
    assert model.sent_dtype == ("bfloat16" if exchanges else "float32")


def on_v5e(*overrides: str) -> Any:
    config = check(compose("model.size=bytes", "zero.stage=3", "data.max_context=256", *overrides), load_sizes())
    return place_model(config, load_sizes()["bytes"], find_devices("v5e-4")).model


def test_wire_of_a_slice() -> None:
    """Where gradients are exchanged they travel in the dtype in which they are computed."""
    for overrides, wire, exchanges in (
        ((), "bfloat16", True),
        (("zero.compute_dtype=float32",), "float32", True),
        (("zero.wire_dtype=float32",), "float32", True),
        (("zero.stage=1",), "float32", True),
        (("zero.overlap_gathers=false",), "float32", False),
    ):
        model = on_v5e(*overrides)
        phases = (4,) if exchanges else (2, 2)  # without overlap one along each dimension of the slice
        assert (model.sent_dtype, model.axis.exchanges, model.axis.shape) == (wire, exchanges, (1, *phases))
    here = place_model(check(compose(), load_sizes()), load_sizes()["bytes"]).model
    assert here.sent_dtype == "float32" and not here.axis.exchanges


@pytest.mark.parametrize(("rows", "expected"), [(16, "mlp"), (32, "full")])
def test_automatic_remat(rows: int, expected: str, caplog: pytest.LogCaptureFixture) -> None:
    """On TPU the policy depends on the memory that a micro-batch leaves."""
    caplog.set_level("INFO")
    size, devices = load_sizes()["1_1b"], find_devices("v5e-16")
    keys = ("model.size=1_1b", "zero.stage=3", "data.max_context=1024")
    config = check(compose(*keys), load_sizes())
    assert make_job(config, place_model(config, size, devices, rows)).model.remat == expected
    assert f"zero.remat=auto: {expected}, two chunks of the vocabulary at once" in caplog.messages
    config = check(compose(*keys, "training.gradient_accumulation_steps=4"), load_sizes())
    assert make_job(config, place_model(config, size, devices, rows)).model.remat == "mlp"
    config = check(compose(*keys, "zero.remat=dots"), load_sizes())
    assert make_job(config, place_model(config, size, devices, rows)).model.remat == "dots"


def test_automatic_remat_with_the_host(caplog: pytest.LogCaptureFixture) -> None:
    """With the host's memory each kind of activation lies where a step takes the fewest predicted seconds."""
    caplog.set_level("INFO")
    size, devices = replace(load_sizes()["llama3_8b"], N=8), find_devices("v5e-8")
    keys = ("model.size=llama3_8b", "zero.stage=3", "data.max_context=8192")

    def choice(*overrides: str, rows: int = 2) -> tuple[str, tuple[str, ...], str]:
        caplog.clear()
        config = check(compose(*keys, *overrides), load_sizes())
        model = make_job(config, place_model(config, size, devices, rows)).model
        logged = [line for line in caplog.messages if line.startswith("zero.remat=auto")]
        return model.remat, kinds_on_host(model), "".join(logged)

    on_host = "zero.offload=activations"
    in_pairs = ", two chunks of the vocabulary at once"
    assert choice() == ("mlp_in+attention", (), f"zero.remat=auto: mlp_in+attention{in_pairs}")
    logged = f"zero.remat=auto: mlp+attention, on the host: mlp_in{in_pairs}"
    assert choice(on_host) == ("mlp+attention", ("mlp_in",), logged)
    logged = f"zero.remat=auto: mlp_in, on the host: mlp_in{in_pairs}"
    assert choice(on_host, rows=4) == ("mlp_in", ("mlp_in",), logged)
    logged = f"zero.remat=auto: mlp+attention, on the host: nothing{in_pairs}"
    assert choice(on_host, rows=1) == ("mlp+attention", (), logged)
    assert choice(on_host, "zero.remat=attention") == ("attention", ("layer_input", "attention"), "")
    caplog.clear()
    choice(rows=4)
    (said,) = (line for line in caplog.messages if line.startswith("zero.offload=activations"))
    saved = re.fullmatch(r".* would store mlp_in, on the host mlp_in, and .* save (\d+) % of a step", said)
    assert saved is not None and 2 <= int(saved[1]) <= 10
    choice(rows=1)
    assert not any(line.startswith("zero.offload=activations") for line in caplog.messages)


def test_rates() -> None:
    """Devices of a chip share its link; wide heads fill a unit of 256 columns; products in 8 bits are faster."""
    v3, v6e = SPEEDS["TPU v3"], SPEEDS["TPU v6 lite"]
    model = replace(on_v5e(), kernel="tpu_v6e")
    wide = replace(model, config=replace(model.config, head_dim=256))
    models = (model, wide, replace(model, kernel=None))
    assert [rates_of(one, v6e).mixers["attention"] / v6e.flops for one in models] == pytest.approx([0.45, 0.7, 0.15])
    assert rates_of(wide, v3).mixers["attention"] == pytest.approx(0.82 * v3.flops)
    assert rates_of(model, v3).link == 8e9
    products = [rates_of(replace(model, product_dtype=dtype), v6e).products for dtype in ("auto", "int8_all")]
    assert products == pytest.approx([0.85 * v6e.flops, 1.7 * v6e.flops])


def on_torus(tensor: int) -> Any:
    """The section `zero` with tensor groups along a torus, of any model."""
    return replace(check(compose("zero.phases=torus"), load_sizes()).zero, tensor_shards=tensor)


@pytest.mark.parametrize(
    ("topology", "overlaps", "expected"),
    [("tpu7x-8", True, True), ("tpu7x-8", False, False), ("v6e-8", True, True), ("v5e-8", True, False)],
)
def test_order_of_gathers(topology: str, overlaps: bool, expected: bool) -> None:
    """Where SparseCores gather, large leaves of a layer follow its small ones, if gathers run beside computation."""
    keys = replace(check(compose(), load_sizes()).zero, overlap_gathers=overlaps)
    assert make_axis(keys, find_devices(topology)).small_first == expected


@pytest.mark.parametrize(("tensor", "exchanges"), [(16, True), (8, False)])
def test_tensor_groups_along_a_torus(tensor: int, exchanges: bool) -> None:
    """On a v3-128 groups of 16 are whole lines, and what gathers weights a ring; those of 8 are half lines."""
    devices = find_devices("v3-128")
    axis = make_axis(on_torus(tensor), devices)
    assert axis.exchanges == exchanges and axis.shape == (1, tensor, 128 // tensor)
    for group in axis.row_groups():
        columns, rows = zip(*(devices[position].coords[:2] for position in group), strict=True)
        assert 1 in (len(set(columns)), len(set(rows)))


@pytest.mark.parametrize(("rows", "expected"), [(2, "torus"), (32, "flat")])
def test_automatic_placement(rows: int, expected: str, caplog: pytest.LogCaptureFixture) -> None:
    """Along lines weights are gathered faster, and many rows are exchanged more slowly."""
    caplog.set_level("INFO")
    name, devices = "dense_lm_137b", find_devices("v3-128")
    keys = (f"model.size={name}", "zero.stage=3", "zero.tensor_shards=16", "data.max_context=1024")
    config = check(compose(*keys, "optimizer=adafactor"), load_sizes())
    job = make_job(config, place_model(config, load_sizes()[name], devices, rows))
    assert [*job.placements] == ["flat", "torus"] and min(job.placements, key=job.placements.__getitem__) == expected
    assert job.model.axis == make_axis(replace(config.zero, phases=expected), devices)
    assert any(line.startswith(f"zero.phases=auto chose {expected} by the time") for line in caplog.messages)


def test_only_placement() -> None:
    """Groups that fill no lines, or have their place by the configuration, leave nothing to choose."""
    for topology, phases in (("v3-32", "auto"), ("v3-128", "flat")):
        keys = ("model.size=dense_lm_137b", "zero.stage=3", "zero.tensor_shards=16", f"zero.phases={phases}")
        config = check(compose(*keys, "data.max_context=1024", "optimizer=adafactor"), load_sizes())
        assert not make_job(
            config, place_model(config, load_sizes()["dense_lm_137b"], find_devices(topology), 2)
        ).placements


def test_tensor_groups_that_make_no_lines() -> None:
    """Groups larger than a line, and devices without a torus, are refused by their key."""
    with pytest.raises(UserError, match=r"zero\.tensor_shards=16 with zero\.phases=torus: .* no dimension of"):
        make_axis(on_torus(16), find_devices("v3-32"))
    with pytest.raises(UserError, match=r"zero\.phases=torus: .* these devices are not a TPU slice"):
        make_axis(on_torus(2))


def on_slices(*numbers: int) -> list[Any]:
    """Devices of slices of TPUs with these numbers."""
    kind = {"platform": "tpu", "device_kind": "TPU v9"}
    return [SimpleNamespace(id=place, slice_index=number, **kind) for place, number in enumerate(numbers)]


def test_only_tpus_have_slices() -> None:
    """XLA numbers the machines of GPUs and CPUs as it numbers slices; their state is cut over all of them."""
    by_default = check(compose(), load_sizes()).zero
    machines = on_slices(0, 1, 0, 1)
    for device in machines:
        device.platform = "gpu"
    assert make_axis(by_default, machines).shape == (1, 4)


def test_each_slice_has_a_copy_of_the_state() -> None:
    """Unless `zero.replicas` says otherwise, gathers stay within a slice."""
    by_default, one_copy = (check(compose(*keys), load_sizes()).zero for keys in ([], ["zero.replicas=1"]))
    assert make_axis(by_default, on_slices(0, 0, 0, 1, 1, 1)).shape == (2, 3)
    assert make_axis(one_copy, on_slices(0, 0, 0, 1, 1, 1)).shape == (1, 3, 2)


def test_a_copy_over_several_slices() -> None:
    """It is gathered between slices first, and scattered there last, unless the phases are to be one."""
    one, two, flat = (
        make_axis(check(compose(*keys), load_sizes()).zero, on_slices(*np.repeat(range(4), 3)))
        for keys in (["zero.replicas=1"], ["zero.replicas=2"], ["zero.replicas=1", "zero.phases=flat"])
    )
    assert (one.shape, two.shape, flat.shape) == ((1, 3, 4), (2, 3, 2), (1, 12))
    assert one.phases(12) == [(4, 1), (3, 4)]
    assert one.groups(4) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert two.groups(2) == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]
    assert two.groups(2, apart=6) == [[0, 6], [3, 9], [1, 7], [4, 10], [2, 8], [5, 11]]  # copies of a shard
    alone = ["zero.replicas=1", "zero.overlap_gathers=false"]  # of a single slice it has a phase per dimension
    assert make_axis(check(compose(*alone), load_sizes()).zero, on_slices(*np.repeat(range(4), 3))).shape == (1, 3, 4)


def test_slices_that_make_no_copies() -> None:
    by_default, on_a_torus = (check(compose(*keys), load_sizes()).zero for keys in ([], ["zero.phases=torus"]))
    with pytest.raises(UserError, match=r"slices of equal size, got 2 devices of slice 0, 1 devices of slice 1"):
        make_axis(by_default, on_slices(0, 0, 1))
    with pytest.raises(UserError, match="the devices of a slice next to each other"):
        make_axis(by_default, on_slices(0, 1, 0, 1))
    with pytest.raises(UserError, match=r"zero\.phases=torus: expected auto or flat, because 2 slices"):
        make_axis(on_a_torus, on_slices(0, 0, 1, 1))


@pytest.mark.parametrize(
    ("kind", "on_host"),
    [
        ("TPU v5 lite", 0.8 * 48e9),
        ("TPU v6 lite", 128 * 2**30),  # 80 % of 180e9, but a program has no more
        ("NVIDIA H100 80GB HBM3", math.inf),
    ],
)
def test_memory_on_the_host(kind: str, on_host: float) -> None:
    """A device's part of its host's memory, and on TPU no more than the compiler accepts."""
    assert most_on_host(SPEEDS[kind]) == pytest.approx(on_host)
