"""Writes a checkpoint as a Hugging Face folder, which `transformers` loads (safetensors)."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from zero.base.errors import Unavailable, UserError, first_line
from zero.corpus.text.hub import PREFIX
from zero.corpus.text.special_tokens import TOKENIZER_CONFIG, as_json, companions
from zero.corpus.text.tokenizers import (
    BYTES_END_OF_TEXT,
    FileTokenizer,
    Tokenizer,
    bytes_as_file,
    load_tokenizer,
)
from zero.exchange.architecture import Architecture
from zero.exchange.architecture_table import architecture_of
from zero.exchange.checkpoint_weights import (
    SavedStep,
    new_directory,
    open_checkpoints,
    read_step,
)
from zero.exchange.codings import QUANTIZATION
from zero.exchange.hf_config import write_config, write_config_as
from zero.exchange.hf_folder import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from zero.exchange.hub_folder import hub_folder
from zero.exchange.joint_experts import Joint, joined, names_within
from zero.exchange.peft_folder import tensor_name, write_peft
from zero.exchange.text_part import check_has_images, text_name
from zero.exchange.warm_start import weights_of_step
from zero.exchange.with_code import CODE, architecture_with_code, computed_keys
from zero.files.parsing import json_object
from zero.models.branch import Branch
from zero.models.branches import LEFT_OUT, branches_of
from zero.models.collections import collections_of
from zero.models.config import HEAD, STACK, GPTConfig
from zero.models.router import ROUTER_BIAS
from zero.models.score_head import replaced_by_scores
from zero.partition.collectives.axis import Axis
from zero.partition.train_state import to_host
from zero.record.run_files import split_step
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import Tuning

DTYPES = ("float32", "bfloat16", "float16")  # of weights in a folder
MAX_FILE_BYTES = 4 << 30  # a file is held in memory while it is written; a larger tensor gets its own file


class Form(NamedTuple):
    """How a model is written: an architecture, the model that its tensors make, and the factor of its queries."""

    architecture: Architecture
    size: GPTConfig
    query_factor: float = 1.0
    keys: Mapping[str, Any] = MappingProxyType({})  # of config.json, in addition to the architecture's


def export(
    place: str,
    folder: Path,
    step: int | None = None,
    *,
    ema: bool = False,
    merges: bool = False,
    with_code: bool = False,
    branches: Collection[str] = (),
    dtype: str | None = None,
    into: str | None = None,
) -> int:
    """Writes one checkpoint as a new Hugging Face folder, with the tokenizer and all files that belong to it.

    The weights are of `dtype`, one of `DTYPES`; None is the dtype of the folder that the run started from, or float32.
    The same checkpoint gives the same bytes. The folder appears once it is complete. With `ema` it holds the moving
    average of the weights, and `with_code` its own code for PyTorch, with which `transformers` loads models that equal
    none of its architectures (`trust_remote_code=True`). `branches` are keys of `zero.models.branches.LEFT_OUT`, whose
    parts the folder then holds too, by the names of published folders. Returns the step: `RUN@STEP`'s, or the newest
    for None. Of a run that trained adapters the folder is one of PEFT, or with `merges` one of its base with the
    adapters merged, for which the host holds the whole model.

    `into` is a folder, or a model of the hub, whose model also reads images, and whose text the run has tuned: the new
    folder is a copy of it with this text. All other tensors and files are the same, byte for byte.

    Raises:
      UserError: no architecture equals the model, there is no such step or no average, the folder exists, there are
        no adapters to merge, or the model lacks one of `branches`, or there are no names for it.
    """
    run, named = split_step(place)
    if None not in (step, named):
        raise UserError(f"{place}: expected a run without a step, as --step {step} is given")
    options: dict[str, Any] = {"with_code": with_code, "branches": branches, "dtype": dtype, "into": into}
    write = partial(_write, folder=folder, ema=ema, merges=merges, **options)
    with open_checkpoints(run) as checkpoints:
        return read_step(checkpoints, named if step is None else step, write)


def _write(
    saved: SavedStep,
    folder: Path,
    *,
    ema: bool,
    merges: bool,
    with_code: bool,
    branches: Collection[str],
    dtype: str | None,
    into: str | None,
) -> int:
    """Writes a checkpoint as `export` does; returns its step."""
    size = saved.size()
    source_model = saved.meta.get("brought") or {"dtype": None, "model_type": None}
    if with_code:
        computed = computed_keys(size)
        form = Form(architecture_with_code(size), size, keys=computed)
    else:
        form = _form_of_transformers(size, source_model["model_type"])
    asked = [branch for branch in LEFT_OUT if branch.key in branches]
    for branch in asked:
        form = _with_branch(saved.origin, form, branch)
    tokenizer = load_tokenizer(saved.meta["config"]["data"]["tokenizer"])
    saved.tokenizer().check(saved.origin, tokenizer)
    within = saved.subtree(ema)
    tuning = saved.tuning()
    prefix = f"{within}/"
    # The bias of a router and the like are averages, whose leaves begin with the name of their collection.
    collections = tuple(f"averages/{name}/" for name in collections_of(size))
    places = {name.removeprefix(prefix): name for name in saved.meta["shapes"] if name.startswith(prefix)}
    places |= {name.removeprefix("averages/"): name for name in saved.meta["shapes"] if name.startswith(collections)}
    left_out = {subtree for branch in LEFT_OUT if branch not in asked for subtree in branch.subtrees}
    if replaced_by_scores(HEAD, size):
        left_out.add(HEAD)
    leaves = [leaf for leaf in places if not {*leaf.split("/")} & left_out]
    if merges and tuning is None:
        raise UserError(f"{saved.origin}: has no adapters to merge; zero-weights export writes its weights")
    if with_code and tuning is not None and not merges:
        raise UserError(f"{saved.origin}: has adapters; zero-weights merge --with-code writes their base with them")

    if tuning is not None and not merges and into is not None:
        raise UserError(f"{saved.origin}: has adapters; zero-weights merge --into writes their base with them")
    if into is not None and (with_code or dtype is not None):
        raise UserError(
            "--into keeps the architecture and the dtypes of its folder and cannot be combined with --with-code or "
            "--dtype"
        )

    read: Callable[[str], np.ndarray] = lambda leaf: saved.checkpoints.read(saved.step, places[leaf])  # noqa: E731
    with new_directory(folder) as unfinished:
        if tuning is not None and not merges:
            base = saved.base()["named"].removeprefix(PREFIX)
            architecture = form.architecture
            has_images = bool(source_model.get("has_images"))
            write_peft(unfinished, read, leaves, tuning.adapters, architecture, base, form.size, has_images=has_images)
            _save_tokenizer(tokenizer, unfinished)
            return saved.step
        if tuning is not None:
            whole = _merged(saved, form.size, within)
            leaves = [leaf for leaf in whole if not {*leaf.split("/")} & left_out]
            read = whole.__getitem__
        if into is not None:
            tensors = _tensors(read, leaves, form, DTYPES[0])
            base_folder = Path(hub_folder(into) if into.startswith(PREFIX) else into)
            write_into(base_folder, unfinished, tensors, form.architecture.joint_experts)
            return saved.step
        dtype = dtype or (source_model["dtype"] if source_model["dtype"] in DTYPES else DTYPES[0])
        _save_tensors(_tensors(read, leaves, form, dtype), unfinished)
        _save_tokenizer(tokenizer, unfinished)
        source = None if with_code or form.size != size else source_model.get("config")
        keys = {**_config(form, source), **form.keys, **_token_ids(tokenizer, source), **_labels(saved)}
        keys |= dict.fromkeys([key for key in ("dtype", "torch_dtype") if source and key in source] or ["dtype"], dtype)
        _write_json(unfinished / CONFIG_FILE, keys)
        if with_code:
            (unfinished / CODE.name).write_bytes(CODE.read_bytes())
    return saved.step


def check_exportable(model_config: GPTConfig, leaves: Iterable[str], tuning: Tuning | None) -> None:
    """Raises UserError if `export` cannot write a model of this size, or its adapters, whose leaves these are."""
    form = _form_of_transformers(model_config, None)
    if tuning is not None:
        for leaf in leaves:
            tensor_name(leaf, form.architecture)


def _form_of_transformers(model_config: GPTConfig, model_type: str | None) -> Form:
    """The form in which `transformers` computes the same with an architecture of its own, whose scores are standard.

    If several equal the model, it is the one of `model_type`, from which the weights came.

    Scores divided by the head dimension, as in mup, equal those of smaller queries divided by its root. Only where the
    factor is a power of two, so that no digit of a weight, a product or a sum changes.
    """
    factor = model_config.head_width**-0.5
    if model_config.attention_scale != "linear" or not math.log2(factor).is_integer():
        return Form(architecture_of(model_config, model_type), model_config)
    changes: dict[str, Any] = {"parametrization": "standard", "mup_base_width": None, "attention_scale": "sqrt"}
    model_config = dataclasses.replace(model_config, **changes)
    return Form(architecture_of(model_config), model_config, factor)


def _with_branch(origin: str, form: Form, branch: Branch) -> Form:
    """The same with a branch, which is a layer after the last one."""
    further = form.architecture.further
    if branch not in branches_of(form.size):
        option = f"--with-{branch.key}"
        raise UserError(f"{origin}: has no {branch.noun}; zero-weights export without {option} writes its weights")
    if further is None or further.branch is not branch:
        kind = form.architecture.model_type
        raise UserError(f"{origin}: folders of {kind} have no names for a {branch.noun}'s tensors")
    architecture = form.architecture.with_further_layer(form.size.N, is_tied=form.size.tied)
    return form._replace(architecture=architecture, keys={**form.keys, further.key: 1})


def _merged(saved: SavedStep, model_config: GPTConfig, within: str) -> dict[str, np.ndarray]:
    """The whole weights of a run that trained adapters, by leaf."""
    model = ShardedGPT(model_config, Axis("zero", (1, jax.device_count())), 3)
    params, collections = model.split(weights_of_step(saved, model, within))
    whole = dict[str, np.ndarray]()
    for name, layout in {"": model.layout, **model.collection_layouts}.items():
        tree = to_host(collections[name] if name else params, layout, model.axis)
        prefix = f"{name}/" if name else ""
        whole |= {prefix + leaf.name: x for leaf, x in zip(layout.leaves, layout.leaves_of(tree), strict=True)}
    return whole


def _tensors(
    read: Callable[[str], np.ndarray], leaves: list[str], form: Form, dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values in the order of the architecture's modules; the leaves of one tensor are read at a time."""
    architecture = form.architecture
    size = form.size
    order = list(architecture.modules)  # query, key, value
    parts: dict[tuple[str, str], list[str]] = {}  # by layer of a period, and tensor
    for leaf in sorted(leaves, key=lambda leaf: order.index(architecture.module_of(leaf))):
        layer = architecture.module_of(leaf).rpartition("/")[0]
        parts.setdefault((layer, architecture.full_name(leaf)), []).append(leaf)
    makes_queries = f"{STACK}/query_norm/" if size.qk_norm else f"{STACK}/query/"
    for (_, name), parts_of_tensor in parts.items():
        arrays = [
            read(leaf).astype(np.float32) * np.float32(form.query_factor if leaf.startswith(makes_queries) else 1)
            for leaf in parts_of_tensor
        ]
        tensor = architecture.pack(parts_of_tensor[0], arrays, size)
        is_bias_of_router = parts_of_tensor[0].startswith(f"{ROUTER_BIAS}/")
        own_dtype = DTYPES[0] if is_bias_of_router else dtype  # transformers keeps it in float32 as well
        for index in np.ndindex(tensor.shape[: name.count("{}")]):  # of layers and experts
            yield (
                architecture.numbered(name, parts_of_tensor[0], index, size),
                tensor[index].astype(jnp.dtype(own_dtype)),
            )
        for copy, table in architecture.copies.items():
            if parts_of_tensor[0].startswith(f"{table}/"):
                yield architecture.prefix + copy, tensor.astype(jnp.dtype(dtype))
    for name, value in architecture.constants.items():
        for number in range(size.N):
            yield architecture.prefix + name.format(number), np.asarray(value, jnp.dtype(dtype))


def _save_tensors(tensors: Iterable[tuple[str, np.ndarray]], folder: Path) -> None:
    """One file, or several and their index, with the names that `transformers` expects."""
    written: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}
    total = 0

    def write() -> None:
        try:
            save_file(pending, folder / f"{len(written)}.part", {"format": "pt"})
        except SafetensorError as error:  # a full disk among them
            raise Unavailable(f"{folder.parent}: the weights could not be written: {first_line(error)}") from error
        written.append(list(pending))
        pending.clear()

    for name, x in tensors:
        if pending and sum(tensor.nbytes for tensor in pending.values()) + x.nbytes > MAX_FILE_BYTES:
            write()
        pending[name] = np.asarray(x, order="C")  # save_file ignores strides
        total += x.nbytes
    write()
    files = [WEIGHTS_FILE]
    if len(written) > 1:
        files = [f"model-{i + 1:05}-of-{len(written):05}.safetensors" for i in range(len(written))]
        weight_map = {name: file for file, names in zip(files, written, strict=True) for name in names}
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for i, file in enumerate(files):
        (folder / f"{i}.part").rename(folder / file)


def write_into(base: Path, folder: Path, tensors: Iterable[tuple[str, np.ndarray]], joint: Joint) -> None:
    """Fills a folder with a copy of `base`, whose model also reads images, with these tensors as its text.

    They are written to disk first: the host holds one file of `base` at a time. `joint` are tensors of `base` that hold
    those of all experts of a layer (`zero.exchange.joint_experts`).

    Raises:
      UserError: `base` is no such folder, its weights are quantized, or its text has other tensors.
    """
    origin = str(base / CONFIG_FILE)
    config = json_object((base / CONFIG_FILE).read_bytes(), origin)
    check_has_images(origin, config)
    if config.get(QUANTIZATION):
        raise UserError(
            f"{origin}: has a {QUANTIZATION}; expected a folder whose weights are floats, as the text's are"
        )
    text = folder / "text"
    text.mkdir()
    _save_tensors(tensors, text)
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "numpy")) for path in sorted(text.glob("*.safetensors"))]
        own = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        for path in sorted(base.iterdir()):
            if path.suffix != ".safetensors":
                if path.is_file():
                    (folder / path.name).write_bytes(path.read_bytes())
                continue
            written = {}
            with safe_open(path, "numpy") as base_file:
                for name in base_file.keys():  # noqa: SIM118
                    x = base_file.get_tensor(name)
                    alone = text_name(name)
                    if alone is not None:
                        parts = names_within(alone, own, joint)
                        if not parts:
                            raise UserError(f"{path}, tensor {name}: the model of the run has no such tensor")
                        new = joined(alone, {part: own.pop(part).get_tensor(part) for part in parts}, joint)
                        if new.shape != x.shape:
                            raise UserError(f"{path}, tensor {name}: is {x.shape}, and that of the run {new.shape}")
                        x = new.astype(x.dtype)
                    written[name] = np.ascontiguousarray(x)
                metadata = base_file.metadata()
            save_file(written, folder / path.name, metadata)
    if own:
        raise UserError(f"{base}: its text part lacks {min(own)}, which the model of the run has")
    shutil.rmtree(text)


def _save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """The tokenizer's file, and those beside it as they are: template, special tokens, generation, maximum length."""
    data = bytes_as_file()
    end = BYTES_END_OF_TEXT
    files: dict[str, bytes] = {}
    names: Mapping[str, str] = {}
    if isinstance(tokenizer, FileTokenizer):
        data = tokenizer.data
        end = tokenizer.spelling(tokenizer.special.eos)
        files = companions(tokenizer.files.folder)
        names = tokenizer.files.names
    if "eos_token" not in names:
        # The tokenizer classes of GPT-2 and BLOOM would add rules of their own.
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end}
        as_brought = json.loads(files[TOKENIZER_CONFIG]) if TOKENIZER_CONFIG in files else {}
        files[TOKENIZER_CONFIG] = as_json({**named, **names, **as_brought})
    for name, content in {"tokenizer.json": data, **files}.items():
        (folder / name).write_bytes(content)


def _config(form: Form, source: Mapping[str, Any] | None) -> dict[str, Any]:
    """The content of config.json; `source` is that of the folder that the run started from."""
    if source is None:
        return write_config(form.architecture, form.size)
    return write_config_as(form.architecture, form.size, source)


def _labels(saved: SavedStep) -> dict[str, Any]:
    """The names of the classes that a run was trained on, as config.json has them; empty without names."""
    names = saved.meta["config"].get("objective", {}).get("label_names")
    if not names:
        return {}
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": {x: i for i, x in enumerate(names)}}


def _token_ids(tokenizer: Tokenizer, source: Mapping[str, Any] | None) -> dict[str, Any]:
    """The ids of special tokens as config.json has them: those of `source` if the tokenizer has the same.

    Beside a `source` only an end is added: servers would add a beginning to prompts that had none.
    """
    special = tokenizer.special
    ends = special.ends[0] if len(special.ends) == 1 else list(special.ends)
    padding = {} if special.padding is None else {"pad_token_id": special.padding}
    ids = {"bos_token_id": special.first, "eos_token_id": ends, **padding}
    if source is None:
        return ids
    stated = {key: source[key] for key in ids if source.get(key) is not None}
    end = {"eos_token_id": ids["eos_token_id"]}
    return end | {key: _stated(value, ids[key]) for key, value in stated.items()}


def _stated(stated: Any, known: Any) -> Any:
    """The ids that a folder states, unless some of them are not among those of the tokenizer."""
    several = [ids if isinstance(ids, list) else [ids] for ids in (stated, known)]
    return stated if all(token in several[1] for token in several[0]) else known


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
