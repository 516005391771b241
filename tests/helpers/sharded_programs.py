"""Random optimizers on random trees, sharded and not.

`Case(seed)` is a tree of awkward shapes and a chain of optax around a `Program`; `compare` runs cases sharded, under
`jax.vmap` over the devices, and as the unsharded program. Cases with several copies of the state, or with a second axis
of the mesh, run under `jax.shard_map`, because vmap has no collectives over groups.

Two thirds of the time went to the compiler, so programs are compiled without optimizations, also by `-m slow`: the
rewriting is compared, not XLA. A program takes 0.9 seconds of CPU time, one half of which traces it.
"""

import dataclasses
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import zero
from tests.helpers.array_programs import OPERATIONS, Program
from tests.helpers.compilation import QUICK_OPTIONS

DEVICES = (3, 5, 8)
COPIES = (
    zero.Axis("batch", (2, 3)),
    zero.Axis("batch", (2, 2, 2), (0, 5, 2, 7, 4, 1, 6, 3)),
    zero.Axis("batch", (3, 2), (0, 2, 4, 1, 3, 5)),
    zero.Axis("batch", (2, 4), sums_copies=False, copies_dtype="bfloat16"),
)
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17)
MOST_ELEMENTS = 200
TOLERANCE = 1e-8  # of float64
LINKS: tuple[Callable[[], Any], ...] = (
    optax.scale_by_adam,
    optax.scale_by_lion,
    partial(optax.trace, 0.5, nesterov=True),
    partial(optax.ema, 0.75),
    partial(optax.add_decayed_weights, 0.1),
    partial(optax.clip, 0.5),
    partial(optax.scale_by_schedule, optax.linear_schedule(1.0, 0.25, 4)),
)
COMMUNICATING: tuple[Callable[[], Any], ...] = (
    partial(optax.clip_by_global_norm, 0.5),
    partial(optax.adaptive_grad_clip, 0.25),
    partial(optax.scale_by_factored_rms, min_dim_size_to_factor=2),
    optax.scale_by_trust_ratio,
    optax.centralize,
    partial(optax.clip_by_block_rms, 0.5),
)
WRAPPERS: tuple[Callable[[Any], Any], ...] = (
    lambda tx: optax.masked(tx, lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    lambda tx: optax.partition(
        {"one": tx, "two": optax.sgd(0.5)}, partial(jax.tree.map, lambda x: ("two", "one")[x.ndim % 2])
    ),
    lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
    lambda tx: optax.apply_if_finite(tx, 3),
    lambda tx: optax.chain(tx, optax.inject_hyperparams(optax.scale)(0.5)),
    lambda tx: optax.transforms.conditionally_transform(tx, lambda step, **_: step < 1),
)


def transform(program: Program) -> optax.GradientTransformation:
    """A transform whose update is the program, of gradients, state and parameters."""

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.sin, params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        treedef: Any
        leaves, treedef = jax.tree.flatten((updates, state))
        return treedef.unflatten(program(leaves))

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer and the tree that it updates, both decided by the seed.

    Attributes:
      communicates: whether it is inside `across_shards`; if not, it may be refused.
      joins: whether its program starts by joining dimensions.
      names: the operations of its program.
      has_copies: whether the axis holds several copies of the state.
      columns: devices along a second axis of the mesh; each column has a tree of its own.
    """

    seed: int
    communicates: bool = True
    joins: bool = False
    names: tuple[str, ...] = dataclasses.field(default=tuple(OPERATIONS), repr=False)
    operations: int = 5
    has_copies: bool = False
    columns: int = 1

    @cached_property
    def axis(self) -> str | zero.Axis:
        return COPIES[self.seed % len(COPIES)] if self.has_copies else "batch"

    @cached_property
    def devices(self) -> int:
        if isinstance(self.axis, zero.Axis):
            return self.axis.size
        if self.columns > 1:
            return 3 + self.seed % 2
        return DEVICES[self.seed % len(DEVICES)]

    def trees(self) -> list[Any]:
        """The tree of each column; all have the same shapes."""
        tree = self.tree()
        return [jax.tree.map(lambda x, i=i: x + i / 4, tree) for i in range(self.columns)]

    def tree(self) -> Any:
        rng = np.random.default_rng([self.seed, 1])

        def leaf(rank: int) -> jax.Array:
            shape = rng.choice(SIZES, rank)
            while np.prod(shape) > MOST_ELEMENTS:
                shape[rng.integers(rank)] = rng.choice(SIZES[:6])
            return jnp.asarray(rng.normal(size=shape))

        ranks = rng.choice([0, 1, 2, 3, 3, 4], rng.integers(1, 3))
        if self.joins:
            ranks = np.maximum(ranks, 2)
        leaves = [leaf(int(rank)) for rank in ranks]
        return {"a": leaves[0], "b": {"c": leaves[1:]}} if len(leaves) > 1 else leaves[0]

    def chain(self) -> Any:
        """The optimizer of an unsharded program."""
        return self._chain(lambda tx: tx)

    def sharded(self) -> Any:
        return zero.shard_optimizer(self._chain(zero.across_shards), self.axis, reduction=None)

    def _chain(self, across: Callable[[Any], Any]) -> Any:
        rng = np.random.default_rng([self.seed, 2])
        program = transform(Program(self.seed, self.operations, self.joins, self.names))
        links = [across(program) if self.communicates else program]
        if rng.random() < 0.2:
            links.insert(int(rng.integers(2)), across(COMMUNICATING[rng.integers(len(COMMUNICATING))]()))
        if rng.random() < 0.2:
            links.append(LINKS[rng.integers(len(LINKS))]())
        tx = optax.chain(*links)
        if rng.random() < 0.2:
            wrapped = WRAPPERS[rng.integers(len(WRAPPERS))](tx)
            tx = across(wrapped) if self.communicates else wrapped
        return tx

    def step(self, tx: Any) -> Callable[[Any], Any]:
        """An update of the tree by itself, and the new state."""

        def run(tree: Any) -> Any:
            updates, state = tx.update(jax.tree.map(jnp.cos, tree), tx.init(tree), tree)
            return updates, zero.gather(state) if isinstance(state, zero.ShardedState) else state

        return run

    def on_devices(self) -> Callable[[list[Any]], list[Any]]:
        """The sharded step of each column's tree: for each of them the results of all devices."""
        step = self.step(self.sharded())
        if self.columns == 1 and not self.has_copies:
            mapped = jax.vmap(step, axis_name="batch", axis_size=self.devices, in_axes=None)
            return lambda trees: [mapped(trees[0])]

        grid = np.reshape(jax.devices()[: self.columns * self.devices], (self.columns, self.devices))

        @partial(
            jax.shard_map,
            mesh=Mesh(grid, ("model", "batch")),
            in_specs=P("model"),
            out_specs=P("model", "batch"),
            check_vma=False,
        )
        def on_mesh(stacked: Any) -> Any:
            results = step(jax.tree.map(lambda x: x[0], stacked))
            return jax.tree.map(lambda x: jnp.expand_dims(x, (0, 1)), results)

        def run(trees: list[Any]) -> list[Any]:
            results = on_mesh(jax.tree.map(lambda *xs: jnp.stack(xs), *trees))
            return [jax.tree.map(lambda x, i=i: x[i], results) for i in range(self.columns)]

        return run


@dataclasses.dataclass
class Outcome:
    """Cases that are equal, refused by name, and wrong with what differs."""

    equal: list[Case] = dataclasses.field(default_factory=list)
    refused: list[Case] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)


def compare(cases: Iterable[Case]) -> Outcome:
    """Runs each case sharded and not."""
    outcome = Outcome()
    for case in cases:
        trees = case.trees()
        try:
            traced = jax.jit(case.on_devices()).trace(trees)
        except zero.NotElementwiseError:
            assert not case.communicates, case
            outcome.refused.append(case)
            continue
        except Exception as error:
            error.add_note(f"in {case}")
            raise
        plain = _compiled(jax.jit(case.step(case.chain())).trace(trees[0]))
        results = _compiled(traced)(trees)
        difference = max(_difference(found, plain(tree)) for found, tree in zip(results, trees, strict=True))
        if difference <= TOLERANCE:
            outcome.equal.append(case)
        else:
            outcome.wrong.append(f"{case} differs by {difference}")
    return outcome


def _compiled(traced: Any) -> Callable[..., Any]:
    return traced.lower().compile(compiler_options=QUICK_OPTIONS)


def _difference(found: Any, expected: Any) -> float:
    """The largest difference between any device's result and the expected one."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        wanted = np.broadcast_to(np.asarray(y, np.float64), x.shape)
        got = np.asarray(x, np.float64)
        if not np.array_equal(np.isnan(got), np.isnan(wanted)):
            return np.inf
        worst = max(worst, float(np.nanmax(np.abs(got - wanted) / (1 + np.abs(wanted)), initial=0)))
    return worst
