"""The transforms of the installed optax, found by looking into it, and arrays to try them on.

`TRANSFORMS` makes each by its name, `UNUSABLE` says why some cannot be compared, `make_tree` draws arrays of `SHAPES`
whose sums over devices are exact, and `PARAMS` are the parameters.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

# Factored moments start at 128; the others are awkward for three and for eight devices.
SHAPES = {"w": (129, 136), "a": {"k": (7, 9), "b": (9,), "n": (8,)}, "s": (), "t": (2,), "u": (1, 25)}
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


def make_tree(rng: np.random.Generator, scale: float = 1 / 8) -> Any:
    """Small multiples of a power of two: sums and means over devices are exact."""
    draw = lambda shape: np.asarray(rng.integers(-8, 9, shape) * scale, np.float32)  # noqa: E731
    return jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


PARAMS = make_tree(np.random.default_rng(0))
