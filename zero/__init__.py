"""ZeRO for any `jax.pmap` program: one slice of the training state per device, by a change of three lines.

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

On the host `zero.to_devices(state)` and `zero.to_host(state)` stand where a program has `replicate` and `unreplicate`.

It is built on two operations, `gather` and `scatter_mean`, on a `Layout`: which leaf is split along which dimension.
The stages of ZeRO are placements of these two:

    layout = zero.make_layout(jax.eval_shape(model.init, key, x), shards=8)
    params = zero.gather(shards, layout, "batch")        # whole, for this step
    grads = zero.scatter_mean(grads, layout, "batch")    # this device's slice of the mean
    sharded_layer = zero.fully_shard(Layer, layout, "batch")     # gathers in, scatters in the backward pass

Without an accelerator call `zero.use_cpu_devices(8)` before the first jax operation, and wrap a function with
collectives in loops as `jax.pmap(zero.in_order(train_step), ...)`, because XLA's CPU backend reorders them.

Nothing here reads a configuration or a file. `print(layout)` and `print(zero.memory(...))` show shards and bytes.
The first use of a name imports jax, so that `zero.corpus` and `zero.files` do without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero.old_names import old_name

if TYPE_CHECKING:
    from zero import groups as groups
    from zero import quantised as quantised
    from zero.public_names import *

__all__ = [
    "Axis",
    "NotElementwiseError",
    "across_shards",
    "check_replicated",
    "checksums",
    "derive_layout",
    "from_global",
    "fully_shard",
    "gather",
    "global_norm",
    "global_shapes",
    "in_order",
    "local",
    "make_layout",
    "memory",
    "on_shards",
    "scatter_mean",
    "scatter_sum",
    "shard",
    "shard_optimizer",
    "specs",
    "to_devices",
    "to_global",
    "to_host",
    "use_cpu_devices",
]

TYPES = ["Layout", "ShardedOptimizer", "ShardedState"]  # of results, for annotations
MODULES = ["groups", "quantised"]


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used; later uses find it in the module itself."""
    if name in MODULES:
        return import_module(f"zero.{name}")
    if name not in [*__all__, *TYPES]:
        return old_name(name)
    value = getattr(import_module("zero.public_names"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *TYPES, *MODULES})
