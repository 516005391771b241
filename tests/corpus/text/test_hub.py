"""A tokenizer by the name of a model: fetched once, copied beside the corpus, and taken from the cache offline."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.corpora import call
from tests.helpers.hub import Hub, point_to, serve

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported

NAME = "someone/tiny"


@pytest.fixture
def hub(tmp_path: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    place = tmp_path / "models" / NAME / "v1"
    place.mkdir(parents=True)
    (place / "tokenizer.json").write_bytes(bpe.read_bytes())
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (place / "model.bin").write_bytes(b"a pickle")
    (tmp_path / "models" / NAME / "empty").mkdir()
    (tmp_path / "models" / NAME / "empty" / "README.md").write_text("nothing else")
    with serve(tmp_path / "models") as hub:
        point_to(hub, tmp_path / "cache", monkeypatch)
        yield hub


def test_tokenizer_by_name(hub: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest records the commit; a second call needs no hub, and another revision is another corpus."""
    options = ("--directory", tmp_path / "corpus", "--index-directory", tmp_path / "index", "--row-tokens", "16")
    done = call(folder, "--tokenizer", f"hf:{NAME}@v1", *options)
    commit = hub.commit(NAME, "v1")
    assert done.returncode == 0 and f"hf:{NAME}@v1 is hf:{NAME}@{commit}" in done.stdout, done.stderr
    place = tmp_path / "corpus" / "text"
    assert json.loads((place / "manifest.json").read_text())["tokenizer_source"] == f"hf:{NAME}@{commit}"
    models = tmp_path / "models" / NAME / "v1"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (place / name).read_bytes() == (models / name).read_bytes()
    assert not any(path.endswith(".bin") for path in hub.requests)
    assert call(tmp_path / "index" / "text_train.index", "--peek", "1").returncode == 0

    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert call(folder, "--tokenizer", f"hf:{NAME}@v1", *options).returncode == 0 and not hub.requests
    gone = call(folder, "--tokenizer", f"hf:{NAME}@v2", *options)
    assert gone.returncode == 1
    assert gone.stderr == f"error: hf:{NAME}@v2: the hub cannot be reached, and this revision is not in the cache\n"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (f"hf:{NAME}@v3", f"error: hf:{NAME}@v3: "),
        (f"hf:{NAME}@empty", f"error: hf:{NAME}@empty has no tokenizer.json; expected a model with"),
        ("hf:not a name", "error: hf:not a name: "),
    ],
)
def test_no_such_tokenizer(place: str, message: str, hub: Hub, folder: Path, tmp_path: Path) -> None:
    """What the hub does not have is refused in one line, before a corpus is begun."""
    done = call(folder, "--tokenizer", place, "--directory", tmp_path / "c", "--index-directory", tmp_path / "c")
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(message)  # after the library's own bar
    assert not (tmp_path / "c").exists()
