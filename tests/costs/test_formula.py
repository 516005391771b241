"""Plans of GPUs that are not there: their names, traffic counted in a trace, memory by the formula."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zero.base.errors import UserError
from zero.commands.cli import compose
from zero.costs import formula
from zero.costs.hlo import bytes_by_kind, collectives
from zero.costs.topology import find_devices
from zero.hosts.speeds import SPEEDS
from zero.planning.compile import Row, compile_step, job_of, step_arguments
from zero.planning.config import Request

DEVICES = 8


def plan(topology: str, *overrides: str, stage: int = 3) -> Row:
    config, size = compose(["mode=plan", "model.size=124m", f"plan.topology={topology}", *overrides])
    return compile_step(Request(config, size, config.plan.micro_batch).with_changes(stage=stage))


@pytest.mark.parametrize("kind", formula.KINDS)
def test_kinds_have_peaks(kind: str) -> None:
    assert formula.gpus(f"gpu:{kind}x2")[1].device_kind in SPEEDS


@pytest.mark.parametrize("name", ["gpu:h100", "gpu:h100x0", "gpu:voodoox8", "gpu:x8", "gpu:h100x8x2"])
def test_unknown_gpus(name: str) -> None:
    with pytest.raises(UserError, match=rf"topology={name}: expected gpu:KINDxCOUNT.* h100"):
        formula.gpus(name)


def test_counted_traffic_is_compiled_traffic() -> None:
    """Of gathers, scatters, sums and exchanges, in groups and in a loop."""
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def step(x: jax.Array) -> Any:
        def body(total: jax.Array, _: None) -> tuple[jax.Array, None]:
            whole = lax.all_gather(total, "x", axis_index_groups=groups, tiled=True)
            return total + lax.psum_scatter(jnp.sin(whole), "x", axis_index_groups=groups, tiled=True), None

        looped = lax.scan(body, x, None, length=5)[0]
        exchanged = lax.all_to_all(jnp.cos(x).reshape(DEVICES, -1), "x", 0, 0)
        return looped, lax.psum(x * 2, "x"), exchanged

    x = np.ones((DEVICES, 16), np.float32)
    program = jax.pmap(step, "x")
    counted = bytes_by_kind(formula.collectives_of(jax.make_jaxpr(program)(x).jaxpr, DEVICES))
    # 5 x 64 bytes x 3 shards; a shard is a quarter of the gathered bytes; 2 x 7/8 and 7/8 of 64 bytes
    assert counted == {"all-gather": 960, "reduce-scatter": 960, "all-reduce": 112, "all-to-all": 56}
    assert counted == bytes_by_kind(collectives(program.lower(x).compile().as_text()))


def test_plan_by_formula() -> None:
    """State is exact, stages and rematerialization order the peak, and seconds are a lower bound."""
    rows = {stage: plan("gpu:h100x16", stage=stage) for stage in (0, 3)}
    assert rows[3]["parameters"] * 12 / 16 == pytest.approx(rows[3]["state_bytes"], rel=0.01)
    assert rows[3]["peak_bytes"] < rows[0]["peak_bytes"] and rows[3]["available_bytes"] == 60 * 10**9
    assert (rows[3]["devices"], rows[3]["hosts"], rows[3]["is_estimate"], rows[3]["fits"]) == (16, 2, True, True)
    assert rows[3]["seconds"] is None
    assert rows[3]["seconds_lower_bound"] >= rows[3]["flops"] / SPEEDS["NVIDIA H100 80GB HBM3"].flops
    assert rows[3]["collective_bytes_across_hosts"] == sum(rows[3]["collective_bytes"].values()) > 0
    assert plan("gpu:t4x1", "plan.micro_batch=64", "zero.remat=none")["fits"] is False


@pytest.mark.parametrize(
    ("size", "keys", "remat"),
    [
        ("qwen2_5_0_5b", ["data.max_context=2048", "plan.micro_batch=8"], "none"),
        ("qwen2_5_0_5b", ["data.max_context=2048", "plan.micro_batch=32"], "mlp+attention"),
        ("smollm3_3b", ["data.max_context=4096", "plan.micro_batch=2"], "attention"),
        ("smollm3_3b", ["data.max_context=4096", "plan.micro_batch=2", "zero.offload=activations"], "full"),
        (
            "qwen2_5_0_5b",
            ["data.max_context=2048", "plan.micro_batch=8", "zero.product_dtype=float8"],
            "mlp+projections",
        ),
        ("llama3_8b", ["data.max_context=4096", "plan.micro_batch=2"], "full"),  # which does not fit either
    ],
)
def test_gpus_store_what_fits(size: str, keys: list[str], remat: str) -> None:
    """What takes the fewest seconds, up to all; a policy that fits leaves a tenth of the memory that jax takes."""
    row = plan("gpu:h100x1", f"model.size={size}", *keys)
    assert row["remat"] == remat
    assert row["peak_bytes"] < 0.9 * 60e9 or size == "llama3_8b"


@pytest.mark.parametrize("variable", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_a_larger_share_of_the_memory_stores_more(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "0.92")
    row = plan("gpu:h100x1", "model.size=smollm3_3b", "data.max_context=4096", "plan.micro_batch=2")
    assert (row["remat"], row["available_bytes"]) == ("mlp+attention", 73.6e9)


def test_the_objective_is_planned() -> None:
    """The step reads what the objective reads, and sums its metrics beside the loss."""
    keys = ("gpu:h100x8", "model.override.N=1")
    of_objective = ("objective=distillation", "objective.top_tokens=8")
    plain, distilled = plan(*keys), plan(*keys, *of_objective)
    assert distilled["collective_bytes"]["all-reduce"] > plain["collective_bytes"]["all-reduce"] > 0
    assert distilled["model_flops"] == plain["model_flops"] and distilled["fits"]
    config, size = compose(["mode=plan", f"plan.topology={keys[0]}", "model.size=124m", *keys[1:], *of_objective])
    job = job_of(Request(config, size, 4), find_devices(config.plan.topology))
    _, batch, _ = step_arguments(job, 4, 1024)
    assert {name: x.shape for name, x in batch.extra.items()} == {
        "teacher/tokens": (8, 4, 1024, 8),
        "teacher/log_probabilities": (8, 4, 1024, 8),
    }


@pytest.mark.parametrize("batch", ["batch=stages", "batch=ramp"])
def test_a_batch_that_grows_is_refused(batch: str) -> None:
    with pytest.raises(UserError, match=f"^{batch}: it has no effect, as mode=plan plans the steps after the"):
        plan("gpu:h100x8", batch)


def test_the_kernel_of_gpus_is_planned_without_a_gpu() -> None:
    """jax traces cuDNN's kernel beside a GPU only; elsewhere a plan has attention in blocks, of the same memory."""
    keys = ["data.max_context=512", "model.override.alibi_attn=false", "zero.remat=full"]  # cuDNN has no ALiBi
    rows = [plan("gpu:h100x1", f"model.attention={choice}", *keys) for choice in ("kernel", "blockwise")]
    assert rows[0]["peak_bytes"] == rows[1]["peak_bytes"] > 0 and rows[0]["flops"] == rows[1]["flops"] > 0


def test_what_a_host_does_not_hold_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations on the host leave the device, and are refused where the memory of the host is too small."""
    rows = [plan("gpu:h100x8", "zero.remat=full", f"zero.offload={offload}") for offload in ("none", "activations")]
    kept, moved = rows
    assert kept["host_bytes"] == 0 < moved["host_bytes"] == moved["bytes_of_one_host"] // 8
    assert moved["peak_bytes"] < kept["peak_bytes"] and moved["fits"] and moved["host_available_bytes"] is None
    for spare, fits in ((0, True), (-1, False)):
        monkeypatch.setattr(
            "zero.planning.compile.host_memory", lambda devices, spare=spare: moved["host_bytes"] * 8 + spare
        )
        assert plan("gpu:h100x8", "zero.remat=full", "zero.offload=activations")["fits"] is fits


@pytest.mark.wide
def test_the_optimizer_on_the_host_is_planned() -> None:
    """Its state leaves the devices but for three layers, and the operations of a step stay the same."""
    keys = ["zero.fused_update=true", "zero.remat=full"]
    kept, moved = (plan("gpu:h100x8", *keys, f"zero.offload={offload}") for offload in ("none", "optimizer"))
    assert moved["host_bytes"] == kept["state_bytes"] - moved["state_bytes"] > 0
    layers = moved["model"]["N"]
    assert kept["peak_bytes"] - moved["peak_bytes"] == moved["host_bytes"] - 3 * moved["host_bytes"] // layers
    assert moved["model_flops"] == kept["model_flops"] and moved["fits"]
    assert moved["flops"] == pytest.approx(kept["flops"], rel=0.02)
    # The last program traces a gather of the embedding, of which it uses nothing, so that the compiler leaves it out.
    gathered, traced = (row["collective_bytes"]["all-gather"] for row in (kept, moved))
    assert gathered <= traced <= 1.15 * gathered
