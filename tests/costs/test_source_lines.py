"""Lines of a program, by the tables of frames at the head of its compiled text."""

import contextlib
from pathlib import Path

import pytest

from zero.costs import program_plan
from zero.costs.hlo import Instruction
from zero.costs.source_lines import SourceLines

pytestmark = pytest.mark.quick
PACKAGES = "/env/lib/python3.12/site-packages"
PLAN = str(Path(program_plan.__file__))


def line(*files: str) -> str:
    """The line of an instruction that was traced in these files; the outermost comes first, each at its number."""
    numbers = range(1, len(files) + 1)
    tables = {
        "FileNames": [f'"{file}"' for file in files],
        "FunctionNames": ['"f"'],
        "FileLocations": [f"{{file_name_id={number} function_name_id=1 line={number}}}" for number in numbers],
        "StackFrames": [f"{{file_location_id={number} parent_frame_id={number}}}" for number in numbers],
    }
    text = ["HloModule step"]
    for name, entries in tables.items():
        text += [name, *(f"{number} {entry}" for number, entry in enumerate(entries, start=1))]
    lines = SourceLines("\n".join([*text, "%add (x: f32[]) -> f32[] {"]))
    rest = f'%x), metadata={{op_name="jit(step)/dot" stack_frame_id={len(files)}}}'
    return lines.of(Instruction("fusion.1", "f32[8]{0}", "fusion", rest))


def test_a_line_is_the_innermost_one_outside_of_libraries() -> None:
    assert line("/home/me/train.py", "/home/me/model.py", f"{PACKAGES}/flax/linen/linear.py") == "model.py:2"


def test_the_program_can_be_an_installed_package() -> None:
    """As MaxText is: a plan named each of its arrays by the line of the script that planned it."""
    layers = f"{PACKAGES}/maxtext/layers/decoders.py"
    assert line("/home/me/plan.py", PLAN, layers, f"{PACKAGES}/flax/nnx/module.py") == "decoders.py:3"


def test_a_line_outside_of_the_planned_function_says_nothing() -> None:
    assert line("/home/me/plan.py", PLAN, f"{PACKAGES}/optax/_src/update.py") == "dot"


def test_files_of_python_are_no_program() -> None:
    assert line("/home/me/train.py", str(contextlib.__file__), f"{PACKAGES}/flax/nnx/module.py") == "train.py:1"


def test_paths_that_are_joined_are_said_once() -> None:
    metadata = 'metadata={op_name="jit(step)/jvp(Unet)/reshape;jit(step)/jvp(Unet)/reshape;jit(step)/jvp(Unet)/dot"}'
    merged = Instruction("fusion.1", "f32[8]{0}", "fusion", f"%x), {metadata}")
    assert SourceLines("HloModule step").of(merged) == "jvp(Unet)/reshape;jvp(Unet)/dot"
