"""What a program gets that uses a sharded optimizer as it must not: the start of each message, and its remedy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, nnx
from jax import lax

import zero
from tests.partition.exact_training import lower, replicate

PARAMS: dict[str, Any] = {"w": np.ones((16, 5), np.float32), "b": np.ones(5, np.float32)}
TX = zero.shard_optimizer(optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adam)(0.5)), "batch")
PAIR: Any = hk.transform(lambda x: x)
REDUCED = zero.shard_optimizer(optax.sgd(0.5), "batch", reduction=None)
SEARCH = zero.shard_optimizer(optax.chain(optax.sgd(0.5), optax.scale_by_backtracking_linesearch(3)), "batch")
OF_SEARCH: Any = {"value": 1.0, "grad": PARAMS, "value_fn": lambda params: jnp.sum(params["w"])}
READING = r"zero.gather\(opt_state\) inside pmap and zero.to_host\(opt_state\) outside"
OTHER_DEVICES = r"zero.to_devices\(zero.to_host\(state\), like=state, devices=...\)"
CHECKPOINTS = r"save zero.to_host\(state\)"


@pytest.fixture(scope="module")
def state() -> Any:
    return zero.to_devices(TX.init(PARAMS))


def update(params: Any, state: Any, grads: Any) -> Any:
    return TX.update(zero.local(grads), state, params)


def step(state: Any, params: Any = PARAMS, grads: Any = PARAMS, axis_name: str = "batch") -> Any:
    return jax.pmap(update, axis_name).lower(replicate(params), state, replicate(grads))


def on_four_devices(state: Any) -> Any:
    return jax.pmap(update, "batch", devices=jax.devices()[:4]).lower(replicate(PARAMS), state, replicate(PARAMS))


def lower_with(**dtypes: Any) -> Any:
    tx = zero.shard_optimizer(optax.sgd(0.5), "batch", **dtypes)
    return lower(lambda p: tx.update(zero.local(p), tx.init(p), p), replicate(PARAMS))


def mapped(fn: Callable[[jax.Array], Any]) -> Callable[[Any], Any]:
    return partial(jax.tree.map, fn)


MISUSES: dict[str, tuple[Callable[[Any], Any], str]] = {
    # Of the state: taken apart.
    "one slice": (mapped(lambda x: x[0]), f"one device's slice .* {CHECKPOINTS}"),
    "unreplicate": (jax_utils.unreplicate, f"one device's slice .* {CHECKPOINTS}"),
    "slices of some devices": (mapped(lambda x: x[:4]), f"has the slices of 4 devices, .* {OTHER_DEVICES}"),
    "slices twice": (mapped(lambda x: jnp.concatenate([x, x])), f"has the slices of 16 devices, .* {OTHER_DEVICES}"),
    "average over devices": (mapped(lambda x: x.mean(0)), f"averages or casts the state .* {CHECKPOINTS}"),
    "pmean": (jax.pmap(lambda s: lax.pmean(s, "batch"), "batch"), f"averages or casts the state .* {CHECKPOINTS}"),
    "cast": (mapped(lambda x: x.astype(jnp.bfloat16)), f"averages or casts the state .* {CHECKPOINTS}"),
    "another order": (lambda s: zero.to_host(mapped(lambda x: x[::-1])(s)), "holds slice 7, not its own, 0"),
    # Of the state: read.
    "moments by name": (lambda s: s[1].inner_state[0].mu, f"no 'mu' that is whole: .* {READING}"),
    "moments by index": (lambda s: s[1].inner_state[0][1], rf"no \[1\] that is whole: .* {READING}"),
    "norm of the moments": (lambda s: optax.tree.norm(s[1].inner_state), f"computes with a part .* {READING}"),
    "assignment": (lambda s: s._replace(count=0), f"no '_replace': .* {READING}"),
    "gather outside": (zero.gather, r"zero.gather runs inside pmap; outside, zero.to_host\(opt_state\)"),
    # On other devices.
    "on other devices": (on_four_devices, "cannot select an axis to squeeze out"),  # jax's; the page has the remedy
    "other devices named": (
        lambda s: zero.to_host(s, devices=jax.devices()[:4]),
        f"has slices of 8 devices, but devices= names 4: .* {OTHER_DEVICES}",
    ),
    "sharded twice": (zero.to_devices, "sharded already: zero.to_devices takes the whole state"),
    "whole state replicated": (
        lambda s: step(replicate(TX.init(PARAMS))),
        r"is whole, .* zero.to_devices\(state\), in place of jax_utils.replicate\(state\)",
    ),
    "plain state": (
        lambda s: step(replicate(zero.to_host(s))),
        r"a ShardedState, got a tuple: .* zero.to_devices\(opt_state, like=...\)",
    ),
    # Of gradients and parameters.
    "gradients of fewer parameters": (
        lambda s: step(s, grads={"w": PARAMS["w"]}),
        "gradients are those of other parameters, .*: it lacks b",
    ),
    "gradients with other names": (
        lambda s: step(s, grads={"w": PARAMS["w"], "c": PARAMS["b"]}),
        "it lacks b; it has, unexpectedly, c. Differentiate by the tree that update gets as params",
    ),
    "gradients in a list": (
        lambda s: step(s, grads=[PARAMS["b"], PARAMS["w"]]),
        "it lacks b, w; it has, unexpectedly, 0",
    ),
    "gradients of examples": (
        lambda s: step(s, grads=replicate(PARAMS)),
        r"leaf b: the parameter has shape \(5,\), its gradient \(8, 5\)",
    ),
    "unmarked gradients": (
        lambda s: lower(lambda p, s: TX.update(p, s, p), replicate(PARAMS), s),
        r"leaf b: the gradient is an array.* zero\.local",
    ),
    "pmap without a name": (
        lambda s: jax.pmap(update).lower(replicate(PARAMS), s, replicate(PARAMS)),
        r"no axis 'batch' here: .* jax.pmap\(train_step, axis_name='batch'\)",
    ),
    "gradients in integers": (
        lambda s: step(s, grads={**PARAMS, "b": np.zeros(5, jax.dtypes.float0)}),
        "leaf b: its gradient is float0, .* or make this gradient None",
    ),
    "reduced gradients, marked": (
        lambda s: jax.pmap(lambda g: REDUCED.update(zero.local(g), REDUCED.init(g), g), "batch")(replicate(PARAMS)),
        r"marks gradients that are not reduced, .* leave reduction out, or pass lax.pmean\(grads, axis_name\)",
    ),
    "line search inside": (
        lambda s: jax.pmap(lambda p: SEARCH.update(zero.local(p), SEARCH.init(p), p, **OF_SEARCH), "batch")(
            replicate(PARAMS)
        ),
        r"value_fn is a function of whole .* Put a line search after .* optax.chain\(zero.shard_optimizer\(",
    ),
    "integers on the wire": (
        lambda s: lower_with(wire_dtype=np.uint8),
        "wire_dtype=uint8 would cut gradients to integers: pass a dtype of floats, or int8",
    ),
    "sums of integers": (
        lambda s: lower_with(reduce_dtype=np.int32),
        "reduce_dtype=int32 would cut gradients to integers: pass a dtype of floats",
    ),
    "another axis": (
        lambda s: step(s, axis_name="data"),
        r"no axis 'batch' here: .* jax.pmap\(train_step, axis_name='batch'\)",
    ),
    # Of what is restored.
    "state of other parameters": (
        lambda s: zero.to_devices(TX.init({"w": PARAMS["w"]}).state, like=s),
        "it lacks .*b",
    ),
    "parameters of another shape": (
        lambda s: zero.to_devices(zero.to_host(s), like=TX.init({**PARAMS, "b": np.ones(7, np.float32)})),
        r"leaf .*/mu/b: expected the whole float32\[7\], .* got float32\[5\]",
    ),
    "moments in another dtype": (
        lambda s: zero.to_devices(jax.tree.map(lambda x: x.astype(np.int16), zero.to_host(s)), like=s),
        "got int16",
    ),
    # Of what zero takes.
    "optax.adam itself": (
        lambda s: zero.shard_optimizer(optax.adam, "batch"),
        r"expected an optax transform, with init and update, got adam: call it first, adam\(...\)",
    ),
    "optax.lamb itself": (
        lambda s: zero.across_shards(optax.lamb),
        r"got lamb: call it first, lamb\(...\)",
    ),
    "a layer of NNX": (
        lambda s: zero.fully_shard(nnx.Linear(5, 3, rngs=nnx.Rngs(0)), zero.make_layout(PARAMS, 8), "batch"),
        r"got a Linear of flax.nnx: pass graph, params = nnx.split\(model\)",
    ),
    "a layer of Haiku": (
        lambda s: zero.fully_shard(hk.Linear, zero.make_layout(PARAMS, 8), "batch"),
        r"got the class Linear of haiku: pass hk.without_apply_rng\(hk.transform\(",
    ),
    "a module of Equinox": (
        lambda s: zero.fully_shard(eqx.nn.Linear(5, 3, key=jax.random.key(0)), zero.make_layout(PARAMS, 8), "batch"),
        r"of equinox: pass params, static = eqx.partition\(model, eqx.is_array\)",
    ),
    "a pair of functions": (
        lambda s: zero.fully_shard(PAIR, zero.make_layout(PARAMS, 8), "batch"),
        "flax.linen modules and functions of parameters, got a Transformed of haiku",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name: str, state: Any) -> None:
    use, message = MISUSES[name]
    with pytest.raises((AttributeError, RuntimeError, TypeError, ValueError), match=f"(?s){message}"):
        use(state)


def test_whole_parts_are_read_as_those_of_optax(state: Any) -> None:
    """Outside pmap as its stack, inside as one device's; unpacked, iterated over and counted like optax's tuples."""
    _, adam = state
    assert len(state) == 2 and len(adam) == len(list(adam)) == 4
    np.testing.assert_array_equal(state[1].hyperparams["learning_rate"], np.full(8, 0.5, np.float32))
    assert adam.count.shape == adam.inner_state[0].count.shape == (8,)

    def read(state: Any) -> Any:
        return state[1].hyperparams["learning_rate"] * 2 + state[-1].inner_state[0].count

    np.testing.assert_array_equal(jax.pmap(read, "batch")(state), np.ones(8))
    mesh = jax.make_mesh((8,), ("batch",))
    assert zero.to_devices(TX.init(PARAMS), devices=mesh)[1].count == 0
    on_one = zero.to_devices(TX.init(PARAMS), devices=jax.devices()[:1])
    assert on_one[1].inner_state[0].mu["w"].shape == (1, 16, 5)  # one device has the whole state


def test_gradients_may_leave_parameters_out(state: Any) -> None:
    """None and MaskedNode stand for leaves without a gradient."""
    tx = zero.shard_optimizer(optax.sgd(0.5), "batch")
    for absent in (None, optax.MaskedNode()):
        lower(lambda p, absent=absent: tx.update(zero.local({**p, "b": absent}), tx.init(p), p), replicate(PARAMS))
