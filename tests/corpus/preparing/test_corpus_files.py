"""Whose files a folder of a corpus holds: zero-prepare removes and replaces its own alone."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpora import digest, make
from zero.base.errors import UserError
from zero.corpus.text.tokenizers import load_tokenizer, train_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    for number in range(40):
        (tmp_path / "source" / f"{number}.txt").write_text(f"document {number} of shards\n" * 3)
    return tmp_path / "source"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Beside it lie the files that zero-prepare copies with it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(train_tokenizer(["a few shards of documents"], 260))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer.model").write_bytes(b"of a model")
    return folder / "tokenizer.json"


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json", "chat_template.jinja"])
def test_a_file_of_the_user_beside_a_corpus(name: str, source: Path, tmp_path: Path) -> None:
    """Neither removed nor mixed with the files of another tokenizer: the message names it, and nothing changes."""
    folder = Path(make(source, tmp_path).directory)
    (folder / name).write_text("mine")
    before = digest(folder)
    with pytest.raises(
        UserError, match=rf"{name} is none of the files that zero-prepare has listed.*: choose another name"
    ):
        make(source, tmp_path, overwrite=True, row_tokens=32)
    assert digest(folder) == before
    (folder / name).rename(tmp_path / name)
    assert make(source, tmp_path, overwrite=True, row_tokens=32).train.rows


@pytest.mark.parametrize(
    "name", ["train-00000.tar", "part-00000.json", "part-00000-00000.tar", "report.html", "removed.jsonl.gz"]
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_other_files(name: str, overwrite: bool, source: Path, tmp_path: Path) -> None:
    """Such as shards of WebDataset, which have the names of zero's, or of Spark."""
    folder = tmp_path / "corpus" / "c"
    folder.mkdir(parents=True)
    (folder / name).write_text("mine")
    with pytest.raises(UserError, match=rf"{name} is none of the files that zero-prepare has listed"):
        make(source, tmp_path, overwrite=overwrite)
    assert (folder / name).read_text() == "mine"


def test_its_own_files_are_replaced(source: Path, tokenizer: Path, tmp_path: Path) -> None:
    """With another tokenizer no file of the first one is left; other files of the user stay, and never matter."""
    options: dict[str, Any] = {"tokenizer": load_tokenizer(str(tokenizer))}
    folder = Path(make(source, tmp_path, **options).directory)
    copied = {"tokenizer.json", "chat_template.jinja", "tokenizer.model"}
    assert copied < {path.name for path in folder.iterdir()}
    (folder / "notes.txt").write_text("mine")
    make(source, tmp_path, overwrite=True)
    assert not copied & {path.name for path in folder.iterdir()}
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_copy_that_was_changed(source: Path, tokenizer: Path, tmp_path: Path) -> None:
    """It is the user's from then on: only a call with this tokenizer itself replaces it, by the same bytes."""
    folder = Path(make(source, tmp_path, tokenizer=load_tokenizer(str(tokenizer))).directory)
    (folder / "chat_template.jinja").write_text(TEMPLATE + "!")
    with pytest.raises(UserError, match=r"chat_template\.jinja is none of .*, or was changed since"):
        make(source, tmp_path, overwrite=True)
    own = load_tokenizer(str(folder / "tokenizer.json"))
    make(source, tmp_path, overwrite=True, tokenizer=own, row_tokens=32)
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE + "!"
    make(source, tmp_path, overwrite=True)
    assert not (folder / "chat_template.jinja").exists()
