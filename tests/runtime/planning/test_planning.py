"""Plans against what they plan: programs of known cost, arrays that lie in memory, and slices that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests import cli
from zero.models.gpt import GPTConfig
from zero.runtime.config.configuration import Config
from zero.runtime.errors import UserError
from zero.runtime.planning import planning
from zero.runtime.planning.hlo import collective_bytes
from zero.runtime.planning.planning import Request, _best
from zero.runtime.planning.topology import (
    available_bytes,
    find_devices,
    out_of_memory,
    prepare_environment,
    slice_shape,
)
from zero.training.flops import matmul_flops

KEYS = {"stage", "micro_batch", "accumulation", "remat", "context", "gradient_dtype", "clipping", "fused_update"}
KEYS |= {"fits", "state_bytes", "peak_bytes", "available_bytes", "collective_bytes", "flops", "seconds_lower_bound"}
KEYS |= {"compile_seconds"}


def plan(place: Path, *overrides: str, timeout: float = 280) -> dict[str, Any]:
    done = cli.finish(cli.start(place, "mode=plan", "hydra.run.dir=plan", *overrides), timeout)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return json.loads((place / "plan" / "plan.json").read_text())


def program(steps: int) -> tuple[Any, jax.ShapeDtypeStruct]:
    """A scan of `steps` turns, each a matrix product, a gather, a scatter and, in a scan of two more, an all-reduce."""

    def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        whole = lax.all_gather(x, "i", tiled=True)  # (8 x 16, 16)
        x = lax.psum_scatter(whole @ x, "i", tiled=True)
        return lax.scan(lambda x, _: (lax.psum(jnp.sin(x), "i"), None), x, length=2)[0], None

    step = jax.pmap(lambda x: lax.scan(turn, x, length=steps)[0], axis_name="i")
    return step, jax.ShapeDtypeStruct((8, 16, 16), jnp.float32)


@pytest.mark.parametrize("steps", [3, 70])
def test_a_loop_counts_as_often_as_it_runs(steps: int) -> None:
    step, x = program(steps)
    shard = 16 * 16 * 4
    assert collective_bytes(step.lower(x).compile().as_text()) == {
        "all-gather": steps * 7 * shard,
        "reduce-scatter": steps * 7 * shard,
        "all-reduce": steps * 2 * (2 * 7 * shard // 8),
    }
    assert matmul_flops(jax.make_jaxpr(step)(x).jaxpr) == steps * 2 * 128 * 16 * 16


def test_a_loop_of_unknown_length_is_refused() -> None:
    def halve(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: x.sum() > 1, lambda x: lax.psum(x @ x, "i") / 2, x)

    step, x = jax.pmap(halve, axis_name="i"), jax.ShapeDtypeStruct((8, 4, 4), jnp.float32)
    with pytest.raises(ValueError, match="cannot be read"):
        collective_bytes(step.lower(x).compile().as_text())
    with pytest.raises(ValueError, match="while loop"):
        matmul_flops(jax.make_jaxpr(step)(x).jaxpr)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("v3-8", "v3:2x2"),
        ("v3-32", "v3:4x4"),
        ("v3-256", "v3:8x16"),
        ("v3-2048", "v3:32x32"),
        ("v4-8", "v4:2x2x1"),
        ("v4-32", "v4:2x2x4"),
        ("v5e-16", "v5e:4x4"),
        ("v5litepod-8", "v5e:2x4"),
        ("v5p-128", "v5p:4x4x4"),
        ("v6e-256", "v6e:16x16"),
    ],
)
def test_names_of_slices(name: str, shape: str) -> None:
    assert slice_shape(name) == shape


@pytest.mark.parametrize("name", ["v3-12", "v3-7", "v9-8", "v4-1", "v3", "moon"])
def test_slices_that_do_not_exist(name: str) -> None:
    with pytest.raises(UserError, match=f"plan.topology={name}"):
        slice_shape(name)


def test_a_missing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"libtpu.*prepareTPUVM.sh --test"):
        prepare_environment("v3-8")


def test_devices_that_are_not_here_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError

    monkeypatch.setattr(jax, "local_devices", fail)
    with pytest.raises(UserError, match=r"plan.topology=gpu: jax finds no such device"):
        find_devices("gpu")
    with pytest.raises(UserError, match=r"plan.topology=v3:9x9x9x9: .*9x9x9x9"):
        pytest.importorskip("libtpu")
        find_devices("v3:9x9x9x9")


def test_what_did_not_fit_is_read_from_the_error() -> None:
    gib = 2**30
    error = RuntimeError("the total memory required for HLO temporaries (20.50G) exceeds available HBM (15.25G).")
    assert out_of_memory(error) == (int(20.5 * gib), int(15.25 * gib))
    assert out_of_memory(RuntimeError("Used 2.00T of 31.25G hbm. Exceeded")) == (2**41, int(31.25 * gib))
    with pytest.raises(RuntimeError, match="something else"):
        out_of_memory(RuntimeError("something else"))


@pytest.mark.parametrize(
    ("name", "devices", "gib"), [("v3-8", 8, 15.48), ("v4-32", 16, 30.75), ("v5e-16", 16, 15.75), ("v6e-8", 8, 31.25)]
)
def test_slices_are_those_that_jax_will_see(name: str, devices: int, gib: float) -> None:
    pytest.importorskip("libtpu")
    found = find_devices(name)
    assert (len(found), available_bytes(found)) == (devices, int(gib * 2**30))


@pytest.mark.timeout(300)
def test_plan_of_a_v3_8(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    result = plan(tmp_path, "plan.topology=v3-8", "model.size=test", "plan.micro_batch=2")
    rows = result["rows"]
    assert (result["devices"], result["parameters"], [row["stage"] for row in rows]) == (8, 69024, [0, 1, 2, 3])
    assert all(KEYS <= row.keys() for row in rows)
    for row in rows:
        assert row["fits"] and row["clipping"] and (row["micro_batch"], row["context"]) == (2, 64)
        assert row["state_bytes"] < row["peak_bytes"] < row["available_bytes"] == int(15.48 * 2**30)
    plain, first, _, third = rows
    assert 7 * first["state_bytes"] < plain["state_bytes"] and third["peak_bytes"] < first["peak_bytes"]
    # All-reduced once: 2 x 7/8 of 4 bytes a parameter, and a few scalars.
    assert 0 <= plain["collective_bytes"]["all-reduce"] - 7 * 69024 < 100
    # 8 operations a parameter and token: forward, forward again, and twice that backward; attention comes on top.
    assert 0.9 < plain["flops"] / (8 * 69024 * 2 * 64) < 1.3


@pytest.mark.timeout(300)
def test_a_program_that_does_not_fit_is_a_row(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    overrides = ("plan.topology=v3-8", "model.size=1_3b", "plan.grid.stage=[0]", "plan.grid.accumulation=[1]")
    result = plan(tmp_path, *overrides, "plan.search=true", "plan.grid.micro_batch=[1, 2]", "plan.grid.remat=[full]")
    (row,) = result["rows"]  # with two sequences it would not fit either
    assert not row["fits"] and row["peak_bytes"] > row["available_bytes"] and result["best"] is None


def test_search_prefers_what_is_fast_and_leaves_headroom() -> None:
    row = {"fits": True, "parameters": 1, "tokens": 100, "peak_bytes": 50, "available_bytes": 100}
    slow, fast = row | {"seconds_lower_bound": 2.0}, row | {"seconds_lower_bound": 1.0}
    full = row | {"seconds_lower_bound": 0.1, "peak_bytes": 96}
    too_big = row | {"seconds_lower_bound": 0.1, "fits": False}
    assert _best([slow, full, fast, too_big], headroom=0.05) is fast
    assert _best([full, too_big], headroom=0.05) is None


@pytest.mark.parametrize("fits_up_to", [4, 5, 8, 61])
def test_the_deepest_that_fits_is_found_in_a_few_programs(fits_up_to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def compile_step(request: Request) -> dict[str, Any]:
        layers = request.size.N
        tried.append(layers)
        peak = 1000 + 100 * layers + (layers % 3) * 2  # a line, but for rounding
        available = 1000 + 100 * fits_up_to + 50
        return {"fits": layers <= fits_up_to, "peak_bytes": peak, "available_bytes": available, "layers": layers}

    monkeypatch.setattr(planning, "compile_step", compile_step)
    size = GPTConfig(512, 50304, 2, 64, 0.0, 4)
    (row,) = planning.deepest(Request(Config(), size, 1))
    assert row["layers"] == fits_up_to and len(tried) <= 6
    monkeypatch.setattr(planning, "compile_step", lambda request: compile_step(request) | {"fits": False})
    assert planning.deepest(Request(Config(), size, 1)) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "arguments",
    [("zero.stage=1",), pytest.param(("zero.gradient_dtype=bfloat16",), marks=pytest.mark.slow)],
    ids=lambda a: a[0],
)
def test_planned_bytes_are_those_of_a_real_step(arguments: tuple[str, ...]) -> None:
    script = Path(__file__).parent / "planned_memory.py"
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    row = found["row"]
    assert found["is_same"]  # training and plan lower the same program, to the letter
    assert found["live"] == pytest.approx(row["state_bytes"], abs=100)  # and a scalar or two
    assert row["peak_bytes"] - row["state_bytes"] == pytest.approx(found["grown"], rel=0.3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_billion_parameters_on_32_v3_cores(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    overrides = ("plan.topology=v3-32", "model.size=1_1b", "plan.micro_batch=4", "plan.processes=1")
    rows = plan(tmp_path, *overrides, timeout=1100)["rows"]
    assert [row["fits"] for row in rows] == [False, True, True, True]
    for row, gib in zip(rows[1:], (5.3, 3.4, 1.5), strict=True):
        assert row["peak_bytes"] <= gib * 2**30 and row["clipping"] and row["skipping"]
