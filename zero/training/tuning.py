"""Parameter-efficient tuning: a partition of a model's parameters into adapters, which are trained, and a frozen base.

The adapters are the parameters of the training state, at any stage as any others. The base has no gradient and no
state: it is an argument of the programs beside the state, sharded as parameters are, and gathered as it is held. A part
of the model gets it as the collection "frozen", next to "params" (docs/decisions/tuning.md).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from zero.base.keys import (
    DTYPES,
    Mistakes,
    at_least,
    choice_name,
    fraction_below_one,
    key,
    list_of,
    map_of,
    named,
    not_empty,
    one_of,
    positive,
    shown,
    whole_number,
)
from zero.models.adapters import TABLES, Adapters, combine, measured, merged, resolved, with_copies
from zero.models.branches import branches_of
from zero.models.config import HEAD, STACKS, VOCABULARY, GPTConfig
from zero.models.gpt import parameter_axes
from zero.partition.collectives.axis import Axis
from zero.partition.layout import Layout, PyTree
from zero.partition.stages import gather, shard
from zero.training.block_codes import CODECS, dequantize, quantize

BASE_DTYPES = (*DTYPES, *CODECS)
FROZEN = "frozen"  # the collection of variables that are not differentiated


@dataclasses.dataclass(frozen=True)
class TuningKeys(ABC):
    """The keys shared by all choices of the group `tuning`."""

    name: str

    def mistakes(self, model_config: GPTConfig, model_label: str, tensor_shards: int, context_shards: int) -> Mistakes:
        """The contradictions between these keys, a model, and the groups of devices that divide it."""
        yield from ()

    @abstractmethod
    def tuning(self) -> Tuning | None:
        """The tuning; None: all parameters are trained."""


@dataclasses.dataclass(frozen=True)
class Whole(TuningKeys):
    """All parameters are trained."""

    name: str = named("none")

    def tuning(self) -> None:
        return None


@cache
def products_of(model_config: GPTConfig) -> frozenset[str]:
    """The products of a model that may have adapters."""
    return frozenset(name.split("/")[-2] for name, axes in parameter_axes(model_config).items() if axes.adaptable)


@dataclasses.dataclass(frozen=True)
class Adapted(TuningKeys):
    """The keys of all kinds of adapters."""

    dropout: ClassVar[float] = 0.0
    has_magnitudes: ClassVar[bool] = False  # whether columns have trained norms
    rank: int = key(16, at_least(1), "Inner dimension of an adapter.", fixed=True)
    alpha: float = key(32.0, positive(), "The products of adapters are multiplied by alpha / rank.", fixed=True)
    targets: list[str] | None = key(
        None,
        list_of(not_empty()),
        "Which products of a layer have adapters: query, key, value, attention_out, mlp_in, mlp_gate, mlp_out, "
        "attention_gate, shared_gate; in latent attention query_latent, latent, key_value; in gated DeltaNet "
        "output_gate, rate, decay_input. null: all that the model has.",
        fixed=True,
    )
    rank_pattern: dict[str, Any] | None = key(
        None,
        map_of(whole_number(at_least(1))),
        "Products with another rank, such as {query: 8, mlp_in: 64}.",
        fixed=True,
    )
    alpha_pattern: dict[str, Any] | None = key(
        None, map_of(positive()), "Products with another alpha; each is divided by its own rank.", fixed=True
    )
    modules_to_save: list[str] | None = key(
        None,
        list_of(one_of(*TABLES)),
        "Tables that are trained in full beside the adapters: vocabulary, the embeddings (and logits if tied to "
        "them), and head, the logits.",
        fixed=True,
    )
    base_dtype: str = key(
        "float32",
        one_of(*BASE_DTYPES),
        "Dtype in which matrices of the frozen weights are held and gathered: float32 or bfloat16; norms and biases "
        "stay float32.",
        "int8 or nf4 (QLoRA, arXiv 2305.14314, with double quantization): the weights of layers in blocks of 64 with "
        "a scale, 1.06 or 0.52 bytes per weight; the vocabulary in bfloat16.",
        fixed=True,
    )
    adapter: str | None = key(
        None,
        not_empty(),
        "A PEFT folder whose adapters the run starts from; null: new adapters, which do not change the model at first.",
        fixed=True,
    )

    def mistakes(self, model_config: GPTConfig, model_label: str, tensor_shards: int, context_shards: int) -> Mistakes:
        if not products_of(model_config):
            yield "tuning", f"none, as {model_label} has no product that can have an adapter"
        if model_config.parametrization != "standard":
            why = f"{model_label} is in {model_config.parametrization}, which sets learning rates for whole matrices"
            yield "tuning", f"none, as {why}"
        for branch in branches_of(model_config):
            if {*branch.subtrees}.isdisjoint(STACKS):  # it has no layers, and is trained whole
                continue
            yield "tuning", f"none, as {model_label} has a {branch.noun}, which adapters do not train"
        patterns = {"rank_pattern": self.rank_pattern or {}, "alpha_pattern": self.alpha_pattern or {}}
        for name, products in {"targets": self.targets or (), **patterns}.items():
            for product in sorted({*products} - products_of(model_config) if products else ()):
                is_of_experts = model_config.experts is not None and product.startswith("mlp_")
                why = "adapters are not for experts" if is_of_experts else "it has none"
                yield f"tuning.{name}", f"products without {product}, as {why} in {model_label}"
        for name, pattern in patterns.items():
            if self.targets is not None and not set(pattern) <= set(self.targets):
                yield f"tuning.{name}", f"products of tuning.targets={shown(self.targets)} only"
        if model_config.tied and HEAD in (self.modules_to_save or ()):
            why = f"the logits of {model_label} are tied to its vocabulary"
            yield "tuning.modules_to_save", f"[{VOCABULARY}] or null, as {why}"
        if self.base_dtype in CODECS and tensor_shards > 1:
            why = f"zero.tensor_shards={tensor_shards} cuts blocks of codes"
            yield "tuning.base_dtype", f"float32 or bfloat16, as {why}"
        for name, shards in (("tensor_shards", tensor_shards), ("context_shards", context_shards)):
            if self.dropout and shards > 1:
                yield "tuning.dropout", f"0, as zero.{name}={shards} divides the inputs of adapters"

    def tuning(self) -> Tuning:
        adapters = Adapters(
            self.rank,
            self.alpha,
            self.dropout,
            None if self.targets is None else tuple(self.targets),
            has_magnitudes=self.has_magnitudes,
            ranks=tuple(sorted((self.rank_pattern or {}).items())),
            alphas=tuple(sorted((self.alpha_pattern or {}).items())),
            tables=tuple(self.modules_to_save or ()),
        )
        return Tuning(adapters, self.base_dtype)


@dataclasses.dataclass(frozen=True)
class Lora(Adapted):
    """Low-rank adapters are trained beside the frozen weights of model.model_path (arXiv 2106.09685)."""

    name: str = named("lora")
    dropout: float = key(  # type: ignore[misc]
        0.0, fraction_below_one(), "Dropout rate of the inputs of adapters.", fixed=True
    )


@dataclasses.dataclass(frozen=True)
class Dora(Adapted):
    """LoRA that also trains the norm of the weights of each output (arXiv 2402.09353)."""

    has_magnitudes = True
    name: str = named("dora")


TUNINGS = (Whole, Lora, Dora)  # the choices of the group `tuning`, the default first


def saved_tuning(values: Mapping[str, Any]) -> Tuning | None:
    """The tuning of a saved configuration, from its section `tuning`; None: all parameters are trained."""
    kinds = {choice_name(kind): kind for kind in TUNINGS}
    return kinds[values["name"]](**values).tuning()


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Which parameters of a model are trained, and how the rest is held.

    Attributes:
      adapters: the parameters that are trained.
      base_dtype: dtype in which matrices of the base are held, the others are float32; or an entry of
        `block_codes.CODECS`, in which products of layers are held, beside a vocabulary in bfloat16.
    """

    adapters: Adapters
    base_dtype: str = "float32"

    @property
    def is_quantized(self) -> bool:
        return self.base_dtype in CODECS


def with_frozen(module_class: type[nn.Module], unfreeze: Callable[[PyTree], PyTree]) -> type[nn.Module]:
    """The module class with the result of `unfreeze` on its collection "frozen", besides the parameters in "params"."""

    def use(variables: PyTree) -> PyTree:
        frozen = lax.stop_gradient(unfreeze(variables.get(FROZEN, {})))
        return {"params": resolved(combine(frozen, variables.get("params", {})))}

    lifted: type[nn.Module] = nn.map_variables(module_class, ["params", FROZEN], use, mutable=False)
    return lifted


def quantize_shards(base: PyTree, *, layout: Layout, quantized: Layout, axis: Axis, codec: str) -> PyTree:
    """Shards of the quantized base, from float shards; one layer is whole at a time. Call inside pmap."""

    def quantize_layer(layer: PyTree, name: str) -> PyTree:
        return shard(quantize(gather(layer, layout.at(name), axis), codec), quantized.at(name), axis)

    stacks = {name: base[name] for name in STACKS if name in base}
    return {**base, **{name: lax.map(partial(quantize_layer, name=name), stack) for name, stack in stacks.items()}}


def neutral_shards(
    frozen: PyTree, adapters: PyTree, *, layout: Layout, quantized: Layout, low: Layout, axis: Axis, tuning: Tuning
) -> PyTree:
    """Shards of adapters that change nothing of this base, from new ones, whose B is zero.

    Magnitudes come from the base (`measure_shards`, with the same arguments), and tables are copies of its tables.
    Call inside pmap.
    """
    if tuning.adapters.has_magnitudes:
        layouts: Any = {"layout": layout, "quantized": quantized, "low": low}
        adapters = measure_shards(frozen, adapters, **layouts, axis=axis, tuning=tuning)
    return with_copies(adapters, frozen)


def measure_shards(
    frozen: PyTree, adapters: PyTree, *, layout: Layout, quantized: Layout, low: Layout, axis: Axis, tuning: Tuning
) -> PyTree:
    """Shards of the adapters with the magnitudes of the base that they are for (`measured`).

    Per device: shards of the quantized base and of the adapters, with the layouts of the base before it is
    quantized, of the quantized base, and of the adapters; one layer is whole at a time. Call inside pmap.
    """
    codec = tuning.base_dtype

    def measure_layer(xs: tuple[PyTree, PyTree], name: str) -> PyTree:
        layer, adapters = xs
        own_low = low.at(name)
        whole = layout.at(name).map(
            lambda leaf, x: dequantize(leaf.shape, x, codec, jnp.float32), gather(layer, quantized.at(name), axis)
        )
        return shard(measured(whole, gather(adapters, own_low, axis), tuning.adapters), own_low, axis)

    stacks = {name: (frozen[name], adapters[name]) for name in STACKS if name in adapters}
    return {**adapters, **{name: lax.map(partial(measure_layer, name=name), stack) for name, stack in stacks.items()}}


def merge_shards(base: PyTree, adapters: PyTree, *, layout: Layout, low: Layout, axis: Axis, tuning: Tuning) -> PyTree:
    """Shards of the parameters of the model without adapters that computes the same, in float32.

    Per device: float shards of the base, before it is quantized, and of the adapters in, with their layouts; one layer
    is whole at a time. Call inside pmap.
    """
    codec = tuning.base_dtype

    def merge_layer(xs: tuple[PyTree, PyTree], name: str) -> PyTree:
        layer, adapters = xs
        own_layout = layout.at(name)
        coded = quantize(gather(layer, own_layout, axis), codec)
        whole = own_layout.map(lambda leaf, x: dequantize(leaf.shape, x, codec, jnp.float32), coded)
        return shard(merged(whole, gather(adapters, low.at(name), axis), tuning.adapters), own_layout, axis)

    tables = {name: x for name, x in adapters.items() if name not in STACKS}
    rest = resolved(combine(jax.tree.map(lambda x: x.astype(jnp.float32), base), tables))
    stacks = {name: (base[name], adapters[name]) for name in STACKS if name in adapters}
    return {**rest, **{name: lax.map(partial(merge_layer, name=name), stack) for name, stack in stacks.items()}}
