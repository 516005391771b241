"""Every transform of the installed optax on shards: equal to the unsharded one, or refused. None is silently wrong.

The table is made by looking into optax, so that a new transform is tested the day it appears; one whose arguments are
not known here fails until they are.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import zero

# Factored moments start at 128; the others are awkward for three and for eight devices.
SHAPES = {"w": (129, 136), "a": {"k": (7, 9), "b": (9,), "n": (8,)}, "s": (), "t": (2,), "u": (1, 25)}
STEPS = 10
ADAM = partial(optax.adam, 1e-2)

# What stands for an argument without a default, by its name.
ARGUMENTS: dict[str, Callable[[], Any]] = {
    "adv_optimizer": lambda: optax.sgd(1e-2),
    "base_optimizer": ADAM,
    "clipping": lambda: 0.1,
    "decay": lambda: 0.9,
    "eta": lambda: 0.01,
    "f": lambda: lambda updates, params: jax.tree.map(lambda u, p: u * p, updates, params),
    "fast_optimizer": ADAM,
    "freeze_mask": lambda: lambda params: jax.tree.map(lambda p: p.ndim == 1, params),
    "gamma": lambda: 0.5,
    "inner": ADAM,
    "l2_norm_clip": lambda: 1.0,
    "learning_rate": lambda: 1e-2,
    "mask": lambda: lambda params: jax.tree.map(lambda p: p.size > 60, params),
    "max_backtracking_steps": lambda: 3,
    "max_consecutive_errors": lambda: 3,
    "max_delta": lambda: 0.5,
    "max_linesearch_steps": lambda: 3,
    "max_norm": lambda: 1.0,
    "measure": lambda: lambda updates, *_, **__: jax.tree.map(jnp.abs, updates),
    "measure_name": lambda: "measure",
    "metrics": lambda: {"norm": lambda updates, *_, **__: optax.tree.norm(updates)},
    "noise_multiplier": lambda: 0.1,
    "optimizer": ADAM,
    "param_labels": lambda: lambda params: jax.tree.map(lambda p: "wide" if p.ndim > 1 else "narrow", params),
    "seed": lambda: 0,
    "should_transform_fn": lambda: lambda step, **_: step % 2 == 0,
    "slow_step_size": lambda: 0.5,
    "step_size": lambda: 0.5,
    "step_size_fn": lambda: optax.linear_schedule(1.0, 0.1, 5),
    "sync_period": lambda: 3,
    "threshold": lambda: 0.1,
    "transforms": lambda: {"wide": optax.adam(1e-2), "narrow": optax.sgd(1e-2)},
    "tx": ADAM,
}
SPECIAL: dict[str, Callable[[], optax.GradientTransformation]] = {
    "add_noise": lambda: optax.add_noise(0.01, 0.5, jax.random.key(0)),
    "chain": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-2), optax.clip(0.1)),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(100.0),
    "named_chain": lambda: optax.named_chain(("a", optax.adam(1e-2)), ("b", optax.scale(0.5))),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.01, 0.1, 5)),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adamw)(learning_rate=1e-2),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(0)),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda u, p: u * p),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "scale_by_param_block_norm": lambda: optax.chain(optax.scale_by_param_block_norm(), optax.scale(1e-3)),
    "selective_transform": lambda: optax.selective_transform(ADAM(), freeze_mask=ARGUMENTS["freeze_mask"]()),
    "sm3": lambda: optax.masked(optax.sm3(1e-2), lambda params: jax.tree.map(lambda p: p.ndim > 0, params)),
    "scale_by_sm3": lambda: optax.masked(
        optax.scale_by_sm3(), lambda params: jax.tree.map(lambda p: p.ndim > 0, params)
    ),
    "clip,adam": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "adagrad,clip": lambda: optax.chain(optax.adagrad(0.1), optax.clip_by_global_norm(0.1)),
    "adamw,mask": lambda: optax.adamw(1e-2, mask=ARGUMENTS["freeze_mask"]()),
    "adafactor,momentum": lambda: optax.adafactor(1e-2, momentum=0.9, weight_decay_rate=1e-3),
    "lbfgs,no line search": lambda: optax.lbfgs(1e-2, linesearch=None),
}
# Those that cannot run on an ordinary tree of gradients, with the reason; they are not compared.
UNUSABLE = {
    "contrib.differentially_private_aggregate": "takes a gradient for each example",
    "contrib.dpsgd": "takes a gradient for each example",
    "contrib.hutchinson_estimator_diag_hessian": "is given a function of whole parameters",
    "contrib.scale_by_muon": "is for matrices alone; muon is compared",
    "contrib.sophia": "is given a function of whole parameters",
    "inject_stateful_hyperparams": "deprecated, and raises a warning",
    "lbfgs": "is given a function of whole parameters",
    "lookahead": "takes pairs of parameter trees",
    "optimistic_adam": "deprecated, and raises a warning",
    "scale_by_backtracking_linesearch": "is given a function of whole parameters",
    "scale_by_distance_over_gradients": "broadcasts (1,) over matrices, which these tests forbid",
    "scale_by_zoom_linesearch": "is given a function of whole parameters",
}
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
# Compared in every run; the others are slow together: `pytest -m slow tests/partition/test_optax.py`.
QUICK = """
adamw lion MultiSteps multi_transform lamb adafactor contrib.muon adagrad,clip apply_if_finite flatten sm3
noisy_sgd contrib.prodigy
"""


def transforms() -> dict[str, Callable[[], optax.GradientTransformation]]:
    found = {}
    for prefix, module in {"": optax, "contrib.": optax.contrib}.items():
        for name, fn in vars(module).items():
            if name in SPECIAL or name.startswith("_") or not isinstance(fn, FunctionType | partial):
                continue
            parameters = inspect.signature(fn).parameters.values()
            needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
            says_so = "GradientTransformation" in str(inspect.signature(fn).return_annotation)
            if says_so or set(needed) <= set(ARGUMENTS):
                make = partial(make_transform, fn, needed)
                if says_so or is_transform(make):
                    found[prefix + name] = make
    return found | SPECIAL


def make_transform(fn: Callable[..., Any], needed: list[str]) -> Any:
    return fn(**{name: ARGUMENTS[name]() for name in needed})


def is_transform(make: Callable[[], Any]) -> bool:
    try:
        return isinstance(make(), optax.GradientTransformation)
    except TypeError:  # a function of something else that happens to share a name
        return False


TRANSFORMS = transforms()


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """Forgets what was compiled: hundreds of programs at once are more memory maps than a process may have."""
    yield
    jax.clear_caches()


def make_tree(rng: np.random.Generator, scale: float = 1 / 8) -> Any:
    """Small multiples of a power of two: sums and means over devices are exact."""
    draw = lambda shape: np.asarray(rng.integers(-8, 9, shape) * scale, np.float32)  # noqa: E731
    return jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


PARAMS = make_tree(np.random.default_rng(0))


def local_grads(devices: int) -> Any:
    """Per leaf `(devices, steps, ...)`, each a multiple of the number of devices."""
    rng = np.random.default_rng(1)
    rows = [[make_tree(rng, devices / 8) for _ in range(STEPS)] for _ in range(devices)]
    stack = lambda *xs: np.stack(xs)  # noqa: E731
    return jax.tree.map(stack, *[jax.tree.map(stack, *row) for row in rows])


def train(tx: optax.GradientTransformation, grads: Any, params: Any, *, with_value: bool) -> Any:
    """Ten steps from one start: `(steps, ...)` gradients in, parameters out."""
    tx = optax.with_extra_args_support(tx)

    def step(carry: Any, g: Any) -> Any:
        params, state = carry
        extra = {"value": sum(jnp.sum(p) for p in jax.tree.leaves(params))} if with_value else {}
        updates, state = tx.update(g, state, params, **extra)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, tx.init(params)), grads)[0][0]


def is_accepted(name: str, devices: int) -> bool:
    """Whether init and update may be traced; nothing is compiled."""
    sharded = zero.shard_optimizer(TRANSFORMS[name](), "batch")
    one_step = jax.tree.map(lambda g: g[:, :1], local_grads(devices))
    try:
        run = partial(train, sharded, with_value=name != "contrib.sam")
        jax.pmap(run, "batch", in_axes=(0, None)).lower(one_step, PARAMS)
    except zero.NotElementwiseError as error:
        assert "zero.across_shards" in str(error)
        return False
    return True


@pytest.mark.parametrize("name", MUST_PASS.split())
def test_elementwise_is_accepted(name: str) -> None:
    assert is_accepted(name, 8)


@pytest.mark.parametrize("name", MUST_REFUSE.split())
def test_not_elementwise_is_refused(name: str) -> None:
    assert not is_accepted(name, 8)


def cases() -> list[Any]:
    slow = [name for name in TRANSFORMS if name not in UNUSABLE and name not in QUICK.split()]
    quick = [pytest.param(name, devices) for name, devices in zip(QUICK.split(), cycle([3, 8]))]
    quick_names = {case.values for case in quick}
    every = [(name, devices) for name in [*QUICK.split(), *slow] for devices in (1, 3, 8)]
    return quick + [pytest.param(*case, marks=pytest.mark.slow) for case in every if case not in quick_names]


@pytest.mark.parametrize(("name", "devices"), cases())
def test_equal_to_unsharded_or_refused(name: str, devices: int) -> None:
    make = TRANSFORMS[name]
    grads = local_grads(devices)
    run = partial(train, with_value=name != "contrib.sam")
    expected = jax.jit(partial(run, make()))(jax.tree.map(lambda g: g.mean(0), grads), PARAMS)
    tx = make() if is_accepted(name, devices) else zero.across_shards(make())
    sharded = zero.shard_optimizer(tx, "batch")
    got = jax.pmap(partial(run, sharded), "batch", in_axes=(0, None))(grads, PARAMS)
    zero.check_replicated(got, "batch")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x[0], y, rtol=0, atol=1e-6 * np.max(np.abs(y)), err_msg=str(path))
