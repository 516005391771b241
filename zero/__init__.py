"""ZeRO for any `jax.pmap` program: one slice of the training state per device, with three changed lines.

    import zero

    tx = zero.shard_optimizer(optax.adamw(3e-4), axis_name="batch")     # an optax.GradientTransformation

    @partial(jax.pmap, axis_name="batch")
    def init(params):                                    # params replicated, as in any data-parallel program
        return tx.init(params)                           # this device's 1/N of the state

    @partial(jax.pmap, axis_name="batch", donate_argnums=(0, 1))
    def train_step(params, opt_state, batch):
        grads = zero.local(jax.grad(loss_fn)(params, batch))     # in place of lax.pmean(grads, "batch")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

Every name, with an example in its own help, such as help(zero.to_host):

    a sharded optimizer    shard_optimizer, local, across_shards, NotElementwiseError, global_norm
    host and devices       to_devices, to_host, check_replicated, checksums, memory
    slices, inside pmap    shard, gather, scatter_mean, scatter_sum; on_shards, fully_shard: stages 2 and 3
    layouts                make_layout, derive_layout: which leaf is split along which dimension; print shows it
    Orbax on all hosts     to_global, from_global, global_shapes
    shard_map              specs
    axes and CPU devices   Axis, use_cpu_devices, in_order
    before you rent        plan, topology: memory, traffic and seconds on TPUs that need not be there
    types of results       ShardedOptimizer, ShardedState, Layout, Plan
    modules                groups: names that the trainer needs; quantized: one-byte state

Stages 2 and 3 of ZeRO are placements of `gather` and `scatter_mean`:

    layout = zero.make_layout(jax.eval_shape(model.init, key, x), shards=8)
    params = zero.gather(shards, layout, "batch")        # whole, for this step
    grads = zero.scatter_mean(grads, layout, "batch")    # this device's slice of the mean
    sharded_layer = zero.fully_shard(Layer, layout, "batch")     # gathers in, scatters in the backward pass

Without an accelerator call `zero.use_cpu_devices(8)` before the first jax operation, and wrap a function with
collectives in loops as `jax.pmap(zero.in_order(train_step), ...)`, because XLA's CPU backend reorders them.

Nothing here reads a configuration or a file. jax is imported when a name is first used, so that `zero.corpus` and
`zero.files` work without it.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers; a test compares it with the tables below
    from zero.costs.program_plan import Plan as Plan
    from zero.costs.program_plan import plan as plan
    from zero.costs.topology import topology as topology
    from zero.partition import groups as groups
    from zero.partition import quantized as quantized
    from zero.partition.checksums import check_replicated as check_replicated
    from zero.partition.checksums import checksums as checksums
    from zero.partition.collectives.axis import Axis as Axis
    from zero.partition.collectives.ordering import in_order as in_order
    from zero.partition.global_arrays import from_global as from_global
    from zero.partition.global_arrays import global_shapes as global_shapes
    from zero.partition.global_arrays import to_global as to_global
    from zero.partition.layout import Layout as Layout
    from zero.partition.layout import derive_layout as derive_layout
    from zero.partition.layout import make_layout as make_layout
    from zero.partition.local_gradients import local as local
    from zero.partition.memory import memory as memory
    from zero.partition.rewrite.entry_points import across_shards as across_shards
    from zero.partition.rewrite.interpreter import NotElementwiseError as NotElementwiseError
    from zero.partition.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
    from zero.partition.sharded_optimizer import global_norm as global_norm
    from zero.partition.sharded_optimizer import on_shards as on_shards
    from zero.partition.sharded_optimizer import shard_optimizer as shard_optimizer
    from zero.partition.sharded_state import ShardedState as ShardedState
    from zero.partition.stages import fully_shard as fully_shard
    from zero.partition.stages import gather as gather
    from zero.partition.stages import scatter_mean as scatter_mean
    from zero.partition.stages import scatter_sum as scatter_sum
    from zero.partition.stages import shard as shard
    from zero.partition.train_state import specs as specs
    from zero.partition.train_state import to_devices as to_devices
    from zero.partition.train_state import to_host as to_host
    from zero.partition.virtual_devices import use_cpu_devices as use_cpu_devices

    __version__: str

_HOMES = {  # the module of each public name
    "Axis": "zero.partition.collectives.axis",
    "Layout": "zero.partition.layout",
    "NotElementwiseError": "zero.partition.rewrite.interpreter",
    "Plan": "zero.costs.program_plan",
    "ShardedOptimizer": "zero.partition.sharded_optimizer",
    "ShardedState": "zero.partition.sharded_state",
    "across_shards": "zero.partition.rewrite.entry_points",
    "check_replicated": "zero.partition.checksums",
    "checksums": "zero.partition.checksums",
    "derive_layout": "zero.partition.layout",
    "from_global": "zero.partition.global_arrays",
    "fully_shard": "zero.partition.stages",
    "gather": "zero.partition.stages",
    "global_norm": "zero.partition.sharded_optimizer",
    "global_shapes": "zero.partition.global_arrays",
    "in_order": "zero.partition.collectives.ordering",
    "local": "zero.partition.local_gradients",
    "make_layout": "zero.partition.layout",
    "memory": "zero.partition.memory",
    "on_shards": "zero.partition.sharded_optimizer",
    "plan": "zero.costs.program_plan",
    "scatter_mean": "zero.partition.stages",
    "scatter_sum": "zero.partition.stages",
    "shard": "zero.partition.stages",
    "shard_optimizer": "zero.partition.sharded_optimizer",
    "specs": "zero.partition.train_state",
    "to_devices": "zero.partition.train_state",
    "to_global": "zero.partition.global_arrays",
    "to_host": "zero.partition.train_state",
    "topology": "zero.costs.topology",
    "use_cpu_devices": "zero.partition.virtual_devices",
}
_MODULES = {"groups": "zero.partition.groups", "quantized": "zero.partition.quantized"}


def _imported(name: str) -> ModuleType:
    """The module of a public name.

    Raises:
      ModuleNotFoundError: it needs a library that is not installed; for plans it names the extra that brings it.
    """
    try:
        return import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if not _HOMES[name].startswith("zero.costs."):
            raise
        from zero.base.errors import install_command

        remedy = install_command("plan")
        raise ModuleNotFoundError(
            f"zero.{name} needs {error.name}, which is missing; {remedy}", name=error.name
        ) from error


if not TYPE_CHECKING:  # type checkers refuse a name that is not imported above

    def __getattr__(name: str) -> Any:
        """A public name, imported when it is first used; later uses find it in the module itself."""
        if name == "__version__":
            value = import_module("zero.base.versions").version_of("zero-pmap")
        elif name in _MODULES:
            value = import_module(_MODULES[name])
        elif name in _HOMES:
            value = getattr(_imported(name), name)
        else:
            raise AttributeError(f"module 'zero' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*_HOMES, *_MODULES, "__version__"})
