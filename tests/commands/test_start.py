"""The installed programs where only what `pip install .` brings is there: each names the extra that it needs."""

import subprocess
import sys
from pathlib import Path

import pytest

from zero.base.errors import install_command

# Libraries that are there after `pip install .`: those of jax, numpy and optax, and Python's own.
WITHOUT_EXTRAS = """
import sys
from importlib.metadata import packages_distributions, requires

plain, waiting = set(), ["jax", "numpy", "optax"]
while waiting:
    name = waiting.pop()
    if name not in plain:
        plain.add(name)
        needed = [line for line in requires(name) or [] if "extra ==" not in line]
        waiting += [line.split(";")[0].split(">")[0].split("=")[0].split("<")[0].strip("! ") for line in needed]


class Missing:
    def find_spec(self, name, path=None, target=None):
        brought = distributions.get(name)
        if path is None and brought and not plain.intersection(one.lower() for one in brought) and name != "zero":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


distributions = packages_distributions()
sys.meta_path.insert(0, Missing())
program, name, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = program
from zero.commands import start

getattr(start, name)()
"""


@pytest.mark.parametrize(
    ("program", "function", "extra"),
    [
        ("zero-train", "train", "train"),
        pytest.param("zero-prepare", "prepare", "corpus", marks=pytest.mark.wide),
        pytest.param("zero-report", "report", "train", marks=pytest.mark.wide),
        pytest.param("zero-weights", "weights", "train", marks=pytest.mark.wide),
    ],
)
def test_missing_extra_is_named(
    program: str, function: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argument = "seed=1" if program == "zero-train" else "--help"  # its help needs no extra
    command = [sys.executable, "-c", WITHOUT_EXTRAS, program, function, argument]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {program}: "), done.stderr
    assert done.stderr.endswith(f" is missing; {install_command(extra)}\n") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("is_own", [False, True])
def test_command_that_installs(is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The set-up in the environment that it made; pip in any other; both with the tested versions."""
    clone = Path(__file__).parents[2]
    monkeypatch.chdir(clone)
    monkeypatch.setattr(sys, "prefix", "/mine" if is_own else str(clone / ".venv"))
    plan = "pip install -c ./constraints.txt -e '.[plan]'" if is_own else "./prepareTPUVM.sh --plan"
    assert install_command("plan") == plan
    assert install_command("hub") == "pip install -c ./constraints.txt -e '.[hub]'"
