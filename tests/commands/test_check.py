"""`python -m zero.commands.check` on programs that were not changed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from zero.commands import check
from zero.hosts.speeds import SPEEDS

EXAMPLES = Path(__file__).parents[2] / "examples"
READY = ["flax_classifier/train.py", "sam/train.py", "translation/train.py", "diffusion/train.py"]


@pytest.mark.parametrize("program", READY)
def test_program_is_ready(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([str(EXAMPLES / program), "optimizer", "create_state"]) == 0
    first, whole, _, last = capsys.readouterr().out.splitlines()
    before, after = (int(word.replace(",", "")) for word in first.split() if word[0].isdigit() and len(word) > 3)
    assert before / 9 < after < before / 5
    assert whole.startswith("whole on every device: ") and last == "the optimizer works on slices unchanged"


def test_program_would_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The refusal is that of the sharded program, with its remedy."""
    program = str(EXAMPLES / "language_model" / "train.py")
    assert check.main([program, "optimizer", "create_state", "--devices", "3"]) == 1
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("optimizer state per device: ") and "unknown" not in first
    assert last.startswith("refused: clip_by_global_norm is not element-wise")
    assert "use zero.across_shards(optax.clip_by_global_norm(...))" in last


PAIR = """
import jax, jax.numpy as jnp, optax

optimizer = optax.adam(1e-3)

def params():
    return {"w": jnp.zeros((64, 64))}

def pair():
    return params(), optimizer.init(params())

def with_key():
    return {"key": jax.random.key(0), "opt_state": optimizer.init(params()), "step": 0, "weights": params()}
"""


@pytest.mark.parametrize("name", ["params", "pair", "with_key"])
def test_the_state_beside_parameters_is_not_a_parameter(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that holds two variables, in place of a train state with `params`."""
    program = tmp_path / "train.py"
    program.write_text(PAIR)
    assert check.main([str(program), "optimizer", name]) == 0
    first, whole, *_ = capsys.readouterr().out.splitlines()
    assert first == "optimizer state per device: 32,772 bytes replicated, 4,100 over 8 devices"
    assert whole == "whole on every device: nothing"


def test_a_plan_names_the_extra_that_it_needs(tmp_path: Path) -> None:
    """`pip install .` brings no psutil."""
    program = tmp_path / "train.py"
    program.write_text(STEP)
    arguments = [str(program), "train_step", "arguments", "--topology", "v5e-8"]
    code = f"import sys; sys.modules['psutil'] = None; from zero.commands import check; check.main({arguments})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert re.fullmatch(r"zero\.plan needs psutil, which is missing; .*plan.*\n", done.stderr)


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"mine\.py: no such file"):
        check.main([str(tmp_path / "mine.py"), "optimizer", "params"])


def test_names_that_a_program_lacks() -> None:
    with pytest.raises(
        SystemExit,
        match=r"has no 'tx' at its top level\. .* print\(check\.examine\(optimizer, params, 32\).text\)",
    ):
        check.main([str(EXAMPLES / "sam" / "train.py"), "tx", "create_state", "--devices", "32"])


STEP = """
from functools import partial
import jax, jax.numpy as jnp

@partial(jax.pmap, axis_name="i")
def train_step(params, batch):
    return params - jax.lax.pmean(jax.grad(lambda p: jnp.square(batch @ p).mean())(params), "i")

def arguments():
    return jax.ShapeDtypeStruct((8, 512, 512), "float32"), jax.ShapeDtypeStruct((8, 64, 512), "float32")

wrong = (1, 2, 3)
"""


def test_a_step_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a page; what the program lacks, and what the plan refuses, is one line."""
    pytest.importorskip("libtpu")
    program = tmp_path / "train.py"
    program.write_text(STEP)
    page = tmp_path / "plan.html"
    options = ["--topology", "v5e-8", "--save", str(page)]
    assert check.main([str(program), "train_step", "arguments", *options]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("train_step on v5e-8: 8 devices") and "all-reduce: 1 per step" in printed
    assert "train.py:7" in page.read_text()
    with pytest.raises(SystemExit, match=r"has no 'step' at its top level.* print\(zero\.plan\(step, \*arguments"):
        check.main([str(program), "step", "arguments", *options])
    with pytest.raises(SystemExit, match="topology=v5e-7: expected"):
        check.main([str(program), "train_step", "arguments", "--topology", "v5e-7"])
    with pytest.raises(SystemExit, match=r"argument 0 has the shape \(\): expected 8 in dimension 0"):
        check.main([str(program), "train_step", "wrong", "--topology", "v5e-8"])


KERNEL = """
from functools import partial
import jax, jax.numpy as jnp
from jax.experimental import pallas

def multiply(x, y, product):
    product[...] = x[...]
    for _ in range(8):
        product[...] = jnp.dot(product[...], y[...], preferred_element_type=jnp.float32)

@partial(jax.pmap, axis_name="i")
def train_step(x):
    for _ in range(2):
        x = pallas.pallas_call(multiply, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, x)
    return jax.lax.psum(x, "i")

arguments = (jax.ShapeDtypeStruct((8, 512, 512), "float32"),)
"""


def test_kernels_are_counted_by_their_instructions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, whose compiler is asked for their cycles."""
    pytest.importorskip("libtpu")
    program = tmp_path / "train.py"
    program.write_text(KERNEL)
    command = [sys.executable, "-m", "zero.commands.check", str(program), "train_step", "arguments", "--exact"]
    done = subprocess.run([*command, "--topology", "v5e-8"], capture_output=True, text=True, check=False, timeout=600)
    step, exposed = map(float, re.findall(r"^(?:step|exposed) +([\d.e-]+) s", done.stdout, re.MULTILINE))
    assert step - exposed > 2 * 8 * 2 * 512**3 / SPEEDS["TPU v5 lite"].flops, done.stdout
    assert "a guess" not in done.stdout
    assert "unknown   which branches of Pallas kernels run" in done.stdout
    with pytest.raises(SystemExit):
        check.main([str(program), "train_step", "arguments", "--exact"])
    assert "--exact and --save need --topology" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"exact=True: the TPU compiler estimates kernels for v5e, .* not for tpu7x-8"):
        check.main([str(program), "train_step", "arguments", "--exact", "--topology", "tpu7x-8"])


MESH = """
import jax, jax.numpy as jnp, numpy as np

mesh = jax.sharding.Mesh(np.reshape(jax.devices(), 16), ("data",))
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
train_step = jax.jit(lambda x: x.sum())
arguments = (jax.device_put(jnp.ones((1024, 1024)), rows),)
"""


def test_a_program_that_makes_its_mesh_of_all_devices(tmp_path: Path) -> None:
    """In a process of its own, where the command decides how many CPUs there are."""
    pytest.importorskip("libtpu")
    (tmp_path / "train.py").write_text(MESH)
    command = [sys.executable, "-m", "zero.commands.check", str(tmp_path / "train.py"), "train_step", "arguments"]
    done = subprocess.run([*command, "--topology", "v5e-16"], capture_output=True, text=True, check=False, timeout=600)
    assert done.stdout.startswith("<lambda> on v5e-16: 16 devices, TPU v5 lite\n"), done.stderr
    assert "all-reduce: 1 per step" in done.stdout
