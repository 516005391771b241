"""Every option crossed with prepared corpora and parts: one that was made with another value is refused."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from zero.base.errors import UserError
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.prepare import Corpus, prepare
from zero.corpus.text.tokenizers import ByteTokenizer

# Another value of each option, and options without which it is refused. `skip_broken` changes no byte.
OTHERS: dict[str, dict[str, Any]] = {
    "tokenizer": {"tokenizer": 300},
    "row_tokens": {"row_tokens": 40},
    "one_document_per_row": {"one_document_per_row": True},
    "cut_documents": {"cut_documents": True, "one_document_per_row": True},
    "begin_rows": {"begin_rows": True},
    "pack": {"pack": "best-fit"},
    "validation_fraction": {"validation_fraction": 0.3},
    "rows_per_member": {"rows_per_member": 32},
    "rows_per_shard": {"rows_per_shard": 512},
    "key": {"key": "other"},
    "lines": {"lines": True},
    "completions": {"completions": True},
    "examples": {"examples": "preferences"},
    "label_key": {"examples": "classification", "label_key": "class"},
    "label_names": {"examples": "classification", "label_key": "class", "label_names": ("no", "yes")},
    "loss_on": {"loss_on": ("user",), "completions": True},
    "template_variables": {"template_variables": '{"system": "brief"}'},
    "splits": {"splits": "all"},
    "document_bytes": {"document_bytes": 10_000},
    "minimum_tokens": {"minimum_tokens": 3},
    "normalize": {"normalize": "nfc"},
    "deduplicate": {"deduplicate": True},
    "shuffle": {"shuffle": True},
    "near_duplicates": {"near_duplicates": 0.8},
    "filters": {"filters": (("words", "2,50"),)},
    "tokenizer_source": {"tokenizer_source": "hf:NAME@COMMIT"},
}
BASE = CorpusOptions(ByteTokenizer(), 32, validation_fraction=0.2)
PART_BYTES = 5000


def test_every_option_is_tried() -> None:
    """A new option has to answer: a corpus is known by it, or it changes no byte. `test_arrays.py` tries token_bits."""
    assert {field.name for field in fields(CorpusOptions)} == OTHERS.keys() | {"skip_broken", "token_bits"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    keys = ("text", "other", "prompt", "completion", "chosen", "rejected")  # of every kind of example
    path = tmp_path / "lines.jsonl"
    texts = [{key: f"{key} {number}" for key in keys} | {"class": number % 2} for number in range(120)]
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("option", OTHERS)
def test_another_value(option: str, source: Path, tmp_path: Path) -> None:
    """In both directions: of a finished corpus, and of the parts that a killed preparation has left."""
    other = replace(BASE, **OTHERS[option])

    def make(options: CorpusOptions, *, overwrite: bool = False) -> Corpus:
        return prepare(
            source,
            "c",
            options,
            directory=tmp_path / "corpus",
            index_directory=tmp_path / "index",
            workers=1,
            overwrite=overwrite,
            progress=False,
            part_bytes=PART_BYTES,
        )

    for first, second in ((BASE, other), (other, BASE)):
        manifest = Path(make(first, overwrite=True).directory) / "manifest.json"
        with pytest.raises(UserError, match="was prepared with "):
            make(second)
        manifest.unlink()
        with pytest.raises(UserError, match="was prepared with "):
            make(second)
