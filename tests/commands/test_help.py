"""`--help`: one screen, and what keys, sections, groups and sizes mean."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from zero.base.errors import UserError
from zero.commands import help
from zero.commands.cli import compose
from zero.commands.declared import CONF, declared, sizes_in_files
from zero.commands.help import WIDEST, help_text
from zero.commands.modes import MODES
from zero.job.sizes import load_sizes
from zero.run.config import GROUPS


@pytest.mark.parametrize("columns", [80, 200])
def test_one_screen(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the commands, groups and files of settings that people need, and fits a screen."""
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = help_text([]).splitlines()
    assert len(lines) <= 65 and max(map(len, lines)) <= min(columns, WIDEST)
    text = "\n".join(lines)
    for part in (
        "--resume",
        "--doctor",
        "mode=sample",
        "mode=plan",
        "+preset",
        "+recipe",
        "FILE:ENTRY: --help sizes",
        *GROUPS,
        *MODES.kinds,
    ):
        assert part in text
    assert "statistics   1 key\n" in text and " 1 keys" not in text


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("zero.stage", ("zero.stage=3", "expects one of 0, 1, 2, 3")),
        ("optimizer", ("optimizer=lion: Lion", "optimizer.nesterov=false")),
        ("schedule=wsd", ("schedule.decay_steps=null",)),
        ("optimizer.b2", ("optimizer.b2=0.95 (optimizer=adamw)", "optimizer.b2=0.99 (optimizer=lion)")),
        ("sample", ("sample.top_p=null",)),
        ("mode=plan", ("plan.topology=local",)),
        ("zero", ("zero.stage=3", "zero.remat=auto")),
        ("recipe", ("gpt-neo-125m",)),
        (
            "sizes",
            ("FILE:ENTRY", "context  family\n", "8,030,261,248      32   4,096    8,192  llama\n", *load_sizes()),
        ),
    ],
)
def test_a_name_is_explained(name: str, parts: tuple[str, ...]) -> None:
    text = help_text([name])
    assert [part for part in parts if part not in text] == []


def test_sizes_are_those_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that a user changes or adds is shown as it is, and not with the parameters that were counted before."""
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    assert sizes_in_files(conf) == sizes_in_files() == declared().sizes
    path = conf / "models" / "gpt_neo.yaml"
    entries = yaml.safe_load(path.read_text())
    entries["gpt_neo_125m"]["N"] = 11
    entries["gpt_neo_mine"] = {"N": 3, "family": "gpt_neo"}
    del entries["gpt_neo_350m"]
    path.write_text(yaml.safe_dump(entries))
    monkeypatch.setattr(help, "CONF", conf)
    lines = [" ".join(line.split()) for line in help_text(["sizes"]).splitlines()]
    assert {"gpt_neo_125m - 11 768 2,048 gpt_neo", "gpt_neo_mine - 3 - - gpt_neo"} < {*lines}
    assert not any(line.startswith("gpt_neo_350m ") for line in lines) and "-: not counted" in lines[-2]
    assert "gpt_neo_13b 12,852,771,840 40 5,120 2,048 gpt_neo" in lines  # comments and the order of keys do not matter


def test_sizes_cost_little() -> None:
    """The files are read without jax."""
    count = "import sys; from zero.commands.help import help_text; help_text(['sizes']); print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", count], capture_output=True, check=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("optimiser", "optimizer"),
        ("batch_size", "training.batch_size"),
        ("stage", "zero.stage or plan.grid.stage"),
        ("zero.stge", "zero.stage"),
    ],
)
def test_unknown_names(name: str, meant: str) -> None:
    with pytest.raises(UserError) as error:
        help_text([name])
    assert str(error.value) == f"{name}: no such key; did you mean {meant}?"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.size=124n",
            "model.size=124n: did you mean 124m? --help sizes lists all, or FILE:ENTRY, such as",
        ),
        (
            "model.size=7b",
            "model.size=7b: no such size; of about as many parameters are olmoe_1b_7b, starcoder2_7b, mistral_7b, ",
        ),
        (
            "model.size=mine",
            "model.size=mine: no such size; --help sizes lists all, or FILE:ENTRY, such as my.yaml:mine",
        ),
        (
            "optimizer=adamm",
            "optimizer=adamm: did you mean adamw? expected one of adamw, ademamix, lion, sgd, adafactor",
        ),
        ("+preset=v3-9", "preset=v3-9: did you mean v3-8? expected one of v3-8, v3-8-4-bytes, "),
        ("zero.remat=ful", "zero.remat=ful: did you mean full? expected one of auto, nested, full, "),
        ("mode=evalaute", "mode=evalaute: did you mean evaluate? expected one of train, evaluate, sample, plan"),
        ("zero.stage=4", "zero.stage=4: expected one of 0, 1, 2, 3"),
    ],
)
def test_a_misspelled_value(override: str, message: str) -> None:
    """A choice, a file, a size or a value names what was meant, and lists its kind in a sensible order."""
    with pytest.raises(UserError) as error:
        compose([override])
    assert str(error.value).startswith(message)
