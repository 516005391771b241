"""Where the guard of a sharded state ends: in containers of other libraries (docs/how-to/pmap-programs.md)."""

from pathlib import Path
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import numpy as np
import optax
import pytest
from flax import nnx, serialization

import zero

ADAM = optax.adam(2.0**-4)
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "pmap-programs.md"
DISSOLVED = r"this was the state .* zero.to_host\(nnx.merge\(graph, arrays\)\)"
GUARD = r"one device's slice .* zero.to_host\(state\)"


def first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def placed(params: Any) -> Any:
    return zero.to_devices(zero.shard_optimizer(ADAM, "batch").init(params))


def equinox_params() -> Any:
    return eqx.filter(eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0)), eqx.is_array)


def haiku_params() -> Any:
    model: Any = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 8])(x)))
    return model.init(jax.random.PRNGKey(0), np.ones((1, 8), np.float32))


@pytest.mark.parametrize("params", [equinox_params, haiku_params])
def test_states_of_other_libraries_are_guarded(params: Any) -> None:
    """A slice of the state of parameters of Equinox and Haiku is refused, and the whole state is that of optax."""
    whole = params()
    state = placed(whole)
    with pytest.raises(ValueError, match=GUARD):
        first(state)
    saved = zero.to_host(state)
    assert structure(saved) == structure(ADAM.init(whole))


def test_what_equinox_does_to_the_state() -> None:
    state = placed(equinox_params())
    for keeps in (
        lambda s: eqx.filter(s, eqx.is_array),
        lambda s: eqx.combine(*eqx.partition(s, eqx.is_inexact_array)),
    ):
        assert structure(keeps(state)) == structure(state)
        with pytest.raises(ValueError, match=GUARD):
            first(keeps(state))
    floats, _ = eqx.partition(state, eqx.is_inexact_array)  # the numbers of the slices are in the other part
    assert len(jax.tree.leaves(first(floats))) == len(jax.tree.leaves(floats))


def test_where_the_guard_ends() -> None:
    """What takes the container apart takes the guard with it, as the page says of each."""
    text = PAGE.read_text().partition("## What never to do")[2]
    state = placed({"w": np.ones((16, 3), np.float32)})
    model = nnx.Linear(16, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, zero.shard_optimizer(ADAM, "batch"), wrt=nnx.Param)
    ends = {
        "nnx.split": lambda: nnx.split(zero.to_devices((model, optimizer)))[1],
        "nnx.state": lambda: nnx.state(zero.to_devices((model, optimizer))),
        "flax.serialization.to_state_dict": lambda: serialization.to_state_dict(state),
        "jax.tree.leaves": lambda: jax.tree.leaves(state),
        "eqx.partition": lambda: eqx.partition(state, eqx.is_inexact_array)[0],
        "opt_state.slices": lambda: state.slices,
        "optax.tree.get": lambda: optax.tree.get(state, "mu"),
    }
    # These leave plain arrays that nothing can be known by.
    unknown = {"jax.tree.leaves", "eqx.partition", "opt_state.slices", "optax.tree.get"}
    for name, dissolve in ends.items():
        assert f"`{name}" in text, name
        first(dissolve())
        if name not in unknown:
            for convert in (zero.to_host, zero.to_devices):
                with pytest.raises(ValueError, match=DISSOLVED):
                    convert(dissolve())
