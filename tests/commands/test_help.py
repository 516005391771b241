"""`--help`: one screen, and what keys, sections, groups and sizes mean."""

import pytest

from zero.base.errors import UserError
from zero.commands.cli import compose
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
        ("sizes", ("FILE:ENTRY", *load_sizes())),
    ],
)
def test_a_name_is_explained(name: str, parts: tuple[str, ...]) -> None:
    text = help_text([name])
    assert [part for part in parts if part not in text] == []


def test_unknown_names() -> None:
    with pytest.raises(UserError, match=r"^optimiser: no such key; did you mean optimizer\?$"):
        help_text(["optimiser"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.size=124n",
            "model.size=124n: did you mean 124m? --help sizes lists all, or FILE:ENTRY, such as",
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
