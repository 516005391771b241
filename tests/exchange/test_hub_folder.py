"""Models by their names on a hub: one on this machine, from its HTTP answers to shards."""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.exchange.random_weights import ALIBI, assert_same, model_of, params, save, whole, without_padding
from tests.helpers.hub import Hub, point_to, serve
from zero.base.errors import Unavailable, UserError
from zero.commands.cli import compose
from zero.exchange import export as exporting
from zero.exchange.export import export
from zero.exchange.warm_start import warm_start

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported

SIZE = dataclasses.replace(ALIBI, N=1)
NAME = "someone/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """BLOOM as bigscience published it: bfloat16, several files, names without a prefix, and another name of a key."""
    monkeypatch.setattr(exporting, "MAX_FILE_BYTES", 30_000)
    for revision, seed in (("main", 0), ("v1", 1)):
        save(tmp_path / f"run-{seed}", SIZE, seed)
        place = tmp_path / "models" / NAME / revision
        export(str(tmp_path / f"run-{seed}"), place)
        for path in place.glob("*.safetensors"):
            tensors = {name.removeprefix("transformer."): x for name, x in load_file(path).items()}
            save_file({name: x.astype(jax.numpy.bfloat16) for name, x in tensors.items()}, path)
        index = json.loads((place / "model.safetensors.index.json").read_text())
        index["weight_map"] = {name.removeprefix("transformer."): x for name, x in index["weight_map"].items()}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
        config = json.loads((place / "config.json").read_text())
        config["num_attention_heads"] = config.pop("n_head")
        (place / "config.json").write_text(json.dumps(config))
        (place / "pytorch_model.bin").write_bytes(b"a pickle")
        (place / "modeling_bloom.py").write_text("raise SystemExit")
    with serve(tmp_path / "models") as hub:
        point_to(hub, tmp_path / "cache", monkeypatch)
        yield hub


def test_modes_take_a_name(hub: Hub) -> None:
    """mode=sample of `hf:NAME@REVISION` has the size, the weights and the tokenizer of its folder in the cache."""
    config, size = compose(["mode=sample", f"model.model_path='hf:{NAME}@v1'"])
    assert (size.embedding_dim, size.N, size.num_head, size.alibi_attn) == (SIZE.embedding_dim, 1, 3, True)
    assert Path(str(config.model.model_path)).name == hub.commit(NAME, "v1")
    assert config.data.tokenizer == f"{config.model.model_path}/tokenizer.json"


def test_training_and_plans_need_no_entry(hub: Hub) -> None:
    """A warm start has the size and the tokenizer of its folder; a plan reads config.json, and no weights."""
    commit = hub.commit(NAME, "v1")
    overrides = ["model.warm_start=true", f"model.model_path='hf:{NAME}@v1'", "data.corpus=null"]
    overrides += ["data.index_path_train=a.index", "data.index_path_validation=null", "training.staged_warmup_steps=0"]
    config, size = compose(overrides)
    assert config.model.size == config.model.model_path == f"hf:{NAME}@{commit}"
    assert (size.embedding_dim, size.N, size.alibi_attn) == (SIZE.embedding_dim, 1, True)
    assert Path(config.data.tokenizer).parent.name == commit
    assert compose([*overrides, "model.override.dropout=0.5"])[1].dropout == 0.5
    assert compose(["mode=plan", f"model.size='hf:{NAME}@v1'"])[1] == size
    assert not any(path.endswith(".safetensors") for path in hub.requests)
    with pytest.raises(UserError, match=r"model.size=hf: no such size"):
        compose([*overrides, "model.size=hf"])


def read(place: str) -> object:
    model = model_of(SIZE)
    return without_padding(whole(warm_start(place, model), model), SIZE)


def expected(seed: int) -> object:
    rounded = jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16).astype(np.float32), params(SIZE, seed))
    return without_padding(rounded, SIZE)


def test_from_hub_name_to_shards(hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A name and a revision become shards; a second start, also offline, takes them from the cache."""
    caplog.set_level("INFO")
    assert_same(read(f"hf:{NAME}"), expected(0))
    commit = hub.commit(NAME, "v1")
    assert_same(read(f"hf:{NAME}@v1"), expected(1))
    assert f"hf:{NAME}@v1 is hf:{NAME}@{commit}" in caplog.text
    fetched = [path for path in hub.requests if "/resolve/" in path]
    assert sum(path.endswith(".safetensors") for path in set(fetched)) > 6  # of two revisions
    assert not any(path.endswith((".bin", ".py")) for path in fetched)

    hub.requests.clear()
    assert_same(read(f"hf:{NAME}@{commit}"), expected(1))
    assert not [path for path in hub.requests if "/resolve/" in path]
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert_same(read(f"hf:{NAME}@v1"), expected(1))
    assert not hub.requests
    with pytest.raises(Unavailable, match=r"@v2: the hub cannot be reached, and this revision is not in the cache$"):
        read(f"hf:{NAME}@v2")


@pytest.mark.parametrize(
    ("place", "line"),
    [
        (f"hf:{NAME}@v3", "hf:someone/tiny@v3: "),
        ("hf:someone/else", "hf:someone/else: "),
        ("hf:not a name", "hf:not a name: "),
    ],
)
def test_missing_model_is_refused(place: str, line: str, hub: Hub) -> None:
    """A model or revision that does not exist is refused in one line with its name."""
    with pytest.raises(UserError, match=line) as caught:
        read(place)
    assert caught.value.status == 2 and "\n" not in str(caught.value)
