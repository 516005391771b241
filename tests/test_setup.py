"""prepareTPUVM.sh with real venv and pip, on a project without dependencies, so that no network is needed."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = '''
"""As little as pip accepts for `pip install -e .[extras]`."""
import zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    info, name = "zero_pmap-0.1.0.dist-info/", "zero_pmap-0.1.0-py3-none-any.whl"
    extras = "".join(f"Provides-Extra: {extra}\\n" for extra in ("train", "plan", "tpu", "cuda12", "test"))
    with zipfile.ZipFile(f"{wheel_directory}/{name}", "w") as wheel:
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: zero-pmap\\nVersion: 0.1.0\\n" + extras)
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
'''
TOOLS = ["bash", "cat", "cksum", "dirname", "env", "grep", "mktemp", "rm", "uname"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory with a blank in its name that holds the script and a project without dependencies."""
    directory = tmp_path / "a clone"
    directory.mkdir()
    shutil.copy(REPOSITORY / "prepareTPUVM.sh", directory)
    (directory / "pyproject.toml").write_text(PYPROJECT)
    (directory / "backend.py").write_text(BACKEND)
    (directory / "constraints.txt").write_text("jax==0.10.2\n")
    return directory


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory for PATH with the tools that the script needs: no apt-get, no nvidia-smi and no Python."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found
        (directory / tool).symlink_to(found)
    return directory


def add_program(programs: Path, name: str, script: str) -> None:
    (programs / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (programs / name).chmod(0o755)


def prepare(checkout: Path, programs: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Calls the script by its absolute path from another directory with nothing but HOME and PATH."""
    return subprocess.run(
        [str(checkout / "prepareTPUVM.sh"), *options],
        cwd="/",
        env={"HOME": str(programs.parent), "PATH": str(programs)},
        capture_output=True,
        text=True,
    )


def test_setup_runs_once(checkout: Path, programs: Path) -> None:
    """The script sets up once, and again only after a change."""
    python = os.path.realpath(sys.executable)
    add_program(programs, "python3.11", "echo 'pyenv: python3.11: command not found' >&2; exit 127")
    add_program(programs, "python3", f'exec {python} "$@"')

    first = prepare(checkout, programs)
    assert first.returncode == 0, first.stderr
    steps = [line[:5] for line in first.stdout.splitlines()]
    assert steps == ["[1/4]", "[2/4]", "[3/4]", "[4/4]", "Ready"]
    assert f"{programs}/python3 (Python 3." in first.stdout
    assert (checkout / ".venv/bin/python").exists()

    started = time.monotonic()
    second = prepare(checkout, programs)
    assert second.stdout.splitlines()[1:] == ["[4/4] .venv is up to date."]
    assert time.monotonic() - started < 1

    (programs / "python3").unlink()  # from here on .venv's own is enough
    (checkout / "constraints.txt").write_text("jax==0.10.3\n")
    changed = prepare(checkout, programs, "--test")
    assert "[3/4] .venv exists." in changed.stdout and ".[train,test]" in changed.stdout and "Ready" in changed.stdout

    moved = checkout.rename(checkout.parent / "moved")
    assert "Ready" in prepare(moved, programs, "--test").stdout  # an editable install contains its path
    assert "up to date" in prepare(moved, programs, "--test").stdout

    (moved / "constraints.txt").write_text("zero-pmap==7\n")
    failed = prepare(moved, programs, "--test")
    assert failed.returncode == 1 and "pip could not install" in failed.stderr and "remedy:" in failed.stderr
    (moved / "constraints.txt").write_text("jax==0.10.3\n")
    assert "Ready" in prepare(moved, programs, "--test").stdout  # a failed call leaves no stamp


def test_names_a_missing_python(checkout: Path, programs: Path) -> None:
    add_program(programs, "python3", '[[ $1 == --version ]] && echo "Python 3.10.12"')
    done = prepare(checkout, programs)
    assert done.returncode == 1
    assert "Python 3.10.12" in done.stdout
    assert "could not install Python 3.11 or newer" in done.stderr and "remedy:" in done.stderr
    assert not (checkout / ".venv").exists()


def test_refuses_an_unknown_option(checkout: Path, programs: Path) -> None:
    done = prepare(checkout, programs, "--tests")
    assert done.returncode == 1 and "--tests" in done.stderr


def test_plan_adds_the_tpu_compiler(checkout: Path, programs: Path) -> None:
    """The option for plans adds the TPU compiler, and later calls keep it."""
    site_packages = checkout / ".venv/lib/python3.11/site-packages"
    for directory in (checkout / ".venv/bin", site_packages):
        directory.mkdir(parents=True)
    add_program(checkout / ".venv/bin", "python", "")  # installs nothing, successfully
    assert ".[train] " in prepare(checkout, programs).stdout
    assert ".[train,plan] " in prepare(checkout, programs, "--plan").stdout
    (site_packages / "libtpu").mkdir()  # as the extra would
    for options in (["--plan"], []):
        assert "up to date" in prepare(checkout, programs, *options).stdout
    assert ".[train,test] " in prepare(checkout, programs, "--plan", "--test").stdout
    (checkout / ".venv/bin/pytest").touch()
    for options in (["--plan"], ["--test"], []):
        assert "up to date" in prepare(checkout, programs, *options).stdout


def test_plan_without_tpu_compiler(checkout: Path, programs: Path) -> None:
    """The option for plans is refused where there is no TPU compiler."""
    (programs / "uname").unlink()
    add_program(programs, "uname", "echo Darwin arm64")
    done = prepare(checkout, programs, "--plan")
    assert done.returncode == 1 and "Darwin arm64" in done.stderr and "remedy:" in done.stderr


def test_sees_a_gpu(checkout: Path, programs: Path) -> None:
    add_program(programs, "nvidia-smi", 'echo "GPU 0: NVIDIA H200 (UUID: GPU-0)"')
    assert "an NVIDIA host" in prepare(checkout, programs).stdout


@pytest.mark.parametrize("script", ["prepareTPUVM.sh", ".ci/run"])
def test_shellcheck_finds_nothing(script: str) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, REPOSITORY / script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_ci_runs_the_documented_command() -> None:
    """CI calls the test command of the README."""
    main, test = re.findall(r"^```\w*\n(.*?)\n```$", (REPOSITORY / "README.md").read_text(), re.DOTALL | re.MULTILINE)[
        :2
    ]
    assert main == "./prepareTPUVM.sh && .venv/bin/python main_zero.py"
    assert test == "./prepareTPUVM.sh --test && .venv/bin/python -m pytest"
    assert test in (REPOSITORY / ".ci/run").read_text()
