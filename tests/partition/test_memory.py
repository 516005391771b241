"""The table of bytes per device against what devices hold."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zero

pytestmark = pytest.mark.quick


def test_memory_counts_what_devices_hold() -> None:
    params = {"blocks": {"w": jnp.ones((4, 16, 8))}, "head": jnp.ones((16, 9)), "scale": jnp.ones(())}
    tx = optax.adamw(1e-3)
    table = zero.memory(params, tx, 8, stacked=["blocks"])
    layout = zero.make_layout(params, 8, stacked=["blocks"])

    def init(_: jax.Array) -> tuple[dict, optax.OptState]:
        shards = zero.shard(params, layout, "batch")
        return shards, tx.init(shards)

    held, state = jax.pmap(init, "batch")(jnp.zeros(8))
    for row in table.rows:
        if row.stage:
            assert row.parameters == sum(x.nbytes for x in jax.tree.leaves(held)) // 8
            assert row.state == sum(x.nbytes for x in jax.tree.leaves(state)) // 8
    whole = 4 * (4 * 16 * 8 + 16 * 9 + 1)
    by_stage = {(row.stage, row.compute_dtype): row for row in table.rows}
    assert by_stage[0, "float32"][2:] == (whole, 2 * whole + 4, 0, whole)
    assert by_stage[0, "bfloat16"].gathered == by_stage[1, "bfloat16"].gradients == whole // 2
    assert by_stage[2, "bfloat16"].gradients == by_stage[2, "bfloat16"].parameters
    assert by_stage[3, "bfloat16"].gathered == 2 * (2 * 16 * 8)  # two layers of the blocks
    assert "bfloat16" in str(table) and f"{whole:,}" in str(table)


def test_memory_of_factored_state() -> None:
    """Memory counts state that depends on whole shapes.

    A matrix that Adafactor factors as a whole, but whose shard is too small to be factored.
    """
    params = {"w": jnp.ones((128, 256))}
    layout = zero.make_layout(params, 8)
    tx = zero.on_shards(zero.across_shards(optax.adafactor(1e-3)), layout, "batch")
    state = jax.pmap(lambda _: tx.init(zero.shard(params, layout, "batch")), "batch")(jnp.zeros(8))
    rows = zero.memory(params, optax.adafactor(1e-3), 8, compute_dtypes=[jnp.float32]).rows
    assert rows[1].state == sum(x.nbytes for x in jax.tree.leaves(state)) // 8
    assert rows[0].state == sum(x.nbytes for x in jax.tree.leaves(optax.adafactor(1e-3).init(params)))
