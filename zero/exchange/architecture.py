"""One architecture of `transformers`: the names and layout of its tensors, and the models that it can express.

In zero the layers are stacked, and query, key and value are separate leaves; `transformers` stores one tensor per
layer, and in some architectures query, key and value in one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from zero.models.adapters import COPY
from zero.models.axes import Axes
from zero.models.branch import Branch
from zero.models.branches import LEFT_OUT
from zero.models.config import FIRST, HEAD, STACK, VOCABULARY, GPTConfig, default_values
from zero.models.families import FAMILIES
from zero.models.gpt import parameter_axes, variable_shapes
from zero.models.part import ATTENTION, DELTA, layer_name
from zero.models.score_head import SCORE_HEAD
from zero.partition.layout import LeafLayout

_YARNS = ("yarn", "yarn_unrounded")
FUSED_QKV = ("query", "key", "value")
# How modules share a tensor: into how many groups of outputs each is divided. A group of the tensor has its outputs of
# the first module, then those of the second, and so on.
GROUPS: dict[str, Callable[[GPTConfig], int]] = {
    "rows": lambda size: 1,  # one module after another
    "head": lambda size: size.num_head,
    "delta_key_head": lambda size: size.delta_groups,
    "column": lambda size: size.mlp_width,
}
# Keys that no architecture chooses: sizes, which `keys` or shapes have, and options of training.
UNWRITTEN = {"embedding_dim", "vocab_size", "num_head", "block_size", "N", "kv_heads", "head_dim", "mlp_dim"}
UNWRITTEN |= {"norm_epsilon", "dropout", "vocab_chunks", "z_loss", "parametrization", "mup_base_width"}
UNWRITTEN |= {"init", "head_init", "zero_init"}
UNWRITTEN |= {"embedding_dropout", "attention_dropout", "residual_dropout"}
UNWRITTEN |= {"delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim", "delta_taps"}
# Of training alone:
UNWRITTEN |= {branch.key for branch in LEFT_OUT}
UNWRITTEN |= {
    "expert_capacity",
    "expert_priority",
    "balance_loss",
    "balance_choices",
    "router_z_loss",
    "router_bias_rate",
}

# Properties of `GPTConfig` that one key of config.json sets, and their attributes, which then have one value.
SEVERAL = {"attention_bias": ("qkv_bias", "out_bias"), "linear_bias": ("qkv_bias", "out_bias", "mlp_bias")}


# Classes of transformers with a head of scores, by model_type, if their names do not follow from `class_name`.
_WITH_SCORES: Mapping[str, str | None] = {
    "zero": None,
    "gemma3_text": "Gemma3TextForSequenceClassification",
    "qwen3_5_text": "Qwen3_5TextForSequenceClassification",
    **dict.fromkeys(("apertus", "ernie4_5", "glm4_moe", "granite", "granitemoe", "olmoe", "qwen3_5_moe_text")),
}


class FurtherLayers(NamedTuple):
    """Layers after the last one, which transformers does not read. The first one is a branch of zero's model.

    Attributes:
      branch: this part of the model.
      key: of config.json, their number.
      modules: zero's names of the branch's modules outside its layer, to theirs within the first of these layers.
      copies: their names of copies within a layer, to zero's names of the tables.
    """

    branch: Branch
    key: str
    modules: Mapping[str, str]
    copies: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Architecture:
    """How `transformers` names and stores the parts of a model."""

    model_type: str  # this and the next as in config.json
    class_name: str
    family: str  # an entry of `zero.models.families.FAMILIES`: what the architecture fixes
    keys: Mapping[str, str]  # of config.json to attributes of `GPTConfig`
    fixed: Mapping[str, Any]  # keys that must have these values, which are also their defaults
    prefix: str  # of all names of tensors but the head's; published files may lack it
    # zero's names of modules, or of single leaves, to theirs, with `{}` for the number of the layer, then of the expert
    modules: Mapping[str, str]
    absent: Mapping[str, Any] = field(default_factory=dict)  # the values of missing keys, as transformers has them
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of keys
    implied: Mapping[str, Any] = field(default_factory=dict)  # values of keys that only published folders have
    written: Mapping[str, Any] = field(default_factory=dict)  # keys of an export that do not concern the weights
    # Keys of an export that other programs than transformers read, to attributes of `GPTConfig`.
    of_servers: Mapping[str, str] = field(default_factory=dict)
    rotary: tuple[str, str | None] | None = None  # keys of the base of rotary positions and of the rotated fraction
    # Kinds of `rotary_scaling`.
    scalings: tuple[str, ...] = ("linear", "llama3", "yarn", "yarn_unrounded", "dynamic", "longrope")
    scaling_aliases: Mapping[str, str] = field(default_factory=dict)  # other names of these
    local_rotary: tuple[str, float] | None = None  # key and default of the base in layers with windows
    unrotated: int | None = None  # the default of no_rope_layer_interval
    window_period: int = 2  # without layer_types, every layer of this period except the last has a window
    legacy: Mapping[str, Any] = field(default_factory=dict)  # values of old folders that mean the same as in `fixed`
    further: FurtherLayers | None = None
    copies: Mapping[str, str] = field(default_factory=dict)  # tensors of the first further layer, to modules
    scales_scores: bool = False  # mscale_all_dim of YaRN is a factor of scores too
    direct_queries: Mapping[str, str] = field(default_factory=dict)  # modules where query_latent_dim is None
    windows: str = ""  # their key: "sliding_window", "layer_types", "attention_types", or "" for no windows
    is_transposed: bool = True  # kernels are stored `(out, in)`
    # Modules with one name share a tensor: from the last part of this name to an entry of `GROUPS`.
    fused: Mapping[str, str] = field(default_factory=dict)
    bare: tuple[str, ...] = ()  # modules that are tensors: `NAME` as zero has it, of all experts, and `NAME_bias`
    # Tensors of all experts of a layer in published folders, by the end of their names: the modules that each joins.
    joint_experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)  # tensors of each layer that hold these numbers
    delta: Mapping[str, str] = field(default_factory=dict)  # modules of gated DeltaNet, for which layer_types is read
    unread: str | None = None  # how names of tensors begin that transformers does not read either
    counts_unread: str | None = None  # the key with the number of layers of these tensors
    width_divides: bool = False  # transformers refuses an embedding_dim that does not divide by num_head
    # Keys of config.json that an export computes, each from these attributes.
    computed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # those that attributes can have, if not all

    def choices(self) -> dict[str, Any]:
        """Every attribute of `GPTConfig` with a default, as this architecture's family has it."""
        return {**default_values(), **FAMILIES[self.family]}

    def differences(self, model_config: GPTConfig) -> list[str]:
        """Descriptions of the properties of a model that this architecture cannot express.

        Each key of a model is written to config.json, or concerns no architecture (`UNWRITTEN`), or must have the
        family's value. A new key must have it until `keys` or `computed` name it.
        """
        free = {*self.keys.values(), *(("windows",) if self.windows else ())}
        if self.rotary is not None:
            free |= {"rotary_base", *(("rotary_fraction",) if self.rotary[1] else ())}
            free |= {"rotary_scaling"} if model_config.rotary_kind in self.scalings else set()
        free |= {"local_rotary_base"} if self.local_rotary else set()
        free |= {name for names in self.computed.values() for name in names}
        free |= {"score_outputs"} if self.class_with_scores else set()
        free |= {"unrotated_every"} if self.unrotated else set()
        if free & {"score_width", "score_multiplier"} and not isinstance(model_config.attention_scale, str):
            free.add("attention_scale")
        free |= {"mixers"} if self.delta and {*model_config.mixers} <= {ATTENTION, DELTA} else set()
        free |= {"output_scale"} if "logit_divisor" in free else set()
        for name, attributes in SEVERAL.items():
            if name in free and len({getattr(model_config, attribute) for attribute in attributes}) == 1:
                free |= {*attributes}
        free |= {"shared_dim"} if "shared_experts" in free else set()
        free |= {"dense_dim"} if "dense_width" in free else set()
        free |= {"value_dim"} if "value_width" in free else set()
        free |= {"head_width"} if "unrotated_width" in free else set()
        if (
            self.scales_scores
            and not isinstance(model_config.attention_scale, str)
            and model_config.rotary_kind in _YARNS
        ):
            free.add("attention_scale")
        expected = {name: value for name, value in self.choices().items() if name not in UNWRITTEN}
        widths = {"key_heads": model_config.num_head, "mlp_width": 4 * model_config.embedding_dim}
        widths["head_width"] = model_config.embedding_dim / model_config.num_head  # type: ignore[assignment]
        differing = [
            f"{name}={value}, this model {getattr(model_config, name)}"
            for name, value in {**expected, **widths}.items()
            if name not in free and getattr(model_config, name) != value
        ]
        for name, values in self.values.items():
            if (value := getattr(model_config, name)) not in values:
                differing.append(f"{name}={' or '.join(map(str, values))}, this model {value}")
        if model_config.has_router_bias != (expected_bias := self.choices()["router_bias_rate"] is not None):
            differing.append("a bias of its router, this model has none" if expected_bias else "no bias of its router")
        if "shared_experts" in free and not float(model_config.shared_experts).is_integer():
            differing.append(f"a shared_dim that is a multiple of mlp_dim, this model {model_config.shared_dim}")
        if ("experts" in free) != (model_config.experts is not None):
            differing.append(
                "experts, this model has none" if model_config.experts is None else "no experts, this model has"
            )
        if self.windows and len({*model_config.windows} - {0}) > 1:
            differing.append(f"windows of one length, this model {list(model_config.windows)}")
        if self.windows == "sliding_window" and len(model_config.windows) > 1:
            differing.append(f"the same window in all layers, this model {list(model_config.windows)}")
        if self.local_rotary and model_config.local_rotary_base is None:
            differing.append("a local_rotary_base, this model none")
        if self.width_divides and model_config.embedding_dim % model_config.num_head:
            differing.append(
                f"embedding_dim divisible by num_head, this model {model_config.embedding_dim} and "
                f"{model_config.num_head}"
            )
        return differing

    def of_queries(self, latent_dim: int | None) -> Architecture:
        """The same for models whose queries have this width of their latent vector, or None."""
        if latent_dim is not None or not self.direct_queries:
            return self
        return replace(self, modules={**self.modules, **self.direct_queries}, direct_queries={})

    def of_mixers(self, mixers: tuple[str, ...]) -> Architecture:
        """The same for models with this pattern of mixers, which has modules for each layer of a period."""
        if not self.delta:
            return self
        stack = f"{STACK}/"
        layer_modules = {name: tensor for name, tensor in self.modules.items() if name.startswith(stack)}
        without_mixer = {name: tensor for name, tensor in layer_modules.items() if ".self_attn." not in tensor}
        modules = {name: tensor for name, tensor in self.modules.items() if name not in layer_modules}
        for place, mixer in enumerate(mixers):
            own = layer_modules if mixer == ATTENTION else {**without_mixer, **self.delta}
            within = f"{stack}{layer_name(place)}/" if len(mixers) > 1 else stack
            modules |= {within + name.removeprefix(stack): tensor for name, tensor in own.items()}
        return replace(self, modules=modules)

    def with_further_layer(self, layers: int, *, is_tied: bool) -> Architecture:
        """The same for models with a further layer after this many, which has the modules of the last ones."""
        assert self.further is not None
        stack = str(self.further.branch.stack)
        within = f"{self.layers}{layers}."
        modules = dict(self.modules)
        for name, tensor in self.modules.items():
            path = name.split("/")
            if STACK in path:
                modules["/".join(stack if part == STACK else part for part in path)] = tensor
        modules |= {name: within + tensor for name, tensor in self.further.modules.items()}
        copies = {
            f"{within}{tensor}.weight": VOCABULARY if is_tied else table
            for tensor, table in self.further.copies.items()
        }
        return replace(self, modules=modules, copies=copies)

    @property
    def class_with_scores(self) -> str | None:
        """The class of a model with a head of scores in place of the head of tokens; None if there is none."""
        stem = self.class_name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        return _WITH_SCORES.get(self.model_type, f"{stem}ForSequenceClassification")

    def of_scores(self, outputs: int | None) -> Architecture:
        """The same for models with a head of scores, which has this many outputs, or None."""
        if outputs is None or self.class_with_scores is None:
            return self
        modules = {name: tensor for name, tensor in self.modules.items() if name != HEAD} | {SCORE_HEAD: "score"}
        labels = {str(number): f"LABEL_{number}" for number in range(outputs)}
        written = {"id2label": labels, "label2id": {label: int(number) for number, label in labels.items()}}
        return replace(self, class_name=self.class_with_scores, modules=modules, written={**self.written, **written})

    @property
    def outputs(self) -> int | None:
        """The outputs of the head of scores; None if there is none."""
        if SCORE_HEAD not in self.modules:
            return None
        return len(self.written["id2label"])

    @property
    def layers_key(self) -> str:
        """The key of config.json that holds the number of layers."""
        return next(key for key, name in self.keys.items() if name == "N")

    @property
    def layers(self) -> str:
        """The prefix of the names of tensors of layers, up to the number of the layer."""
        return next(name for name in self.modules.values() if "{}" in name).partition("{}")[0]

    def module_of(self, leaf: str) -> str:
        """The key of `modules` that has this leaf."""
        return leaf if leaf in self.modules else leaf.rpartition("/")[0]

    def kernels_of(self, product: str) -> list[str]:
        """The leaves with the weights of this product, in each layer of a period that has it."""
        named = [name.split("/") for name in self.modules]
        return ["/".join([*path, "kernel"]) for path in named if path[-1] == product and "experts" not in path]

    def tensor_name(self, leaf: str) -> str:
        """`h.{}.attn.c_attn.weight` for `blocks/query/kernel`, with `{}` for the numbers of layer and expert."""
        name = self.modules[self.module_of(leaf)]
        is_bias = leaf.endswith("/bias")
        if name not in self.bare:
            ending = "bias" if is_bias else "weight"
            return f"{name}.{ending}"
        if is_bias:
            return f"{name}_bias"
        return name

    def _to_theirs(self, leaf: str, x: np.ndarray, model_config: GPTConfig) -> np.ndarray:
        """An array of a leaf as its tensor has it: kernels are `(out, in)`, convolutions `(channels, 1, taps)`."""
        axes = _axes_of(leaf, model_config)
        if axes.is_convolution:
            return x.swapaxes(-1, -2)[..., None, :]
        if not self._is_turned(leaf, axes):
            return x
        return x.swapaxes(-1, -2)

    def _to_ours(self, leaf: str, x: np.ndarray, model_config: GPTConfig) -> np.ndarray:
        """The inverse of `_to_theirs`."""
        axes = _axes_of(leaf, model_config)
        if axes.is_convolution:
            return x[..., 0, :].swapaxes(-1, -2)
        if not self._is_turned(leaf, axes):
            return x
        return x.swapaxes(-1, -2)

    def _is_turned(self, leaf: str, axes: Axes) -> bool:
        """Whether a tensor is `(out, in)`. A product outside of layers is a torch.nn.Linear in every class."""
        if not axes.is_product or self.modules[self.module_of(leaf)] in self.bare:
            return False
        return self.is_transposed or not axes.is_of_layers

    def full_name(self, leaf: str) -> str:
        """`tensor_name` as it is in the files."""
        return ("" if leaf.startswith((f"{HEAD}/", f"{SCORE_HEAD}/")) else self.prefix) + self.tensor_name(leaf)

    def numbered(self, name: str, leaf: str, index: tuple[int, ...], model_config: GPTConfig) -> str:
        """The name of the tensor of one layer and expert: of this entry of the leaf's stack."""
        if "{}" not in name:
            return name
        path = leaf.split("/")
        if self.further is not None and self.further.branch.stack in path:
            return name.format(model_config.N, *index[1:])
        layer = index[0] if path[0] == FIRST else model_config.first_dense + index[0] * model_config.period
        place = [number for number in range(model_config.period) if path[1] == layer_name(number)]
        return name.format(layer + sum(place), *index[1:])

    def tensor_shape(self, leaf: LeafLayout, model_config: GPTConfig) -> tuple[int, ...]:
        """The shape of the tensor that holds this leaf, of one layer and expert."""
        if _axes_of(leaf.name, model_config).is_table:
            return (model_config.vocab_size, model_config.embedding_dim)
        shape = leaf.shape[self.tensor_name(leaf.name).count("{}") :]
        widths = self._widths(leaf.name, model_config)
        if widths:
            shape = (*shape[:-1], sum(widths.values()))
        return self._to_theirs(leaf.name, np.broadcast_to(0, shape), model_config).shape

    def pack(self, leaf: str, arrays: Sequence[np.ndarray], model_config: GPTConfig) -> np.ndarray:
        """The tensor of a leaf, or of the leaves that share it; leading dimensions stay."""
        whole = arrays[0]
        if _axes_of(leaf, model_config).is_table:
            return whole.reshape(-1, model_config.embedding_dim)[: model_config.vocab_size]
        if len(arrays) > 1:
            groups = self._groups(leaf, model_config)
            parts = [x.reshape(*x.shape[:-1], groups, -1) for x in arrays]
            whole = np.concatenate(parts, axis=-1).reshape(*whole.shape[:-1], -1)
        return self._to_theirs(leaf, whole, model_config)

    def unpack(self, leaf: LeafLayout, tensor: np.ndarray, model_config: GPTConfig) -> np.ndarray:
        """The leaf, or one layer and expert of it, from its tensor; the inverse of `pack`."""
        if _axes_of(leaf.name, model_config).is_table:
            rows = model_config.vocab_chunks * model_config.chunk_rows - model_config.vocab_size
            return np.pad(tensor, ((0, rows), (0, 0))).reshape(leaf.shape)
        tensor = self._to_ours(leaf.name, tensor, model_config)
        widths = self._widths(leaf.name, model_config)
        if not widths:
            return tensor
        groups = self._groups(leaf.name, model_config)
        modules = list(widths)
        index = modules.index(self.module_of(leaf.name))
        first = sum(widths[module] for module in modules[:index]) // groups
        end = first + widths[modules[index]] // groups
        outer = tensor.shape[:-1]
        return tensor.reshape(*outer, groups, -1)[..., first:end].reshape(*outer, -1)

    def _groups(self, leaf: str, model_config: GPTConfig) -> int:
        """The groups of the modules that share the tensor of this leaf."""
        name = self.modules[self.module_of(leaf)]
        return GROUPS[self.fused[name.rpartition(".")[2]]](model_config)

    def sharing(self, leaf: str) -> list[str]:
        """The modules in the tensor of this leaf, in order; alone where modules of other models have the same name."""
        module = self.module_of(leaf)
        tensor = self.modules[module]
        if tensor.rpartition(".")[2] not in self.fused:
            return [module]
        layer = module.rpartition("/")[0]
        return [name for name in self.modules if self.modules[name] == tensor and name.rpartition("/")[0] == layer]

    def _widths(self, leaf: str, model_config: GPTConfig) -> dict[str, int]:
        """Outputs of each module in the tensor of this leaf, in order; empty if it has one of its own."""
        modules = self.sharing(leaf)
        if len(modules) < 2:
            return {}
        kind = leaf.rpartition("/")[2]
        return {module: _width(model_config, f"{module}/{kind}") for module in modules}


def _width(model_config: GPTConfig, leaf: str) -> int:
    """The last dimension of a leaf."""
    tree: Any = variable_shapes(model_config)["params"]
    for name in leaf.split("/"):
        tree = tree[name]
    return int(tree.shape[-1])


def _axes_of(leaf: str, model_config: GPTConfig) -> Axes:
    """The axes of a parameter, or of a trained copy of it; a variable of another collection has none."""
    module, _, name = leaf.rpartition("/")
    return parameter_axes(model_config).get(f"{module}/{name.removeprefix(COPY)}", Axes(()))
