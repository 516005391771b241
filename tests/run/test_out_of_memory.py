"""What is said when a device runs out of memory."""

import jax
import jax.numpy as jnp
import pytest

from zero.base.errors import UserError
from zero.run.out_of_memory import GIB, named_out_of_memory

pytestmark = pytest.mark.quick


def test_the_program_and_its_state_are_named() -> None:
    allocates_too_much = jax.jit(lambda: jnp.zeros(2**46, jnp.int8))
    expected = (
        r"out of memory: the step does not fit .* the state takes 2\.00 \(RESOURCE_EXHAUSTED: .*zero\.remat=nested"
    )
    with pytest.raises(UserError, match=expected), named_out_of_memory("the step", 2 * GIB):
        allocates_too_much().block_until_ready()


def test_other_errors_pass() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), named_out_of_memory("the step", GIB):
        raise jax.errors.JaxRuntimeError("INTERNAL: a fault of another kind")
