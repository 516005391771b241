"""The messages that docs/how-to/pmap-programs.md lists, each from the program that it names."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import zero
from tests.partition.exact_training import replicate

PAGE = Path(__file__).parents[2] / "docs/how-to/pmap-programs.md"
TX = zero.shard_optimizer(optax.inject_hyperparams(optax.adam)(0.5), "batch")
CLIPPED = zero.shard_optimizer(optax.clip_by_global_norm(1.0), "batch")


def make_params() -> Any:
    return {"w": np.ones((8, 5), np.float32)}


def create_state() -> Any:
    return {"params": make_params(), "opt_state": TX.init(make_params())}


def step(state: Any, mark: Callable[[Any], Any] = zero.local) -> Any:
    updates, opt_state = TX.update(mark(state["params"]), state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}


def update_sgd(rows: int) -> Any:
    """No leaf of its state is a scalar; all have a first dimension of so many rows."""
    tx, params = zero.shard_optimizer(optax.sgd(0.1, momentum=0.5), "batch"), {"w": np.ones((rows, 5), np.float32)}
    return jax.pmap(lambda p, s: tx.update(zero.local(p), s, p), "batch")(replicate(params), tx.init(params))


def without_containers(state: Any) -> Any:
    """As Orbax restores it without a target: dicts by name."""
    whole = zero.to_host(zero.to_devices(state))
    return {"params": whole["params"], "opt_state": whole["opt_state"]._asdict()}


def on_four_devices() -> Any:
    return jax.pmap(step, "batch", devices=jax.devices()[:4])(zero.to_devices(create_state()))


CAUSES: dict[str, Callable[[], Any]] = {
    "tuple index out of range": lambda: jax.pmap(step, "batch")(create_state()),
    "implies that array axis 0 is partitioned": lambda: update_sgd(13),
    "this state of a sharded optimizer is whole": lambda: update_sgd(8),
    "the state has the same leaves in other containers": lambda: zero.to_devices(
        without_containers(create_state()), like=create_state()
    ),
    "expected the state of a sharded optimizer, a ShardedState, got": lambda: jax.pmap(step, "batch")(
        zero.to_devices(without_containers(create_state()))
    ),
    "the gradient is an array": lambda: jax.pmap(lambda s: step(s, lambda g: g), "batch")(
        zero.to_devices(create_state())
    ),
    "is not element-wise": lambda: jax.pmap(lambda p: CLIPPED.update(zero.local(p), CLIPPED.init(p), p), "batch")(
        replicate(make_params())
    ),
    "cannot select an axis to squeeze out": on_four_devices,
    "this takes one device's slice": lambda: jax.tree.map(lambda x: x[0], zero.to_devices(create_state())),
}


def test_messages_of_the_page() -> None:
    rows = PAGE.read_text().partition("## Messages")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(.*?)`", rows, re.MULTILINE) == [*CAUSES]
    for message, cause in CAUSES.items():
        with pytest.raises((IndexError, TypeError, ValueError), match=re.escape(message)):
            cause()


def test_state_that_orbax_restores(tmp_path: Path) -> None:
    """Without a target it is dicts and lists, which the message names; with the whole state as a target it trains."""
    state = zero.to_devices(create_state())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", zero.to_host(state))
        checkpointer.wait_until_finished()
        plain, restored = (checkpointer.restore(tmp_path / "saved", *target) for target in ([], [create_state()]))
    with pytest.raises(ValueError, match=r"that Orbax restores without a target: .*restore\(path, create_state\(\)\)"):
        zero.to_devices(plain, like=state)
    again = zero.to_devices(restored)
    jax.tree.map(np.testing.assert_array_equal, zero.to_host(again), zero.to_host(state))
    structure: Any = jax.tree.structure(again)
    assert structure == jax.tree.structure(state)


@pytest.mark.parametrize("rate", [jnp.full(8, 0.25), np.full(8, 0.25)])
def test_rate_that_is_set_between_steps(rate: Any) -> None:
    """It is saved as it is, like one that an update has taken; one that differs between devices is named."""
    state = optax.tree.set(zero.to_devices(create_state()), learning_rate=rate)
    assert zero.to_host(state)["opt_state"].hyperparams["learning_rate"] == np.float32(0.25)
    differs = optax.tree.set(state, learning_rate=rate + np.arange(8))
    with pytest.raises(ValueError, match=r"differ between .*: hyperparams/learning_rate"):
        zero.to_host(differs)


@pytest.mark.parametrize("rate", [0.25, np.float64(0.25), jnp.float32(0.25)])
def test_rate_that_is_set_under_shard_map(rate: Any) -> None:
    mesh = jax.make_mesh((8,), ("batch",))
    state = optax.tree.set(zero.to_devices(create_state(), devices=mesh), learning_rate=rate)
    found = zero.to_host(state)["opt_state"].hyperparams["learning_rate"]
    assert found == 0.25 and found.dtype == np.float32
