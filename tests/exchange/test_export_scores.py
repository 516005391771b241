"""A model with a head of scores is a ForSequenceClassification of transformers, with the same scores."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.exchange.random_weights import SIZES, SOME, assert_same, model_of, params, save, whole, without_padding
from zero.base.errors import UserError
from zero.exchange.architecture_table import ARCHITECTURES
from zero.exchange.export import export
from zero.exchange.hub_model import open_hf_model
from zero.exchange.warm_start import warm_start
from zero.models.config import HEAD, GPTConfig
from zero.models.gpt import GPT

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

OUTPUTS = 3


@pytest.mark.parametrize("name", SOME)
def test_transformers_computes_the_same_scores(name: str, tmp_path: Path) -> None:
    """At the last token of each text, with padding after it."""
    import torch
    import transformers

    size = dataclasses.replace(SIZES[name], score_outputs=OUTPUTS)
    save(tmp_path / "run", size, 0)
    export(str(tmp_path / "run"), tmp_path / "folder")
    auto: Any = transformers.AutoModelForSequenceClassification
    model, loaded = auto.from_pretrained(tmp_path / "folder", output_loading_info=True, pad_token_id=0)
    assert not any(loaded.values())
    rows = np.random.default_rng(0).integers(1, size.vocab_size, (2, 12), np.int32)
    rows[1, 7:] = 0
    weights = params(size)
    hidden, _ = GPT(size).apply({"params": weights}, rows, None, method="hidden")
    expected = (hidden @ weights["score_head"]["kernel"])[jnp.arange(2), jnp.asarray([11, 6])]
    with torch.no_grad():
        scores = model(torch.from_numpy(rows).long(), attention_mask=torch.from_numpy(rows > 0).long()).logits
    np.testing.assert_allclose(scores, expected, atol=1e-4, rtol=0)
    _assert_is_read(tmp_path / "folder", size, weights)


def _assert_is_read(folder: Path, size: GPTConfig, weights: Any) -> None:
    """The folder of a `ForSequenceClassification` is the same model, to evaluate and to train on."""
    found = open_hf_model(str(folder))
    assert found is not None and found.size.score_outputs == OUTPUTS
    table = {name: tree for name, tree in weights.items() if name == HEAD}  # which the class does not have
    for seed in (None, 0):
        read = whole(warm_start(str(folder), model_of(size), seed=seed), model_of(size))
        assert read.keys() == weights.keys()
        assert_same(without_padding({**read, **table}, size), without_padding(weights, size))


def test_class_names_are_those_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES

    assert {name: architecture.class_with_scores for name, architecture in ARCHITECTURES.items()} == {
        name: NAMES.get(name) for name in ARCHITECTURES
    }


def test_scores_without_a_class_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "run", dataclasses.replace(SIZES["olmoe"], score_outputs=1), 0)
    with pytest.raises(UserError, match="olmoe has score_outputs=None, this model 1"):
        export(str(tmp_path / "run"), tmp_path / "folder")
    with pytest.raises(UserError, match="score_outputs=None, this model 1"):
        export(str(tmp_path / "run"), tmp_path / "folder", with_code=True)
