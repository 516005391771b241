"""How state and sequences lie on the devices: section `zero`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from zero.config.constraints import DTYPES, at_least, one_of, shown
from zero.config.keys import Mistakes, key
from zero.models.collections import collections_of
from zero.models.config import GPTConfig
from zero.models.products import EIGHT_BITS, PRODUCTS
from zero.models.stack import OFFLOADED, REMAT, STORED, span_size

_WITHOUT_INT8 = {"wire_dtype": "auto, float32 or bfloat16", "gather_dtype": "auto"}


@dataclass
class WeightKeys:
    """How weights lie on the devices and are multiplied with: all that inference reads."""

    stage: int = key(
        3,
        one_of(0, 1, 2, 3),
        "ZeRO's stage; weights and optimizer state are sharded at 1 to 3. From most to least memory:",
        "0: everything is replicated, plain data parallelism.",
        "1: parameters are gathered at the start of a step, gradients reduce-scattered at its end.",
        "2: gradients are reduce-scattered layer by layer.",
        "3: parameters are gathered layer by layer as well.",
        in_scores=True,
    )
    compute_dtype: str = key(
        "auto",
        one_of("auto", *DTYPES),
        "Dtype of gathered parameters and matrix products: float32, bfloat16, or auto: float32 on CPU, else bfloat16.",
        in_scores=True,
    )
    product_dtype: str = key(
        "auto",
        one_of(*PRODUCTS),
        "Matrix products with the weights of attention and MLP: auto, compute_dtype; bfloat16; or int8, int8_all or "
        "float8, with operands rounded with a scale per row and per column.",
        "With int8 the gradient of the weights is still computed in compute_dtype; with int8_all also in int8, with a "
        "scale per channel over the positions of a device.",
        in_scores=True,
    )
    gather_dtype: str = key(
        "auto",
        one_of("auto", "int8", "products"),
        "Dtype in which parameters are gathered: auto, the narrower of compute_dtype and master_dtype; int8 in blocks "
        "of 256; or, at stage 3 with product_dtype in 8 bits, products: already rounded as their products round them, "
        "so no result changes.",
        in_scores=True,
    )
    master_dtype: str = key(
        "float32",
        one_of(*DTYPES),
        "Dtype of the weights between steps: float32, or bfloat16 with stochastic rounding for half the memory; norms "
        "and biases stay float32.",
        in_scores=True,
    )
    tensor_shards: int = key(
        1,
        at_least(1),
        "Tensor parallelism: neighboring devices compute the same sequences, each with its share of the heads, the "
        "MLP and the vocabulary.",
        in_scores=True,
    )
    expert_shards: int = key(
        1,
        at_least(1),
        "Expert parallelism: neighboring devices divide the experts of a layer and exchange tokens; needs a model "
        "with experts and expert_capacity.",
        in_scores=True,
    )
    phases: str = key(
        "auto",
        one_of("auto", "flat", "torus"),
        "Collectives of gathers and scatters: flat, one over all devices; torus, one along each dimension of a TPU "
        "slice; auto: flat, which the TPU compiler predicts to be faster; for a copy of the state across several "
        "slices, one within each slice and one between slices; without overlap_gathers, torus where possible, which "
        "sends the fewest bytes.",
        "With tensor_shards, torus places each group along one dimension and gathers along the other; auto chooses "
        "the placement whose links need less time.",
        in_scores=True,
    )
    overlap_gathers: bool = key(
        True,
        None,
        "On TPU and GPU, overlap sending parameters and gradients with matrix products; false: send before and after "
        "them, which needs slightly less memory.",
    )

    def alone(self) -> Sharding:
        """The same for one copy of the weights and whole rows, without anything of an update."""
        return Sharding(**{name: getattr(self, name) for name in WeightKeys.__dataclass_fields__}, replicas=1)

    def mistakes(self, size: GPTConfig, of_model: str, lengths: Iterable[tuple[str, int]] = ()) -> Mistakes:
        """The contradictions between these keys, and beside a model.

        Args:
          of_model: how a message names the model.
          lengths: of sequences that devices divide, each with its description.
        """
        if self.phases == "torus" and self.expert_shards > 1:
            yield "zero.phases", f"auto or flat, as zero.expert_shards={self.expert_shards}"
        yield from self._with_int8(["gather_dtype"])
        yield from self._uncut(size, of_model, lengths)
        yield from self._undivided(size, of_model)
        yield from self._unrounded(size, of_model)
        yield from self._unsent()

    def _with_int8(self, names: Collection[str]) -> Mistakes:
        """Of these keys, those of a dtype that is int8 where nothing is sent in blocks."""
        for name in (name for name in names if getattr(self, name) == "int8"):
            other = _WITHOUT_INT8[name]
            if self.stage == 0:
                yield f"zero.{name}", f"{other}, as zero.stage=0 sums whole gradients and gathers nothing"
            if self.expert_shards > 1:
                yield f"zero.{name}", f"{other}, as zero.expert_shards={self.expert_shards}"

    def _uncut(self, size: GPTConfig, of_model: str, lengths: Iterable[tuple[str, int]]) -> Mistakes:
        """The sizes that tensor groups cannot cut into equal parts."""
        cut = [
            (f"num_head={size.num_head} of {of_model}", size.num_head),
            (f"kv_heads={size.key_heads} of {of_model}", size.key_heads),
            (f"mlp_dim={size.mlp_width} of {of_model}", size.mlp_width),
        ]
        widths = {"dense_dim": size.dense_dim, "shared_dim": size.shared_dim}
        cut += [(f"{name}={width} of {of_model}", width) for name, width in widths.items() if width is not None]
        if size.layer == "gated_units":
            cut = [(f"twice embedding_dim={size.embedding_dim} of {of_model}", 2 * size.embedding_dim)]
        for description, count in (*cut, *lengths):
            if count % self.tensor_shards:
                yield "zero.tensor_shards", f"a divisor of {description}"

    def _undivided(self, size: GPTConfig, of_model: str) -> Mistakes:
        """The keys that do not fit expert groups."""
        if self.expert_shards == 1:
            return
        if size.experts is None:
            yield "zero.expert_shards", f"1, as {of_model} has no experts"
        elif size.experts % self.expert_shards:
            yield "zero.expert_shards", f"a divisor of experts={size.experts} of {of_model}"
        elif size.expert_capacity is None:
            why = "as devices exchange a fixed number of tokens"
            yield "zero.expert_shards", f"1, or a number as expert_capacity of {of_model}, {why}"
        if self.tensor_shards > 1:
            yield "zero.tensor_shards", f"1, as zero.expert_shards={self.expert_shards}"

    def _unrounded(self, size: GPTConfig, of_model: str) -> Mistakes:
        """The models whose products are not computed in another dtype than activations."""
        if self.product_dtype == "auto":
            return
        if size.layer == "gated_units":
            yield "zero.product_dtype", f"auto, as {of_model} has gated units"
        if size.experts is not None:
            yield "zero.product_dtype", f"auto, as {of_model} has experts"

    def _unsent(self) -> Mistakes:
        """The keys with which weights are not gathered as their products round them."""
        given = "zero.gather_dtype=products"
        if self.gather_dtype != "products":
            return
        if self.product_dtype not in EIGHT_BITS:
            why = f"as {given} sends weights as these products round them"
            yield "zero.product_dtype", f"one of {', '.join(EIGHT_BITS)}, {why}"
        if self.stage != 3:
            yield "zero.stage", f"3, as {given} rounds each layer that is gathered"
        if self.tensor_shards > 1:
            why = f"{given} gathers whole columns, of which a device of a tensor group has parts"
            yield "zero.tensor_shards", f"1, as {why}"


@dataclass
class Sharding(WeightKeys):
    """How the state of training lies on the devices, how gradients are summed, and what is stored."""

    wire_dtype: str = key(
        "auto",
        one_of("auto", *DTYPES, "int8"),
        "Dtype in which gradients are sent: float32, bfloat16, or int8 in blocks of 256 with a scale; they are summed "
        "in reduce_dtype.",
        "auto: float32; on TPUs before v6e, at stages 2 and 3 in slices where an all-to-all is fast, compute_dtype, "
        "in which gradients are computed.",
    )
    reduce_dtype: str = key(
        "float32", one_of(*DTYPES), "Dtype in which gradients are summed over devices: float32 or bfloat16."
    )
    gradient_dtype: str = key(
        "float32",
        one_of(*DTYPES),
        "Dtype of gradients held until the update: float32, or bfloat16 for half the memory.",
    )
    remat: str = key(
        "auto",
        one_of("auto", *REMAT),
        "What the forward pass stores so that the backward pass does not recompute it. auto: on CPU everything "
        "(none), on GPU full;",
        "on TPU at stage 3, the first that fits of mlp+attention (without a kernel), mlp, mlp_in and full, logged at "
        "the start;",
        "for rows of 4,096 or more positions, the first that fits of mlp+attention, mlp_in+attention, attention and "
        "full.",
        "none: everything; at stage 3 each layer is gathered once and kept for the backward pass.",
        "dots: the products with weights, and the output of attention.",
        "mlp: the input products of an MLP; mlp_in: the same without the gate's.",
        "projections: queries, keys, values and the output of attention; attention: only the output of its scores "
        "and values.",
        "mlp+attention, mlp_in+attention, mlp+projections, mlp_in+projections: both.",
        "full: only the inputs of layers, which all of the above store too.",
        "nested: only the inputs of spans of layers, at the cost of one more forward pass.",
    )
    offload: str = key(
        "none",
        one_of(*OFFLOADED),
        "What is kept in the host's memory: none, nothing.",
        "activations: everything that remat stores, between the forward and the backward pass, so that a device holds "
        "only about two layers of it; results are bit for bit the same.",
        "With remat=auto, on TPU at stage 3 without fused_update, each kind of activation is kept on the device, "
        "moved to the host or recomputed, by predicted seconds; logged at the start.",
        "optimizer: the optimizer state of layers, between their updates, so that a device holds only three spans of "
        "layers of it; requires zero.fused_update. both: activations and optimizer.",
    )
    fused_update: bool = key(
        False,
        None,
        "At stage 3, update each layer inside the backward pass: needs the least memory, cannot accumulate gradients, "
        "and clips and skips layer by layer.",
    )
    replicas: int | None = key(
        None,
        at_least(1),
        "Copies of the whole state, each sharded over a group of neighboring devices: gathers stay inside a group, "
        "and gradients are summed over all devices; null: one per TPU slice, so that only these sums leave a slice.",
        in_scores=True,
    )
    replica_wire_dtype: str = key(
        "auto",
        one_of("auto", "bfloat16", "int8"),
        "Dtype in which gradients are sent between copies of the state, once per update: auto, as they are summed; "
        "bfloat16; or int8 in blocks of 256 with a scale, for slices with a slow network between them.",
    )
    context_shards: int = key(
        1,
        at_least(1),
        "Context parallelism: neighboring devices share sequences, and each holds 1/context_shards of the positions "
        "and their activations.",
        in_scores=True,
    )

    def mistakes(self, size: GPTConfig, of_model: str, lengths: Iterable[tuple[str, int]] = ()) -> Mistakes:
        yield from super().mistakes(size, of_model, lengths)
        yield from self._stored(size, of_model)
        if self.phases == "torus" and (self.replicas or 1) > 1:
            yield "zero.phases", f"auto or flat, as zero.replicas={self.replicas}"
        yield from self._with_int8(["wire_dtype"])
        if self.replica_wire_dtype != "auto":
            if self.stage == 0:
                yield "zero.replica_wire_dtype", "auto, as zero.stage=0 sums whole gradients over all devices"
            if self.replicas == 1:
                yield "zero.replica_wire_dtype", "auto, as zero.replicas=1 is one copy of the state"
        if self.remat == "dots" and self.product_dtype in EIGHT_BITS:
            why = "stores the sums of products, which have 4 bytes"
            yield "zero.product_dtype", f"auto or bfloat16, as zero.remat=dots {why}"
        yield from self._in_context_groups(size, of_model, [length for _, length in lengths])
        if self.fused_update:
            yield from self._fused(size, of_model)

    def _stored(self, size: GPTConfig, of_model: str) -> Mistakes:
        offloaded = OFFLOADED[self.offload]
        if self.remat in STORED and size.layer == "gated_units":
            yield "zero.remat", f"dots, full or none, as {of_model} has gated units"
        if self.remat == "nested" and span_size(size.scanned_layers) == 1:
            yield "zero.remat", f"full, as the {size.scanned_layers} layers of {of_model} make no equal spans"
        if self.remat == "none" and "activations" in offloaded:
            why = f"zero.offload={self.offload} finds no names in what none stores"
            yield "zero.remat", f"full or another value, as {why}"
        if "optimizer" in offloaded and not self.fused_update:
            why = f"zero.offload={self.offload} moves the state of a span of layers at a time"
            yield "zero.fused_update", f"true, as {why}"

    def _in_context_groups(self, size: GPTConfig, of_model: str, lengths: Iterable[int]) -> Mistakes:
        if self.context_shards == 1:
            return
        if size.layer == "gated_units":
            yield "zero.context_shards", f"1, as {of_model} has gated units (docs/decisions/vq.md)"
        if self.tensor_shards > 1:
            yield "zero.context_shards", f"1, as zero.tensor_shards={self.tensor_shards}"
        if size.experts is not None:
            yield "zero.context_shards", f"1, as tokens are routed row by row in {of_model}"
        for length in lengths:
            if length % (2 * self.context_shards):
                yield "zero.context_shards", f"a divisor of half of the {length} tokens of a sequence"

    def _fused(self, size: GPTConfig, of_model: str) -> Mistakes:
        for collection in collections_of(size).values():
            why = f"{of_model} has {collection.words}, which an update of single layers cannot move"
            yield "zero.fused_update", f"false, as {why}"
        needed: dict[str, tuple[Any, list[Any]]] = {
            "stage": (self.stage, [3]),
            "remat": (self.remat, ["auto", "full", "nested"]),
        }
        for name, (value, choices) in needed.items():
            if value not in choices:
                possible = " or ".join(map(shown, choices))
                yield f"zero.{name}", f"{possible}, as zero.fused_update=true never holds the whole gradient"
        if self.master_dtype == "bfloat16" and self.gradient_dtype != "bfloat16":
            yield "zero.gradient_dtype", "bfloat16, the dtype of zero.master_dtype, as zero.fused_update=true"
