"""The layer after the last one of a folder, which predicts a further token, by the names of DeepSeek-V3 and GLM-4.5."""

import dataclasses
import json
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.exchange.random_weights import SIZES, model_of, params, save, variables, whole
from tests.exchange.small_models import LAYERS, small, theirs
from zero.base.errors import UserError
from zero.exchange.export import export
from zero.exchange.hf_folder import HuggingFaceFolder
from zero.exchange.warm_start import warm_start
from zero.models.gpt import GPT
from zero.models.mtp import MtpInputs

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def with_further_layers(place: Path, keys: dict[str, Any], tensors: dict[str, np.ndarray], layers: int) -> None:
    """Writes a folder of `tensors`, whose last layer is the one after `layers` others, with what it has beside it."""
    width = keys["hidden_size"]
    rng = np.random.default_rng(5)
    beside = {
        "enorm": rng.normal(1, 0.3, width),
        "hnorm": rng.normal(1, 0.3, width),
        "eh_proj": rng.normal(0, 0.2, (width, 2 * width)),
        "shared_head.norm": rng.normal(1, 0.3, width),
        "embed_tokens": tensors["model.embed_tokens.weight"],
        "shared_head.head": tensors["lm_head.weight"],
    }
    own = {f"model.layers.{layers}.{name}.weight": x.astype(np.float32) for name, x in beside.items()}
    save_file({**tensors, **own}, place / WEIGHTS)
    changed = {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    (place / CONFIG).write_text(json.dumps(keys | changed))


@pytest.mark.wide
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_logits_by_a_layer_of_transformers(model_type: str, tmp_path: Path) -> None:
    """The formula by hand, with a layer of transformers, on the outputs of its model of the layers before."""
    import torch

    # Its last layer becomes the one that looks ahead. With larger weights float32 rounds by more than 1e-5.
    model = theirs(small(model_type) | {"initializer_range": 0.1})
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(tmp_path)
    keys = json.loads((tmp_path / CONFIG).read_text())
    with_further_layers(tmp_path, keys, load_file(tmp_path / WEIGHTS), LAYERS - 1)
    tensors = {name: torch.tensor(x).double() for name, x in load_file(tmp_path / WEIGHTS).items()}
    own = {name: tensors[f"model.layers.{LAYERS - 1}.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")}

    def rms(x: Any, scale: Any) -> Any:
        return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + model.config.rms_norm_eps) * scale

    tokens = np.random.default_rng(0).integers(0, keys["vocab_size"], (2, 20))
    read, following = torch.tensor(tokens[:, :-1]), torch.tensor(tokens[:, 1:])
    count = read.shape[1]
    model.set_experts_implementation("eager")  # the other one has no float64
    model.double().config.num_hidden_layers = LAYERS - 1
    with torch.no_grad():
        hidden = model.model(read, use_cache=False).last_hidden_state
        both = [rms(model.model.embed_tokens(following), own["enorm"]), rms(hidden, own["hnorm"])]
        x = torch.cat(both, -1) @ own["eh_proj"].T
        mask = torch.full((count, count), -torch.inf).double().triu(1)[None, None]
        positions = torch.arange(count)[None]
        turns = model.model.rotary_emb(x, positions)
        x = model.model.layers[LAYERS - 1](x, mask, position_ids=positions, position_embeddings=turns)
        x = rms(x, tensors[f"model.layers.{LAYERS - 1}.shared_head.norm.weight"])
        expected = torch.log_softmax(model.lm_head(x), -1).numpy()

    with HuggingFaceFolder(tmp_path) as folder:
        size = dataclasses.replace(folder.whole_size(), predictor=True)
    sharded = model_of(size)
    tree = variables(size, whole(warm_start(str(tmp_path), sharded), sharded))

    def log_probability(target: jax.Array) -> Any:
        """Of one token at all positions."""
        ahead = MtpInputs(jax.numpy.asarray(following.numpy()), jax.numpy.full(read.shape, target))
        scores = partial(GPT(size).apply, tree, method="scores")(
            read.numpy(), read.numpy(), inputs={"predictor": ahead}
        )
        return -scores[0].extra["predictor"]

    got = jax.jit(partial(jax.lax.map, log_probability))(jax.numpy.arange(size.vocab_size))
    np.testing.assert_allclose(np.moveaxis(got, 0, 2), expected, atol=1e-5, rtol=0)


SIZE = dataclasses.replace(SIZES["glm4_moe"], N=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two layers and one that looks ahead."""
    place = tmp_path_factory.mktemp("ahead")
    save(place / "run", dataclasses.replace(SIZE, N=3), 0)
    export(str(place / "run"), place / "hf")
    keys = json.loads((place / "hf" / CONFIG).read_text())
    with_further_layers(place / "hf", keys, load_file(place / "hf" / WEIGHTS), 2)
    return place / "hf"


def test_the_layer_ahead_is_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the model has a predictor; else it is left out, in a line that says so."""
    caplog.set_level(logging.INFO)
    size = dataclasses.replace(SIZE, predictor=True)
    deeper = params(dataclasses.replace(SIZE, N=3))
    model = model_of(size)
    read = whole(warm_start(str(folder), model), model)
    assert "further tokens" not in caplog.text
    last = jax.tree.map(lambda x: x[-1:], deeper["blocks"])
    jax.tree.map(np.testing.assert_array_equal, read["predictor_blocks"], last)
    bias = read["router_bias"]["predictor_blocks"]["experts"]["bias"]
    np.testing.assert_array_equal(bias, deeper["router_bias"]["blocks"]["experts"]["bias"][-1:])
    tensors = load_file(folder / WEIGHTS)
    product = tensors["model.layers.2.eh_proj.weight"].T
    np.testing.assert_array_equal(read["predictor_join"]["product"]["kernel"], product)
    alone = model_of(SIZE)
    without = whole(warm_start(str(folder), alone), alone)
    assert "1 layers that predict further tokens are not read; with model.override.predictor=true" in caplog.text
    jax.tree.map(np.testing.assert_array_equal, without["blocks"], read["blocks"])


@pytest.mark.wide  # a round trip; test_a_further_layer_is_left_out has what an export writes by default
def test_the_layer_ahead_is_written(folder: Path, tmp_path: Path) -> None:
    """A folder that was read is written with the same tensors."""
    size = dataclasses.replace(SIZE, predictor=True)
    model = model_of(size)
    save(tmp_path / "run", size, 0, values=whole(warm_start(str(folder), model), model))
    export(str(tmp_path / "run"), tmp_path / "hf", branches=("predictor",))
    written, expected = load_file(tmp_path / "hf" / WEIGHTS), load_file(folder / WEIGHTS)
    assert written.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(written[name], x, err_msg=name)
    assert json.loads((tmp_path / "hf" / CONFIG).read_text()) == json.loads((folder / CONFIG).read_text())
    save(tmp_path / "llama", dataclasses.replace(SIZES["llama"], N=2, predictor=True), 0)
    save(tmp_path / "without", SIZE, 0)
    for run, line in (("llama", "folders of llama have no names for"), ("without", "has no predictor; zero-weights")):
        with pytest.raises(UserError, match=line):
            export(str(tmp_path / run), tmp_path / "other", branches=("predictor",))


def test_layers_that_do_not_fit_are_refused(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = model_of(dataclasses.replace(SIZE, predictor=True))
    tensors = load_file(folder / WEIGHTS)

    def refusal(tensors: dict[str, np.ndarray], seed: int | None = None) -> str:
        save_file(tensors, tmp_path / WEIGHTS)
        with pytest.raises(UserError) as caught:
            warm_start(str(tmp_path), model, seed=seed)
        return str(caught.value)

    (tmp_path / CONFIG).write_bytes((folder / CONFIG).read_bytes())
    for name, original in (("embed_tokens", "embed_tokens"), ("shared_head.head", "lm_head")):
        copy = f"model.layers.2.{name}.weight"
        line = f"tensor {copy.removeprefix('model.')}: differs from {original}.weight, which a predictor shares"
        assert line in refusal({**tensors, copy: tensors[copy] + 1})
    for seed in (None, 0):  # with a seed a part may be missing as a whole
        assert "tensor layers.2.enorm.weight: holds nothing" in refusal(
            {name: x for name, x in tensors.items() if "enorm" not in name}, seed
        )
    assert "expected predictor: false, as it has no layer that predicts further tokens" in refusal(
        {name: x for name, x in tensors.items() if "layers.2." not in name}
    )
    deeper = {**tensors, "model.layers.3.enorm.weight": tensors["model.layers.2.enorm.weight"]}
    assert "num_hidden_layers is 2, the files hold 4 layers" in refusal(deeper)
    keys = json.loads((folder / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(keys | {"num_nextn_predict_layers": 2}))
    assert "tensor layers.2.hnorm.weight: holds nothing" in refusal(
        {name: x for name, x in deeper.items() if "hnorm" not in name}
    )
    assert "of 2 layers that predict further tokens the first one is read" in caplog.text
