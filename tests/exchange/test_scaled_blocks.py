"""Folders whose matrices are 8-bit floats in blocks with a scale, as DeepSeek-V3 and the FP8 models of Qwen are."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.exchange.random_weights import SIZES, model_of, save, whole
from zero.base.errors import UserError
from zero.exchange.export import export
from zero.exchange.scaled_blocks import ScaledBlocks
from zero.exchange.warm_start import warm_start

BLOCK = (20, 9)  # divides the width of the MLP and no other


def is_matrix(name: str) -> bool:
    """Whether published folders hold it in 8 bits: no table, norm or router."""
    return name.endswith("_proj.weight")


def write(path: Path, tensors: dict[str, Any]) -> None:
    """A file of torch's tensors, which safetensors writes in 8 bits."""
    import torch
    from safetensors.torch import save_file

    def of_torch(x: np.ndarray) -> torch.Tensor:
        if x.dtype == ml_dtypes.float8_e4m3fn:
            return torch.tensor(x.view(np.uint8)).view(torch.float8_e4m3fn)
        if x.dtype == ml_dtypes.bfloat16:
            return torch.tensor(x.astype(np.float32)).bfloat16()
        return torch.tensor(x)

    save_file({name: of_torch(x) for name, x in tensors.items()}, path, {"format": "pt"})


def write_in_8_bits(hf: Path, block: tuple[int, int]) -> dict[str, np.ndarray]:
    """Writes the weights of a folder in 8 bits; the matrices that they stand for, by the formula.

    The scales are in a file of their own, and some of them in bfloat16, as in Qwen's folders.
    """
    rng = np.random.default_rng(0)
    tensors = load_file(hf / "model.safetensors")
    codes, scales, expected = {}, {}, {}
    for name in filter(is_matrix, tensors):
        outputs, inputs = tensors[name].shape
        codes[name] = rng.normal(0, 30, (outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
        scale = rng.uniform(1e-3, 1e-2, (-(-outputs // block[0]), -(-inputs // block[1]))).astype(np.float32)
        if name.endswith("o_proj.weight"):
            scale = scale.astype(ml_dtypes.bfloat16)
        scales[f"{name}_scale_inv"] = scale
        of_elements = scale.astype(np.float32)[np.arange(outputs)[:, None] // block[0], np.arange(inputs) // block[1]]
        expected[name] = codes[name].astype(np.float32) * of_elements
    write(hf / "model.safetensors", {**tensors, **codes})
    write(hf / "scales.safetensors", scales)
    files = {**dict.fromkeys(tensors, "model.safetensors"), **dict.fromkeys(scales, "scales.safetensors")}
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    change(hf, quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=list(block))
    return expected


def change(hf: Path, **keys: Any) -> None:
    """Keys of `quantization_config`."""
    config = json.loads((hf / "config.json").read_text())
    config["quantization_config"] = {**config.get("quantization_config", {}), **keys}
    (hf / "config.json").write_text(json.dumps(config))


SIZE = dataclasses.replace(SIZES["qwen3"], N=2, mlp_dim=60)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    save(folder / "run", SIZE, 0)
    export(str(folder / "run"), folder / "hf")
    return folder / "hf"


@pytest.fixture
def hf(exported: Path, tmp_path: Path) -> Path:
    """A folder in float32."""
    return Path(shutil.copytree(exported, tmp_path / "hf"))


def test_blocks_are_read_as_the_floats_they_stand_for(hf: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bit for bit; an export of them has no trace of 8 bits."""
    model = model_of(SIZE, 1)
    expected = write_in_8_bits(hf, BLOCK)
    assert {x.shape[0] % BLOCK[0] > 0 for x in expected.values()} == {True, False}
    with caplog.at_level(logging.INFO):
        blocks = whole(warm_start(str(hf), model), model)["blocks"]
    assert "quantized weights are read as the floats that they stand for; exports have floats" in caplog.text
    ours = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "attention_out"}
    ours |= {"gate_proj": "mlp_gate", "up_proj": "mlp_in", "down_proj": "mlp_out"}
    for name, x in expected.items():
        *_, layer, _, module, _ = name.split(".")
        np.testing.assert_array_equal(blocks[ours[module]]["kernel"][int(layer)], x.T, err_msg=name)


def test_transformers_decodes_the_same() -> None:
    """Whole blocks: transformers 5.23 does not read partial ones."""
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rng = np.random.default_rng(0)
    codes = torch.tensor(rng.normal(0, 30, (12, 20))).to(torch.float8_e4m3fn)
    scales = torch.tensor(rng.uniform(1e-3, 1e-2, (3, 2)).astype(np.float32))
    theirs: Any = Fp8Dequantize(None).convert({"weight": [codes], "weight_scale_inv": [scales]})["weight"]
    bytes_OI = codes.view(torch.uint8).numpy()
    ours = ScaledBlocks(InMemory(bytes_OI.view(ml_dtypes.float8_e4m3fn)), InMemory(scales.numpy()), (4, 10))
    np.testing.assert_array_equal(ours[:], theirs.numpy())
    np.testing.assert_array_equal(ours[2:7], theirs[2:7].numpy())


class InMemory:
    """Stands for a tensor of a file."""

    def __init__(self, x: np.ndarray) -> None:
        self._x = x

    def get_shape(self) -> list[int]:
        return list(self._x.shape)

    def get_dtype(self) -> str:
        return "F8_E4M3" if self._x.dtype.itemsize == 1 else "F32"

    def __getitem__(self, index: Any) -> np.ndarray:
        part: np.ndarray = self._x[index]
        return part


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"weight_block_size": None},
            "config.json: quantization_config has weight_block_size None; expected two num",
        ),
        ({"activation_scheme": "static"}, "has activation_scheme 'static'; expected 'dynamic'"),
        ({"group_size": 7}, "has group_size 7, which zero does not know"),
        ({"quant_method": "gptq"}, "has quant_method 'gptq'; expected one of fp8, mxfp4.*save the model dequantized"),
        ({"weight_block_size": [16, 8]}, r"scales.safetensors, tensor .*_scale_inv: holds .*\], expected \[.*\] of"),
    ],
)
def test_other_codes_are_refused(keys: dict[str, Any], message: str, hf: Path) -> None:
    write_in_8_bits(hf, BLOCK)
    change(hf, **keys)
    with pytest.raises(UserError, match=message):
        warm_start(str(hf), model_of(SIZE, 1))


def test_a_missing_scale_is_named(hf: Path) -> None:
    write_in_8_bits(hf, BLOCK)
    scales = load_file(hf / "scales.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    del scales[f"{name}_scale_inv"]
    write(hf / "scales.safetensors", scales)
    with pytest.raises(UserError, match=f"model.safetensors, tensor {name}: holds F8_E4M3 without a tensor"):
        warm_start(str(hf), model_of(SIZE, 1))
