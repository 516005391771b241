"""Every input of the table in bad_inputs.py ends with one line that says what is wrong and where, and with 2."""

import copy
from pathlib import Path

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from tests.commands.bad_inputs import CONFIGURATIONS, DAMAGED_LINES, FILES, PROGRAMS, content
from tests.config.composing import compose
from tests.helpers import cli
from tests.helpers.readers import READERS, outcome
from zero.base.errors import UserError
from zero.commands.cli import all_mistakes, check_names, resolve
from zero.commands.cli import compose as cli_compose
from zero.commands.modes import default_config
from zero.config.saved_config import flat_config
from zero.record.run_files import save_config
from zero.run.find_run import resume_overrides


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories that are not runs: a configuration of `5`, a step of `²`, a directory as log, a loop of links."""
    monkeypatch.chdir(tmp_path)
    for name in ("number", "superscript"):
        (tmp_path / name / "checkpoints" / "²").mkdir(parents=True)
        save_config(tmp_path / name, default_config())
    (tmp_path / "number" / "config.yaml").write_text("5")
    (tmp_path / "locked" / "main_zero.log").mkdir(parents=True)
    (tmp_path / "loop").symlink_to(tmp_path / "pool")
    (tmp_path / "pool").symlink_to(tmp_path / "loop")
    return tmp_path


@pytest.mark.parametrize("overrides", CONFIGURATIONS)
def test_configurations(workplace: Path, overrides: str) -> None:
    def start() -> None:
        arguments = overrides.split(" ")
        try:
            check_names(arguments)
            arguments = resume_overrides(arguments)
            resolve(compose(*arguments), arguments)
        except HydraException as error:
            raise UserError("\n".join(all_mistakes(arguments, error))) from error

    status, message = outcome(start)
    assert status == 2
    assert "\n" not in message and CONFIGURATIONS[overrides] in message, message


@pytest.mark.parametrize("mode", ["train", "plan"])  # the others first look for a run
def test_interpolation_that_cannot_be_resolved(mode: str) -> None:
    """It is refused by the name of its key, whichever key it is."""
    composed = compose(f"mode={mode}")
    for key in flat_config(composed):
        config = copy.deepcopy(composed)
        OmegaConf.update(config, key, "${nope}", merge=False)
        with pytest.raises(UserError) as caught:
            resolve(config, [])
        lines = str(caught.value).splitlines()
        wanted = (f"{key}=${{nope}}: Interpolation key", f"{key}: Interpolation key")
        assert any(line.startswith(wanted) for line in lines), lines


def test_keys_of_a_choice_beside_a_misspelled_one() -> None:
    """Only what is misspelled is named, wherever the choice is written that brings the other keys."""
    for arguments in (["mode=plan", "plan.search=fastest", "plan.topologi=v3-8"], ["plan.topologi=v3-8", "mode=plan"]):
        with pytest.raises(UserError) as caught:
            cli_compose(arguments)
        assert str(caught.value) == "plan.topologi: no such key; did you mean plan.topology?"


@pytest.mark.parametrize("number", range(len(FILES)), ids=lambda number: f"{number}-{FILES[number][0]}")
def test_files(tmp_path: Path, number: int) -> None:
    name, given, words = FILES[number]
    status, message = outcome(lambda: READERS[name](tmp_path, content(given)))
    assert status == 2
    assert "\n" not in message and str(tmp_path) in message and words in message, message
    assert len(message) < 700 + len(str(tmp_path)) + (5000 if given == b"a" * 5000 else 0)


@pytest.mark.parametrize("number", range(len(DAMAGED_LINES)))
def test_damaged_lines_of_metrics(tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged line blocks no resume: it is named and passed over."""
    data, line = DAMAGED_LINES[number]
    assert outcome(lambda: READERS["metrics.jsonl"](tmp_path, data))[0] == 0
    assert f"metrics.jsonl: skipped line {line}, which is damaged: expected a JSON object with a step" in caplog.text


@pytest.mark.parametrize("arguments", PROGRAMS)
def test_programs(workplace: Path, arguments: str) -> None:
    done = cli.Forks(workplace).run(*arguments.split(" "))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and PROGRAMS[arguments] in done.stderr


def test_the_table_is_long() -> None:
    assert len(CONFIGURATIONS) + len(FILES) >= 150
