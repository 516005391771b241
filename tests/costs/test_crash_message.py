"""What a process says that a crash of the TPU compiler ends."""

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zero.costs.crash_message import printed_if_this_process_dies

DIES = "from zero.costs.crash_message import printed_if_this_process_dies as said\nimport os, signal, sys\n"
STEP = """
import os, jax, jax.numpy as jnp
from zero.costs.compiler import Compiler
Compiler.compile_lowered = lambda self, lowered: os.abort()  # as a fault of libtpu does
train_step = jax.pmap(lambda x: x + 1)
arguments = (jax.ShapeDtypeStruct((8, 2), jnp.float32),)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("ending", ["os.abort()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_process_that_dies_leaves_a_message(ending: str) -> None:
    ended = run("-c", f"{DIES}with said('the compiler, $HOME'): {ending}")
    assert ended.returncode < 0 and "the compiler, $HOME\n" in ended.stderr


@pytest.mark.parametrize("ending", ["pass", "sys.exit(3)", "raise KeyboardInterrupt"])
def test_one_that_lives_leaves_none(ending: str) -> None:
    ended = run("-c", f"{DIES}with said('the compiler'): {ending}")
    assert "the compiler" not in ended.stderr.replace("said('the compiler')", "")


def test_errors_inside_are_raised() -> None:
    with pytest.raises(ValueError, match="inside"), printed_if_this_process_dies("no"):
        raise ValueError("inside")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
def test_a_compiler_that_dies_names_the_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STEP)
    command = (
        "-m",
        "zero.commands.check",
        str(tmp_path / "train.py"),
        "train_step",
        "arguments",
        "--topology",
        "v5e-8",
    )
    ended = run(*command)
    assert ended.returncode == -signal.SIGABRT
    assert "this process ended while the TPU compiler compiled <lambda> for v5e-8: a fault" in ended.stderr
