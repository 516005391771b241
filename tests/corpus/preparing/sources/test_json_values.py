"""Files of .json: lines, one array, one object or several, as `load_dataset("json")` reads the same bytes."""

import gzip
import json
from pathlib import Path

import pytest

from tests.helpers.corpora import both, call, documents_of, make
from zero.base.errors import UserError
from zero.corpus.preparing import documents
from zero.corpus.preparing.sources.json_values import _values
from zero.corpus.preparing.sources.source import Source

TEXTS = [f"text {number} \u6f22" for number in range(9)]
OBJECTS = [{"url": "http://a.b", "text": text} for text in TEXTS]
FILES = {
    "lines": "\n".join(map(json.dumps, OBJECTS)),
    "an array": json.dumps(OBJECTS),
    "a printed array": json.dumps(OBJECTS, indent=1),
    "an array of texts": json.dumps(TEXTS),
    "printed objects": "\n".join(json.dumps(entry, indent=1) for entry in OBJECTS),
    "a mark of UTF-8": "\ufeff" + json.dumps(OBJECTS),
}


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("unit_bytes", [1 << 20, 7])
def test_forms_are_read_alike(form: str, unit_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in blocks that end anywhere, within a character too."""
    monkeypatch.setattr(documents, "UNIT_BYTES", unit_bytes)
    for name, data in {"a.json": FILES[form].encode(), "b.json.gz": gzip.compress(FILES[form].encode())}.items():
        (tmp_path / name).write_bytes(data)
        units = Source(str(tmp_path / name), "text", 0.2).units()
        assert [document.content for unit in units for document in unit.documents()] == TEXTS


def test_forms_are_those_of_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for number, content in enumerate(FILES.values()):
        path = tmp_path / f"{number}.json"
        path.write_text(content, encoding="utf-8")
        rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path))
        assert rows["text"] == TEXTS


def test_bytes_are_those_of_lines(tmp_path: Path) -> None:
    """An array becomes the tokens of the same objects in lines."""
    for name, form in {"a.jsonl": "lines", "a.json": "a printed array"}.items():
        (tmp_path / name).write_text(FILES[form], encoding="utf-8")
    corpora = [make(tmp_path / name, tmp_path, name[2:]) for name in ("a.jsonl", "a.json")]
    assert both(corpora[0]) == both(corpora[1]) == sorted(TEXTS)
    assert documents_of(corpora[0].train_index, 16) == documents_of(corpora[1].train_index, 16)


def test_broken_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(FILES["lines"] + '\n{"text": }\n{"text": "a \\udc00"}')
    corpus = make(tmp_path / "a.json", tmp_path, skip_broken=2)
    assert corpus.skipped == 2 and both(corpus) == sorted(TEXTS)


def test_settings_of_a_folder_are_no_documents(tmp_path: Path) -> None:
    """A folder may hold .json for programs: they are left out and named; a glob reads them."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "package.json").write_text('{"name": "a"}')
    with pytest.raises(UserError, match=r"holds .json files, which a folder may have for settings: .*code/\*.json'"):
        Source(str(tmp_path / "code"), "text", 0.2)
    (tmp_path / "code" / "a.py").write_text("a = 1")
    (remark,) = Source(str(tmp_path / "code"), "text", 0.2).remarks
    assert "left out 1 file that is not text, judging by the suffix: package.json; to read one anyway" in remark
    assert Source(str(tmp_path / "code" / "*.json"), "name", 0.2).has_documents


def test_markup_is_named(tmp_path: Path) -> None:
    """Each kind once, with the program that extracts its text."""
    for name in ("a.yaml", "b.yml", "c.ipynb", "d.tex"):
        (tmp_path / name).write_text("<a>text</a>")
    done = call(tmp_path, "--row-tokens", "8", "--directory", tmp_path / "c", "--index-directory", tmp_path / "i")
    for kind in ("(.yaml, .yml): a parser of the format", "(.ipynb): jupyter nbconvert", "(.tex): pandoc"):
        assert f"with {'their' if ',' in kind else 'its'} markup {kind}" in done.stdout


def test_the_line_of_a_broken_end() -> None:
    text = b'["' + 30 * b"x" + b'",\n{"text": "a\n\n\n'
    with pytest.raises(UserError, match=r"^a\.json, line 2: expected JSON: Invalid control character"):
        list(_values([text], "a.json"))
