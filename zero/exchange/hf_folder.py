"""Reads weights from a Hugging Face folder: `config.json` and safetensors files (safetensors)."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from zero.base.errors import UserError
from zero.exchange.codings import QUANTIZATION, coding_of
from zero.exchange.fresh_parts import held_parts
from zero.exchange.hf_config import read_architecture, read_choices, read_size
from zero.exchange.joint_experts import separated
from zero.exchange.stored_tensor import Stored, StoredTensor
from zero.exchange.text_part import has_images, text_config, text_name
from zero.files.parsing import json_object, reading
from zero.models.branches import branches_of
from zero.models.config import HEAD, VOCABULARY, GPTConfig
from zero.partition.global_arrays import from_global, global_shapes
from zero.partition.layout import Layout, LeafLayout, PyTree
from zero.training.sharded_gpt import ShardedGPT

log = logging.getLogger(__name__)
Bounds = tuple[tuple[int, int], ...]  # where a part begins and ends, in each dimension

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"  # of several files: the file of each tensor
# The dtypes of weights. Integers are codes of a quantized model, whose scales would be lost.
_FLOATS = ("F64", "F32", "F16", "BF16")
# The ends of the names of tensors that are constants: masks, and the frequencies of rotary positions.
_CONSTANTS = (".attn.bias", ".attention.bias", ".masked_bias", ".rotary_emb.inv_freq")
_ROUNDING = 2**-8  # of a number to bfloat16


class HuggingFaceFolder:
    """A local Hugging Face folder, open for reading; a context manager that closes its files.

    Raises:
      UserError: its architecture equals no model of zero, or its weights are not safetensors; no pickle is ever loaded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        whole = json_object((path / CONFIG_FILE).read_bytes(), str(path / CONFIG_FILE))
        self._has_images = has_images(whole)
        config = text_config(str(path / CONFIG_FILE), whole)
        self.architecture = read_architecture(str(path / CONFIG_FILE), config)
        self._is_tied = config.get("tie_word_embeddings", self.architecture.choices()["tied"])
        coding = coding_of(str(path / CONFIG_FILE), config)
        with ExitStack() as stack:
            self._tensors = self._open_tensors(stack)
            if coding is not None:
                log.info("%s: quantized weights are read as the floats that they stand for; exports have floats", path)
                self._tensors = coding.decoded(self._tensors, config[QUANTIZATION])
            self._tensors = separated(self._own_tensors(), self.architecture.joint_experts)
            self._files = stack.pop_all()
        first = self.architecture.layers
        numbers = {name: name.removeprefix(first).split(".")[0] for name in self._tensors if name.startswith(first)}
        self._further = self._further_layers(config, numbers)
        layers = len({*numbers.values()}) - len({*self._further.values()})
        if not layers:
            raise UserError(f"{path}: has no tensor of a layer; expected {self.architecture.prefix}{first}0 and so on")
        if self._further:
            self.architecture = self.architecture.with_further_layer(layers, is_tied=self._is_tied)
        self._config = config
        self.layers = layers
        self.size = {"N": layers, **read_choices(str(path / CONFIG_FILE), config, self.architecture, layers)}

    def whole_size(self) -> GPTConfig:
        """The model of the folder. Raises UserError if its config.json describes none."""
        return read_size(str(self.path / CONFIG_FILE), self._config, self.architecture, self.layers)

    def _further_layers(self, config: Mapping[str, Any], numbers: Mapping[str, str]) -> dict[str, int]:
        """The tensors of layers after the last one, which predict further tokens, and the number of their layer.

        `numbers` has the number of the layer of each tensor.
        """
        further = self.architecture.further
        stated = config.get(self.architecture.layers_key)
        if further is None or not isinstance(stated, int):
            return {}
        beyond = {name: int(number) for name, number in numbers.items() if number.isdigit() and int(number) >= stated}
        most = config.get(further.key, config.get(self.architecture.aliases.get(further.key, "")))
        if not isinstance(most, int) or len({*beyond.values()}) > most:
            return {}  # the number of layers is then refused
        return beyond

    def _unread(self, model_config: GPTConfig, *, may_lack: bool) -> set[str]:
        """The tensors that predict further tokens and that no leaf of this model holds.

        In a model with the branch that the first of these layers is, they are copies of the tables, and other layers.

        Raises:
          UserError: the model has the branch, and the folder has no such layer although it must not `may_lack` one; or
            a copy differs from its table.
        """
        count = len({*self._further.values()})
        if self.architecture.further is None:
            return set()
        branch = self.architecture.further.branch
        if branch not in branches_of(model_config):
            if count:
                log.info(
                    "%s: %d layers that predict further tokens are not read; with model.override.%s=true the first "
                    "one is, to be trained on",
                    self.path,
                    count,
                    branch.key,
                )
            return {*self._further}
        if not count:
            if may_lack:
                return set()
            without = f"{branch.key}: false"
            raise UserError(f"{self.path}: expected {without}, as it has no layer that predicts further tokens")
        if count > 1:
            log.info("%s: of %d layers that predict further tokens the first one is read", self.path, count)
        others = {name for name, number in self._further.items() if number > self.layers}
        return others | self._checked_copies(branch.noun)

    def _checked_copies(self, noun: str) -> set[str]:
        """The copies of the tables in the first further layer, which belongs to a part that messages call `noun`."""
        copies = {name: table for name, table in self.architecture.copies.items() if name in self._tensors}
        for name, table in copies.items():
            original = f"{self.architecture.modules[table]}.weight"
            if original in self._tensors and not _are_equal(self._tensors[name], self._tensors[original]):
                raise UserError(f"{self.path}, tensor {name}: differs from {original}, which a {noun} shares")
        return {*copies}

    def _open_tensors(self, stack: ExitStack) -> dict[str, Stored]:
        """Unread tensors by name without the architecture's prefix."""
        tensors: dict[str, Stored] = {}
        for name in self._file_names():
            path = self.path / name
            if not path.is_file():
                raise UserError(f"{self.path}: {name} is missing; weights are read from safetensors only")
            with reading(f"{path}: not a safetensors file", SafetensorError):
                file = stack.enter_context(safe_open(path, "numpy"))
            prefix = self.architecture.prefix
            names = {key: text_name(key) if self._has_images else key for key in file.keys()}  # noqa: SIM118
            tensors |= {
                name.removeprefix(prefix): StoredTensor(path, file, key)
                for key, name in names.items()
                if name is not None
            }
        return tensors

    def _own_tensors(self) -> dict[str, Stored]:
        """The tensors without constants, a second output matrix and what transformers does not read either."""
        tensors = dict(self._tensors)
        if unread := self.architecture.unread:
            tensors = {name: x for name, x in tensors.items() if not name.startswith(unread)}
            if len(tensors) < len(self._tensors):
                log.info("%s: %s*, which predicts further tokens, is not read", self.path, unread)
        head = self.architecture.modules.get(HEAD)
        if head is None or self._is_tied:
            # Some folders hold the output matrix although it is the embedding's.
            name = "lm_head.weight" if head is None else f"{head}.weight"
            copy = tensors.pop(name, None)
            embedding = tensors.get(f"{self.architecture.modules[VOCABULARY]}.weight")
            if copy is not None and embedding is not None and not _are_equal(copy, embedding):
                raise UserError(
                    f"{self.path}: {name} is not the embedding, and the model's are tied "
                    "(tie_word_embeddings); transformers keeps both: an untied architecture with "
                    "tie_word_embeddings false reads both here"
                )
        elif "lm_head.weight" in tensors:  # GPT-NeoX as transformers has it in memory
            tensors[f"{head}.weight"] = tensors.pop("lm_head.weight")
        self._check_constants(tensors)
        constants = (*_CONSTANTS, *(name.rpartition("{}")[2] for name in self.architecture.constants))
        return {name: x for name, x in tensors.items() if not name.endswith(constants)}

    def _check_constants(self, tensors: Mapping[str, Stored]) -> None:
        """Raises UserError for a constant of a layer with another value, rounded to the folder's dtype."""
        for constant, expected in self.architecture.constants.items():
            for name in tensors:
                if not name.endswith(constant.rpartition("{}")[2]):
                    continue
                value = float(tensors[name][...])
                if not math.isclose(value, expected, rel_tol=_ROUNDING):
                    raise UserError(f"{self.path}, tensor {name}: holds {value}; zero supports only {expected}")

    def _file_names(self) -> list[str]:
        index = self.path / INDEX_FILE
        if not index.is_file():
            return [WEIGHTS_FILE]
        weight_map = json_object(index.read_bytes(), str(index)).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"{index}: expected a weight_map from the names of tensors to names of files")
        for name in weight_map.values():
            if name != Path(name).name:  # has a directory, as ../x and /x do
                raise UserError(f"{index}: weight_map names {name!r}; expected a file in this folder")
        return sorted(set(weight_map.values()))

    def params(self, model: ShardedGPT, seed: int | None = None) -> PyTree:
        """Shards for a pmap; the host holds one tensor at a time, and its devices' shards of one leaf.

        A model with more tokens than the folder has new rows in its tables, at the mean of the others. With a seed,
        fresh parts that the folder lacks are new (`read_parts`).

        Raises:
          UserError: a tensor is missing, left over, of integers, or of another shape than the model's; or a further
            layer does not fit, as in `_unread`.
        """
        parts = held_parts(model, lambda leaf: self._holds(leaf, model.config), seed)
        left_over = set(self._tensors) - self._unread(model.config, may_lack=seed is not None)
        for collection, layout in parts.layouts.items():
            for leaf in layout.leaves:
                left_over -= self._check(_within(collection, leaf), model.config)
        if left_over:
            raise UserError(f"{self.path}, tensor {min(left_over)}: this model has no such leaf")
        read = {collection: self._read(collection, layout, model) for collection, layout in parts.layouts.items()}
        return parts.completed(str(self.path), read, model, seed)

    def _holds(self, leaf: LeafLayout, model_config: GPTConfig) -> bool:
        """Whether the folder holds a tensor of this leaf."""
        if self.architecture.module_of(leaf.name) not in self.architecture.modules:
            return False
        return not self._tensors.keys().isdisjoint(self._tensor_names(leaf, model_config).values())

    def _check(self, leaf: LeafLayout, model_config: GPTConfig) -> set[str]:
        """The names of the tensors of a leaf; raises UserError if one of them does not fit it."""
        names = [*dict.fromkeys(self._tensor_names(leaf, model_config).values())]  # in order: messages name the first
        expected = self.architecture.tensor_shape(leaf, model_config)
        for name in names:
            found = tuple(self._tensors[name].get_shape()) if name in self._tensors else "nothing"
            if found != expected and not _grows(leaf, found, expected):
                raise UserError(f"{self.path}, tensor {name}: holds {found}, leaf {leaf.name} expects {expected}")
            if (dtype := self._tensors[name].get_dtype()) not in _FLOATS:
                raise UserError(f"{self.path}, tensor {name}: holds {dtype}, expected F64, F32, F16 or BF16")
        return set(names)

    def _read(self, collection: str, layout: Layout, model: ShardedGPT) -> PyTree:
        """Shards of the parameters, whose collection is "", or of another collection."""
        architecture = self.architecture
        size = model.config

        def read(leaf: LeafLayout, target: jax.ShapeDtypeStruct) -> jax.Array:
            shape = leaf.padded_shape
            sharding = target.sharding
            assert sharding is not None
            pieces: dict[Bounds, np.ndarray] = {}
            for index in sharding.addressable_devices_indices_map(shape).values():
                bounds = _bounds(index, shape)
                pieces[bounds] = np.zeros([stop - start for start, stop in bounds], leaf.dtype)
            leaf = _within(collection, leaf)
            for place, name in self._tensor_names(leaf, size).items():
                tensor = self._tensors[name][:]
                if not np.isfinite(tensor.astype(np.float32, copy=False)).all():
                    raise UserError(f"{self.path}, tensor {name}: holds values that are not finite")
                if _grows(leaf, tensor.shape, architecture.tensor_shape(leaf, size)):
                    count = size.vocab_size - len(tensor)
                    log.info(
                        "%s: the rows of %d new tokens start at the mean of the other %d", name, count, len(tensor)
                    )
                    mean = tensor.astype(np.float32).mean(axis=0, keepdims=True)
                    tensor = np.concatenate([tensor.astype(np.float32), np.repeat(mean, count, axis=0)])
                values = architecture.unpack(leaf, tensor, size)
                for bounds, piece in pieces.items():
                    _write(piece, bounds, place, values)
            return jax.make_array_from_callback(shape, sharding, lambda index: pieces[_bounds(index, shape)])

        whole = layout.map(read, global_shapes(layout, model.axis))
        return from_global(whole, layout, model.axis, donate=True)

    def _tensor_names(self, leaf: LeafLayout, model_config: GPTConfig) -> dict[tuple[int, ...], str]:
        """The tensors that hold this leaf, one per layer and expert, by their place in it."""
        if self.architecture.module_of(leaf.name) not in self.architecture.modules:
            raise UserError(f"{self.path}: {self.architecture.model_type} has no tensor for leaf {leaf.name}")
        name = self.architecture.tensor_name(leaf.name)
        places = np.ndindex(leaf.shape[: name.count("{}")])
        return {index: self.architecture.numbered(name, leaf.name, index, model_config) for index in places}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    """Where a shard begins and ends in each dimension."""
    slices = (slice(None),) * len(shape) if index is None else index
    return tuple(part.indices(size)[:2] for part, size in zip(slices, shape, strict=True))


def _write(piece: np.ndarray, bounds: Bounds, place: tuple[int, ...], values: np.ndarray) -> None:
    """Copies the values at this place of an array's first dimensions to the piece with these bounds, if it has them.

    >>> piece = np.zeros((1, 2))
    >>> for layer in range(2):
    ...     _write(piece, ((1, 2), (2, 4)), (layer,), np.asarray([0, 1, 2]) + 10 * layer)  # without padding
    >>> piece
    array([[12.,  0.]])
    """
    before = bounds[: len(place)]
    if not all(start <= number < stop for number, (start, stop) in zip(place, before, strict=True)):
        return
    within = values[tuple(slice(start, stop) for start, stop in bounds[len(place) :])]
    first = tuple(number - start for number, (start, _) in zip(place, before, strict=True))
    index: Any = (*first, *map(slice, within.shape))
    piece[index] = within


def _within(collection: str, leaf: LeafLayout) -> LeafLayout:
    """The leaf by its name in an architecture, which begins with the name of its collection."""
    if not collection:
        return leaf
    return dataclasses.replace(leaf, path=(collection, *leaf.path))


def _grows(leaf: LeafLayout, found: tuple[int, ...] | str, expected: tuple[int, ...]) -> bool:
    """Whether a table of tokens has fewer rows than expected."""
    is_table = leaf.path[0] in (VOCABULARY, HEAD) and not isinstance(found, str) and len(found) == 2
    return is_table and int(found[0]) < expected[0] and found[1:] == expected[1:]


def _are_equal(one: Stored, other: Stored) -> bool:
    """Whether two unread tensors hold the same, read some rows at a time."""
    if one.get_shape() != other.get_shape() or one.get_dtype() != other.get_dtype():
        return False
    rows = one.get_shape()[0]
    parts = [slice(start, min(start + 4096, rows)) for start in range(0, rows, 4096)]
    return all(np.array_equal(one[part], other[part]) for part in parts)
