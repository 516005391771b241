"""The time of programs whose cycles, transfers and schedule are known, and of one that the TPU compiler has made."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from zero.costs.hlo import Instruction
from zero.costs.predict import Prediction, TimedPart, part_of, predict, transfer_seconds
from zero.costs.topology import find_devices
from zero.hosts.speeds import HOP, SPEEDS

V3 = SPEEDS["TPU v3"]
V5E = SPEEDS["TPU v5 lite"]
V6E = SPEEDS["TPU v6 lite"]
LINE = ', replica_groups={{0,1,2,3}}, metadata={op_name="jvp(f)/zero_gather/all_gather"}'
MS = round(V5E.clock / 1000)  # cycles


def line_of(count: int, kind: str = "TPU v5 lite") -> list[Any]:
    """Chips side by side."""
    return [SimpleNamespace(device_kind=kind, coords=(x, 0, 0), core_on_chip=0) for x in range(count)]


def predicted(*lines: str, more: str = "", devices: list[Any] | None = None) -> Prediction:
    body = "\n".join(f"  {line}" for line in lines)
    text = f"{more}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}"
    found = predict(text, devices or line_of(4))
    assert found is not None
    return found


def fusion(name: str, milliseconds: float, path: str = "jvp(f)/TransformerLayer._mlp/mul", calls: str = "c") -> str:
    cycles = round(milliseconds * MS)
    config = f'metadata={{op_name="{path}"}}, backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    return f"%{name} = f32[8] fusion(%x), kind=kLoop, calls=%{calls}, {config}"


PRODUCT = "%c (p: f32[8]) -> f32[8] {\n  %y = f32[8] multiply(%p, %p)\n}"


def test_cycles_of_loops() -> None:
    """Cycles are divided by the clock, and a loop counts as often as it runs."""
    loop = "%body (p: f32[8]) -> f32[8] {\n  " + fusion("a", 2) + "\n}\n%cond (p: f32[8]) -> pred[] {\n}"
    trips = 'backend_config={"known_trip_count":{"n":"5"}}'
    found = predicted(
        fusion("b", 1, "transpose(jvp(f))/TransformerLayer._mlp/mul"),
        f"%w = f32[8] while(%b), condition=%cond, body=%body, {trips}",
        more=f"{PRODUCT}\n{loop}",
    )
    assert found.seconds == pytest.approx(0.011, rel=1e-6) and found.exposed_seconds == 0
    assert found.by_part == {
        TimedPart("MLP", "forward"): pytest.approx(0.010),
        TimedPart("MLP", "backward"): pytest.approx(0.001),
    }


def gather_seconds(size: float) -> float:
    """Over a line of four chips."""
    return 3 / 4 * size / V5E.link + 3 * HOP


@pytest.mark.parametrize(("beside", "waited"), [(0.0, 1.0), (0.4, 0.6), (3.0, 0.0)])
def test_exposed_part_of_a_gather(beside: float, waited: float) -> None:
    """Only the part of a gather that no computation hides is added.

    With a start and a done, and as a chain of fusions.
    """
    size = 4 * 8_000_000
    whole = gather_seconds(size)
    computed = beside * whole
    work = fusion("a", 1000 * computed)
    found = predicted(
        f"%g = (f32[2000000], f32[8000000]) all-gather-start(%x){LINE}",
        work,
        "%d = f32[8000000] all-gather-done(%g)",
        more=PRODUCT,
    )
    assert found.seconds == pytest.approx(max(computed, whole), rel=1e-3)
    assert found.exposed_seconds == pytest.approx(waited * whole, rel=1e-3, abs=1e-9)
    assert found.exposed_bytes == pytest.approx(waited * 0.75 * size, rel=1e-3, abs=1e-3)
    assert found.by_part[TimedPart("gathers", "forward")] == pytest.approx(found.exposed_seconds)
    chain = LINE + ', frontend_attributes={chain_id="7"}'
    inner = "\n".join(
        f"%c{i} (p: f32[8]) -> f32[8] {{\n  %h = f32[8000000] all-gather(%p){chain}\n}}" for i in range(3)
    )
    again = predicted(
        "%s = f32[8] fusion(%x), kind=kCustom, calls=%c0",
        fusion("a", 1000 * computed, calls="c1"),
        "%e = f32[8] fusion(%a), kind=kCustom, calls=%c2",
        more=inner,
    )
    assert again.seconds == pytest.approx(found.seconds, rel=1e-6)
    assert again.exposed_bytes == pytest.approx(found.exposed_bytes, rel=1e-3, abs=1e-3)


def test_concurrent_collectives() -> None:
    """Collectives that run at once share the network, and a synchronous one waits for it."""
    whole = gather_seconds(4 * 8_000_000)
    start = f"(f32[2000000], f32[8000000]) all-gather-start(%x){LINE}"
    found = predicted(
        f"%g = {start}",
        f"%h = {start}",
        f"%i = f32[8000000] all-gather(%x){LINE}",
        "%d = f32[8000000] all-gather-done(%g)",
        "%e = f32[8000000] all-gather-done(%h)",
        fusion("a", 0),
        more=PRODUCT,
    )
    assert found.seconds == pytest.approx(3 * whole) == pytest.approx(found.exposed_seconds)


def test_prefetch_is_waited_for() -> None:
    """A prefetch is waited for where it is used."""
    copy = "%p = (f32[81900000]{0:S(1)}, f32[81900000], u32[]) copy-start(%x)"  # 0.4 ms of 819 GB/s
    for milliseconds, total in ((0.1, 0.4), (0.5, 0.5)):
        found = predicted(copy, fusion("a", milliseconds), "%d = f32[81900000]{0:S(1)} copy-done(%p)", more=PRODUCT)
        assert found.seconds == pytest.approx(total / 1000, rel=1e-6) and found.exposed_seconds == 0


def test_copies_to_and_from_the_host() -> None:
    """They take the time of the host's link in their direction, beside computation and each other."""
    host, here = "f32[4,4000000]{1,0:S(5)}", "f32[1,4000000]{1,0}"  # a slice has 16 MB: 1 ms of 16 GB/s
    more = f"""{PRODUCT}
%into (a: f32[4,4000000], b: f32[1,4000000], i: s32[]) -> f32[4,4000000] {{
  ROOT %u = {host} dynamic-update-slice(%a, %b, %i)
}}
%of (a: f32[4,4000000], i: s32[]) -> f32[1,4000000] {{
  ROOT %s = {here} dynamic-slice(%a, %i)
}}"""
    store = f"%p = (({host}, {here}, s32[]), {host}, u32[]{{:S(2)}}) async-start(%x, %y, %i), calls=%into"
    load = f"%q = (({host}, s32[]), {here}, u32[]{{:S(2)}}) async-start(%x, %i), calls=%of"
    copy = f"%r = ({here}, f32[1,4000000]{{1,0:S(5)}}, u32[]{{:S(2)}}) copy-start(%x)"
    done = "%d{0} = f32[4] async-done(%{0})"
    for started, milliseconds, total in (
        ((store,), 0.4, 1.0),
        ((store,), 1.5, 1.5),
        ((store, load), 0.4, 1.0),
        ((load, copy), 0.4, 2.0),
    ):
        ends = [done.format(one[1]) for one in started]
        found = predicted(*started, fusion("a", milliseconds), *ends, more=more)
        assert found.seconds == pytest.approx(total / 1000, rel=1e-6) and found.exposed_seconds == 0


def test_unknown_cycles() -> None:
    """A product that the compiler cannot estimate, fused with a gather, takes the time of its bytes in HBM.

    The buffers of the gather are in VMEM and do not count; the gather runs beside it.
    """
    chain = LINE + ', frontend_attributes={chain_id="7"}'
    gathering = f"%c0 (p: f32[8]) -> f32[8] {{\n  %h = f32[8] all-gather(%p){chain}\n}}"
    unknown = f'backend_config={{"window_config":{{"estimated_cycles":"{2**63 - 1}"}}}}'
    found = predicted(
        "%a = f32[60000000]{0} parameter(0)",  # 240 MB
        "%g = f32[409500000]{0:S(1)} parameter(1)",
        f"%s = (f32[21900000]{{0}}, f32[409500000]{{0:S(1)}}) fusion(%a, %g), kind=kOutput, calls=%c0, {unknown}",
        fusion("b", 1),
        more=f"{PRODUCT}\n{gathering}",
    )
    assert found.seconds == pytest.approx(0.0014, rel=1e-3)  # 327.6 MB of 819 GB/s, and 1 ms


@pytest.mark.parametrize(("milliseconds", "exposed"), [(0.4, 0.6), (1.5, 0.0)])
@pytest.mark.parametrize("is_stored", [True, False])
def test_slices_of_a_stack_on_the_host(is_stored: bool, milliseconds: float, exposed: float) -> None:
    """One that is written and one that is read take different directions of the link; a wait for either is exposed."""
    host, here = "f32[4,4000000]{1,0:S(5)}", "f32[1,4000000]{1,0}"
    store = f"%p = (({host}, {here}, s32[]), {host}, u32[]{{:S(2)}}) dynamic-update-slice-start(%x, %y, %i)"
    load = f"%p = (({host}, s32[]), {here}, u32[]{{:S(2)}}) dynamic-slice-start(%x, %i)"
    copy = f"%q = ({here}, {host}, u32[]{{:S(2)}}) copy-start(%x)"  # from the host
    done = f"%d = {host} dynamic-update-slice-done(%p)" if is_stored else f"%d = {here} dynamic-slice-done(%p)"
    found = predicted(store if is_stored else load, fusion("a", milliseconds), done, more=PRODUCT)
    assert found.seconds == pytest.approx((milliseconds + exposed) / 1000, rel=1e-6)
    assert found.host_exposed_seconds == pytest.approx(exposed / 1000, rel=1e-6, abs=1e-9)
    assert (found.host_link_bytes, found.host_link_seconds) == (pytest.approx(16e6), pytest.approx(0.001))
    assert found.exposed_seconds == found.exposed_bytes == 0
    both = predicted(store if is_stored else load, copy, fusion("a", 0), done, more=PRODUCT)
    seconds = 0.001 if is_stored else 0.002  # two in one direction follow each other
    assert both.host_link_seconds == pytest.approx(seconds) and both.host_link_bytes == pytest.approx(32e6)


@pytest.mark.parametrize(("first", "trips"), [(0, 5), (1, 4)])
def test_a_loop_that_begins_later(first: int, trips: int) -> None:
    """XLA runs the first iteration ahead of a loop whose transfers it starts an iteration early."""
    state = "(s32[], f32[8])"
    body = f"%body (p: {state}) -> {state} {{\n  {fusion('a', 2)}\n}}"
    condition = f"""%cond (p: {state}) -> pred[] {{
  %n = s32[] constant(5)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}"""
    found = predicted(
        f"%k = s32[] constant({first})",
        "%copied = s32[] copy(%k)",
        f"%t = {state} tuple(%copied, %x)",
        f"%w = {state} while(%t), condition=%cond, body=%body",
        more=f"{PRODUCT}\n{body}\n{condition}",
    )
    assert found.seconds == pytest.approx(2e-3 * trips, rel=1e-6)


def test_no_cycles_no_prediction() -> None:
    """A program without cycles has no prediction."""
    text = jax.jit(lambda x: x + 1).lower(1.0).compile().as_text()
    assert text is not None and predict(text, line_of(1)) is None
    assert predict('"estimated_cycles":"5"', line_of(1, "NVIDIA H200")) is None


def groups(*devices: int) -> str:
    return "{{" + ",".join(map(str, devices)) + "}}"


@pytest.mark.parametrize(
    ("members", "links"),
    [
        ((0, 1, 2, 3), 1.0),  # a line: its last device receives over one link
        ((0, 1), 1.0),
        ((0, 2), 0.5),  # and the group of 1 and 3 uses the same links
        (tuple(range(0, 64, 4)), 2.0),  # sixteen chips are a ring
        (tuple(range(64)), 3.0),
    ],
)
def test_links_of_a_group(members: tuple[int, ...], links: float) -> None:
    """A group uses the links of the torus dimensions that it spans.

    On a slice of 4 x 16 chips.
    """
    places = [(x, y, 0, 0) for y in range(16) for x in range(4)]
    gather = Instruction("g", "f32[64000000]{0}", "all-gather", f"%x), replica_groups={groups(*members)}")
    sent = 4 * 64e6 * (len(members) - 1) / len(members)
    assert transfer_seconds(gather, places, V5E) == pytest.approx(sent / (links * V5E.link), rel=2e-2)


@pytest.mark.parametrize(
    ("members", "share"),
    [
        ((0, 1, 2, 3), 1.0),  # each of two chips sends half of its bytes over the link in the middle
        ((0, 1), 0.5),
        ((0, 2), 1.0),  # and the group of 1 and 3 uses the same link
        (tuple(range(0, 64, 4)), 2.0),  # sixteen chips are a ring: 8 x a half, over two links
        (tuple(range(64)), 2.0),  # the other dimension takes half as long
    ],
)
def test_links_of_an_all_to_all(members: tuple[int, ...], share: float) -> None:
    """The links in the middle of the longest dimension carry half of all bytes.

    On a slice of 4 x 16 chips.
    """
    places = [(x, y, 0, 0) for y in range(16) for x in range(4)]
    exchange = Instruction("a", "f32[64000000]{0}", "all-to-all", f"%x), replica_groups={groups(*members)}")
    assert transfer_seconds(exchange, places, V5E) == pytest.approx(share * 4 * 64e6 / V5E.link, rel=2e-2)
    cores = [(*place[:-1], core) for place in places[:4] for core in range(2)]
    of_cores = exchange._replace(rest=f"%x), replica_groups={groups(*range(8))}")
    assert transfer_seconds(of_cores, cores, V3) == pytest.approx(2 * 4 * 64e6 / V3.link, rel=2e-2)


def test_ring_through_all_devices() -> None:
    """A collective that the compiler sends around one ring uses two links, whatever dimensions its group spans."""
    places = [(x, y, 0, 0) for y in range(16) for x in range(4)]
    scatter = Instruction("s", "f32[1000000]{0}", "reduce-scatter", f"%x), replica_groups={groups(*range(64))}")
    ring = scatter._replace(rest=scatter.rest + ', "debug":"\\nStrategyRing{colors:1 phases:1}"')
    sent = 63 * 4 * 1e6
    assert transfer_seconds(scatter, places, V5E) == pytest.approx(sent / (3 * V5E.link), rel=2e-2)
    assert transfer_seconds(ring, places, V5E) == pytest.approx(sent / (2 * V5E.link), rel=2e-2)


CALL = ["%st = ((f32[8]), f32[1250000]) call-start(%x), calls=%s"]  # libtpu 0.0.42; below 0.0.52
UPDATED_CALL = [
    "%u = ((), (), (s32[8]{0})) custom-call-start(), called_computations={%s}",
    "%st = ((f32[8]), f32[1250000], (s32[8]{0})) custom-call-update(%u, %x)",
]


@pytest.mark.parametrize("starts", [CALL, UPDATED_CALL])
def test_call_on_a_sparse_core_hides_a_collective(starts: list[str]) -> None:
    """What runs between the start and the done of a call hides the collective of the called computation."""
    called = f"%s (p: f32[8]) -> f32[1250000] {{\n  %g = f32[1250000] all-gather(%p{LINE}\n}}"
    alone = gather_seconds(5e6)
    done = "%d = f32[1250000] call-done(%st)"
    bare = predicted(*starts, done, fusion("a", 1), more=f"{PRODUCT}\n{called}")
    assert bare.exposed_seconds == pytest.approx(alone, rel=1e-3)
    hidden = predicted(*starts, fusion("a", 1e3 * alone), done, more=f"{PRODUCT}\n{called}")
    assert hidden.exposed_seconds == pytest.approx(0, abs=1e-8) and hidden.seconds == pytest.approx(alone, rel=1e-3)


def test_shared_links_and_memory() -> None:
    """Cores of a chip share its links or its memory."""
    places = [(chip, 0, 0, core) for chip in range(4) for core in range(2)]

    def seconds(*members: int) -> float:
        rest = f"%x), replica_groups={groups(*members)}"
        return transfer_seconds(Instruction("g", "f32[64000000]{0}", "all-gather", rest), places, V3)

    size = 4 * 64e6
    assert seconds(0, 1) == pytest.approx(size / V3.memory)
    assert seconds(0, 2, 4, 6) == pytest.approx(3 / 4 * size / (V3.link / 2), rel=1e-2)  # as do the other cores
    assert seconds(*range(8)) == pytest.approx(7 / 8 * size / V3.link, rel=1e-2)


def test_time_of_sums_that_are_not_fused() -> None:
    """A sum streams its array from memory, however long the compiler estimates, except over short tiles."""
    moved = 4 * (4 + 1) * 8192 * 128
    streamed = moved / V5E.memory
    for milliseconds, rows_of_tile, seconds in ((1000.0, 8, streamed), (0.001, 8, 1e-6), (1000.0, 4, 1.0)):
        layout = f"{{2,1,0:T({rows_of_tile},128)}}"
        cycles = round(milliseconds * MS)
        config = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
        found = predicted(
            f"%p = f32[4,8192,128]{layout} parameter(0)",
            f"%r = f32[8192,128] reduce(%p, %zero), dimensions={{0}}, to_apply=%c, {config}",
            more=PRODUCT,
        )
        assert found.seconds == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("op", "path", "part"),
    [
        (
            "fusion",
            "jvp(GPT)/GPT._layers/TransformerLayer._attention/SelfAttention_0/SelfAttention_0._attend/BGXK,BSGK->BGXS/dot_general",
            "attention scores",
        ),
        (
            "fusion",
            "jvp(GPT)/GPT._layers/TransformerLayer._attention/SelfAttention_0/SelfAttention_0._attend/sub",
            "softmax",
        ),
        ("custom-call", "jvp(GPT)/SelfAttention_0._attend/zero_attention_fwd_128/pallas_call", "attention scores"),
        ("custom-call", "jvp(GPT)/TransformerLayer._attention/zero_rotary/pallas_call", "projections"),
        ("fusion", "jvp(GPT)/GPT._layers/TransformerLayer._attention/query/dot_general", "projections"),
        ("fusion", "jvp(GPT)/TransformerLayer._attention/GatedDelta_0/delta_rule/while/body/mul", "delta rule"),
        ("fusion", "jvp(GPT)/GPT.score/head/dot_general", "vocabulary"),
        ("fusion", "jvp(GPT)/GPT._layers/TransformerLayer._norm/norm_mlp/mul", "norms"),
        ("copy", "jvp(GPT)/GPT._layers/TransformerLayer._mlp/mul", "copies"),
        ("all-gather", "jvp(GPT)/GPT._layers/TransformerLayer.method/zero_gather/all_gather", "gathers"),
        ("all-reduce", "jvp(GPT)/GPT._layers/TransformerLayer._mlp/psum", "exchanges"),
    ],
)
def test_parts_of_the_model(op: str, path: str, part: str) -> None:
    assert part_of(Instruction("i", "f32[8]", op, f'%x), metadata={{op_name="{path}"}}')) == TimedPart(part, "forward")


def test_phases_of_a_step() -> None:
    def phase(path: str, op: str = "fusion") -> TimedPart:
        return part_of(Instruction("i", "f32[8]", op, f'%x), metadata={{op_name="{path}"}}'))

    assert phase("transpose(jvp(GPT))/checkpoint/rematted_computation/TransformerLayer._mlp") == TimedPart(
        "MLP", "recomputed"
    )
    assert phase("transpose(jvp(GPT))/checkpoint/TransformerLayer._mlp") == TimedPart("MLP", "backward")
    assert phase("jit(f)/sqrt") == TimedPart("update", "update")
    assert phase("transpose(jvp(GPT))/zero_scatter/add", "all-reduce") == TimedPart("scatters", "backward")
    assert phase("TransformerLayer/TransformerLayer._mlp/mlp_out/add", "all-reduce") == TimedPart(
        "exchanges", "forward"
    )
    assert phase("checkpoint/TransformerLayer/add", "all-reduce") == TimedPart("exchanges", "backward")


def test_name_of_merged_reductions() -> None:
    """A merged reduction is named after the operation that adds its elements."""
    lines = (
        '%a = f32[] parameter(0), metadata={op_name="reduce_scatter"}',
        '%s = f32[] add(%a, %a), metadata={op_name="zero_scatter/add"}',
    )
    region = f"%r (a: f32[]) -> f32[] {{\n  {lines[0]}\n  {lines[1]}\n}}\n{PRODUCT}"
    reduce = "%g = f32[8000000] all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%r"
    found = predicted(reduce, fusion("a", 1), more=region)
    assert found.by_part[TimedPart("scatters", "backward")] == pytest.approx(found.exposed_seconds)


def test_product_runs_near_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix product of a real program runs near the peak.

    A scan of three pairs of products of 4,096 x 2,048 x 2,048 on a v3 core, with gathers of their weights.
    """
    pytest.importorskip("libtpu")
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)  # set by a run in this process, it hides gathers
    devices = find_devices("v3-8")

    def layer(x: jax.Array, shards: jax.Array) -> tuple[jax.Array, None]:
        for shard in shards:
            x = jax.nn.relu(x @ lax.all_gather(shard, "i", tiled=True))
        return x, None

    step = jax.pmap(lambda x, shards: lax.scan(layer, x, shards)[0], axis_name="i", devices=devices)
    x = jax.ShapeDtypeStruct((8, 4096, 2048), jnp.bfloat16)
    text = step.lower(x, jax.ShapeDtypeStruct((8, 3, 2, 256, 2048), jnp.bfloat16)).compile().as_text()
    found = predict(text, devices)
    assert found is not None
    products = 3 * 2 * 2 * 4096 * 2048 * 2048 / V3.flops
    computed = found.seconds - found.exposed_seconds
    assert products < computed < 1.3 * products
    sent = 6 * 2048 * 2048 * 2 * 7 / 8
    assert found.exposed_bytes == pytest.approx(sent, rel=0.01)  # no option of the compiler hides them
    assert found.exposed_seconds == pytest.approx(sent / (2 * V3.link), rel=0.1)  # two lines of two chips
