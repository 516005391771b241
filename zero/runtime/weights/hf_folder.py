"""Reads weights from a Hugging Face folder: `config.json` and safetensors, what `transformers` loads (safetensors)."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from zero.partition.layout import LeafLayout, PyTree
from zero.partition.state import global_shapes
from zero.runtime.errors import UserError
from zero.runtime.weights.architectures import ARCHITECTURES, Architecture
from zero.training.step import ShardedGPT

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"  # of several files: the file of each tensor
PREFIX = "transformer."  # of the tensors' names in the files


class HuggingFaceFolder:
    """A local Hugging Face folder, open for reading; a context manager that closes its files.

    Raises:
      UserError: its architecture equals no GPT of zero, or its weights are not safetensors; no pickle is ever loaded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = ExitStack()
        config = _read_json(path / CONFIG_FILE)
        self.architecture = _checked_architecture(path / CONFIG_FILE, config)
        with ExitStack() as stack:
            self._tensors = self._open_tensors(stack)
            self._files = stack.pop_all()
        layers = {name.split(".")[1] for name in self._tensors if name.startswith("h.")}
        if not layers:
            raise UserError(f"{path}: holds no tensor of a layer; expected {PREFIX}h.0 and so on")
        self.size = {
            "N": len(layers),
            "num_head": config.get("n_head", config.get("num_attention_heads")),  # bigscience's BLOOM has the latter
            "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        }

    def _open_tensors(self, stack: ExitStack) -> dict[str, Any]:
        """Unread slices of the tensors that are weights, by name without `PREFIX`."""
        tensors: dict[str, Any] = {}
        for name in self._file_names():
            path = self.path / name
            if not path.is_file():
                raise UserError(f"{self.path}: {name} is missing; weights are read from safetensors only")
            try:
                file = stack.enter_context(safe_open(path, "numpy"))
            except SafetensorError as error:
                raise UserError(f"{path}: not a safetensors file: {error}") from error
            tensors |= {key.removeprefix(PREFIX): file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        # The output matrix is tied to the embedding, and GPT-2's attention masks are constants.
        masks = (".attn.bias", ".attn.masked_bias")
        return {name: x for name, x in tensors.items() if name != "lm_head.weight" and not name.endswith(masks)}

    def _file_names(self) -> list[str]:
        index = self.path / INDEX_FILE
        if not index.is_file():
            return [WEIGHTS_FILE]
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"{index}: expected a weight_map from the names of tensors to names of files")
        for name in weight_map.values():
            if name != Path(name).name:  # has a directory, as ../x and /x do
                raise UserError(f"{index}: weight_map names {name!r}; expected a file in this folder")
        return sorted(set(weight_map.values()))

    def params(self, model: ShardedGPT) -> PyTree:
        """Whole arrays for `zero.from_global`, padded as the model's layout says; the host holds one leaf at a time.

        Raises:
          UserError: a tensor is missing, left over, or of another shape than the model's; the message names it.
        """
        architecture, size = self.architecture, model.config
        left_over = set(self._tensors)
        for leaf in model.layout.leaves:
            for name in self._tensor_names(leaf):
                expected = architecture.tensor_shape(leaf, size)
                found = tuple(self._tensors[name].get_shape()) if name in self._tensors else "nothing"
                if found != expected:
                    raise UserError(f"{self.path}, tensor {name}: holds {found}, leaf {leaf.name} expects {expected}")
                left_over.discard(name)
        if left_over:
            raise UserError(f"{self.path}, tensor {min(left_over)}: this model has no leaf for it")

        def read(leaf: LeafLayout, target: jax.ShapeDtypeStruct) -> jax.Array:
            padded = np.zeros(leaf.padded_shape, leaf.dtype)
            logical = padded[tuple(slice(length) for length in leaf.shape)]
            for i, name in enumerate(self._tensor_names(leaf)):
                part = architecture.unpack(leaf, self._tensors[name][:], size)
                logical[(i,) if "{}" in architecture.tensor_name(leaf.name) else ()] = part
            return jax.make_array_from_callback(padded.shape, target.sharding, lambda index: padded[index])

        return model.layout.map(read, global_shapes(model.layout, model.axis))

    def _tensor_names(self, leaf: LeafLayout) -> list[str]:
        """The tensors that hold this leaf, one per layer."""
        if leaf.name.rpartition("/")[0] not in self.architecture.modules:
            raise UserError(f"{self.path}: {self.architecture.model_type} has nothing for leaf {leaf.name}")
        name = self.architecture.tensor_name(leaf.name)
        return [name.format(i) for i in range(leaf.shape[0])] if "{}" in name else [name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.close()


def _checked_architecture(path: Path, config: dict[str, Any]) -> Architecture:
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise UserError(f"{path}: model_type {model_type!r}: expected one of {', '.join(map(repr, ARCHITECTURES))}")
    architecture = ARCHITECTURES[model_type]
    for key, value in architecture.fixed.items():
        if config.get(key, value) != value:
            raise UserError(f"{path}: {key} is {config[key]!r}, a GPT of zero has {value!r}")
    return architecture


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object")
    return content
