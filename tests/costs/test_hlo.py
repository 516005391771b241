"""Traffic and operations of programs whose cost is known."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from zero.costs.hlo import Collective, Instruction, across_hosts, bytes_by_kind, collectives, hidden_share
from zero.costs.topology import find_devices
from zero.hosts.xla_options import OVERLAP_ON_TPU
from zero.training.flops import matmul_flops


def program(steps: int) -> tuple[Any, jax.ShapeDtypeStruct]:
    """A scan of `steps` turns, each a matrix product, a gather, a scatter and, in a scan of two more, an all-reduce."""

    def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        whole = lax.all_gather(x, "i", tiled=True)  # (8 x 16, 16)
        x = lax.psum_scatter(whole @ x, "i", tiled=True)
        return lax.scan(lambda x, _: (lax.psum(jnp.sin(x), "i"), None), x, length=2)[0], None

    step = jax.pmap(lambda x: lax.scan(turn, x, length=steps)[0], axis_name="i")
    return step, jax.ShapeDtypeStruct((8, 16, 16), jnp.float32)


@pytest.mark.parametrize("steps", [3, 70])
def test_loops_count_every_iteration(steps: int) -> None:
    """A loop counts as often as it runs."""
    step, x = program(steps)
    shard = 16 * 16 * 4
    assert bytes_by_kind(collectives(step.lower(x).compile().as_text())) == {
        "all-gather": steps * 7 * shard,
        "reduce-scatter": steps * 7 * shard,
        "all-reduce": steps * 2 * (2 * 7 * shard // 8),
    }
    assert matmul_flops(jax.make_jaxpr(step)(x).jaxpr) == steps * 2 * 128 * 16 * 16


def test_bytes_across_hosts() -> None:
    """Bytes across hosts are those of groups that span hosts."""
    inside, across = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]

    def step(x: jax.Array) -> jax.Array:
        x = lax.all_gather(x, "i", axis_index_groups=inside, tiled=True)
        return lax.psum(x, "i", axis_index_groups=across)

    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    text = jax.pmap(step, axis_name="i").lower(x).compile().as_text()
    gathered, reduced = {"all-gather": 3 * 64}, {"all-reduce": 4 * 64}
    assert bytes_by_kind(collectives(text)) == gathered | reduced
    assert bytes_by_kind(across_hosts(collectives(text), [0] * 4 + [1] * 4)) == reduced
    assert bytes_by_kind(across_hosts(collectives(text), [0] * 8)) == {}
    assert bytes_by_kind(across_hosts(collectives(text), [0, 1] * 4)) == gathered


@pytest.mark.parametrize(
    ("groups", "sent", "spans_halves", "spans_neighbors"),
    [
        ("[4,2]<=[2,4]T(1,0)", 32, True, False),  # as XLA for TPU writes them
        ("[2,4]<=[8]", 48, False, True),
        ("mesh['i'=8] {'i'}", 56, True, True),  # as XLA has written one group of all devices since jaxlib 0.12
        ("mesh['host'=2,'core'=4] {'core'}", 48, False, True),
        ("mesh['core'=4,'host'=2] {'core'}", 48, True, False),
        ("mesh['core'=4,'host'=2], device_ids=([2,4]T(1,0)) {'core'}", 48, False, True),
        ("mesh['i'=8], device_ids=([8]) {'i'}", 56, True, True),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", 48, True, True),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','b'}", 48, True, False),
    ],
)
def test_groups_are_read_from_each_notation(groups: str, sent: int, spans_halves: bool, spans_neighbors: bool) -> None:
    line = f"  %y = f32[8]{{0}} all-reduce(%x), replica_groups={groups}, use_global_device_ids=true"
    found = collectives(f"ENTRY %main (x: f32[8]) -> f32[8] {{\n{line}\n}}")
    assert bytes_by_kind(found) == {"all-reduce": sent}
    assert bool(across_hosts(found, [0] * 4 + [1] * 4)) == spans_halves
    assert bool(across_hosts(found, [0, 1] * 4)) == spans_neighbors


@pytest.mark.parametrize("groups", ["{}", "mesh['a'=8] {'a':(2)4}", "mesh['a'=8], device_ids=([8]) {'a':(2)4}"])
def test_groups_in_another_notation_are_refused(groups: str) -> None:
    line = f"  %y = f32[8]{{0}} all-reduce(%x), replica_groups={groups}"
    with pytest.raises(ValueError, match="replica groups not understood"):
        collectives(f"ENTRY %main (x: f32[8]) -> f32[8] {{\n{line}\n}}")


def test_unknown_loop_length_is_refused() -> None:
    """A loop of unknown length is refused."""

    def halve(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: x.sum() > 1, lambda x: lax.psum(x @ x, "i") / 2, x)

    step, x = jax.pmap(halve, axis_name="i"), jax.ShapeDtypeStruct((8, 4, 4), jnp.float32)
    with pytest.raises(ValueError, match="cannot be read"):
        collectives(step.lower(x).compile().as_text())
    with pytest.raises(ValueError, match="while loop"):
        matmul_flops(jax.make_jaxpr(step)(x).jaxpr)


def overlapping_program(devices: list[Any]) -> Any:
    """Layers of two products each, with weights that are gathered, lowered for these devices."""

    def layer(x: jax.Array, shards: jax.Array) -> tuple[jax.Array, None]:
        for shard in shards:
            x = jnp.sin(x @ lax.all_gather(shard, "i", tiled=True))
        return x, None

    step = jax.pmap(lambda x, shards: lax.scan(layer, x, shards)[0], axis_name="i", devices=devices)
    count = len(devices)
    x = jax.ShapeDtypeStruct((count, 4096, 2048), jnp.bfloat16)
    return step.lower(x, jax.ShapeDtypeStruct((count, 3, 2, 2048 // count, 2048), jnp.bfloat16))


@pytest.mark.wide
@pytest.mark.parametrize(("topology", "has_chains"), [("v3-8", False), ("v5e-4", True)])
def test_hidden_gather_counts_once(topology: str, has_chains: bool) -> None:
    """A gather beside a matrix product is hidden and counts once."""
    devices = find_devices(topology)
    lowered, count = overlapping_program(devices), len(devices)
    texts = {
        overlap: lowered.compile(dict.fromkeys(OVERLAP_ON_TPU, overlap)).as_text()
        for overlap in ([True] if has_chains else [False, True])
    }
    assert ("chain_id" in texts[True]) == has_chains
    for overlap, text in texts.items():
        found = collectives(text)
        assert bytes_by_kind(found)["all-gather"] == 6 * 2048 * 2048 * 2 * (count - 1) // count
        assert hidden_share(found) == (pytest.approx(0.5) if overlap else 0)


@pytest.mark.parametrize("beside", ["dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "negate(%p)"])
def test_chain_of_fusions_counts_once(beside: str) -> None:
    """A gather of a TPU that is spread over fusions is one, which a product in any of them hides."""
    gather = '%g = f32[8,8] all-gather(%p), replica_groups={{0,1}}, frontend_attributes={chain_id="7"}'
    body = "%c{} (p: f32[8,8]) -> f32[8,8] {{\n  {}\n}}"
    first, second = body.format(0, gather), body.format(1, f"{gather}\n  ROOT %m = f32[8,8] {beside}")
    calls = [f"  %f{i} = f32[8,8] fusion(%x), kind=kCustom, calls=%c{i}" for i in range(2)]
    text = "\n".join([first, second, "ENTRY %main (x: f32[8,8]) -> f32[8,8] {", *calls, "}"])
    (found,) = collectives(text)
    assert (found.kind, found.sent, found.is_hidden) == ("all-gather", 128, beside.startswith("dot"))


def test_nothing_hidden_without_gathers() -> None:
    """Nothing is hidden where nothing is gathered."""
    assert hidden_share([]) is None
    assert hidden_share([Collective("all-reduce", 8, "", is_hidden=True)]) is None


@pytest.mark.parametrize(
    ("target", "is_hidden"), [("__cublas$gemm", True), ("__cudnn$fmhaSoftmax", True), ("Sharding", False)]
)
def test_library_kernels_hide_gathers(target: str, is_hidden: bool) -> None:
    """A library kernel hides a gather, and another call does not.

    A program as XLA for GPU schedules it.
    """
    text = f"""
ENTRY %main (x: f32[8], y: f32[8,8]) -> f32[16] {{
  %start = (f32[8]{{0}}, f32[16]{{0}}) all-gather-start(%x), replica_groups={{{{0,1}}}}, dimensions={{0}}
  %product = f32[8,8]{{1,0}} custom-call(%y, %y), custom_call_target="{target}"
  ROOT %done = f32[16]{{0}} all-gather-done(%start)
}}"""
    (found,) = collectives(text)
    assert (found.sent, found.is_hidden) == (32, is_hidden)


@pytest.mark.parametrize(
    ("name", "kind", "sent"), [("all-reduce-scatter.1", "reduce-scatter", 3), ("f", "all-reduce", 6)]
)
def test_reduce_scatter_in_a_fusion(name: str, kind: str, sent: int) -> None:
    """A fusion of an all-reduce and a slice that XLA names so sends the bytes of a reduce-scatter."""
    text = (
        f"%{name} (p: f32[32]) -> f32[8] {{\n  %a = f32[32] all-reduce(%p), replica_groups={{{{0,1,2,3}}}}\n"
        "  ROOT %s = f32[8] dynamic-slice(%a, %i), dynamic_slice_sizes={8}\n}\n"
        f"ENTRY %main (x: f32[32]) -> f32[8] {{\n  %y = f32[8] fusion(%x), kind=kCustom, calls=%{name}\n}}"
    )
    assert bytes_by_kind(collectives(text)) == {kind: sent * 4 * 8}


def test_quotes_in_the_names_of_arguments() -> None:
    rest = r"""0), metadata={op_name="state.params[\'embed\'][\"rows\"].value" stack_frame_id=3}"""
    assert Instruction("p", "f32[2]", "parameter", rest).op_name == """state.params['embed']["rows"].value"""
