"""Every transform of the installed optax on shards: equal to the unsharded one, or refused. None is silently wrong.

The table (tests/helpers/optax_transforms.py) is made by looking into optax, so that a new transform is
tested the day it appears; one whose arguments are not known there fails until they are.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero
from tests.helpers.optax_transforms import PARAMS, TRANSFORMS, UNUSABLE, make_tree

STEPS = 10

# Exact on shards, element by element, and so accepted as they are; whatever else is accepted must be equal too.
MUST_PASS = """
adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad lion nadam nadamw radam rmsprop rprop sgd
sign_sgd signum yogi optimistic_adam_v2 MultiSteps chain inject_hyperparams masked multi_transform
scale_by_schedule keep_params_nonnegative contrib.adopt contrib.ademamix contrib.schedule_free_adamw
contrib.madgrad contrib.cocob
"""
MUST_REFUSE = """
adafactor apply_if_finite centralize clip_by_block_rms clip_by_global_norm flatten fromage lamb lars noisy_sgd
novograd sm3 adaptive_grad_clip normalize_by_update_norm contrib.muon contrib.prodigy contrib.dadapt_adamw
contrib.galore contrib.dog contrib.dowg contrib.momo scale_by_param_block_norm add_noise adagrad,clip
"""
# Compared in every run; test_sharded_optimizer.py compares AdamW, LAMB and MultiSteps, test_whole_state.py Lion. The
# others are slow together: `pytest -m slow tests/partition/test_sharded_optimizer_of_optax.py`.
QUICK = """
adamw lion MultiSteps multi_transform lamb adafactor contrib.muon adagrad,clip apply_if_finite flatten sm3
noisy_sgd contrib.prodigy
"""
WIDE = "adamw lion MultiSteps lamb contrib.muon contrib.prodigy multi_transform flatten apply_if_finite"


@cache
def local_grads(devices: int) -> Any:
    """Per leaf `(devices, steps, ...)`, each a multiple of the number of devices."""
    rng = np.random.default_rng(1)
    rows = [[make_tree(rng, devices / 8) for _ in range(STEPS)] for _ in range(devices)]
    stack = lambda *xs: np.stack(xs)  # noqa: E731
    return jax.tree.map(stack, *[jax.tree.map(stack, *row) for row in rows])


def train(
    tx: optax.GradientTransformation,
    grads: Any,
    params: Any,
    *,
    with_value: bool,
    mark: Callable[[Any], Any] = lambda g: g,
) -> Any:
    """Ten steps from one start: `(steps, ...)` gradients in, parameters out."""
    tx = optax.with_extra_args_support(tx)

    def step(carry: Any, g: Any) -> Any:
        params, state = carry
        extra = {"value": sum(jnp.sum(p) for p in jax.tree.leaves(params))} if with_value else {}
        updates, state = tx.update(mark(g), state, params, **extra)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, tx.init(params)), grads)[0][0]


@cache
def is_accepted(name: str) -> bool:
    """Whether init and update may be traced on eight devices; nothing is compiled."""
    sharded = zero.shard_optimizer(TRANSFORMS[name](), "batch")
    one_step = jax.tree.map(lambda g: g[0, :1], local_grads(8))
    run = partial(train, sharded, with_value=name != "contrib.sam", mark=zero.local)
    try:
        jax.make_jaxpr(run, axis_env=[("batch", 8)])(one_step, PARAMS)
    except zero.NotElementwiseError as error:
        assert "zero.across_shards" in str(error) or "leave optax.flatten out" in str(error)
        return False
    return True


@pytest.mark.parametrize("name", MUST_PASS.split())
def test_elementwise_is_accepted(name: str) -> None:
    assert is_accepted(name)


@pytest.mark.parametrize("name", MUST_REFUSE.split())
def test_not_elementwise_is_refused(name: str) -> None:
    assert not is_accepted(name)


def cases() -> list[Any]:
    slow = [name for name in TRANSFORMS if name not in UNUSABLE and name not in QUICK.split()]
    quick = [
        pytest.param(name, devices, marks=pytest.mark.wide if name in WIDE.split() else ())
        for name, devices in zip(QUICK.split(), cycle([3, 8]))
    ]
    quick_names = {case.values for case in quick}
    every = [(name, devices) for name in [*QUICK.split(), *slow] for devices in (1, 3, 8)]
    return quick + [pytest.param(*case, marks=pytest.mark.slow) for case in every if case not in quick_names]


@pytest.mark.parametrize(("name", "devices"), cases())
def test_equal_to_unsharded_or_refused(name: str, devices: int) -> None:
    make = TRANSFORMS[name]
    grads = local_grads(devices)
    run = partial(train, with_value=name != "contrib.sam")
    expected = jax.jit(partial(run, make()))(jax.tree.map(lambda g: g.mean(0), grads), PARAMS)
    # What is accepted on eight devices and not on these would raise below.
    tx = make() if is_accepted(name) else zero.across_shards(make())
    sharded = zero.shard_optimizer(tx, "batch")
    got = jax.pmap(partial(run, sharded, mark=zero.local), "batch", in_axes=(0, None))(grads, PARAMS)
    zero.check_replicated(got, "batch")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x[0], y, rtol=0, atol=1e-6 * np.max(np.abs(y)), err_msg=str(path))


def with_python_values() -> Any:
    """A transform of an author whose first state has Python values beside arrays."""

    def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
        updates = jax.tree.map(lambda g, m: jnp.where(state["first"], g, g + m), updates, state["last"])
        return updates, {"first": False, "count": state["count"] + 1, "rate": state["rate"] / 2, "last": updates}

    return optax.GradientTransformation(
        lambda params: {"first": True, "count": 0, "rate": 0.5, "last": params}, update_fn
    )


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("name", ["optimistic_gradient_descent", "contrib.dog", "python values"])
def test_leaf_that_is_no_array(name: str, trust: bool) -> None:
    """A leaf of a state may be a Python value, or a constant of the trace: it is gathered as it crosses pmap.

    In the trace of `init`, before an update and after one; on the host before an update.
    """
    plain = with_python_values() if name == "python values" else TRANSFORMS[name]()
    tx = zero.shard_optimizer(plain if trust else zero.across_shards(plain), "batch", trust=trust)

    def run(params: Any) -> Any:
        state = tx.init(params)
        _, new_state = tx.update(zero.local(params), state, params)
        return zero.gather(state), zero.gather(new_state)

    right = plain.init(PARAMS)
    copies = jax.tree.map(lambda x: np.stack([x] * 8), PARAMS)
    for gathered in jax.eval_shape(jax.vmap(run, axis_name="batch"), copies):
        expected = [((8, *np.shape(x)), jnp.result_type(x)) for x in jax.tree.leaves(right)]
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(gathered)] == expected
    for state in (zero.to_devices(tx.init(PARAMS)), tx.init(PARAMS)):
        saved = zero.to_host(state)
        structure: Any = jax.tree.structure(saved)
        assert structure == jax.tree.structure(right)
        jax.tree.map(np.testing.assert_array_equal, saved, right)
