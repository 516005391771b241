"""A misspelled key is refused, and help is printed, before jax is imported; the words are those of the full check."""

import subprocess
import sys

import pytest

from tests.commands.bad_inputs import CONFIGURATIONS
from zero.commands.declared import declared
from zero.commands.modes import MODES
from zero.commands.names import main, unknown_names

pytestmark = pytest.mark.quick
KEYS = list(declared().owners())
GROUPS = ("preset", "slice", "memory", "recipe", "tune")
PROGRAM = """
import sys
from zero.commands.start import train
try:
    train()
finally:
    print(sorted({"hydra", "jax", "orbax", "flax"} & sys.modules.keys()))
"""


def test_a_misspelled_key_is_refused_without_jax() -> None:
    words = ["zero.stge=1", "seed=2", "traning.total_steps=3"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True)
    expected = [f"error: {MODES.unknown(name)}" for name in ("zero.stge", "traning.total_steps")]
    assert (done.returncode, done.stderr.splitlines(), done.stdout) == (2, expected, "['hydra']\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--help"], "optimizer    adamw, ademamix, lion"),
        (["--help", "zero.stage"], "3: parameters"),
        (["-h", "sizes"], "llama3_8b"),
        (["--version"], "zero 0"),
    ],
)
def test_help_is_printed_without_jax(words: list[str], text: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout.splitlines()[-1]) == (0, "", "[]")
    assert text in done.stdout


def test_every_key_and_group_passes() -> None:
    names = [*MODES.keys, *MODES.choices(), *MODES.own_sections, *(f"+{group}" for group in GROUPS)]
    names += ["model.override.N", "hydra.run.dir", "~optimizer", "optimizer.name", "tuning.rank_pattern.query"]
    assert unknown_names([f"{name}=1" for name in names], KEYS, GROUPS) == []


@pytest.mark.parametrize("overrides", CONFIGURATIONS)
def test_what_the_full_check_explains_passes(overrides: str) -> None:
    """The names in these are right; what is wrong with their values is said by the full check."""
    assert unknown_names(overrides.split(" "), KEYS, GROUPS) == []


@pytest.mark.parametrize("arguments", [["--help", "nope=1"], ["--config-dir", "mine", "nope=1"], ["--cfg=job", "a=1"]])
def test_beside_other_options_nothing_is_refused(arguments: list[str]) -> None:
    main(arguments)
