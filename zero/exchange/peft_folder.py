"""Adapters in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors` (safetensors)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from zero.base.errors import Unavailable, UserError, first_line
from zero.exchange.architecture import Architecture
from zero.exchange.architecture_table import architecture_of
from zero.exchange.text_part import BESIDE_IMAGES, name_beside_images, text_name
from zero.files.parsing import json_object, reading
from zero.models.adapters import COPY, LORA_A, LORA_B, MAGNITUDE, TABLES, Adapters, product_number
from zero.models.config import FIRST, STACK, VOCABULARY, GPTConfig
from zero.partition.layout import LeafLayout, PyTree
from zero.partition.train_state import to_devices
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import products_of

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of names: PEFT's model holds the model of transformers
# Where tied tables are trained whole, PEFT writes and reads a copy of them under this name.
_TIED_HEAD = f"{_PREFIX}lm_head.weight"
_PARTS = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
# Keys of adapter_config.json that change the computation, and the values with which it equals zero's.
_FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    # Other initializations (PiSSA, ...) subtract the adapter from the base, so it no longer equals the folder's
    # weights.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", None),
    "alora_invocation_tokens": (None, []),
    "trainable_token_indices": (None, {}, []),
    "target_parameters": (None, []),
    "layers_pattern": (None, "", []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "use_bdlora": (None, False),
}
# Keys that change nothing of a trained adapter, or that are read.
_WITHOUT_EFFECT = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora"),
        *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("use_dora", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
        *("rank_pattern", "alpha_pattern", "modules_to_save"),
    )
)


def check_adapter_keys(path: Path, config: Mapping[str, Any]) -> None:
    """Raises UserError for a key that zero does not know, or that makes these more than plain adapters."""
    for key, value in config.items():
        expected = _FIXED.get(key, (None, False, [], {}))
        if key not in _WITHOUT_EFFECT and value not in expected:
            raise UserError(f"{path}: {key} is {value!r}, expected {expected[0]!r}")


def alpha_of(config: Mapping[str, Any], rank: int | None = None, alpha: float | None = None) -> float:
    """The `alpha` of zero: products are multiplied by alpha / rank. rsLoRA (arXiv 2312.03732) divides by its root.

    Args:
      config: the content of adapter_config.json.
      rank: of the product; None for the rank of most.
      alpha: of the product; None for the alpha of most.

    >>> alpha_of({"r": 16, "lora_alpha": 8}), alpha_of({"r": 16, "lora_alpha": 8, "use_rslora": True})
    (8.0, 32.0)
    """
    rank = int(config["r"]) if rank is None else rank
    alpha = float(config["lora_alpha"] if alpha is None else alpha)
    if not config.get("use_rslora"):
        return alpha
    return alpha * math.sqrt(rank)


def write_peft(
    folder: Path,
    read: Callable[[str], np.ndarray],
    leaves: list[str],
    adapters: Adapters,
    architecture: Architecture,
    base: str,
    model_config: GPTConfig,
    *,
    has_images: bool = False,
) -> None:
    """Writes adapters into an empty folder, in float32.

    Args:
      folder: an empty directory.
      read: from the name of a leaf to its whole array.
      leaves: names of all adapters, such as "blocks/query/lora_a".
      adapters: their rank, alpha and dropout.
      architecture: of the model that they are for.
      base: name or path of its weights.
      model_config: that model.
      has_images: whether it is the text of a model of transformers that also reads images.

    Raises:
      UserError: a product shares its tensor with others in this architecture.
    """
    tensors: dict[str, np.ndarray] = {}
    products: dict[str, str] = {}  # the modules of PEFT, and zero's names of them
    tables: list[str] = []
    for leaf in leaves:
        name = tensor_name(leaf, architecture)
        whole = read(leaf).astype(np.float32)
        module, _, part = leaf.rpartition("/")
        if part.startswith(COPY):
            tables.append(architecture.modules[module])
            tensors[name] = np.ascontiguousarray(architecture.pack(_copied(leaf), [whole], model_config))
            if model_config.tied and module in TABLES:
                tensors[_TIED_HEAD] = tensors[name].copy()
            continue
        products[architecture.modules[module].partition("{}.")[2]] = module.rpartition("/")[2]
        for layer in range(len(whole)):
            tensors[architecture.numbered(name, leaf, (layer,), model_config)] = np.ascontiguousarray(whole[layer].T)
    ranks = {module: adapters.rank_of(product) for module, product in products.items()}
    alphas = {module: adapters.alpha_of(product) for module, product in products.items()}
    targets: list[str] | str = sorted(products)
    if has_images:  # whose modules of images have the same names at their ends
        targets = rf"{re.escape(BESIDE_IMAGES)}.*\.({'|'.join(map(re.escape, targets))})"
        tensors = {_PREFIX + name_beside_images(name.removeprefix(_PREFIX)): x for name, x in tensors.items()}
    config = {
        "alpha_pattern": {module: alpha for module, alpha in alphas.items() if alpha != adapters.alpha},
        "base_model_name_or_path": base,
        "bias": "none",
        "ensure_weight_tying": bool(tables) and model_config.tied,
        "fan_in_fan_out": not architecture.is_transposed,
        "inference_mode": True,
        "lora_alpha": adapters.alpha,
        "lora_dropout": adapters.dropout,
        "modules_to_save": sorted(tables) or None,
        "peft_type": "LORA",
        "r": adapters.rank,
        "rank_pattern": {module: rank for module, rank in ranks.items() if rank != adapters.rank},
        "target_modules": targets,
        "task_type": "CAUSAL_LM" if model_config.score_outputs is None else "SEQ_CLS",
        "use_dora": adapters.has_magnitudes,
    }
    try:
        save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt"})
    except SafetensorError as error:  # a full disk among them
        raise Unavailable(f"{folder.parent}: the adapters could not be written: {first_line(error)}") from error
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _copied(leaf: str) -> str:
    """The leaf of the base in whose place a trained copy is."""
    module, _, part = leaf.rpartition("/")
    return f"{module}/{part.removeprefix(COPY)}"


def tensor_name(leaf: str, architecture: Architecture) -> str:
    """PEFT's name of the tensor of an adapter, with `{}` for the number of the layer.

    Raises:
      UserError: the product shares its tensor with others in this architecture, or this has none for it.
    """
    module, _, part = leaf.rpartition("/")
    if part.startswith(COPY):
        if architecture.module_of(_copied(leaf)) not in architecture.modules:
            raise UserError(
                f"{module} was trained whole beside the adapters, and {architecture.model_type} has no tensor for it"
            )
        return _PREFIX + architecture.full_name(_copied(leaf))
    name = architecture.modules[module]
    product = module.rpartition("/")[2]
    if f"{STACK}/experts/{product}" in architecture.modules:
        raise UserError(
            f"tuning.targets: {product} of {architecture.model_type} beside its experts, and PEFT would take it for "
            "that of the experts; zero-weights merge writes whole weights"
        )
    if len(architecture.sharing(leaf)) > 1:
        raise UserError(
            f"tuning.targets: {product} shares the tensor {name} with other products in {architecture.model_type}, but "
            "PEFT has one adapter for all of them; zero-weights merge writes whole weights"
        )
    return f"{_PREFIX}{architecture.prefix}{name}.{_PARTS[part]}"


def peft_adapters(folder: Path, model_config: GPTConfig) -> Adapters:
    """The ranks, the scales and the products of the adapters in a folder of PEFT, without dropout.

    Raises:
      UserError: it holds none for this model.
    """
    path = folder / CONFIG_FILE
    architecture = architecture_of(model_config)
    config = json_object(path.read_bytes(), str(path))
    with reading(f"{path}: expected numbers r and lora_alpha"):
        rank = int(config["r"])
        alpha = alpha_of(config)
    check_adapter_keys(path, config)
    with _opened(folder) as file:
        names = _names(file)
    stacks = {STACK: model_config.scanned_layers, FIRST: model_config.first_dense}

    def modules_of(product: str) -> list[str]:
        """The modules of a product in all layers."""
        return [
            architecture.numbered(architecture.full_name(leaf), leaf, (layer,), model_config).removesuffix(".weight")
            for leaf in architecture.kernels_of(product)
            for layer in range(stacks[leaf.partition("/")[0]])
        ]

    products = [
        product
        for product in sorted(products_of(model_config), key=product_number)
        if any(f"{_PREFIX}{module}.{_PARTS[LORA_A]}" in names for module in modules_of(product))
    ]
    if not products:
        raise UserError(f"{folder}: holds no adapter of a product of {architecture.model_type}")
    ranks: list[tuple[str, int]] = []
    alphas: list[tuple[str, float]] = []
    with reading(f"{path}: expected modules and numbers under rank_pattern and alpha_pattern", re.error):
        for name in products:
            modules = modules_of(name)
            own_rank = int(_pattern_value(path, config, "rank_pattern", modules) or rank)
            own_alpha = alpha_of(config, own_rank, _pattern_value(path, config, "alpha_pattern", modules))
            if own_rank != rank:
                ranks.append((name, own_rank))
            if own_alpha != alpha:
                alphas.append((name, own_alpha))
    tables = _saved_tables(path, config, architecture, model_config)
    return Adapters(
        rank,
        alpha,
        targets=tuple(products),
        has_magnitudes=bool(config.get("use_dora")),
        ranks=tuple(sorted(ranks)),
        alphas=tuple(sorted(alphas)),
        tables=tables,
    )


def _pattern_value(path: Path, config: Mapping[str, Any], key: str, modules: list[str]) -> Any:
    """What a pattern has for a product, whose modules in all layers are these; None for nothing.

    The first expression counts that an end of a module's name matches, as in PEFT.
    """
    pattern = config.get(key) or {}
    values = []
    for module in modules:
        matching = [value for name, value in pattern.items() if re.match(rf"(.*\.)?({name})$", module)]
        values.append(matching[0] if matching else None)
    if any(value != values[0] for value in values):
        raise UserError(f"{path}: {key} differs between layers of {modules[0]}, expected one value for all layers")
    return values[0]


def _saved_tables(
    path: Path, config: Mapping[str, Any], architecture: Architecture, model_config: GPTConfig
) -> tuple[str, ...]:
    """The tables of the vocabulary that were trained whole (modules_to_save)."""
    known = {architecture.modules[name]: name for name in TABLES if name in architecture.modules}
    tables = set()
    for module in config.get("modules_to_save") or []:
        table = known.get(str(module).rpartition(".")[2])
        if table is None:
            raise UserError(f"{path}: modules_to_save holds {module!r}, expected {' or '.join(known)}")
        tables.add(VOCABULARY if model_config.tied else table)
    if tables and model_config.tied and not config.get("ensure_weight_tying"):
        raise UserError(
            f"{path}: modules_to_save without ensure_weight_tying unties {' and '.join(config['modules_to_save'])} "
            "from the other table; expected ensure_weight_tying=true, because this model ties them"
        )
    return tuple(table for table in TABLES if table in tables)


def _opened(folder: Path) -> Any:
    with reading(f"{folder / WEIGHTS_FILE}: not a safetensors file", SafetensorError):
        return safe_open(folder / WEIGHTS_FILE, "numpy")


def _names(file: Any) -> dict[str, str]:
    """The names in a file by those that its tensors have in a model of the text alone."""
    names = {}
    for name in file.keys():  # noqa: SIM118
        alone = text_name(name.removeprefix(_PREFIX))
        names[name if alone is None else _PREFIX + alone] = name
    return names


def read_peft(folder: Path, model: ShardedGPT) -> PyTree:
    """Shards for a pmap of the adapters in a folder of PEFT, for a model with adapters of that form.

    Raises:
      UserError: a key or a tensor does not belong to this model's adapters.
    """
    assert model.tuning is not None
    path = folder / CONFIG_FILE
    adapters = model.tuning.adapters
    if not path.is_file():
        raise UserError(f"tuning.adapter={folder}: expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    config = json_object(path.read_bytes(), str(path))
    check_adapter_keys(path, config)
    with reading(f"{path}: expected numbers r and lora_alpha"):
        expected = {"rank": float(config["r"]), "alpha": alpha_of(config)}
    for name, value in expected.items():
        if not math.isclose(value, getattr(adapters, name)):
            key = {"rank": "r", "alpha": "lora_alpha"}[name]
            rs = f" with use_rslora, {value:g} of zero" if config.get("use_rslora") and name == "alpha" else ""
            raise UserError(f"{path}: {key} is {config[key]!r}{rs}, expected tuning.{name}={getattr(adapters, name):g}")
    folder_adapters = peft_adapters(folder, model.config)
    for product in folder_adapters.targets or ():
        for key, number, run_number in (
            ("rank_pattern", folder_adapters.rank_of(product), adapters.rank_of(product)),
            ("alpha_pattern", folder_adapters.alpha_of(product), adapters.alpha_of(product)),
        ):
            if not math.isclose(number, run_number):
                raise UserError(
                    f"{path}: {key} gives {product} {number:g}, expected tuning.{key}={{{product}: {run_number:g}}}"
                )
    if set(folder_adapters.tables) != set(adapters.tables):
        tables = f"[{', '.join(folder_adapters.tables)}]" if folder_adapters.tables else "null"
        raise UserError(
            f"{path}: modules_to_save is {config.get('modules_to_save')}, expected with tuning.modules_to_save={tables}"
        )
    if bool(config.get("use_dora")) != adapters.has_magnitudes:
        method = "lora" if adapters.has_magnitudes else "dora"
        raise UserError(f"{path}: use_dora is {config.get('use_dora', False)}, expected with tuning={method}")
    architecture = architecture_of(model.config)
    with _opened(folder) as file:
        names_of_file = _names(file)
        left_over = set(names_of_file)

        def tensor(name: str, leaf: LeafLayout, expected: tuple[int, ...]) -> np.ndarray:
            found = tuple(file.get_slice(names_of_file[name]).get_shape()) if name in left_over else "nothing"
            if found != expected:
                raise UserError(f"{folder}, tensor {name}: holds {found}, leaf {leaf.name} expects {expected}")
            left_over.discard(name)
            return np.asarray(file.get_tensor(names_of_file[name]))

        def read(leaf: LeafLayout) -> np.ndarray:
            if leaf.path[0] in TABLES:
                whole = tensor(
                    tensor_name(leaf.name, architecture), leaf, architecture.tensor_shape(leaf, model.config)
                )
                return architecture.unpack(leaf, whole, model.config).astype(leaf.dtype)
            named = tensor_name(leaf.name, architecture)
            layers = range(leaf.shape[0])
            names = [architecture.numbered(named, leaf.name, (layer,), model.config) for layer in layers]
            return np.stack([tensor(name, leaf, leaf.shape[:0:-1]).T for name in names]).astype(leaf.dtype)

        whole = model.layout.map(read)
        if model.config.tied and adapters.tables and _TIED_HEAD in left_over:
            left_over.discard(_TIED_HEAD)
            embeddings = tensor_name(f"{VOCABULARY}/{COPY}table", architecture)
            if not np.array_equal(*(file.get_tensor(names_of_file[name]) for name in (_TIED_HEAD, embeddings))):
                raise UserError(f"{folder}, tensor {_TIED_HEAD}: differs from {embeddings}, but this model ties them")
    if left_over:
        raise UserError(f"{folder}, tensor {min(left_over)}: tuning.targets has no product for it")
    return to_devices(whole, model.layout, model.axis)
