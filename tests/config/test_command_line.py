"""Values on the command line: a text is taken as it is written."""

import shlex

import pytest

from zero.base.errors import UserError
from zero.commands.arguments import check_form, take_text_literally
from zero.commands.cli import composed
from zero.commands.help import COMMANDS

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("written", "text"),
    [
        *(
            (text, text)
            for text in ("def main(", "it's", 'say "hi"', "a, b", "1e3", "{a:1}", "[x for x in", " a ", "'")
        ),
        *((text, text) for text in ("echo ${HOME} $1", "a=b", "two\nlines", "back\\slash", "", "true", "'a' and 'b'")),
        ("'def main('", "def main("),
        ('"def main("', "def main("),
        ("null", None),
        ("[one,two]", ["one", "two"]),
    ],
)
def test_a_prompt_is_any_text(written: str, text: str | list[str] | None) -> None:
    """Only quotes around the whole, null and a list of texts are syntax."""
    overrides = take_text_literally(["mode=sample", f"sample.prompt={written}"])
    assert composed(overrides).sample.prompt == text


@pytest.mark.parametrize(
    ("written", "value"), [("my (old) text", "my (old) text"), ("1e3", "1e3"), ("~/a", "~/a"), ("null", None)]
)
def test_a_path_is_any_text(written: str, value: str | None) -> None:
    assert composed(take_text_literally([f"data.cache_directory={written}"])).data.cache_directory == value


@pytest.mark.parametrize("name", ["data/{a,b}.index", "gs://b/train-{000..099}.tar", "{a,b}.index"])
def test_an_index_file_may_have_braces(name: str) -> None:
    overrides = take_text_literally([f"data.index_path_train={name}"])
    assert composed(overrides).data.index_path_train == name


def test_mixtures_and_sets_of_index_files_stay() -> None:
    arguments = ["data.index_path_train=[{index: a.index, weight: 0.7}]", "data.index_path_validation={a: a.index}"]
    assert take_text_literally(arguments) == arguments


def test_braces_that_a_shell_has_expanded() -> None:
    with pytest.raises(UserError, match=r"^data\.index_path_train: given 2 times; if a shell expanded the braces"):
        check_form(["data.index_path_train=a.index", "data.index_path_train=b.index"])
    check_form(["data.index_path_train=a.index", "seed=1", "data.index_path_train=b.index"])  # the later one counts


def test_what_hydra_reads_stays() -> None:
    """Interpolations in paths, sweeps, numbers, its own keys."""
    arguments = ["data.corpus=${oc.env:HOME}/x", "data.tokenizer=a,b", "seed=7", "hydra.run.dir='a, b'", "--resume"]
    assert take_text_literally(arguments) == arguments
    assert take_text_literally(["-m", "sample.prompt=a,b"]) == ["-m", "sample.prompt=a,b"]
    assert take_text_literally(["sample.prompt=a,b"]) == ["sample.prompt='a,b'"]


@pytest.mark.parametrize("example", COMMANDS)
def test_examples_of_help(example: str) -> None:
    """Each is accepted as it is printed; tests/inference/test_sample.py runs the one with a prompt."""
    words = [word for word in shlex.split(example) if not word.startswith("--")]
    composed(take_text_literally(words))
