"""The dtypes in which weights and gradients are held, sent and multiplied: keys of section `zero`."""

from __future__ import annotations

from dataclasses import dataclass

from zero.config.constraints import DTYPES, one_of
from zero.config.keys import Mistakes, key
from zero.models.config import GPTConfig
from zero.models.products import PRODUCTS


@dataclass(frozen=True)
class WeightDtypes:
    """Dtypes of weights: the keys that inference reads."""

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

    def product_mistakes(self, size: GPTConfig, of_model: str) -> Mistakes:
        """Models whose products cannot use another dtype than their activations."""
        if self.product_dtype == "auto":
            return
        if size.layer == "gated_units":
            yield "zero.product_dtype", f"auto, as {of_model} has gated units"
        if size.experts is not None:
            yield "zero.product_dtype", f"auto, as {of_model} has experts"


@dataclass(frozen=True)
class GradientDtypes:
    """Dtypes of gradients."""

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
