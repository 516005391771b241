"""Estimates of the memory of activations against what jax stores for a backward pass."""

import dataclasses
import math
from collections.abc import Sequence
from functools import cache
from itertools import chain, combinations
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.commands.cli import compose
from zero.costs.compiler import Compiler, compiler_options
from zero.costs.topology import find_devices, prepare_environment
from zero.job.job import make_job, place_model
from zero.job.sizes import load_sizes
from zero.job.step_costs import compile_programs
from zero.models.attention.delta_rule import CHUNK
from zero.models.config import STACK, GPTConfig
from zero.models.gpt import GPT, variable_shapes
from zero.models.mtp import MtpInputs
from zero.models.stack import (
    ATTENTION_OUTPUT,
    ATTENTION_SUMS,
    EXPERTS,
    KINDS,
    LAYER_INPUT,
    PROJECTIONS,
    STORED,
    kinds_of,
)
from zero.partition.collectives.axis import Axis
from zero.planning.compile import step_arguments
from zero.planning.process_per_call import ProcessPerCall
from zero.training.activations import (
    PRODUCTS_SHARE,
    Memory,
    Rates,
    activation_bytes,
    host_bytes,
    kinds_on_host,
    ladder,
    numbers_per_position,
    seconds_by_kind,
    storage_choices,
    storage_seconds,
    stored_bytes,
    with_fitting_storage,
)
from zero.training.sharded_gpt import ShardedGPT

PLAIN = GPTConfig(embedding_dim=32, vocab_size=64, num_head=4, block_size=CHUNK, dropout=0.0, N=3, qkv_bias=False)
GATED = dataclasses.replace(PLAIN, gated=True, mlp_dim=96, kv_heads=2)
LATENT = dataclasses.replace(
    GATED, kv_heads=None, alibi_attn=False, positions="rotary", norm="rms", head_dim=24, rotary_dim=8, latent_dim=40,
    query_latent_dim=48, value_dim=16,
)  # fmt: skip
UNITS = dataclasses.replace(PLAIN, layer="gated_units", num_head=1, alibi_attn=False, positions="none", qkv_bias=True)
ROWS, CONTEXT = 2, CHUNK  # one state of the delta rule
# With a group of experts and their places; without, tokens are sorted.
PLACES = dataclasses.replace(
    GATED, experts=4, experts_per_token=2, expert_capacity=1.5, shared_dim=24, mlp_bias=False, mlp_dim=40
)
SORTED = dataclasses.replace(PLACES, expert_capacity=None, first_dense=1, dense_dim=56)
MTP = dataclasses.replace(PLACES, predictor=True, first_dense=1, dense_dim=56)
DELTA = dataclasses.replace(
    GATED, kv_heads=None, alibi_attn=False, positions="none", mixers=("delta",), delta_key_heads=2,
    delta_value_heads=4, delta_key_dim=16, delta_value_dim=24, qkv_bias=False, out_bias=False,
)  # fmt: skip
LINEAR = dataclasses.replace(GATED, alibi_attn=False, positions="none", mixers=("linear",))
RATES = Rates(products=1e12, mixers={"attention": 1e11, "delta": 1e10}, network=1e9, link=1e9)


@cache
def residuals(config: GPTConfig, remat: str) -> int:
    """Bytes that the forward pass stores for the backward pass, blockwise attention."""
    gpt, tokens = GPT(config, remat=remat, blockwise_from=2), jnp.zeros((ROWS, CONTEXT), jnp.int32)

    inputs = {"predictor": MtpInputs(tokens, tokens)} if config.predictor else {}

    def loss(variables: Any) -> jax.Array:
        scores: Any = gpt.apply(variables, tokens, tokens, inputs=inputs, method="scores")[0]
        return jnp.sum(scores.losses_BT) + sum(jnp.sum(x) for x in scores.extra.values())

    def backward(variables: Any) -> Any:
        return jax.vjp(loss, variables)[1]

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(backward, variable_shapes(config))))


@pytest.mark.parametrize(
    ("config", "policies"),
    [
        pytest.param(PLAIN, STORED, marks=pytest.mark.wide),
        pytest.param(GATED, [*STORED], marks=pytest.mark.wide),
        (LATENT, [*STORED]),
        (PLACES, ["mlp_in", "mlp", "experts", "experts+attention"]),
        (SORTED, ["mlp_in", "mlp", "experts"]),
        (DELTA, ["attention", "projections"]),
        pytest.param(LINEAR, ["attention", "projections"], marks=pytest.mark.wide),
        (MTP, ["experts+projections"]),
    ],
    ids=["plain", "gated", "latent", "places", "sorted", "delta", "linear", "mtp"],
)
def test_stored_values(config: GPTConfig, policies: list[str]) -> None:
    """The numbers per position are those that a policy stores beyond the inputs of layers."""
    for remat in policies:
        model = ShardedGPT(config, Axis("zero", (1, 1)), 3, remat=remat)
        more = residuals(config, remat) - residuals(config, "full")
        numbers = numbers_per_position(model, kinds_of(remat)) - doubled(model, kinds_of(remat)) / 2
        layers = config.layer_count
        assert more == pytest.approx(4 * ROWS * CONTEXT * layers * numbers, rel=0.02), remat
        of_full = dataclasses.replace(model, remat="full")
        assert stored_bytes(model, ROWS, CONTEXT) - stored_bytes(
            of_full, ROWS, CONTEXT
        ) == 4 * ROWS * CONTEXT * layers * (numbers_per_position(model, kinds_of(remat)))


def doubled(model: ShardedGPT, kinds: Sequence[str]) -> float:
    """Numbers of 4 bytes, which count as two on TPU: log-sum-exps, the delta rule, and the places of tokens."""
    config = model.config
    is_attention = config.mixers == ("attention",)
    of_attention = numbers_per_position(model, [ATTENTION_SUMS if is_attention else ATTENTION_OUTPUT])
    of_experts = 2 * config.experts_per_token * config.expert_layers / config.layer_count if config.experts else 0
    return of_attention * (ATTENTION_OUTPUT in kinds) + of_experts * (EXPERTS in kinds)


def test_ladder() -> None:
    """Each policy of the ladder stores more, and the last one that fits is taken."""
    model = ShardedGPT(GATED, Axis("zero", (1, 8)), 3, jnp.bfloat16)
    rungs = ladder(model, CONTEXT)
    assert rungs == ("full", "mlp_in", "mlp", "mlp+attention")
    needs = [activation_bytes(dataclasses.replace(model, remat=remat), ROWS, CONTEXT) for remat in rungs]
    assert needs == sorted(set(needs))

    def fit(capacity: float) -> str:
        return with_fitting_storage(model, ROWS, CONTEXT, Memory(10**6, capacity), RATES).remat

    chosen = [rungs.index(fit((10**6 + need) * 1.3)) for need in (0, *needs)]
    assert chosen == sorted(chosen) and rungs[chosen[0]] == "full"
    assert fit(1e9) == "mlp+attention" and fit(0.0) == "full"


def test_a_gate_that_does_not_exist_is_stored() -> None:
    """Without a gate two policies are the same; the one that stores more by its name is taken, as ever."""
    model = ShardedGPT(PLAIN, Axis("zero", (1, 8)), 3, jnp.bfloat16, kernel="tpu_v4")
    assert with_fitting_storage(model, ROWS, CONTEXT, Memory(0, 1e9), RATES).remat == "mlp"


def test_chunks_of_the_vocabulary_in_pairs() -> None:
    """An iteration has two chunks if that fits beside the activations that save the most time, and there are two."""
    config = dataclasses.replace(GATED, vocab_size=10**6, vocab_chunks=4)
    model = ShardedGPT(config, Axis("zero", (1, 8)), 3, jnp.bfloat16)
    gradients = gradient_bytes(model)

    def chosen(of_model: ShardedGPT, more: int) -> ShardedGPT:
        """With so many bytes beside those of single chunks."""
        most = activation_bytes(dataclasses.replace(of_model, remat="mlp+attention"), ROWS, CONTEXT)
        memory = Memory(0, (gradients + most + more) / 0.9 + 100)
        return with_fitting_storage(of_model, ROWS, CONTEXT, memory, RATES)

    half = 4 * ROWS * CONTEXT * 10**6 // 4 // 2  # of the logits of a chunk, more than layers and gradients take
    assert [chosen(model, more).chunks_at_once for more in (0, half // 2, half)] == [1, 1, 2]
    assert {chosen(model, more).remat for more in (0, half)} == {"mlp+attention"}
    whole = dataclasses.replace(model, config=dataclasses.replace(config, vocab_chunks=1))
    assert chosen(whole, 10**12).chunks_at_once == 1


LONG = 4096
DEEP = dataclasses.replace(GATED, N=8, block_size=LONG)
OF_KERNEL = ShardedGPT(DEEP, Axis("zero", (1, 8)), 3, jnp.bfloat16, kernel="tpu_v4", offload=KINDS)


def all_placements(model: ShardedGPT, context: int) -> list[ShardedGPT]:
    """The model with each policy of its ladder, and each set of its kinds on the host."""
    found = []
    for remat in ladder(model, context):
        kinds = [kind for kind in kinds_of(remat) if kind in KINDS]
        for moved in chain.from_iterable(combinations(kinds, count) for count in range(len(kinds) + 1)):
            found.append(dataclasses.replace(model, remat=remat, offload=moved))
    return found


def gradient_bytes(model: ShardedGPT) -> int:
    """Bytes of a device of the gradients, in float32."""
    return 4 * sum(math.prod(leaf.shard_shape) for leaf in model.layout.leaves)


def fixed_bytes(model: ShardedGPT) -> int:
    """Gradients and two whole layers, beside which nothing is held here."""
    return gradient_bytes(model) + 2 * 2 * sum(math.prod(leaf.gathered_shape) for leaf in model.layout.at(STACK).leaves)


STORED_MOST = stored_bytes(dataclasses.replace(OF_KERNEL, remat="mlp+attention"), ROWS, LONG)
SHARES = st.floats(0, 1.2)  # of the bytes of the policy that stores most


@settings(deadline=None, max_examples=60)
@given(device=SHARES, host=SHARES, link=st.floats(-2, 3), attention=st.floats(-2, 1))
def test_the_fewest_seconds_of_all_that_fit(device: float, host: float, link: float, attention: float) -> None:
    """The choice is the least of a brute force, and fits both memories; a faster link has no less on the host."""
    # From links that hide nothing to those that hide all; attention from cheaper than an MLP to far more expensive.
    rates = RATES._replace(mixers={**RATES.mixers, "attention": 1e12 * 10**attention}, link=1e9 * 10**link)
    least = min(activation_bytes(one, ROWS, LONG) for one in all_placements(OF_KERNEL, LONG))
    fixed = fixed_bytes(OF_KERNEL)
    capacity, host_capacity = (fixed + least + device * STORED_MOST) / 0.935 + 100, host * STORED_MOST

    def chosen_with(rates: Rates) -> ShardedGPT:
        return with_fitting_storage(OF_KERNEL, ROWS, LONG, Memory(0, capacity, host_capacity), rates)

    def cost(one: ShardedGPT) -> tuple[float, int, int]:
        seconds = storage_seconds(one, ROWS, LONG, rates)
        return seconds, host_bytes(one, ROWS, LONG), -ladder(OF_KERNEL, LONG).index(one.remat)

    def fits(one: ShardedGPT) -> bool:
        is_held = fixed + activation_bytes(one, ROWS, LONG) <= 0.935 * capacity  # one layer per iteration, by a kernel
        return is_held and host_bytes(one, ROWS, LONG) <= host_capacity

    fitting = [one for one in all_placements(OF_KERNEL, LONG) if fits(one)]
    chosen = chosen_with(rates)
    if not fitting:
        assert (chosen.remat, kinds_on_host(chosen)) == ("full", (LAYER_INPUT,))
        return
    assert fits(chosen) and cost(chosen) == min(map(cost, fitting))
    assert host_bytes(chosen_with(rates._replace(link=2 * rates.link)), ROWS, LONG) >= host_bytes(chosen, ROWS, LONG)


@settings(deadline=None, max_examples=30)
@given(device=SHARES)
def test_without_the_host_the_last_that_fits_is_taken(device: float) -> None:
    """Storing more saves time, so the predicted seconds give the ladder's order."""
    model = dataclasses.replace(OF_KERNEL, offload=())
    rungs = ladder(model, LONG)
    needs = [fixed_bytes(model) + activation_bytes(dataclasses.replace(model, remat=r), ROWS, LONG) for r in rungs]
    capacity = (needs[0] + device * STORED_MOST) / 0.935
    fitting = [remat for remat, need in zip(rungs, needs, strict=True) if need <= 0.935 * capacity]
    chosen = with_fitting_storage(model, ROWS, LONG, Memory(0, capacity), RATES)
    assert (chosen.remat, chosen.offload) == (fitting[-1] if fitting else "full", ())


V6E = RATES._replace(products=PRODUCTS_SHARE * 918e12, mixers={"attention": 0.66 * 918e12}, link=63e9)
V5E = RATES._replace(products=PRODUCTS_SHARE * 197e12, mixers={"attention": 0.97 * 197e12}, link=16e9)
NARROW_MISTRAL = {"embedding_dim": 2048, "num_head": 16, "mlp_dim": 7168, "N": 8}
NARROW_LLAMA = {"embedding_dim": 1024, "num_head": 8, "kv_heads": 2, "mlp_dim": 3584, "N": 8}


@pytest.mark.parametrize(
    ("size", "changes", "batch", "remat", "rates", "compiled"),
    [
        ("mistral_7b", {}, (6, 8192), "attention", V6E, 0.0),
        ("mistral_7b", {}, (6, 8192), "mlp_in+attention", V6E, 0.7095),
        ("llama3_70b", {}, (2, 8192), "mlp_in+attention", V6E, 1.0431),
        ("mistral_7b", NARROW_MISTRAL, (6, 8192), "full", V6E, 0.0),
        ("mistral_7b", NARROW_MISTRAL, (6, 8192), "mlp_in+attention", V6E, 0.0964),
        ("mistral_7b", NARROW_MISTRAL, (6, 8192), "mlp+attention", V6E, 0.2027),
        ("llama3_8b", {"N": 8}, (2, 8192), "full", V5E, 0.0),
        ("llama3_8b", {"N": 8}, (2, 8192), "attention", V5E, 0.0107),
        ("llama3_8b", {"N": 8}, (2, 8192), "mlp_in", V5E, 0.0801),
        ("llama3_8b", {"N": 8}, (2, 8192), "mlp_in+attention", V5E, 0.2163),
        ("llama3_8b", NARROW_LLAMA, (2, 2048), "full", V5E, 0.0),
        ("llama3_8b", NARROW_LLAMA, (2, 2048), "mlp_in+attention", V5E, 0.0244),
        ("llama3_8b", NARROW_LLAMA, (2, 2048), "mlp_in+projections", V5E, 0.0449),
    ],
)
def test_waits_for_the_host(
    size: str, changes: dict[str, Any], batch: tuple[int, int], remat: str, rates: Rates, compiled: float
) -> None:
    """Seconds in which a step waits, beside those of programs as XLA schedules them (docs/decisions/offload.md)."""
    config = dataclasses.replace(load_sizes()[size], **changes)
    model = ShardedGPT(config, Axis("zero", (1, 8)), 3, jnp.bfloat16, remat=remat, kernel="tpu_v6e")
    moved = dataclasses.replace(model, offload=KINDS)
    waits = storage_seconds(moved, *batch, rates) - storage_seconds(model, *batch, rates)
    assert waits == pytest.approx(compiled, rel=0.3, abs=0.011)


def test_seconds_of_each_kind() -> None:
    """Kinds of a layer by hand, for groups of four devices that share each row; and of windows, in whole blocks."""
    config = dataclasses.replace(GATED, block_size=4096, windows=(0, 1024, 1024), N=3)
    model = ShardedGPT(config, Axis.with_tensor_groups("zero", 8, 4), 3, kernel="tpu_v4")
    positions, width, heads = 2 * 4096, config.embedding_dim, config.num_head * config.head_width
    found = seconds_by_kind(model, 2, 4096, RATES)
    scores = 512**2 * (36 + 2 * (1 + 2 + 6 * 3)) / 3
    assert found == pytest.approx(
        {
            "attention": 4 * 2 * scores * heads / 4 / RATES.mixers["attention"],
            "projections": 2 * positions * width * (2 * heads + 2 * config.key_heads * config.head_width) / 4e12,
            "mlp_in": 2 * positions * width * 96 / 4e12,
            "mlp_gate": 2 * positions * width * 96 / 4e12,
            "experts": 0,
        }
    )
    whole = dataclasses.replace(model, config=dataclasses.replace(config, windows=(0,), gated=False))
    assert seconds_by_kind(whole, 2, 4096, RATES)["attention"] > found["attention"]
    assert seconds_by_kind(whole, 2, 4096, RATES)["mlp_gate"] == 0
    cut = dataclasses.replace(whole, axis=Axis("zero", (1, 8), context=2))
    alone = dataclasses.replace(whole, axis=Axis("zero", (1, 8)))
    by_two, by_one = (seconds_by_kind(one, 2, 4096, RATES) for one in (cut, alone))
    assert by_one == pytest.approx({kind: 2 * seconds for kind, seconds in by_two.items()})


@pytest.mark.parametrize(
    ("config", "kernel", "context", "rungs"),
    [
        (GATED, None, 8192, ["full", "mlp_in", "mlp", "mlp+attention"]),
        (GATED, "tpu_v4", 2048, ["full", "mlp_in", "mlp"]),
        (GATED, "tpu_v4", 4096, ["full", "attention", "mlp_in+attention", "mlp+attention"]),
        (PLACES, "tpu_v4", 2048, ["full", "mlp_in", "mlp", "experts"]),
        (DELTA, "tpu_v4", 2048, ["full", "attention", "mlp_in+attention", "mlp+attention"]),
        (UNITS, None, 64, ["full"]),
    ],
)
def test_rungs_of_the_ladder(config: GPTConfig, kernel: str | None, context: int, rungs: list[str]) -> None:
    """Attention that a kernel computes is stored only in long rows, and nothing of gated units."""
    model = ShardedGPT(config, Axis("zero", (1, 8)), 3, kernel=kernel)
    found = list(ladder(model, context))
    needs = [activation_bytes(dataclasses.replace(model, remat=remat), ROWS, context) for remat in found]
    assert found == rungs and needs == sorted(set(needs))


def test_products_of_an_mlp_are_stored_alone_on_the_host() -> None:
    """Attention would wait there behind them, and is computed again."""
    assert ladder(OF_KERNEL, LONG) == ("full", "attention", "mlp_in", "mlp", "mlp_in+attention", "mlp+attention")


def test_layers_of_an_iteration_are_estimated_together() -> None:
    """Of layers whose windows differ each has its projections, and its input if it comes from the host, at once."""
    windows = dataclasses.replace(OF_KERNEL, config=dataclasses.replace(DEEP, windows=(64, 64, 64, 0)))
    width = 2 * ROWS * LONG
    projections = width * numbers_per_position(OF_KERNEL, [ATTENTION_OUTPUT, PROJECTIONS])
    inputs = width * DEEP.embedding_dim
    for offload, in_transit in ((), 0), ((LAYER_INPUT,), 6 * inputs):
        with_windows, without = (dataclasses.replace(one, offload=offload) for one in (windows, OF_KERNEL))
        more = activation_bytes(with_windows, ROWS, LONG) - activation_bytes(without, ROWS, LONG)
        assert more == 3 * projections + in_transit
        by_blocks = [dataclasses.replace(one, kernel=None, blockwise_from=2) for one in (with_windows, without)]
        assert len({activation_bytes(one, ROWS, LONG) for one in by_blocks}) == 1


def estimated_and_assigned(remat: str, offload: str) -> tuple[int, int]:
    """Bytes of a device at the peak of a step of Mistral 7B with six layers, by the formula and by the compiler."""
    keys = [f"zero.remat={remat}", f"zero.offload={offload}", "distributed.compilation_cache=null"]
    request = ["mode=plan", "plan.topology=v6e-8", "model.size=mistral_7b", "data.max_context=8192", *keys]
    config: Any = compose(request)[0]
    size = dataclasses.replace(load_sizes()["mistral_7b"], N=6)
    devices = find_devices("v6e-8")
    job = make_job(config, place_model(config, size, devices, 6))
    on_host = kinds_on_host(job.model)
    choices = storage_choices(job.model, 6, 8192, Memory(job.state_bytes, math.inf), RATES)
    (estimate,) = [x.bytes for x in choices if x.model.remat == remat and kinds_on_host(x.model) == on_host]
    compiled = compile_programs(
        Compiler(devices, compiler_options(devices, True)),
        job.programs.step,
        *step_arguments(job, 6, 8192),
        whole=False,
    )
    return estimate, compiled.memory_analysis().peak_memory_in_bytes


@pytest.mark.wide
@pytest.mark.parametrize(("remat", "offload"), [("full", "activations"), ("attention", "none")])
def test_estimates_are_near_what_the_compiler_assigns(remat: str, offload: str) -> None:
    """Long rows of a wide gated MLP, whose activations take more than its weights."""
    pytest.importorskip("libtpu")
    with ProcessPerCall(1, [], prepare_environment, ("v6e-8",)) as pool:  # ends before the compiler has machine code
        estimate, assigned = pool.submit(estimated_and_assigned, remat, offload).result()
    assert 0.97 * assigned <= estimate <= 1.1 * assigned
