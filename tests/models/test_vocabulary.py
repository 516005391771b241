"""What the chunks of a vocabulary compute, read from traced programs, and what a frequent token learns."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.equations import equations
from zero.models.config import GPTConfig
from zero.models.gpt import GPT
from zero.models.vocabulary import rows_of

pytestmark = pytest.mark.quick

ROWS, POSITIONS, CHUNKS, TOKENS, WIDTH = 3, 16, 4, 64, 32  # tokens per chunk
LOGITS = (ROWS, POSITIONS, TOKENS)
TABLE = (TOKENS, WIDTH)


def gradient(config: GPTConfig, **options: Any) -> list[Any]:
    """The equations of loss and gradient in bfloat16."""
    model = GPT(config, jnp.bfloat16, **options)
    tokens = jnp.zeros((ROWS, POSITIONS), jnp.int32)
    parameters = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, None, method="hidden"))
    parameters = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), parameters)
    loss = jax.value_and_grad(lambda parameters: jnp.mean(jnp.asarray(model.apply(parameters, tokens, tokens))))
    return list(equations(jax.make_jaxpr(loss)(parameters).jaxpr))


def count(program: list[Any], name: str, shape: tuple[int, ...]) -> int:
    """How often an operation has an operand of this shape."""
    return sum(equation.primitive.name == name and equation.invars[0].aval.shape == shape for equation in program)


@pytest.mark.parametrize("padding", [0, 3])
def test_backward_pass_sums_no_exponentials(padding: int) -> None:
    program = gradient(GPTConfig(WIDTH, CHUNKS * TOKENS - padding, 2, POSITIONS, 0.0, 1, vocab_chunks=CHUNKS))
    assert count(program, "exp", LOGITS) == 2  # of the forward pass, and of the gradient
    assert count(program, "reduce_max", LOGITS) == 1
    assert count(program, "reduce_sum", LOGITS) == 2  # of exponentials, and the logit of the target


def test_chunks_at_once() -> None:
    """Loops over the vocabulary, of the embedding and of the loss, have that many chunks in an iteration."""
    config = GPTConfig(WIDTH, CHUNKS * TOKENS, 2, POSITIONS, 0.0, 1, vocab_chunks=CHUNKS)
    program = gradient(config, chunks_at_once=2)
    loops = [e.params["unroll"] for e in program if e.primitive.name == "scan" and e.params["length"] == CHUNKS]
    assert loops and set(loops) == {2}


def test_no_table_is_converted() -> None:
    program = gradient(GPTConfig(WIDTH, CHUNKS * TOKENS, 2, POSITIONS, 0.0, 1, vocab_chunks=CHUNKS))
    converted = [e for e in program if e.primitive.name == "convert_element_type" and e.invars[0].aval.shape == TABLE]
    assert all(e.params["new_dtype"] == jnp.bfloat16 for e in converted)  # gradients alone, which are sums in float32


def test_gradient_of_a_frequent_token() -> None:
    """In bfloat16 a sum of ones would end at 256."""
    row_BT = jnp.array([[1] * 999 + [0, 7, -2]])
    table_CD = jnp.ones((3, 2), jnp.bfloat16)
    out_BTD, backward = jax.vjp(rows_of, table_CD, row_BT)
    (gradient_CD, _) = backward(jnp.ones_like(out_BTD))
    assert gradient_CD.dtype == jnp.bfloat16
    assert np.asarray(gradient_CD, np.float32).tolist() == [[2, 2], [1000, 1000], [1, 1]]  # 999, as bfloat16 has it


def test_gradient_of_logits_is_multiplied_in_the_compute_dtype() -> None:
    program = gradient(GPTConfig(WIDTH, CHUNKS * TOKENS, 2, POSITIONS, 0.0, 1, vocab_chunks=CHUNKS))
    products = [e for e in program if e.primitive.name == "dot_general" and LOGITS in [x.aval.shape for x in e.invars]]
    assert len(products) == 2
    assert {operand.aval.dtype for product in products for operand in product.invars} == {jnp.dtype(jnp.bfloat16)}
