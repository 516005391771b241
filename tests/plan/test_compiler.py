"""Compiled programs that are kept: their answers, and when they are compiled again."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from zero.partition.pmapped import pmap
from zero.plan.compiler import Compiler, KeptProgram
from zero.plan.topology import find_devices, prepare_environment


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


def lowered(devices: list[Any], name: str = "sum") -> Any:
    def add(x: jax.Array) -> jax.Array:
        with jax.named_scope(name):
            return jax.lax.psum(x + 1, "zero")

    return pmap(add, "zero", devices).lower(jax.ShapeDtypeStruct((len(devices), 256), jnp.float32))


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.exists() else []


def test_a_kept_program_answers_as_the_compiled_one(devices: list[Any], tmp_path: Path) -> None:
    """Text and memory are those of the compiled program, and come from the file the next time."""
    compiled = Compiler(devices, True).compile(lowered(devices))
    kept = Compiler(devices, True, tmp_path / "plans").compile(lowered(devices))
    assert not isinstance(compiled, KeptProgram) and isinstance(kept, KeptProgram)
    assert kept.as_text() == compiled.as_text()
    for name in vars(kept.memory_analysis()):
        assert getattr(kept.memory_analysis(), name) == getattr(compiled.memory_analysis(), name)
    (file,) = files(tmp_path / "plans")
    content = json.loads(gzip.decompress(file.read_bytes())) | {"text": "of the file"}
    file.write_bytes(gzip.compress(json.dumps(content).encode()))
    assert Compiler(devices, True, tmp_path / "plans").compile(lowered(devices)).as_text() == "of the file"


def test_other_answers_are_other_files(devices: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file depends on the paths of operations, which name parts of the model, on options and on versions."""
    Compiler(devices, True, tmp_path).compile(lowered(devices))
    Compiler(devices, True, tmp_path).compile(lowered(devices, "another_part"))
    assert len(files(tmp_path)) == 2
    Compiler(devices, False, tmp_path).compile(lowered(devices))
    assert len(files(tmp_path)) == 3
    monkeypatch.setattr("zero.plan.compiler.version", lambda name: "0.0.0")
    Compiler(devices, True, tmp_path).compile(lowered(devices))
    assert len(files(tmp_path)) == 4


def test_a_damaged_file_is_compiled_again(devices: list[Any], tmp_path: Path, caplog: Any) -> None:
    whole = Compiler(devices, True, tmp_path).compile(lowered(devices)).as_text()
    (file,) = files(tmp_path)
    data = file.read_bytes()
    for damaged in (data[:-9], data[:40] + b"?" + data[41:], b""):
        file.write_bytes(damaged)
        caplog.clear()
        assert Compiler(devices, True, tmp_path).compile(lowered(devices)).as_text() == whole
        assert "compiling the program again" in caplog.text and file.read_bytes() == data
