"""Compiled programs that are kept: their answers, and when they are compiled again."""

import gzip
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from zero.costs.compiler import (
    MEMORY_REPORT,
    SCHEDULE_AGAIN,
    Compiler,
    KeptProgram,
    Memory,
    compiler_options,
    read_schedule,
)
from zero.costs.predict import predict
from zero.costs.topology import available_bytes, find_devices, prepare_environment
from zero.partition.pmapped import pmap
from zero.planning.compile import compiled_unless_decided


@pytest.fixture(scope="module")
def devices() -> list[Any]:
    pytest.importorskip("libtpu")
    before = dict(os.environ)
    prepare_environment("v3-8")
    try:
        return find_devices("v3-8")
    finally:
        os.environ.clear()
        os.environ.update(before)


def program(devices: list[Any], name: str = "sum", line: int = 1) -> tuple[Any, jax.ShapeDtypeStruct]:
    """A program with a Pallas kernel, as if both were written from this line of a file on, and its argument."""
    source = """
def double(x, out):
    out[...] = 2 * x[...]

def add(x):
    with jax.named_scope(name):
        return jax.lax.psum(pl.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype))(x), "zero")
"""
    names: dict[str, Any] = {"jax": jax, "pl": pl, "name": name}
    exec(compile("\n" * (line - 1) + source, __file__, "exec"), names)
    return pmap(names["add"], "zero", devices), jax.ShapeDtypeStruct((len(devices), 256), jnp.float32)


def compiler_of_run(devices: list[Any], directory: Path, *, overlap_gathers: bool = True) -> Compiler:
    return Compiler(devices, compiler_options(devices, overlap_gathers), directory)


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.exists() else []


def test_a_kept_program_answers_as_the_compiled_one(devices: list[Any], tmp_path: Path) -> None:
    """Text and memory are those of the compiled program, and come from the file the next time."""
    compiler = compiler_of_run(devices, tmp_path / "plans")
    kept = compiler.compile(*program(devices))
    assert isinstance(kept, KeptProgram)
    function, argument = program(devices)
    compiled = function.lower(argument).compile(compiler.options)
    assert kept.as_text() == compiled.as_text()
    for name in vars(kept.memory_analysis()):
        assert getattr(kept.memory_analysis(), name) == getattr(compiled.memory_analysis(), name)
    (file,) = files(tmp_path / "plans")
    content = json.loads(gzip.decompress(file.read_bytes())) | {"text": "of the file"}
    file.write_bytes(gzip.compress(json.dumps(content).encode()))
    again = compiler_of_run(devices, tmp_path / "plans").compile(*program(devices))
    assert again.as_text() == "of the file"
    assert kept.buffers and kept.live_ranges and kept.assigned_bytes
    for name in ("buffers", "live_ranges", "assigned_bytes"):  # of which the page of a plan is made
        assert getattr(again, name) == getattr(kept, name)


def test_other_answers_are_other_files(devices: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file depends on the paths of operations, which name parts of the model, on options and on versions."""
    compiler_of_run(devices, tmp_path).compile(*program(devices))
    compiler_of_run(devices, tmp_path).compile(*program(devices, "another_part"))
    assert len(files(tmp_path)) == 2
    compiler_of_run(devices, tmp_path, overlap_gathers=False).compile(*program(devices))
    assert len(files(tmp_path)) == 3
    monkeypatch.setattr("zero.costs.compiler.version", lambda name: "0.0.0")
    compiler_of_run(devices, tmp_path).compile(*program(devices))
    assert len(files(tmp_path)) == 4


def test_an_edit_that_moves_lines_compiles_nothing_again(devices: list[Any], tmp_path: Path) -> None:
    """The lines of a kernel and of the function around it are not in the program that names the file."""
    frames = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 10)  # a run has lines; these tests switch them off
    try:
        for line in (1, 40):
            compiler_of_run(devices, tmp_path).compile(*program(devices, line=line))
        assert jax.config.values["jax_traceback_in_locations_limit"] == 10
    finally:
        jax.config.update("jax_traceback_in_locations_limit", frames)
    assert len(files(tmp_path)) == 1


def test_unordered_instructions_change_no_figure(devices: list[Any]) -> None:
    """Cycles and memory are as with the options of a run, whose machine code is another."""

    def layer(x: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.tanh(x @ x) @ x, "zero")

    own, argument = pmap(layer, "zero", devices), jax.ShapeDtypeStruct((len(devices), 512, 512), jnp.bfloat16)
    of_run = own.lower(argument).compile(compiler_options(devices, True))
    of_plan = own.lower(argument).compile(Compiler(devices, compiler_options(devices, True)).options)
    cycles = [re.findall(r'"estimated_cycles":"\d+"', one.as_text()) for one in (of_run, of_plan)]
    assert cycles[0] == cycles[1] != []
    sizes = {name: getattr(of_run.memory_analysis(), name) for name in Memory.__dataclass_fields__}
    assert sizes == {name: getattr(of_plan.memory_analysis(), name) for name in sizes}
    bytes_of_code = [one.memory_analysis().generated_code_size_in_bytes for one in (of_run, of_plan)]
    assert bytes_of_code[0] != bytes_of_code[1]


def test_a_damaged_file_is_compiled_again(devices: list[Any], tmp_path: Path, caplog: Any) -> None:
    whole = compiler_of_run(devices, tmp_path).compile(*program(devices)).as_text()
    (file,) = files(tmp_path)
    data = file.read_bytes()
    for damaged in (data[:-9], data[:40] + b"?" + data[41:], b""):
        file.write_bytes(damaged)
        caplog.clear()
        assert compiler_of_run(devices, tmp_path).compile(*program(devices)).as_text() == whole
        assert "compiling the program again" in caplog.text and file.read_bytes() == data


def layers(devices: list[Any]) -> tuple[Any, jax.ShapeDtypeStruct]:
    """A loop of two products and a sum over devices, whose machine code takes the compiler seconds."""

    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.psum(jnp.tanh(x @ x) @ x, "zero"), None

    program = pmap(lambda x: jax.lax.scan(layer, x, None, length=4)[0], "zero", devices)
    return program, jax.ShapeDtypeStruct((len(devices), 1024, 1024), jnp.bfloat16)


def test_a_schedule_is_read_as_soon_as_it_is_written(devices: list[Any], tmp_path: Path) -> None:
    """It is the compiled program without its cycles. Of a program as small as this one the estimate is rough."""
    program, argument = layers(devices)
    options: Any = {**(compiler_options(devices, True) or {}), "xla_dump_to": str(tmp_path)}
    compiled = program.lower(argument).compile(options)
    scheduled = read_schedule(tmp_path)
    assert scheduled is not None and not scheduled.is_whole and "estimated_cycles" not in scheduled.text
    peak = compiled.memory_analysis().peak_memory_in_bytes
    assert peak <= scheduled.memory.peak_memory_in_bytes <= 1.05 * peak + 2**20
    exact, estimate = (predict(one.as_text(), devices, one is compiled) for one in (compiled, scheduled))
    assert exact is not None and estimate is not None
    assert estimate.seconds == pytest.approx(exact.seconds, rel=0.35)
    (again,) = tmp_path.glob(SCHEDULE_AGAIN)
    text = again.read_text()
    again.write_text(text[:-100])  # half written
    assert read_schedule(tmp_path) is None
    again.write_text(text)
    whole = read_schedule(tmp_path)
    assert whole is not None and whole.text == scheduled.text
    (report,) = tmp_path.glob(MEMORY_REPORT)
    report.write_text("")
    assert read_schedule(tmp_path) is None
    report.unlink()
    assert read_schedule(tmp_path) is None


def test_a_schedule_is_kept_beside_the_whole_program(devices: list[Any], tmp_path: Path) -> None:
    """A plan that needs the whole program waits for the compilation that it has begun."""
    compiler = compiler_of_run(devices, tmp_path)
    early = compiler.compile(*layers(devices), whole=False)
    assert not early.is_whole and [file.name[64:] for file in files(tmp_path)] == [".schedule.json.gz"]
    assert compiler_of_run(devices, tmp_path).compile(*layers(devices), whole=False).text == early.text
    compiler.options = {"no_such_option": True}  # another compilation would fail
    whole = compiler.compile(*layers(devices))
    assert whole.is_whole and "estimated_cycles" in whole.text
    assert len(files(tmp_path)) == 2
    assert compiler_of_run(devices, tmp_path).compile(*layers(devices), whole=False).text == whole.text


def test_the_peak_beside_arrays_on_the_host_is_that_of_the_device(devices: list[Any], tmp_path: Path) -> None:
    """Of a program whose host holds more than the device, jax's peak is that of the host, and its parts a bound."""
    stored = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["input"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    @partial(jax.checkpoint, policy=stored)
    def layer(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(checkpoint_name(x, "input") @ weights), None

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(layer, x, weights)[0]).astype(jnp.float32)

    shapes = [jax.ShapeDtypeStruct((len(devices), *shape), jnp.bfloat16) for shape in ((64, 128, 128), (8192, 128))]
    compiler = compiler_of_run(devices, tmp_path)
    gradient = pmap(jax.grad(loss), "zero", devices)
    early = compiler.compile(gradient, *shapes, whole=False)
    whole = compiler.compile(gradient, *shapes)
    of_jax = gradient.lower(*shapes).compile(compiler.options).memory_analysis()
    on_host = 64 * 8192 * 128 * 2
    assert not early.is_whole and whole.is_whole
    assert early.memory.host_temp_size_in_bytes == whole.memory.host_temp_size_in_bytes == on_host
    arrays = 2 * 64 * 128 * 128 * 2 + 8192 * 128 * 2  # weights, their gradient, and the first input
    assert whole.memory.peak_memory_in_bytes == early.memory.peak_memory_in_bytes
    assert arrays < whole.memory.peak_memory_in_bytes < on_host / 4 < on_host < of_jax.peak_memory_in_bytes


@pytest.mark.parametrize(("share", "expected"), [(0.95, False), (0.99, True), (1.01, None)])
def test_a_schedule_decides_whether_a_program_fits(
    devices: list[Any], tmp_path: Path, share: float, expected: bool | None
) -> None:
    """Up to 98 % of the memory; above, the whole program is compiled, and one that does not fit is refused."""
    available = available_bytes(devices)
    weights = jax.ShapeDtypeStruct((len(devices), 512, 512), jnp.bfloat16)
    large = jax.ShapeDtypeStruct((len(devices), int(share * available) // 4096, 1024), jnp.float32)

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return x * jnp.sum(jax.lax.psum(w @ w, "zero")).astype(jnp.float32)

    function = pmap(multiply, "zero", devices, donate_argnums=0)
    compiler = compiler_of_run(devices, tmp_path)
    if expected is None:
        with pytest.raises(jax.errors.JaxRuntimeError, match="memory on HBM"):
            compiled_unless_decided(compiler, False, available, function, large, weights)
        return
    compiled = compiled_unless_decided(compiler, False, available, function, large, weights)
    assert compiled.is_whole == expected
    assert compiled.memory.peak_memory_in_bytes == pytest.approx(share * available, rel=0.005)
