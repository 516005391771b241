"""Section `zero`: the keys of devices, dtypes and memory together, and the rules between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from zero.base.keys import Mistakes
from zero.job.devices import DeviceKeys, GroupKeys
from zero.job.dtypes import GradientDtypes, WeightDtypes
from zero.job.memory import RematKeys
from zero.models.config import GPTConfig
from zero.models.products import EIGHT_BITS

_WITHOUT_INT8 = {"wire_dtype": "auto, float32 or bfloat16", "gather_dtype": "auto"}


@dataclass(frozen=True)
class WeightKeys(GroupKeys, WeightDtypes):
    """How weights are placed on the devices and multiplied: the keys that inference reads."""

    def alone(self) -> Sharding:
        """The same for one copy of the weights and whole rows, without the keys of updates."""
        return Sharding(**{name: getattr(self, name) for name in WeightKeys.__dataclass_fields__}, replicas=1)

    def mistakes(self, model_config: GPTConfig, model_label: str, lengths: Iterable[tuple[str, int]] = ()) -> Mistakes:
        """Contradictions between these keys, and with a model.

        Args:
          model_label: the model's name in messages.
          lengths: the sequence lengths that devices divide, each with a description.
        """
        yield from self.group_mistakes(model_config, model_label, lengths)
        yield from self.product_mistakes(model_config, model_label)
        yield from self._with_int8(["gather_dtype"])
        yield from self._unsent()

    def _with_int8(self, names: Collection[str]) -> Mistakes:
        """The keys that set int8 although nothing is sent in blocks."""
        for name in (name for name in names if getattr(self, name) == "int8"):
            alternative = _WITHOUT_INT8[name]
            if self.stage == 0:
                yield f"zero.{name}", f"{alternative}, as zero.stage=0 sums whole gradients and gathers nothing"
            if self.expert_shards > 1:
                yield f"zero.{name}", f"{alternative}, as zero.expert_shards={self.expert_shards}"

    def _unsent(self) -> Mistakes:
        """The keys that prevent gathering weights as their products round them."""
        setting = "zero.gather_dtype=products"
        if self.gather_dtype != "products":
            return
        if self.product_dtype not in EIGHT_BITS:
            why = f"as {setting} sends weights as these products round them"
            yield "zero.product_dtype", f"one of {', '.join(EIGHT_BITS)}, {why}"
        if self.stage != 3:
            yield "zero.stage", f"3, as {setting} rounds each layer that is gathered"
        if self.tensor_shards > 1:
            why = f"{setting} gathers whole columns, of which a device of a tensor group has parts"
            yield "zero.tensor_shards", f"1, as {why}"


@dataclass(frozen=True)
class Sharding(WeightKeys, DeviceKeys, GradientDtypes, RematKeys):
    """How training state is placed on the devices, how gradients are summed, and what is stored."""

    def mistakes(self, model_config: GPTConfig, model_label: str, lengths: Iterable[tuple[str, int]] = ()) -> Mistakes:
        yield from super().mistakes(model_config, model_label, lengths)
        yield from self.copy_mistakes()
        yield from self.context_mistakes(model_config, model_label, [length for _, length in lengths])
        yield from self.memory_mistakes(model_config, model_label)
        yield from self._with_int8(["wire_dtype"])
        if self.remat == "dots" and self.product_dtype in EIGHT_BITS:
            why = "stores the sums of products, which have 4 bytes"
            yield "zero.product_dtype", f"auto or bfloat16, as zero.remat=dots {why}"
        if not self.fused_update:
            return
        if self.stage != 3:
            yield "zero.stage", "3, as zero.fused_update=true never holds the whole gradient"
        if self.gradient_dtype != self.master_dtype:
            why = "the dtype of zero.master_dtype, as zero.fused_update=true never holds the whole gradient"
            yield "zero.gradient_dtype", f"{self.master_dtype}, {why}"
