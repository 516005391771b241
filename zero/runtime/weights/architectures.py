"""The architectures of `transformers` that compute what a GPT of zero computes: names, shapes and layouts of tensors.

docs/decisions/interchange.md says which and why. In zero the layers are stacked and query, key and value are leaves of
their own; `transformers` stores one tensor per layer, and query, key and value in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zero.models.gpt import GPTConfig
from zero.partition.layout import LeafLayout, PyTree, make_layout
from zero.partition.state import from_global, global_shapes
from zero.runtime import run_directory as run_files
from zero.runtime.checkpoints.manager import Checkpoints
from zero.runtime.errors import UserError
from zero.runtime.tokenizers import FileTokenizer, load_tokenizer
from zero.training.programs import repeat_blocks
from zero.training.step import ShardedGPT

FUSED_QKV = ("query", "key", "value")


@dataclass(frozen=True)
class Architecture:
    """How `transformers` names and stores the parts of a GPT.

    Attributes:
      model_type, class_name: as in config.json.
      sizes: keys of config.json, and the attribute of `GPTConfig` that each holds.
      fixed: keys that must have these values, which are also the defaults where config.json lacks them.
      written: keys of an export that say nothing about the weights.
      modules: the names of zero's modules to those of `transformers`, with `{}` for the number of the layer.
      is_linear: kernels are stored `(out, in)`, and query, key and value side by side head by head; otherwise
        `(in, out)`, one after the other.
    """

    model_type: str
    class_name: str
    sizes: Mapping[str, str]
    fixed: Mapping[str, Any]
    written: Mapping[str, Any]
    modules: Mapping[str, str]
    is_linear: bool

    def tensor_name(self, leaf: str) -> str:
        """`h.{}.attn.c_attn.weight` for `blocks/query/kernel`, with `{}` for the number of the layer."""
        module, _, kind = leaf.rpartition("/")
        return f"{self.modules[module]}.{'bias' if kind == 'bias' else 'weight'}"

    def tensor_shape(self, leaf: LeafLayout, size: GPTConfig) -> tuple[int, ...]:
        """The shape of the tensor that holds this leaf, of one layer."""
        if leaf.path[0] == VOCABULARY:
            return (size.vocab_size, size.embedding_dim)
        shape = leaf.shape[1:] if leaf.stacked else leaf.shape
        if leaf.path[-2] in FUSED_QKV:
            shape = (*shape[:-1], 3 * shape[-1])
        return shape[::-1] if self.is_linear and leaf.path[-1] == "kernel" else shape

    def pack(self, leaf: str, arrays: Sequence[np.ndarray], size: GPTConfig) -> np.ndarray:
        """The tensor of a leaf, or of the leaves of query, key and value; leading dimensions stay."""
        whole = arrays[0]
        if leaf.startswith(f"{VOCABULARY}/"):
            return whole.reshape(-1, size.embedding_dim)[: size.vocab_size]
        if len(arrays) > 1:
            heads = [x.reshape(*x.shape[:-1], size.num_head, -1) for x in arrays]
            whole = np.stack(heads, axis=-2 if self.is_linear else -3).reshape(*whole.shape[:-1], -1)
        return whole.swapaxes(-1, -2) if self.is_linear and leaf.endswith("kernel") else whole

    def unpack(self, leaf: LeafLayout, tensor: np.ndarray, size: GPTConfig) -> np.ndarray:
        """The leaf, or one layer of it, from its tensor; the inverse of `pack`."""
        if leaf.path[0] == VOCABULARY:
            rows = size.vocab_chunks * size.chunk_rows - size.vocab_size
            return np.pad(tensor, ((0, rows), (0, 0))).reshape(leaf.shape)
        if self.is_linear and leaf.path[-1] == "kernel":
            tensor = tensor.swapaxes(-1, -2)
        if leaf.path[-2] not in FUSED_QKV:
            return tensor
        outer = tensor.shape[:-1]
        dims = (size.num_head, 3, -1) if self.is_linear else (3, size.num_head, -1)
        heads = tensor.reshape(*outer, *dims).take(FUSED_QKV.index(leaf.path[-2]), axis=-2 if self.is_linear else -3)
        return heads.reshape(*outer, -1)


GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    sizes={
        "vocab_size": "vocab_size",
        "n_positions": "block_size",
        "n_embd": "embedding_dim",
        "n_layer": "N",
        "n_head": "num_head",
        "layer_norm_epsilon": "norm_epsilon",
        "attn_pdrop": "dropout",
        "resid_pdrop": "dropout",
    },
    fixed={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    written={"embd_pdrop": 0.0},
    modules={
        VOCABULARY: "wte",
        "positions": "wpe",
        f"{BLOCKS}/norm_attention": "h.{}.ln_1",
        f"{BLOCKS}/query": "h.{}.attn.c_attn",
        f"{BLOCKS}/key": "h.{}.attn.c_attn",
        f"{BLOCKS}/value": "h.{}.attn.c_attn",
        f"{BLOCKS}/attention_out": "h.{}.attn.c_proj",
        f"{BLOCKS}/norm_mlp": "h.{}.ln_2",
        f"{BLOCKS}/mlp_in": "h.{}.mlp.c_fc",
        f"{BLOCKS}/mlp_out": "h.{}.mlp.c_proj",
        "norm": "ln_f",
    },
    is_linear=False,
)
BLOOM = Architecture(
    model_type="bloom",
    class_name="BloomForCausalLM",
    sizes={
        "vocab_size": "vocab_size",
        "seq_length": "block_size",
        "hidden_size": "embedding_dim",
        "n_layer": "N",
        "n_head": "num_head",
        "layer_norm_epsilon": "norm_epsilon",
        "attention_dropout": "dropout",
        "hidden_dropout": "dropout",
    },
    fixed={"apply_residual_connection_post_layernorm": False, "tie_word_embeddings": True},
    written={},
    modules={
        VOCABULARY: "word_embeddings",
        "embedding_norm": "word_embeddings_layernorm",
        f"{BLOCKS}/norm_attention": "h.{}.input_layernorm",
        f"{BLOCKS}/query": "h.{}.self_attention.query_key_value",
        f"{BLOCKS}/key": "h.{}.self_attention.query_key_value",
        f"{BLOCKS}/value": "h.{}.self_attention.query_key_value",
        f"{BLOCKS}/attention_out": "h.{}.self_attention.dense",
        f"{BLOCKS}/norm_mlp": "h.{}.post_attention_layernorm",
        f"{BLOCKS}/mlp_in": "h.{}.mlp.dense_h_to_4h",
        f"{BLOCKS}/mlp_out": "h.{}.mlp.dense_4h_to_h",
        "norm": "ln_f",
    },
    is_linear=True,
)
ARCHITECTURES = {one.model_type: one for one in (GPT2, BLOOM)}


def architecture_of(size: GPTConfig) -> Architecture:
    """The architecture that computes the same as a GPT of this size.

    Raises:
      UserError: there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _read_json(path / CONFIG_FILE)
        kind = self.config.get("model_type")
        found = [one for one in (GPT2, BLOOM) if one.model_type == kind]
        if not found:
            raise UserError(f"{path / CONFIG_FILE}: model_type {kind!r}: expected one of 'gpt2', 'bloom'")
        self.architecture = found[0]
        for key, value in self.architecture.fixed.items():
            if self.config.get(key, value) != value:
                raise UserError(f"{path / CONFIG_FILE}: {key} is {self.config[key]!r}, our model has {value!r}")
        self._files = ExitStack()
        self._tensors: dict[str, Any] = {}
        index = path / INDEX_FILE
        names = sorted(set(_read_json(index)["weight_map"].values())) if index.is_file() else [WEIGHTS_FILE]
        for name in names:
            if not (path / name).is_file():
                raise UserError(f"{path}: {name} is missing; weights are read from safetensors, and from nothing else")
            try:
                file = self._files.enter_context(safe_open(path / name, "numpy"))
            except SafetensorError as error:
                raise UserError(f"{path / name}: not a safetensors file: {error}") from error
            self._tensors |= {key.removeprefix("transformer."): file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        # A tied output is the embedding, and GPT-2's masks are no weights.
        for name in [
            n for n in self._tensors if n == "lm_head.weight" or n.endswith((".attn.bias", ".attn.masked_bias"))
        ]:
            del self._tensors[name]
        layers = {name.split(".")[1] for name in self._tensors if name.startswith("h.")}
        if not layers:
            raise UserError(f"{path}: no tensor of a layer is there; expected transformer.h.0 and on")
        self.facts = {
            "N": len(layers),
            "num_head": self.config.get("n_head", self.config.get("num_attention_heads")),  # BLOOM's own say the latter
            "norm_epsilon": self.config.get("layer_norm_epsilon", 1e-5),
        }

    def params(self, model: ShardedGPT) -> PyTree:
        """Whole arrays for `zero.from_global`, padded as the model's layout says; one leaf at a time is on this host.

        Raises:
          UserError: a tensor is missing, left over, or of another shape than the model's; the line names it.
        """
        architecture, size = self.architecture, model.config
        left_over = set(self._tensors)
        for leaf in model.layout.leaves:
            for name in self._names(leaf):
                shape = architecture.tensor_shape(leaf, size)
                stands = tuple(self._tensors[name].get_shape()) if name in self._tensors else "nothing"
                if stands != shape:
                    raise UserError(f"{self.path}, tensor {name}: holds {stands}, leaf {leaf.name} expects {shape}")
                left_over.discard(name)
        if left_over:
            raise UserError(f"{self.path}, tensor {min(left_over)}: this model has no leaf for it")

        def one(leaf: LeafLayout, target: jax.ShapeDtypeStruct) -> jax.Array:
            whole = np.zeros(leaf.padded_shape, leaf.dtype)
            inside = whole[tuple(slice(length) for length in leaf.shape)]
            for i, name in enumerate(self._names(leaf)):
                part = architecture.unpack(leaf, self._tensors[name][:], size)
                inside[(i,) if "{}" in architecture.tensor_name(leaf.name) else ()] = part
            return jax.make_array_from_callback(whole.shape, target.sharding, lambda index: whole[index])

        return model.layout.map(one, global_shapes(model.layout, model.axis))

    def _names(self, leaf: LeafLayout) -> list[str]:
        """The tensors that hold this leaf, one a layer."""
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


def warm_start(place: str, model: ShardedGPT) -> PyTree:
    """Parameter shards for a pmap, from a Hugging Face folder, a run, or a place that holds checkpoints.

    A source with fewer blocks is grown (`repeated_blocks`).

    Raises:
      UserError: nothing to read is there, or it does not fit the model; the line names what.
    """
    read: Callable[[ShardedGPT], PyTree]
    with ExitStack() as stack:
        if (Path(place) / CONFIG_FILE).is_file():
            folder = stack.enter_context(Folder(Path(place)))
            origin, has, read = place, folder.facts, folder.params
        else:
            checkpoints = stack.enter_context(open_checkpoints(place))
            step = _choose(checkpoints, None)[-1]
            origin, has = f"{checkpoints.directory}, step {step}", checkpoints.meta(step)["size"]
            read = partial(_restore_params, checkpoints, step)
        for key in ("num_head", "norm_epsilon"):  # which no shape tells
            if has[key] != getattr(model.config, key):
                raise UserError(f"{origin}: {key} is {has[key]}, this run expects {getattr(model.config, key)}")
        order = repeated_blocks(has["N"], model.config.N, origin)
        source = dataclasses.replace(model, config=dataclasses.replace(model.config, N=has["N"]))
        params = from_global(read(source), source.layout, model.axis, donate=True)
    log.info("weights from %s", origin)
    if has["N"] < model.config.N:
        log.info("grown from %d blocks to %d, which repeat blocks %s", has["N"], model.config.N, order)
        params = repeat_blocks(params, order, model.axis)
    return params


def repeated_blocks(blocks: int, deeper: int, origin: str) -> list[int]:
    """Which block of a model each block of a deeper one repeats.

    Source: Gopher (Rae et al., arXiv 2112.11446), appendix G.3.3: at twice the depth each block stands twice, at 4/3 of
    the depth every third one does.

    Raises:
      UserError: the ratio is another one, or the model is not deeper.

    >>> repeated_blocks(3, 6, ""), repeated_blocks(3, 4, "")
    ([0, 0, 1, 1, 2, 2], [0, 1, 2, 2])
    """
    if deeper % blocks and 3 * deeper != 4 * blocks:
        raise UserError(
            f"{origin}: N={blocks} blocks do not grow to N={deeper}, only to a multiple or to 4/3 of {blocks}"
        )
    return [-(-(i + 1) * blocks // deeper) - 1 for i in range(deeper)]


def open_checkpoints(place: str) -> Checkpoints:
    """To read: those of a run directory, or those that lie in this very place, local or gs://; there may be none."""
    directory: Path | str = place
    if (Path(place) / run_files.CONFIG_FILE).is_file():
        data = run_files.saved_config(Path(place)).data
        directory = run_files.checkpoint_directory(Path(place), data.bucket_path, data.checkpoint_directory)
    return Checkpoints(directory, keep=None)


def export(place: str, folder: Path, step: int | None = None) -> int:
    """Writes one checkpoint as a new folder that `transformers` loads, its tokenizer too where it is a file.

    The same checkpoint gives the same bytes. `config.json` comes last: without it nobody takes the folder for whole.

    Returns:
      The step; by default it is the newest.

    Raises:
      UserError: no architecture equals the model, the step is not there, or the folder is.
    """
    with open_checkpoints(place) as checkpoints:
        step = _choose(checkpoints, None if step is None else [step])[-1]
        meta = checkpoints.meta(step)
        size = GPTConfig(**meta["size"])
        architecture = _architecture_of(size)
        tokenizer = load_tokenizer(meta["config"]["data"]["tokenizer"])
        _make_new(folder)
        ours = [name.removeprefix("params/") for name in meta["shapes"] if name.startswith("params/")]
        order = list(architecture.modules)  # query, key, value
        parts: dict[str, list[str]] = {}
        for leaf in sorted(ours, key=lambda leaf: order.index(leaf.rpartition("/")[0])):
            parts.setdefault(architecture.tensor_name(leaf), []).append(leaf)

        def tensors() -> Iterator[tuple[str, np.ndarray]]:
            for name, leaves in parts.items():
                arrays = [checkpoints.read(step, f"params/{leaf}") for leaf in leaves]
                whole = architecture.pack(leaves[0], arrays, size)
                if "{}" in name:
                    yield from ((name.format(i), layer) for i, layer in enumerate(whole))
                else:
                    yield name, whole

        _save_tensors((("transformer." + name, x) for name, x in tensors()), folder)
    ends = {"bos_token_id": tokenizer.end_of_text, "eos_token_id": tokenizer.end_of_text}
    if isinstance(tokenizer, FileTokenizer):
        text = tokenizer.end_of_text_token
        (folder / "tokenizer.json").write_bytes(tokenizer.data)
        # GPT2's or BLOOM's own tokenizer class would bring habits of its own.
        said = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": text, "eos_token": text}
        _write_json(folder / "tokenizer_config.json", said)
    sizes = {theirs: getattr(size, ours) for theirs, ours in architecture.sizes.items()}
    named = {"architectures": [architecture.class_name], "model_type": architecture.model_type, "dtype": "float32"}
    _write_json(folder / CONFIG_FILE, {**named, **sizes, **ends, **architecture.fixed, **architecture.written})
    return step


def average(place: str, run_directory: Path, steps: Sequence[int] | None = None) -> list[int]:
    """Writes a new run directory with one checkpoint of weights: the mean, in float32, of several of one run.

    Args:
      place: the run, or where its checkpoints lie.
      run_directory: made; every mode but a resume reads it as any other.
      steps: which; None for all that stand.

    Returns:
      The steps that were averaged. The checkpoint bears the number of the last.

    Raises:
      UserError: a step is not there, or the run directory is.
    """
    with open_checkpoints(place) as checkpoints:
        chosen = _choose(checkpoints, steps)
        meta = checkpoints.meta(chosen[-1])
        names = [name for name in meta["shapes"] if name.startswith("params/")]
        _make_new(run_directory)

        def mean(name: str) -> np.ndarray:
            total = checkpoints.read(chosen[0], name)
            for step in chosen[1:]:
                total = total + checkpoints.read(step, name)
            return total / np.float32(len(chosen))

        means = {name: mean(name) for name in names}
    config = meta["config"]
    config["data"] |= {"bucket_path": None, "checkpoint_directory": "checkpoints"}
    run_files.save_config(run_directory, config)
    kept = {key: value for key, value in meta.items() if key not in ("shapes", "checksums")}  # of other arrays
    with Checkpoints(run_directory / "checkpoints", keep=1) as averaged:
        averaged.save(chosen[-1], means, make_layout(means, 1), kept | {"averaged": chosen})
    return chosen


def _restore_params(checkpoints: Checkpoints, step: int, model: ShardedGPT) -> PyTree:
    return checkpoints.restore(step, model.layout, model.axis, within="params")


def _architecture_of(size: GPTConfig) -> Architecture:
    if size.alibi_attn == size.embedding_norm:
        return BLOOM if size.alibi_attn else GPT2
    has = "ALiBi without embedding_norm" if size.alibi_attn else "learned positions with embedding_norm"
    raise UserError(
        f"no architecture of transformers equals a model that has {has}: GPT-2 equals learned positions without it, "
        "BLOOM equals ALiBi with it"
    )
