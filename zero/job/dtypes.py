"""The dtypes in which weights and gradients are held, sent and multiplied: keys of section `zero`."""

from __future__ import annotations

from dataclasses import dataclass

from zero.base.keys import DTYPES, Mistakes, key, one_of
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
        "Dtype of the operands of matrix products with the weights of attention and MLP. auto: compute_dtype.",
        "int8, int8_all, float8: rounded, with a scale per row and per column. With int8 the gradient of the weights "
        "is still computed in compute_dtype; with int8_all in int8, with a scale per channel over the positions of a "
        "device.",
        in_scores=True,
    )
    gather_dtype: str = key(
        "auto",
        one_of("auto", "int8", "products"),
        "Dtype in which parameters are gathered. auto: the narrower of compute_dtype and master_dtype. int8: in blocks "
        "of 256 with a scale.",
        "products: rounded to product_dtype before they are gathered instead of after, with the same results; needs "
        "stage 3 and a product_dtype of 8 bits.",
        in_scores=True,
    )
    master_dtype: str = key(
        "float32",
        one_of(*DTYPES),
        "Dtype of the weights between steps: float32, or bfloat16 with stochastic rounding for half the memory; norms "
        "and biases stay float32.",
        in_scores=True,
    )

    def product_mistakes(self, model_config: GPTConfig, model_label: str) -> Mistakes:
        """Models whose products cannot use another dtype than their activations."""
        if self.product_dtype == "auto":
            return
        if model_config.alone is not None:
            yield "zero.product_dtype", f"auto, as {model_label} has {model_config.alone.noun}"
        if model_config.experts is not None:
            yield "zero.product_dtype", f"auto, as {model_label} has experts"


@dataclass(frozen=True)
class GradientDtypes:
    """Dtypes of gradients."""

    wire_dtype: str = key(
        "auto",
        one_of("auto", *DTYPES, "int8"),
        "Dtype in which gradients are sent: float32, bfloat16, or int8 in blocks of 256 with a scale; they are summed "
        "in reduce_dtype.",
        "auto: float32; compute_dtype, in which gradients are computed, on TPUs before v6e at stages 2 and 3, in "
        "slices where an all-to-all is fast.",
    )
    reduce_dtype: str = key(
        "float32", one_of(*DTYPES), "Dtype in which gradients are summed over devices: float32 or bfloat16."
    )
    gradient_dtype: str = key(
        "float32",
        one_of(*DTYPES),
        "Dtype of gradients held until the update: float32, or bfloat16 for half the memory.",
    )
