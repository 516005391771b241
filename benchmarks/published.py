"""The steps that Google publishes for slices of 8 to 1,024 TPU chips, beside zero's predicted ones.

    python -m benchmarks.published [--rows llama3-8b-v6e-16 ...]
    python -m benchmarks.published --choices   # compiles nothing: what zero.remat=auto chooses from, in a minute
    python -m benchmarks.published --schedule --rows NAME --keys zero.remat=full --xla xla_jf_vliw_scheduler=false

Compiles zero's step for the slice, the sequences and the context of a recipe of AI-Hypercomputer/tpu-recipes, without
a TPU, and writes docs/sources/published.json and the table of benchmarks/measured/beside-maxtext.md. A row takes 3 to
10 minutes on two idle cores and is written once it is there; one whose program, compiler and code of predictions are
those of its digests is not compiled again. Where the time of a step goes is printed beside its row. `--schedule` tries
keys and options of XLA on a step: it compiles as far as the schedule, in 15 to 350 CPU seconds, and writes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.recipe_sources import REPOSITORY, with_part
from benchmarks.recipes import Digests, digest, prediction, what_changed
from zero.commands.cli import composed
from zero.commands.modes import typed
from zero.costs.compiler import Compiler
from zero.costs.hlo import computations
from zero.costs.live_arrays import LiveArrays, read_live_arrays
from zero.costs.predict import Prediction, predict
from zero.costs.topology import available_bytes, find_devices, out_of_memory, prepare_environment
from zero.hosts.speeds import SPEEDS, usable_bytes
from zero.job.job import Job, PlacedModel, make_job, place_model
from zero.job.memory import most_on_host, rates_of
from zero.job.sizes import load_sizes
from zero.job.step_costs import compile_programs, costs_of
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.stack import kinds_of, movable_kinds
from zero.planning.compile import compiler_of, options_of, step_arguments
from zero.planning.config import Request
from zero.training.activations import (
    Choice,
    Memory,
    kinds_on_host,
    numbers_per_position,
    seconds_by_kind,
    spare,
    storage_choices,
)
from zero.training.flops import model_flops
from zero.training.sharded_gpt import ShardedGPT

TABLE = REPOSITORY / "docs" / "sources" / "published.json"
MAXTEXT = REPOSITORY / "docs" / "sources" / "maxtext.json"  # of benchmarks/clock.py
PAGE = REPOSITORY / "benchmarks" / "measured" / "beside-maxtext.md"
START = "<!-- printed by benchmarks/published.py -->\n"
WITHOUT_WAITS = "the same if MaxText never waited for the host"
COLUMNS = (
    "recipe",
    "slice",
    "sequences per chip",
    "published, s",
    "zero's keys",
    "peak, GiB per device",
    "predicted, s",
    "MFU",
    "exposed, s",
    "predicted / published",
    "MaxText predicted, s",
    "MaxText predicted / published",
    "zero / MaxText, both predicted",
    WITHOUT_WAITS,
)
CHOICE_COLUMNS = (
    "recipe",
    "slice",
    "stored",
    "estimate, GiB",
    "compiled, GiB",
    "recomputed and waited for, s",
    "the fastest that could fit",
    "it would save",
    "a part of the layers would save",
)
OFFLOAD = ("zero.offload=activations",)
INT8 = ("zero.product_dtype=int8_all", "zero.gather_dtype=products")
LLAMA2_70B = {"vocab_size": 32000, "block_size": 4096, "vocab_chunks": 3, "rotary_base": 10000.0}
LLAMA_405B = {"embedding_dim": 16384, "num_head": 128, "N": 126, "mlp_dim": 53248}
DROPPED = {"expert_capacity": 1.25}
MIXTRAL_8X22B = DROPPED | {"embedding_dim": 6144, "num_head": 48, "N": 56, "mlp_dim": 16384, "vocab_size": 32768}
GEMMA_12B = {"embedding_dim": 3840, "num_head": 16, "kv_heads": 8, "N": 48, "mlp_dim": 15360}
# Tokens over the capacity are dropped, where MaxText's sorted ones have none. The loss of a sequence: arXiv 2412.19437.
DEEPSEEK_V3 = DROPPED | {"balance_loss": 0.0001}
QWEN3_235B = DROPPED | {"embedding_dim": 4096, "num_head": 64, "mlp_dim": 1536, "N": 94}
# Gradients in bfloat16, as in the recipe: those of a layer's experts are 21 GiB, in float32 twice as many.
NARROW_GRADIENTS = ("zero.wire_dtype=bfloat16", "zero.reduce_dtype=bfloat16", "zero.gradient_dtype=bfloat16", *OFFLOAD)
EXPERT_GROUPS = ("zero.expert_shards=32", *OFFLOAD)
GPT3_175B = {"embedding_dim": 12288, "num_head": 96, "N": 96, "vocab_size": 50304, "block_size": 2048, "dropout": 0.0}


@dataclass(frozen=True)
class Recipe:
    """A published step.

    Attributes:
      source: the folder of tpu-recipes.
      topology: the slice, or the slices.
      size: the model: an entry of conf/models, of which `changes` replaces fields.
      sequences: per chip.
      context: tokens per sequence.
      seconds: as published.
      keys: of zero.
      changes: fields of the model.
    """

    source: str
    topology: str
    size: str
    sequences: int
    context: int
    seconds: float
    keys: tuple[str, ...] = ()
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


V6E = "training/trillium"
IRONWOOD = "training/ironwood"
V5P = "training/v5p"
RECIPES = {
    "llama3-8b-v6e-8": Recipe(f"{V6E}/Llama3.1-8B-MaxText/v6e-8", "v6e-8", "llama3_8b", 3, 8192, 3.443),
    "llama3-8b-v6e-16": Recipe(f"{V6E}/Llama3.1-8B-MaxText/v6e-16", "v6e-16", "llama3_8b", 3, 8192, 3.393),
    "llama3-8b-v6e-32": Recipe(f"{V6E}/Llama3.1-8B-MaxText/v6e-32", "v6e:4x8", "llama3_8b", 3, 8192, 3.495),
    "llama3-8b-v6e-64": Recipe(f"{V6E}/Llama3.1-8B-MaxText/v6e-64", "v6e-64", "llama3_8b", 5, 8192, 5.652),
    "llama3-8b-v6e-128": Recipe(f"{V6E}/Llama3.1-8B-MaxText/v6e-128", "v6e:8x16", "llama3_8b", 4, 8192, 4.602),
    "llama3-8b-v6e-256": Recipe(f"{V6E}/Llama3.1-8B-MaxText/v6e-256", "v6e-256", "llama3_8b", 4, 8192, 4.546),
    "mistral-7b-v6e-8": Recipe(f"{V6E}/Mistral-7B-MaxText", "v6e-8", "mistral_7b", 6, 8192, 6.320, OFFLOAD),
    "llama2-70b-v6e-256": Recipe(
        f"{V6E}/Llama2-70B-MaxText", "v6e-256", "llama3_70b", 2, 4096, 9.052, changes=LLAMA2_70B
    ),
    "llama3-70b-v6e-32": Recipe(
        f"{V6E}/Llama3.1-70B-MaxText/v6e-32",
        "v6e:4x8",
        "llama3_70b",
        2,
        8192,
        17.790,
        ("zero.fused_update=true", "zero.offload=both"),
    ),
    "llama3-70b-v6e-64": Recipe(f"{V6E}/Llama3.1-70B-MaxText/v6e-64", "v6e-64", "llama3_70b", 2, 8192, 18.688, OFFLOAD),
    "llama3-70b-v6e-128": Recipe(
        f"{V6E}/Llama3.1-70B-MaxText/v6e-128", "v6e:8x16", "llama3_70b", 4, 8192, 34.786, OFFLOAD
    ),
    "llama3-70b-v6e-256": Recipe(
        f"{V6E}/Llama3.1-70B-MaxText/v6e-256", "v6e-256", "llama3_70b", 5, 8192, 42.656, OFFLOAD
    ),
    "llama3-405b-2xv6e-256": Recipe(
        f"{V6E}/Llama3.1-405B-MaxText",
        "2xv6e-256",
        "llama3_70b",
        1,
        8192,
        54.803,
        ("zero.replicas=1", *OFFLOAD),
        LLAMA_405B,
    ),
    "gpt3-175b-v6e-256": Recipe(
        f"{V6E}/GPT3-175B-MaxText/bf16", "v6e-256", "gpt2", 3, 2048, 17.182, OFFLOAD, GPT3_175B
    ),
    "gemma3-12b-v6e-256": Recipe(
        f"{V6E}/Gemma3-12B-MaxText/v6e-256", "v6e-256", "gemma3_1b", 1, 32768, 7.318, OFFLOAD, GEMMA_12B
    ),
    "gemma3-12b-2xv6e-256": Recipe(
        f"{V6E}/Gemma3-12B-MaxText/2x-v6e-256", "2xv6e-256", "gemma3_1b", 1, 32768, 7.793, OFFLOAD, GEMMA_12B
    ),
    "gemma3-12b-4xv6e-256": Recipe(
        f"{V6E}/Gemma3-12B-MaxText/4x-v6e-256", "4xv6e-256", "gemma3_1b", 1, 32768, 8.390, OFFLOAD, GEMMA_12B
    ),
    "mixtral-8x7b-v6e-256": Recipe(
        f"{V6E}/Mixtral-8x7B-MaxText", "v6e-256", "mixtral_8x7b", 12, 4096, 13.484, OFFLOAD, DROPPED
    ),
    "mixtral-8x22b-v6e-256": Recipe(
        f"{V6E}/Mixtral-8x22B-MaxText", "v6e-256", "mixtral_8x7b", 8, 4096, 24.706, OFFLOAD, MIXTRAL_8X22B
    ),
    "llama3-70b-tpu7x-64": Recipe(f"{IRONWOOD}/llama3.1-70b", "tpu7x:4x4x4", "llama3_70b", 4, 8192, 12.20),
    "llama3-70b-tpu7x-256": Recipe(f"{IRONWOOD}/llama3.1-70b", "tpu7x:4x8x8", "llama3_70b", 4, 8192, 12.27),
    "llama3-405b-tpu7x-256": Recipe(
        f"{IRONWOOD}/llama3.1-405b", "tpu7x:4x8x8", "llama3_70b", 6, 8192, 98.34, OFFLOAD, LLAMA_405B
    ),
    "llama3-405b-v5p-1024": Recipe(
        f"{V5P}/Llama3.1-405B-MaxText", "v5p:8x8x8", "llama3_70b", 2, 8192, 131.474, changes=LLAMA_405B
    ),
    "gpt3-175b-v5p-1024": Recipe(f"{V5P}/GPT3-175B-MaxText", "v5p:8x8x8", "gpt2", 4, 2048, 22.197, INT8, GPT3_175B),
    "deepseek3-671b-v5p-1024": Recipe(
        f"{V5P}/DeepSeek3-671B-MaxText", "v5p:8x8x8", "deepseek_v3", 6, 8192, 90.668, NARROW_GRADIENTS, DEEPSEEK_V3
    ),
    "deepseek3-671b-tpu7x-128": Recipe(
        f"{IRONWOOD}/deepseek3-671b", "tpu7x:4x4x8", "deepseek_v3", 16, 4096, 27.02, NARROW_GRADIENTS, DEEPSEEK_V3
    ),
    "deepseek3-671b-tpu7x-256": Recipe(
        f"{IRONWOOD}/deepseek3-671b", "tpu7x:4x8x8", "deepseek_v3", 16, 4096, 26.79, NARROW_GRADIENTS, DEEPSEEK_V3
    ),
    "qwen3-235b-tpu7x-256": Recipe(
        f"{IRONWOOD}/qwen3-235b-a22b", "tpu7x:4x8x8", "qwen3_30b_a3b", 32, 4096, 30.87, EXPERT_GROUPS, QWEN3_235B
    ),
}


@dataclass(frozen=True)
class Row:
    """The figures of a recipe; those of time are None where the step does not fit.

    Attributes:
      digests: of all that they depend on.
      remat: what is stored, as `zero.remat=auto` has chosen it; "auto" where only some of it lies on the host, which
        no other value says.
      peak_bytes: of one device.
      available_bytes: of one device.
      seconds: per step.
      exposed_seconds: in which only collectives run.
      mfu: model FLOPs utilization.
    """

    digests: Digests
    remat: str
    peak_bytes: int
    available_bytes: int
    seconds: float | None = None
    exposed_seconds: float | None = None
    mfu: float | None = None


def size_of(recipe: Recipe) -> GPTConfig:
    """The model of a recipe."""
    if recipe.size == "gpt2":
        return GPTConfig(**(FAMILIES["gpt2"] | {"vocab_chunks": 12, **recipe.changes}))
    changes = dict(recipe.changes)
    if recipe.size == "gemma3_1b":  # five layers with a window, then one without
        changes["windows"] = ([1024] * 5 + [0]) * (changes["N"] // 6)
    return dataclasses.replace(load_sizes()[recipe.size], **changes)


def request_of(recipe: Recipe) -> Request:
    """The step as a plan takes it."""
    keys = ("mode=plan", f"plan.topology={recipe.topology}", f"data.max_context={recipe.context}", *recipe.keys)
    config: Any = typed(composed(list(keys)))
    devices_per_chip = 2 if recipe.topology.startswith("tpu7x") else 1
    return Request(config, size_of(recipe), recipe.sequences // devices_per_chip)


class Step(NamedTuple):
    """The step of a recipe before it is compiled."""

    request: Request
    devices: list[Any]
    placed: PlacedModel
    job: Job
    arguments: Any


def step_of(recipe: Recipe) -> Step:
    """The step of a recipe, on its slice."""
    prepare_environment(recipe.topology)
    request = request_of(recipe)
    devices = find_devices(recipe.topology)
    placed = place_model(request.config, request.size, devices, request.rows)
    job = make_job(request.config, placed)
    return Step(request, devices, placed, job, step_arguments(job, request.rows, recipe.context))


def row_of(name: str) -> Row | None:
    """Compiles the step of a recipe; None if its row is there already."""
    recipe = RECIPES[name]
    request, devices, _, job, arguments = step_of(recipe)
    speed = SPEEDS[devices[0].device_kind]
    lowered = job.programs.step.lower(*arguments)
    options = options_of(request.config.zero, devices)
    programs = digest([lowered.as_text(), json.dumps(options, sort_keys=True)])
    digests = Digests(programs, f"libtpu {version('libtpu')}", prediction())
    before = load_rows().get(name)
    if what_changed(None if before is None else before.digests, digests) is None:
        return None
    try:
        step = compile_programs(compiler_of(request, devices), job.programs.step, *arguments)
    except jax.errors.JaxRuntimeError as error:
        return Row(digests, job.model.remat, *out_of_memory(error))
    available = available_bytes(devices)
    costs = costs_of(step, job.storage, job.state_bytes, devices, available)
    found = costs.predicted
    assert found is not None, "the compiler has written no cycles"
    for part, seconds in sorted(found.by_part.items(), key=lambda item: -item[1])[:12]:
        print(f"  {part.name:20} {part.phase:12} {seconds:8.3f} s", flush=True)
    flops = model_flops(request.size, request.rows, recipe.context) // job.model.axis.row_group
    is_in_part = OFFLOAD[0] in recipe.keys and kinds_on_host(job.model) != movable_kinds(job.model.remat)
    return Row(
        digests,
        "auto" if is_in_part else job.model.remat,
        costs.peak,
        available,
        found.seconds,
        found.exposed_seconds,
        flops / (found.seconds * speed.flops),
    )


def print_schedule(name: str, keys: Sequence[str], xla: Mapping[str, bool | float]) -> None:
    """Compiles the step of a recipe as far as the schedule, and prints its figures, its longest waits and its peak.

    Args:
      name: of the recipe.
      keys: in addition to those of the recipe.
      xla: options of XLA, in addition to those of a run.
    """
    recipe = RECIPES[name]
    request, devices, _, job, arguments = step_of(dataclasses.replace(recipe, keys=(*recipe.keys, *keys)))
    options = {**(options_of(request.config.zero, devices) or {}), **xla}
    scheduled = Compiler(devices, options).compile(job.programs.step, *arguments, whole=False)
    predicted = predict(scheduled.as_text(), devices, is_whole=scheduled.is_whole)
    assert predicted is not None, f"zero has no rates for {devices[0].device_kind}"
    print(
        f"{name}: {shown_storage(job.model)}, {predicted.seconds:.3f} s, exposed {predicted.exposed_seconds:.3f} s,"
        f" {scheduled.memory_analysis().peak_memory_in_bytes / 2**30:.2f} GiB"
    )
    for seconds, waiting in longest_waits(predicted):
        print(f"  waits {seconds:8.3f} s for {waiting}")
    bodies, _ = computations(scheduled.as_text())
    for size, count, array in largest_at_peak(read_live_arrays(scheduled.buffers, scheduled.live_ranges, bodies)):
        print(f"  at the peak {size / 2**30:7.3f} GiB: {count} x {array}")
    sys.stdout.flush()


def longest_waits(predicted: Prediction, share: float = 0.002) -> list[tuple[float, str]]:
    """Seconds of a step in which a device waits for each transfer, and what it is; those of at least this share."""
    assert predicted.timeline is not None
    seconds: defaultdict[str, float] = defaultdict(float)
    for event, times in predicted.timeline.runs():
        if event.waits_for is not None:
            name = f"{event.waits_for.name} of {event.part.name}, {event.part.phase}: {event.waits_for.op_name}"
            seconds[name] += times * event.seconds
    longest = sorted(((spent, name) for name, spent in seconds.items()), reverse=True)
    return [(spent, name) for spent, name in longest if spent >= share * predicted.seconds]


def largest_at_peak(live: LiveArrays, least: int = 2**28) -> list[tuple[int, int, str]]:
    """Bytes at the peak of all arrays of one shape, their number, and the shape; those of at least as many bytes."""
    counts: Counter[tuple[int, str]] = Counter()
    for array in live.at_peak():
        result = array.instruction.result
        shape = f"{array.bytes / 2**30:.3f} GiB of a tuple" if result.startswith("(") else result.partition("{")[0]
        counts[array.bytes, shape] += 1
    largest = sorted(((size * count, count, shape) for (size, shape), count in counts.items()), reverse=True)
    return [row for row in largest if row[0] >= least]


def choices_of(name: str) -> tuple[Choice, list[Choice], float]:
    """What `zero.remat=auto` takes for a recipe, all that it compares, and what a part of the layers could save.

    The last is in seconds: kinds of activations that are not stored, those first that save the most seconds per byte,
    for as many layers as the memory that is left on the device holds.
    """
    recipe = RECIPES[name]
    request, _, placed, job, _ = step_of(recipe)
    assert placed.speed is not None
    memory = Memory(job.state_bytes, usable_bytes(placed.device), most_on_host(placed.speed))
    rates = rates_of(job.model, placed.speed)
    choices = storage_choices(placed.model, request.rows, recipe.context, memory, rates)
    stored = job.model.remat, kinds_on_host(job.model)
    (taken,) = [choice for choice in choices if (choice.model.remat, kinds_on_host(choice.model)) == stored]
    seconds_of = seconds_by_kind(job.model, request.rows, recipe.context, rates)
    width = jnp.dtype(job.model.compute_dtype).itemsize * request.rows * recipe.context
    bytes_of = {kind: width * numbers_per_position(job.model, [kind]) for kind in seconds_of}
    left = memory.capacity * (1 - spare(taken.model)) - taken.bytes
    saved = 0.0
    missing = [kind for kind in seconds_of if bytes_of[kind] and kind not in kinds_of(job.model.remat)]
    for kind in sorted(missing, key=lambda kind: seconds_of[kind] / bytes_of[kind], reverse=True):
        layers = min(request.size.N, max(0, int(left / bytes_of[kind])))
        saved += layers * seconds_of[kind]
        left -= layers * bytes_of[kind]
    return taken, choices, saved


def print_choices(names: Sequence[str]) -> None:
    """Prints a row for each recipe whose remat is automatic: the choice, and the fastest that could fit.

    A choice could fit if the bytes estimated on the device and on its host are fewer than each has. `zero.remat=auto`
    takes it only if both also leave a margin.
    """
    print(f"| {' | '.join(CHOICE_COLUMNS)} |\n{'|---' * len(CHOICE_COLUMNS)}|")
    compiled = load_rows()
    for name in names:
        recipe = RECIPES[name]
        if "zero.fused_update=true" in recipe.keys:
            continue
        taken, choices, saved = choices_of(name)
        speed = SPEEDS[find_devices(recipe.topology)[0].device_kind]
        in_device = [choice for choice in choices if choice.bytes <= speed.capacity]
        in_both = [choice for choice in in_device if choice.host_bytes <= most_on_host(speed)]
        best = min([taken, *in_both], key=lambda choice: choice.seconds)
        row = compiled.get(name)
        cells = [
            "-".join(name.split("-")[:2]),
            recipe.topology,
            shown_storage(taken.model),
            f"{taken.bytes / 2**30:.1f} of {speed.capacity / 2**30:.1f}",
            "" if row is None else f"{row.peak_bytes / 2**30:.1f}",
            f"{taken.seconds:.3f}",
            shown_storage(best.model) if best.seconds < taken.seconds else "",
            share(taken.seconds - best.seconds, row),
            share(saved, row),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def share(seconds: float, row: Row | None) -> str:
    """These seconds of the step of a row; empty if there are none, or no row."""
    if row is None or row.seconds is None or not seconds:
        return ""
    return f"{100 * seconds / row.seconds:.1f} %"


def shown_storage(model: ShardedGPT) -> str:
    """The policy of a model, and the kinds of activations that it stores on the host."""
    on_host = kinds_on_host(model)
    return f"`{model.remat}`" + (f", on the host {', '.join(on_host)}" if on_host else "")


def load_rows() -> dict[str, Row]:
    """The rows of docs/sources/published.json."""
    rows = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return {name: Row(Digests(**row.pop("digests")), **row) for name, row in rows.items()}


def maxtext_seconds() -> dict[str, tuple[float, float]]:
    """Seconds that are predicted of MaxText's own program, and among them waits for the host's link, by recipe."""
    rows = json.loads(MAXTEXT.read_text()) if MAXTEXT.exists() else {}
    return {name: (row["seconds"], row["host_seconds"]) for name, row in rows.items()}


def write(rows: Mapping[str, Row]) -> None:
    """Writes the rows, and the table that is printed from them."""
    TABLE.write_text(json.dumps({name: asdict(rows[name]) for name in RECIPES if name in rows}, indent=1) + "\n")
    PAGE.write_text(with_part(PAGE.read_text(), page_part(rows), START))


def table_row(name: str, row: Row, maxtext: tuple[float, float] | None = None) -> str:
    """The row of a recipe in the page; `maxtext` is what is predicted of MaxText's own program, if it was compiled."""
    recipe = RECIPES[name]
    keys = [f"zero.remat={row.remat}", *recipe.keys]
    is_bound = row.peak_bytes == row.available_bytes  # the compiler tells only the peak of the host's memory
    cells = {
        "recipe": "-".join(name.split("-")[:2]),
        "slice": recipe.topology,
        "sequences per chip": f"{recipe.sequences} x {recipe.context:,}",
        "published, s": f"{recipe.seconds:.3f}",
        "zero's keys": f"`{' '.join(keys)}`",
        "peak, GiB per device": f"{'at most ' * is_bound}{row.peak_bytes / 2**30:.2f}",
    }
    if row.seconds is None or row.exposed_seconds is None or row.mfu is None:
        cells["predicted, s"] = f"does not fit in {row.available_bytes / 2**30:.2f} GiB"
    else:
        cells |= {
            "predicted, s": f"{row.seconds:.3f}",
            "MFU": f"{100 * row.mfu:.0f} %",
            "exposed, s": f"{row.exposed_seconds:.3f}",
            "predicted / published": f"{row.seconds / recipe.seconds:.2f}",
        }
    if maxtext is not None:
        seconds, waits = maxtext
        cells["MaxText predicted, s"] = f"{seconds:.3f}"
        cells["MaxText predicted / published"] = f"{seconds / recipe.seconds:.2f}"
        if row.seconds is not None:
            cells["zero / MaxText, both predicted"] = f"{row.seconds / seconds:.2f}"
            cells[WITHOUT_WAITS] = f"{row.seconds / (seconds - waits):.2f}"
    return f"| {' | '.join(cells.get(column, '') for column in COLUMNS)} |\n"


def page_part(rows: Mapping[str, Row]) -> str:
    """The table of benchmarks/measured/beside-maxtext.md."""
    maxtext = maxtext_seconds()
    lines = [table_row(name, rows[name], maxtext.get(name)) for name in RECIPES if name in rows]
    return f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n{''.join(lines)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=list(RECIPES), default=list(RECIPES), metavar="NAME")
    parser.add_argument("--choices", action="store_true", help="print what zero.remat=auto chooses from")
    parser.add_argument("--schedule", action="store_true", help="compile as far as the schedule, and print its figures")
    parser.add_argument("--keys", nargs="*", default=[], metavar="KEY=VALUE", help="with --schedule: further keys")
    parser.add_argument("--xla", nargs="*", default=[], metavar="NAME=VALUE", help="with --schedule: options of XLA")
    options = parser.parse_args()
    if not options.schedule and (options.keys or options.xla):
        parser.error("--keys and --xla are tried with --schedule; a row is that of its recipe")
    if options.choices:
        print_choices(options.rows)
        return
    jax.config.update("jax_traceback_in_locations_limit", 0)  # else kernels hold the lines of their sources
    if options.schedule:
        xla = {name: json.loads(value) for name, _, value in (option.partition("=") for option in options.xla)}
        for name in options.rows:
            print_schedule(name, options.keys, xla)
        os._exit(0)  # the compiler would go on to the machine code
    for name in options.rows:
        row = row_of(name)
        if row is not None:
            write(load_rows() | {name: row})  # read again: another process may have written a row
        print(f"{name}: {'the same' if row is None else row}", flush=True)
    write(load_rows())


if __name__ == "__main__":
    main()
