"""Products with the weights of a layer in 8 bits: what `zero.product_dtype` chooses.

A product contracts a row of inputs with a column of weights. Each row and each column is divided by its largest
magnitude before it is rounded, and the sum is multiplied by both again, so that a large value makes only its own row
or column coarse. A gradient with respect to the inputs contracts the other dimension of the weights: their scales are
multiplied into the gradient of the outputs first, and the weights that the forward pass has rounded are used again.
The gradient of the weights sums over positions, where the rows of one device would share a scale, and is computed
in the dtype of the inputs with "int8": so it does not depend on how rows are divided over devices. With "int8_all" the
numbers of the inputs are used again as well: the scale of a position is multiplied into the gradient of the outputs,
which is rounded once more, with a scale per output over the positions of the device.

Weights may come rounded, from a gather in 8 bits (`RoundedWeight`).

Sources: SwitchBack (Wortsman et al., arXiv 2304.13013), section 2: the gradient of weights in 16 bits; AQT
(Abdolrashidi et al., arXiv 2105.03536): scales per row and per column; FP8 Formats for Deep Learning (Micikevicius et
al., arXiv 2209.05433): E4M3 for values, E5M2 for gradients. What was compared: docs/decisions/narrow-numbers.md.

Shapes are named by suffix:
  B rows, T positions of a row, X inputs and F outputs of a product, each of one or two dimensions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from zero.models.elements import Product, contraction
from zero.partition.model_parallel import RoundedWeight

_SMALLEST = 1e-30  # rows whose largest magnitude is below have no finite reciprocal of a scale in float32


class Form(NamedTuple):
    """Numbers of 8 bits.

    Attributes:
      dtype: of the numbers.
      largest: the largest of them.
      sums: the dtype in which their products are summed.
    """

    dtype: DTypeLike
    largest: float
    sums: DTypeLike

    def numbers(self, x: jax.Array, largest: jax.Array) -> jax.Array:
        """`x` in this form, from the largest magnitude of each line, float32 with size 1 along the line."""
        numbers = x.astype(jnp.float32) * (self.largest / jnp.maximum(largest, _SMALLEST))
        return (jnp.round(numbers) if jnp.issubdtype(self.dtype, jnp.integer) else numbers).astype(self.dtype)

    def scales(self, largest: jax.Array) -> jax.Array:
        """What the numbers are multiplied by."""
        return jnp.maximum(largest, _SMALLEST) / self.largest


INT8 = Form(jnp.int8, 127, jnp.int32)
E4M3 = Form(jnp.float8_e4m3fn, 448, jnp.float32)
E5M2 = Form(jnp.float8_e5m2, 57344, jnp.float32)


class Forms(NamedTuple):
    """The numbers of the three products of a layer's weights.

    Attributes:
      values: inputs and weights, in the forward pass; weights also for the gradient of the inputs.
      to_inputs: the outputs' gradient, where it is contracted with weights.
      to_weights: inputs and the outputs' gradient, where they are contracted with each other; None: not rounded, and
        None for inputs: as the forward pass has rounded them.
    """

    values: Form
    to_inputs: Form
    to_weights: tuple[Form | None, Form] | None


OF_INT8 = Forms(INT8, INT8, None)
ALL_OF_INT8 = Forms(INT8, INT8, (None, INT8))
OF_FLOAT8 = Forms(E4M3, E5M2, (E4M3, E5M2))
# By the key zero.product_dtype.
FORMS: Mapping[str, Forms] = MappingProxyType({"int8": OF_INT8, "int8_all": ALL_OF_INT8, "float8": OF_FLOAT8})


def quantized(x: jax.Array, form: Form, dims: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """`x` as numbers of a form, and their scales, float32 with size 1 in `dims`: their product is about `x`.

    A magnitude that is not finite makes the scale so, and with it every sum of its row: the step is skipped.

    >>> numbers, scales = quantized(jnp.asarray([[-1.0, 0.25], [0.0, 0.0]]), INT8, (1,))
    >>> numbers.tolist(), [round(scale * 127, 3) for scale in scales[:, 0].tolist()]
    ([[-127, 32], [0, 0]], [1.0, 0.0])
    """
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=tuple(dims), keepdims=True)
    return form.numbers(x, largest), form.scales(largest)


def quantized_product(forms: Forms, x_BTX: jax.Array, w_XF: jax.Array | RoundedWeight) -> jax.Array:
    """Like `contraction`, in 8-bit numbers; the result has the dtype of `x_BTX`.

    Args:
      w_XF: the weight, or as it is gathered in 8 bits.

    Raises:
      ValueError: the sum of a row could leave the range of int32.

    >>> x, w = jnp.asarray([[[1.0, -0.5]]]), jnp.asarray([[0.5], [1.0]])
    >>> round(float(quantized_product(OF_INT8, x, w)[0, 0, 0]), 3)
    0.0
    """
    if isinstance(w_XF, RoundedWeight):
        return _product(forms, x_BTX, *w_XF)
    w, w_scale = quantized(lax.stop_gradient(w_XF), forms.values, range(x_BTX.ndim - 2))
    return _product(forms, x_BTX, w_XF, w, w_scale)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(forms: Forms, x_BTX: jax.Array, flow_XF: jax.Array, w: jax.Array, w_scale: jax.Array) -> jax.Array:
    """The product with the numbers of a weight, whose gradient flows to `flow_XF`."""
    return _forward(forms, x_BTX, flow_XF, w, w_scale)[0]


def _forward(
    forms: Forms, x_BTX: jax.Array, flow_XF: jax.Array, w: jax.Array, w_scale: jax.Array
) -> tuple[jax.Array, Any]:
    inputs = x_BTX.ndim - 2
    x, x_scale = quantized(x_BTX, forms.values, range(2, x_BTX.ndim))
    sums_BTF = _contracted(forms.values, x, w, range(2, x.ndim), range(inputs))
    row_scale = x_scale.reshape(*x_BTX.shape[:2], *(1,) * (w.ndim - inputs))
    column_scale = w_scale.reshape(1, 1, *w.shape[inputs:])
    y_BTF = (sums_BTF * row_scale * column_scale).astype(x_BTX.dtype)
    uses_again = forms.to_weights is not None and forms.to_weights[0] is None
    return y_BTF, ((x, x_scale) if uses_again else (x_BTX, None), w, w_scale)


def _backward(forms: Forms, saved: Any, grad_BTF: jax.Array) -> tuple[jax.Array | None, ...]:
    (x_BTX, x_scale), w, w_scale = saved
    inputs = x_BTX.ndim - 2
    features = range(2, grad_BTF.ndim)
    scaled_BTF = grad_BTF.astype(jnp.float32) * w_scale.reshape(1, 1, *w.shape[inputs:])
    grad, grad_scale = quantized(scaled_BTF, forms.to_inputs, features)
    sums_BTX = _contracted(forms.to_inputs, grad, w, features, range(inputs, w.ndim))
    row_scale = grad_scale.reshape(*x_BTX.shape[:2], *(1,) * inputs)
    to_inputs = (sums_BTX * row_scale).astype(grad_BTF.dtype)
    return to_inputs, _to_weights(forms.to_weights, x_BTX, x_scale, grad_BTF), None, None


def _to_weights(
    forms: tuple[Form | None, Form] | None, x_BTX: jax.Array, x_scale: jax.Array | None, grad_BTF: jax.Array
) -> jax.Array:
    """The gradient of the weights, `(X, F)`, from inputs, or from their numbers and the scales of positions."""
    if forms is None:
        return jnp.tensordot(x_BTX, grad_BTF, ((0, 1), (0, 1)))
    x_form, grad_form = forms
    if x_form is None:
        assert x_scale is not None
        # Inputs have a scale per position, and the sum is over positions: so the gradient is multiplied by the scales.
        position_scale = x_scale.reshape(*x_scale.shape[:2], *(1,) * (grad_BTF.ndim - 2))
        grad, grad_scale = quantized(grad_BTF.astype(jnp.float32) * position_scale, grad_form, (0, 1))
        sums_XF = _over_positions(grad_form, x_BTX, grad)
    else:
        x, x_scale = quantized(x_BTX, x_form, (0, 1))
        grad, grad_scale = quantized(grad_BTF, grad_form, (0, 1))
        row_scale = x_scale.reshape(*x.shape[2:], *(1,) * (grad.ndim - 2))
        sums_XF = _contracted(grad_form, x, grad, (0, 1), (0, 1)) * row_scale
    column_scale = grad_scale.reshape(*(1,) * (x_BTX.ndim - 2), *grad.shape[2:])
    return (sums_XF * column_scale).astype(grad_BTF.dtype)


def _over_positions(form: Form, x_BTX: jax.Array, grad_BTF: jax.Array) -> jax.Array:
    """Numbers contracted over the positions of all rows, float32 `(X, F)`.

    XLA for TPU multiplies int8 twice as fast as bfloat16 only where the contracted dimension of the first operand is
    the last one in memory, and does not move it there by itself.
    """
    x_XN = jnp.moveaxis(lax.collapse(x_BTX, 0, 2), 0, -1)
    x_XN = lax.optimization_barrier(with_layout_constraint(x_XN, Layout(tuple(range(x_XN.ndim)))))
    grad_NF = lax.collapse(grad_BTF, 0, 2)
    positions = len(grad_NF)
    most = _most_products(form) or positions
    pieces = [slice(start, start + most) for start in range(0, positions, most)]
    sums_XF = [_contracted(form, x_XN[..., piece], grad_NF[piece], (x_XN.ndim - 1,), (0,)) for piece in pieces]
    return reduce(jnp.add, sums_XF)


_product.defvjp(_forward, _backward)


def _contracted(form: Form, x: jax.Array, y: jax.Array, x_dims: Sequence[int], y_dims: Sequence[int]) -> jax.Array:
    """Sums over these dimensions, float32."""
    count = 1
    for dim in x_dims:
        count *= x.shape[dim]
    most = _most_products(form)
    if most is not None and count > most:
        raise ValueError(f"the sum of {count} products of int8 can leave the range of int32")
    numbers = ((tuple(x_dims), tuple(y_dims)), ((), ()))
    return lax.dot_general(x, y, numbers, preferred_element_type=form.sums).astype(jnp.float32)


def _most_products(form: Form) -> int | None:
    """How many products of largest numbers the dtype of sums holds, None for floats: 133,144 of int8 in int32."""
    if not jnp.issubdtype(form.sums, jnp.integer):
        return None
    return int(jnp.iinfo(form.sums).max // form.largest**2)


def in_bfloat16(x_BTX: jax.Array, w_XF: jax.Array) -> jax.Array:
    """Like `contraction`, of operands that are rounded to bfloat16."""
    return contraction(x_BTX.astype(jnp.bfloat16), w_XF.astype(jnp.bfloat16)).astype(x_BTX.dtype)


# By the key zero.product_dtype; "auto" is the dtype of activations.
PRODUCTS: Mapping[str, Product] = MappingProxyType(
    {
        "auto": contraction,
        "bfloat16": in_bfloat16,
        **{name: partial(quantized_product, forms) for name, forms in FORMS.items()},
    }
)
EIGHT_BITS = tuple(FORMS)
