"""Chains of optax made at random, wrapped at random, sharded at any level: as the unsharded program, or refused.

A case is traced first, on shapes: it is refused by name, or its updates and its state have the shapes of the unsharded
program. Then two steps of it are compared in numbers, under `jax.vmap` over the devices. They run operation by
operation, so that all cases share the same few compiled operations; only a branch is compiled with all that it holds.
The state is gathered in the trace of `init` and after the updates, and goes to the host before and after an update.
`jax.shard_map` accepts and refuses the same cases. Every so many of them are also compiled under pmap and shard_map.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zero

DTYPES: tuple[Any, ...] = (np.float32, jnp.bfloat16)
DEVICES = (1, 3, 8)
REFUSALS = (ValueError, TypeError)  # NotElementwiseError is a ValueError
RATE = 2.0**-4
STEPS = 2

LINKS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.scale_by_adam(),
    "adan": lambda: optax.scale_by_adan(),
    "amsgrad": lambda: optax.scale_by_amsgrad(),
    "belief": lambda: optax.scale_by_belief(),
    "lion": lambda: optax.scale_by_lion(),
    "novograd": lambda: optax.scale_by_novograd(),
    "radam": lambda: optax.scale_by_radam(),
    "rms": lambda: optax.scale_by_rms(),
    "rss": lambda: optax.scale_by_rss(),
    "rprop": lambda: optax.scale_by_rprop(RATE),
    "stddev": lambda: optax.scale_by_stddev(),
    "yogi": lambda: optax.scale_by_yogi(),
    "factored": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=3),
    "trust ratio": lambda: optax.scale_by_trust_ratio(),
    "schedule": lambda: optax.scale_by_schedule(optax.linear_schedule(1.0, 0.25, 4)),
    "learning rate": lambda: optax.scale_by_learning_rate(RATE),
    "scale": lambda: optax.scale(0.5),
    "sign": lambda: optax.scale_by_sign(),
    "trace": lambda: optax.trace(0.5),
    "nesterov": lambda: optax.trace(0.5, nesterov=True),
    "ema": lambda: optax.ema(0.75),
    "decay": lambda: optax.add_decayed_weights(RATE),
    "masked decay": lambda: optax.add_decayed_weights(RATE, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "noise": lambda: optax.add_noise(0.01, 0.5, jax.random.key(0)),
    "keep nonnegative": lambda: optax.keep_params_nonnegative(),
    "clip": lambda: optax.clip(0.25),
    "clip norm": lambda: optax.clip_by_global_norm(0.5),
    "clip rms": lambda: optax.clip_by_block_rms(0.5),
    "adaptive clip": lambda: optax.adaptive_grad_clip(0.25),
    "normalize": lambda: optax.normalize_by_update_norm(),
    "centralize": lambda: optax.centralize(),
    "zero nans": lambda: optax.zero_nans(),
    "block norm": lambda: optax.scale_by_param_block_norm(),
    "param rms": lambda: optax.scale_by_param_block_rms(),
    "adopt": lambda: optax.contrib.scale_by_adopt(),
    "ademamix": lambda: optax.contrib.scale_by_ademamix(),
}


def labels(tree: Any) -> Any:
    return {name: "one" if name == "w" else "two" for name in tree}


def early(step: Any, **_: Any) -> Any:
    return step < 1


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "masked": lambda tx: optax.masked(tx, lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "partition": lambda tx: optax.partition({"one": tx, "two": optax.sgd(RATE)}, labels),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "inject_hyperparams": lambda tx: optax.chain(tx, optax.inject_hyperparams(optax.scale)(0.5)),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "apply_if_finite, across": lambda tx: zero.across_shards(optax.apply_if_finite(tx, 3)),
    "conditionally_transform": lambda tx: optax.transforms.conditionally_transform(tx, early),
    "conditionally_mask": lambda tx: optax.transforms.conditionally_mask(tx, early),
    "flatten": optax.flatten,
    "named_chain": lambda tx: optax.named_chain(("inner", tx), ("after", optax.ema(0.5))),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, RATE),
    "across": lambda tx: zero.across_shards(tx),
}


class Case(NamedTuple):
    """A chain of optax, and how it is sharded.

    Attributes:
      links: names of `LINKS`.
      may_communicate: of each link, whether it is inside `across_shards`.
      wrappers: names of `WRAPPERS`, the innermost first.
      level: how many of the wrappers are inside `shard_optimizer`.
      in_front: how many links stay outside, in front of it; only at level 0.
      reduction: of `shard_optimizer`.
      dtypes: of the matrix and the scalar, and of the vector.
      devices: their number.
    """

    links: tuple[str, ...]
    may_communicate: tuple[bool, ...]
    wrappers: tuple[str, ...]
    level: int
    in_front: int
    reduction: str | None
    dtypes: tuple[Any, Any]
    devices: int


SHAPES = {"w": (8, 5), "b": (8,), "s": ()}


@cache
def params_of(dtypes: tuple[Any, Any]) -> Any:
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.integers(1, 9, shape) / 8, dtypes[name == "b"]) for name, shape in sorted(SHAPES.items())
    }


@cache
def grads_of(dtypes: tuple[Any, Any], devices: int, step: int) -> Any:
    """Sums over 1, 3 and 8 devices are exact in any dtype, and their means in those of 8 and 1; 3 devices are alike."""
    rng = np.random.default_rng(step)
    whole = {name: rng.integers(-4, 5, (8, *shape)) / 4 for name, shape in sorted(SHAPES.items())}
    return {
        name: jnp.stack([jnp.asarray(x[i if devices == 8 else 0], dtypes[name == "b"]) for i in range(devices)])
        for name, x in whole.items()
    }


@cache
def mean_grads_of(dtypes: tuple[Any, Any], devices: int, step: int) -> Any:
    return jax.tree.map(lambda g: np.mean(g, 0, np.float32).astype(g.dtype), grads_of(dtypes, devices, step))


def link(name: str, may_communicate: bool) -> Any:
    made = LINKS[name]()
    return zero.across_shards(made) if may_communicate else made


def chains(case: Case) -> tuple[Any, Any]:
    """The optimizer as its author has it, and sharded."""

    def shard(tx: Any) -> Any:
        return zero.shard_optimizer(tx, "batch", reduction=case.reduction)  # type: ignore[arg-type]  # of two kinds

    first = case.in_front
    links = list(itertools.starmap(link, zip(case.links, case.may_communicate, strict=True)))
    plain, sharded = optax.chain(*(LINKS[name]() for name in case.links[first:])), optax.chain(*links[first:])
    if case.level == 0:
        sharded = shard(sharded)
    if first:
        plain = optax.chain(*(LINKS[name]() for name in case.links[:first]), plain)
        sharded = optax.chain(*links[:first], sharded)
    for depth, name in enumerate(case.wrappers, 1):
        plain, sharded = WRAPPERS[name](plain), WRAPPERS[name](sharded)
        if depth == case.level:
            sharded = shard(sharded)
    return plain, sharded


def start(params: Any, devices: int) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x] * devices), params)


def step_of(tx: Any, case: Case) -> Callable[[Any, Any, Any], Any]:
    """What a device computes: parameters and state after an update."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        if case.reduction is None:
            given = jax.lax.pmean(grads, "batch")
        else:
            given = zero.local(grads)
        updates, state = tx.update(given, state, params)
        return optax.apply_updates(params, updates), state

    return step


def plain_step(tx: Any) -> Callable[[Any, Any, Any], Any]:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def shapes_of(tree: Any) -> list[Any]:
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def states_in(state: Any) -> Iterator[zero.ShardedState]:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, zero.ShardedState))
    return (x for x in leaves if isinstance(x, zero.ShardedState))


def whole(state: Any) -> Any:
    """Inside a mapped function: the state of the unsharded program."""
    return zero.gather(state) if any(True for _ in states_in(state)) else state


def same(x: Any, y: Any, tolerance: float) -> bool:
    return np.allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), tolerance, tolerance, equal_nan=True)


def assert_close(found: Any, expected: Any, case: Case, what: str) -> None:
    """Leaves of all devices against those of the unsharded program.

    A norm over a tree with bfloat16 leaves is rounded to bfloat16 for all of them.
    """
    tolerance = 2**-6 if jnp.bfloat16 in case.dtypes else 1e-5
    leaves = [jax.tree_util.tree_leaves_with_path(tree) for tree in (found, expected)]
    for (path, x), (_, y) in zip(*leaves, strict=True):
        name = f"{case}: {what}{jax.tree_util.keystr(path)}"
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.dtype == y.dtype, f"{name}: {x.dtype}, not {y.dtype}"
        for row in np.asarray(x):
            assert same(row, np.asarray(y), tolerance), f"{name}: {row}, not {y}"


def traced(fn: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Any]:
    """The function of arguments of these shapes, which is not traced again, and the shapes of its result."""
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    flat = jaxpr_as_fun(closed)

    def run(*args: Any) -> Any:
        return jax.tree.unflatten(structure(shapes), flat(*jax.tree.leaves(args)))

    return run, shapes


def check(case: Case, in_pmap: bool = False) -> str:
    """ "equal", "refused", or, where optax itself raises, "unusable"; anything else is an error."""
    plain, sharded = chains(case)
    params = params_of(case.dtypes)
    grads = [grads_of(case.dtypes, case.devices, i) for i in range(STEPS)]
    means = [mean_grads_of(case.dtypes, case.devices, i) for i in range(STEPS)]
    try:
        right = plain.init(params)
        run_plain, right_shapes = traced(plain_step(plain), params, right, means[0])
    except (TypeError, ValueError):
        return "unusable"
    if shapes_of(right_shapes) != shapes_of((params, right)):
        return "unusable"  # a state that changes its shapes, as that of `snapshot`, or its dtypes

    mapped = partial(jax.vmap, axis_name="batch", axis_size=case.devices)
    step, placed = step_of(sharded, case), start(params, case.devices)
    on_mesh = under_shard_map(sharded, step, case)
    try:
        init, (state_shapes, gathered_shapes) = traced(mapped(gathered_init(sharded)), placed)
        run, found_shapes = traced(mapped(step), placed, state_shapes, grads[0])
    except REFUSALS as error:
        assert any(word in str(error) for word in ("zero.", "optax.")), f"{case}: {error}"
        with pytest.raises(REFUSALS, match=r"zero\.|optax\."):
            on_mesh.trace(params, grads[0])
        return "refused"
    on_mesh.trace(params, grads[0])
    assert structure(found_shapes[1]) == structure(state_shapes), case
    gather, whole_shapes = traced(mapped(whole), found_shapes[1])
    expected_shapes = [((case.devices, *shape), dtype) for shape, dtype in shapes_of(right)]
    assert shapes_of(whole_shapes) == shapes_of(gathered_shapes) == expected_shapes, case

    if in_pmap:
        pmap = partial(jax.pmap, axis_name="batch", devices=jax.devices()[: case.devices])
        run, init = pmap(step), pmap(gathered_init(sharded))
    expected, found = params, placed
    state, gathered = init(placed)
    assert_close(gathered, right, case, "new state")
    for local, mean in zip(grads, means, strict=True):
        check_on_host(case, sharded, state, right)  # before an update, and after one
        expected, right = run_plain(expected, right, mean)
        found, state = run(found, state, local)
    assert_close(found, expected, case, "parameters")
    if in_pmap:
        check_on_host(case, sharded, state, right)
        found, state = on_mesh.run(params, grads)
        assert_close(jax.tree.map(lambda x: x[None], found), expected, case, "parameters under shard_map")
        assert_close(jax.tree.map(lambda x: x[None], zero.to_host(state)), right, case, "state under shard_map")
    else:
        assert_close(gather(state), right, case, "state")
    return "equal"


def gathered_init(sharded: Any) -> Callable[[Any], Any]:
    """A new state, and the whole of it, gathered in the trace of `init`."""

    def init(params: Any) -> Any:
        state = sharded.init(params)
        return state, whole(state)

    return init


class UnderShardMap(NamedTuple):
    """The program under `jax.shard_map`.

    Attributes:
      trace: raises what jax and zero raise for parameters and the gradients of all devices.
      run: parameters and state after updates with a list of such gradients.
    """

    trace: Callable[[Any, Any], Any]
    run: Callable[[Any, list[Any]], Any]


def under_shard_map(sharded: Any, step: Callable[[Any, Any, Any], Any], case: Case) -> UnderShardMap:
    mesh = Mesh(np.asarray(jax.devices()[: case.devices]), "batch")

    def programs(params: Any) -> tuple[Any, Any]:
        specs = zero.specs(sharded.init(params), mesh)
        on_each = partial(jax.shard_map, mesh=mesh, check_vma=False)

        def one(params: Any, state: Any, grads: Any) -> Any:
            return step(params, state, jax.tree.map(lambda g: g[0], grads))

        init = on_each(sharded.init, in_specs=P(), out_specs=specs)
        return init, on_each(one, in_specs=(P(), specs, P("batch")), out_specs=(P(), specs))

    def trace(params: Any, grads: Any) -> Any:
        init, update = programs(params)
        return jax.eval_shape(lambda p, g: update(p, init(p), g), params, grads)

    def run(params: Any, grads: list[Any]) -> Any:
        init, update = map(jax.jit, programs(params))
        state = init(params)
        for local in grads:
            params, state = update(params, state, local)
        return params, state

    return UnderShardMap(trace, run)


def check_on_host(case: Case, sharded: Any, state: Any, right: Any) -> None:
    """The state leaves as that of the unsharded program, and comes back."""
    here = jax.devices()[: case.devices]
    stacked = NamedSharding(Mesh(np.asarray(here), "batch"), P("batch"))
    state = jax.tree.map(lambda x: jax.device_put(x, stacked), state)  # as pmap returns it
    saved = zero.to_host(state, devices=here)
    assert structure(saved) == structure(right), case
    assert_close(jax.tree.map(lambda x: x[None], saved), right, case, "saved state")
    back = zero.to_devices(saved, like=sharded.init(params_of(case.dtypes)), devices=here)
    for slices, others in zip(states_in(back), states_in(state), strict=True):
        for x, y in zip(jax.tree.leaves(slices.slices), jax.tree.leaves(others.slices), strict=True):
            if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                assert x.dtype == y.dtype and x.shape == y.shape, case


def cases(count: int, seed: int) -> list[Case]:
    """Different cases: one to four links, at most two wrappers, sharded at any level."""
    rng = np.random.default_rng(seed)

    def choose(names: Sequence[Any]) -> Any:
        return names[int(rng.integers(len(names)))]

    drawn: dict[Case, None] = {}
    while len(drawn) < count:
        links = tuple(choose(list(LINKS)) for _ in range(rng.integers(1, 5)))
        may_communicate = tuple(bool(rng.random() < 0.92) for _ in links)
        wrappers = tuple(choose(list(WRAPPERS)) for _ in range(choose([0, 0, 1, 1, 2])))
        level = int(rng.integers(len(wrappers) + 1))
        in_front = int(rng.integers(len(links))) if level == 0 and rng.random() < 0.25 else 0
        reduction = choose(["mean", "mean", None])
        dtypes = (choose(DTYPES), choose(DTYPES))
        case = Case(links, may_communicate, wrappers, level, in_front, reduction, dtypes, choose(DEVICES))
        drawn[case] = None
    return list(drawn)


FLOATS = (np.float32, np.float32)
SHORT = [
    Case(("clip norm", "adam", "masked decay"), (True, False, False), ("partition",), 1, 0, "mean", FLOATS, 8),
    Case(("trace", "scale"), (False, False), ("apply_if_finite",), 0, 0, None, FLOATS, 8),
    Case(("clip norm", "trace"), (True, False), (), 0, 1, "mean", FLOATS, 8),
    Case(("trust ratio",), (False,), ("masked",), 1, 0, "mean", FLOATS, 8),
]


def counts(some: Sequence[Case], every: int) -> Counter[str]:
    """How many are equal, refused and unusable; every so many of the equal ones run in a real pmap as well."""
    results = Counter[str]()
    for case in some:
        result = check(case)
        results[result] += 1
        if result == "equal" and results["equal"] % every == 1:
            check(case, in_pmap=True)
            results["in a pmap"] += 1
    return results


@pytest.mark.wide  # test_sharded_optimizer_edges.py and test_sharded_optimizer_of_optax.py have chains and wrappers
def test_a_few_chains() -> None:
    """One of each kind, sharded at each level, one of them in a pmap as well."""
    assert [check(case) for case in SHORT] == ["equal", "equal", "refused", "refused"]
    assert check(SHORT[0], in_pmap=True) == "equal"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(10))
def test_three_hundred_chains(part: int) -> None:
    results = counts(cases(300, 0)[30 * part : 30 * part + 30], every=10)
    print(results)  # with -s
    assert results["equal"] >= 10 and results["refused"] >= 3 and results["in a pmap"] >= 1
