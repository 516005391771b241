"""The corpus of `data.corpus`: prepared if it is missing, and not because a path is misspelled."""

import logging
import re
import shutil
from pathlib import Path

import pytest

from zero.base.errors import UserError
from zero.corpus.format.index_files import read_index, row_tokens
from zero.corpus.preparing.prepare_if_missing import prepare_if_missing
from zero.corpus.text.tokenizers import ByteTokenizer

OWN = ["data/index/lines_train.index", "data/index/lines_validation.index"]


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source in the current directory whose name is that of its corpus."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines").mkdir()
    for number in range(9):
        (tmp_path / "lines" / f"{number}.txt").write_text(f"document {number}")
    return tmp_path / "lines"


def test_prepared_only_if_missing(source: Path, caplog: pytest.LogCaptureFixture):
    """A corpus is prepared if an index is missing, which a line says, and left as it is if not."""
    caplog.set_level(logging.INFO)
    prepare_if_missing("lines", OWN, ByteTokenizer(), 8)
    (line,) = [record.message for record in caplog.records if record.message.startswith("prepared")]
    size = r"\d+ documents, \d+ tokens"
    assert re.fullmatch(rf"prepared data/corpus/lines: {size} for training; {size} for validation", line)
    shards = [Path(shard.path) for index in OWN for shard in read_index(index)]
    before = [shard.stat().st_mtime_ns for shard in shards]
    (source / "9.txt").write_text("another one, which would be refused if it were looked at")
    prepare_if_missing("lines", [*map(str, map(Path.absolute, map(Path, OWN)))], ByteTokenizer(), 8)
    prepare_if_missing("lines", ["gs://bucket/elsewhere.index"], ByteTokenizer(), 8)
    assert [shard.stat().st_mtime_ns for shard in shards] == before


@pytest.mark.parametrize("misspelled", ["data/index/lines_trian.index", "index/lines_train.index", "mine_train.index"])
def test_a_misspelled_index_path_prepares_nothing(tmp_path: Path, misspelled: str):
    message = rf"^index file {misspelled}: no such file; data\.corpus=lines prepares only {OWN[0]} and {OWN[1]}$"
    with pytest.raises(UserError, match=message):
        prepare_if_missing("lines", [misspelled, OWN[1]], ByteTokenizer(), 8)
    assert not (tmp_path / "data").exists()


def test_longer_rows(source: Path):
    """Longer rows are prepared beside the corpus.

    As where model.size=test has prepared the default corpus before the default job asks for rows of 256 tokens.
    """
    assert prepare_if_missing("lines", OWN, ByteTokenizer(), 8) == {}
    before = {path: path.read_bytes() for path in Path("data").rglob("*") if path.is_file()}
    beside = [path.replace("lines_", "lines-16_") for path in OWN]
    for _ in range(2):
        assert prepare_if_missing("lines", OWN, ByteTokenizer(), 16) == dict(zip(OWN, beside, strict=True))
        assert {path: path.read_bytes() for path in before} == before
    assert {row_tokens(path) for path in beside} == {16}
    assert prepare_if_missing("lines", OWN, ByteTokenizer(), 4) == {}  # longer rows are cut
    assert prepare_if_missing("lines", OWN[:1], ByteTokenizer(), 16) == {}  # beside an index of somebody's own
    shutil.rmtree("data")
    assert prepare_if_missing("lines", beside, ByteTokenizer(), 16) == {}  # of a run that is resumed elsewhere
    assert {row_tokens(path) for path in beside} == {16}
