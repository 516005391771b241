"""Plans against what they plan: the table of a slice that is not here, and a step that was really made."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import psutil
import pytest

from tests.config.composing import compose
from tests.helpers import browser, cli
from zero.base.errors import Unavailable
from zero.base.keys import with_values
from zero.commands.modes import check
from zero.costs.predict import Prediction
from zero.hosts.speeds import SPEEDS, host_memory
from zero.job.job import make_job, place_model
from zero.job.sizes import load_sizes
from zero.job.step_costs import device_peak
from zero.models.config import GPTConfig
from zero.planning.compile import PAUSES, SCHEDULE, compile_step, highest_peak, step_arguments, time_and_cost
from zero.planning.config import PlanConfig, Request
from zero.planning.page import PAGE_FILE, SCHEDULE_FILE, memory_segments, page, time_segments
from zero.planning.plan import _compilers
from zero.planning.table import COLUMNS, DETAILS, RESULTS, SETTINGS, WIDTH, breakdown_table, table, training_command
from zero.run.step_programs import split_batch
from zero.training.host_rows import HostRows

KEYS = {"stage", "micro_batch", "accumulation", "remat", "context", "gradient_dtype", "clipping", "fused_update"}
KEYS |= {"fits", "state_bytes", "peak_bytes", "available_bytes", "collective_bytes", "flops", "seconds_lower_bound"}
KEYS |= {"state_dtype", "master_dtype", "product_dtype", "state_bytes_per_parameter"}
KEYS |= {"compile_seconds", "is_estimate", *(f"{name}_peak_bytes" for name in PAUSES), "model_flops"}
KEYS |= {"seconds", "tokens_per_second", "mfu", "exposed_bytes", "exposed_seconds", "breakdown"}


def plan(place: Path, *overrides: str, timeout: float = 900) -> dict[str, Any]:
    done = cli.finish(cli.start(place, "mode=plan", "hydra.run.dir=plan", *overrides), timeout)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return json.loads((place / "plan" / "plan.json").read_text())


@pytest.mark.parametrize(
    ("stages", "has_pauses"),
    [
        ((3,), False),
        pytest.param((3,), True, marks=pytest.mark.wide),
        pytest.param((0, 3), True, marks=pytest.mark.slow),
    ],
)
def test_plan_of_a_v3_8(tmp_path: Path, stages: tuple[int, ...], has_pauses: bool) -> None:
    pytest.importorskip("libtpu")
    grid = (
        "plan.search=fastest",
        f"plan.grid.stage={[*stages]}",
        "plan.grid.accumulation=[1]",
        "plan.grid.remat=[full]",
    )
    price = ("plan.dollars_per_hour=12", "plan.breakdown=true", "plan.tokens=1_000_000_000")
    pauses = ("plan.processes=2", "statistics.every=100") if has_pauses else ("training.sample_tokens=0",)
    slice_of_8 = ("plan.topology=v3-8", "model.size=test", "plan.grid.micro_batch=[2]")
    result = plan(tmp_path, *slice_of_8, *grid, *price, *pauses)
    rows = result["rows"]
    assert (result["devices"], result["parameters"], [row["stage"] for row in rows]) == (8, 69024, [*stages])
    assert all(KEYS <= row.keys() for row in rows)
    for row in rows:
        assert row["fits"] and row["clipping"] and (row["micro_batch"], row["context"]) == (2, 64)
        assert row["state_bytes"] < row["peak_bytes"] < row["available_bytes"] == int(15.48 * 2**30)
    third = rows[-1]
    assert result["best"] in range(len(stages)) and 0 <= third["gathers_hidden"] <= 1
    assert 8 * third["state_bytes"] == pytest.approx(12 * 69024, rel=0.02)  # weights and two moments, cut and padded
    for plain in rows[:-1]:
        assert 7 * third["state_bytes"] < plain["state_bytes"] and third["peak_bytes"] < plain["peak_bytes"]
        # All-reduced once: 2 x 7/8 of 4 bytes per parameter, and a few scalars.
        assert 0 <= plain["collective_bytes"]["all-reduce"] - 7 * 69024 < 100
        assert plain["gathers_hidden"] is None
    alone = (1 - third["gathers_hidden"]) * third["collective_bytes"]["all-gather"]  # and what else is never hidden
    alone += sum(sent for kind, sent in third["collective_bytes"].items() if kind != "all-gather")
    computing = third["flops"] / SPEEDS["TPU v3"].flops
    assert third["seconds_lower_bound"] == pytest.approx(computing + alone / SPEEDS["TPU v3"].network, rel=0.1)
    for row in rows:  # the model's operations are the same at each stage: 6 per parameter and token, and attention
        assert row["model_flops"] == third["model_flops"]
        assert row["seconds"] > row["exposed_seconds"] > 0
        assert row["seconds"] == pytest.approx(sum(seconds for _, _, seconds in row["breakdown"]))
        assert row["tokens_per_second"] == pytest.approx(8 * 2 * 64 / row["seconds"])
        assert row["mfu"] == pytest.approx(row["model_flops"] / (row["seconds"] * SPEEDS["TPU v3"].flops))
        assert row["days"] == pytest.approx(1e9 / row["tokens"] * row["seconds"] / 86400)
        assert row["dollars"] == pytest.approx(12 * 24 * row["days"])
        assert row["evaluation_peak_bytes"] is row["sampling_peak_bytes"] is None  # far from the limit
        if has_pauses:
            a_copy_of_the_weights = row["state_bytes"] // 3 - 16
            assert row["statistics_peak_bytes"] >= row["peak_bytes"] + a_copy_of_the_weights
    assert 0.9 < third["model_flops"] / (6 * 69024 * 2 * 64) < 1.3
    # 8 operations per parameter and token: forward, forward again, and twice that backward; attention comes on top.
    assert 0.9 < rows[0]["flops"] / (8 * 69024 * 2 * 64) < 1.3


@pytest.mark.slow  # test_topology.py reads the compiler's error
def test_row_of_misfits(tmp_path: Path) -> None:
    """A program that does not fit into memory has a row too."""
    pytest.importorskip("libtpu")
    overrides = ("plan.topology=v3-8", "model.size=1_3b", "plan.grid.stage=[0]", "plan.grid.accumulation=[1]")
    result = plan(tmp_path, *overrides, "plan.search=fastest", "plan.grid.micro_batch=[1, 2]", "plan.grid.remat=[full]")
    (row,) = result["rows"]  # with two sequences it would not fit either
    assert not row["fits"] and row["peak_bytes"] > row["available_bytes"] and result["best"] is None


def test_plan_lowers_the_step_of_training() -> None:
    """Shapes that a plan compiles for and arrays of a run lower to the same program, to the letter."""
    config = check(compose("mode=plan", "plan.topology=cpu", "data.max_context=64"), load_sizes())
    size = GPTConfig(embedding_dim=16, vocab_size=64, num_head=2, block_size=64, dropout=0.0, N=2, vocab_chunks=2)
    job = make_job(config, place_model(config, size))
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    state = job.programs.start(job.programs.init(np.stack([key] * 8)))
    lowered = job.programs.step.lower(state, split_batch(np.ones((32, 64), np.int32), HostRows.here(job.model.axis)))
    assert lowered.as_text() == job.programs.step.lower(*step_arguments(job, 4, 64)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("zero.stage=1",), ("zero.gradient_dtype=bfloat16",)],
    ids=lambda a: a[0],
)
def test_planned_bytes_equal_real_step(arguments: tuple[str, ...]) -> None:
    """Planned bytes are those of a real step."""
    script = Path(__file__).parent / "planned_memory.py"
    environment = cli.environment() | {"XLA_FLAGS": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    row = found["row"]
    assert found["is_same"]  # training and plan lower the same program, to the letter
    assert found["live"] == pytest.approx(row["state_bytes"], abs=100)  # and a scalar or two
    assert row["peak_bytes"] - row["state_bytes"] == pytest.approx(found["grown"], rel=0.3)


@pytest.mark.slow
def test_plan_of_four_bytes_per_parameter(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    state = ("optimizer.state_dtype=int8", "zero.master_dtype=bfloat16", "zero.gradient_dtype=bfloat16")
    small = (
        "zero.fused_update=true",
        "zero.remat=nested",
        "model.size=bytes",
        "data.max_context=64",
        "plan.micro_batch=1",
        "training.sample_tokens=0",
    )
    (row,) = plan(tmp_path, "plan.topology=v3-8", "plan.processes=1", *state, *small)["rows"]
    assert (row["stage"], row["remat"], row["master_dtype"], row["state_dtype"]) == (3, "nested", "bfloat16", "int8")
    assert row["fits"] and row["fused_update"] and row["clipping"] and row["skipping"]
    assert row["statistics_peak_bytes"] is None
    assert 4 < row["state_bytes_per_parameter"] < 4.1  # norms and biases have 12
    assert row["state_bytes"] < row["peak_bytes"]
    schedule = (tmp_path / "plan" / SCHEDULE_FILE).read_text()
    assert "TransformerLayer.method/zero_gather/all_gather" in schedule and SCHEDULE not in row
    assert f'href="{SCHEDULE_FILE}"' in (tmp_path / "plan" / PAGE_FILE).read_text()


@pytest.mark.slow
def test_products_fused_into_products_compile(tmp_path: Path) -> None:
    """The compiler's threads overflowed their stacks of 64 KiB in this program, and the process died."""
    pytest.importorskip("libtpu")
    (row,) = plan(tmp_path, "plan.topology=v5e-8", "model.size=test", "distributed.compilation_cache=null")["rows"]
    assert row["fits"] and row["seconds"] > 0


@pytest.mark.wide
def test_programs_between_steps_where_the_memory_is_tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation and sampling are compiled if little memory is left beside them by the formula."""
    # On CPU a step needs more than twice as much as the formula.
    monkeypatch.setattr("zero.planning.compile.TIGHT", 0.4)
    overrides = ("mode=plan", "plan.topology=cpu", "data.max_context=64", "distributed.compilation_cache=null")
    config = check(compose(*overrides), load_sizes())
    size = GPTConfig(embedding_dim=16, vocab_size=64, num_head=2, block_size=64, dropout=0.0, N=2)
    row = compile_step(Request(config, size, 1))
    assert row["fits"] and row["evaluation_peak_bytes"] is row["sampling_peak_bytes"] is None

    def with_memory(available: int, rows: int = 1) -> dict[str, Any]:
        monkeypatch.setattr("zero.planning.compile.available_bytes", lambda devices: available)
        return compile_step(Request(config, size, rows))

    assert with_memory(row["peak_bytes"] * 5 // 4)["evaluation_peak_bytes"] is None
    tight = with_memory(row["peak_bytes"] * 21 // 20)
    moments = 2 * row["state_bytes"] // 3
    assert moments < tight["evaluation_peak_bytes"] < row["peak_bytes"]
    assert moments < tight["sampling_peak_bytes"] < row["peak_bytes"]


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.wide), pytest.param(signal.SIGKILL, marks=pytest.mark.slow)],
)
def test_a_signal_leaves_no_compiler_behind(number: int, tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    options = ("plan.topology=v3-8", "model.size=1_3b", "plan.search=stages", "plan.processes=2")
    process = cli.start(tmp_path, "mode=plan", "hydra.run.dir=plan", *options)
    log = tmp_path / "plan" / "compiler.log"
    while not (log.exists() and log.stat().st_size):  # libtpu is loaded, and a program is traced or compiled
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(2)
    compilers = psutil.Process(process.pid).children(recursive=True)
    assert len(compilers) >= 2
    process.send_signal(number)
    try:
        assert process.wait(900) == (128 + number if number == signal.SIGTERM else -number)
        assert psutil.wait_procs(compilers, timeout=900)[1] == []
    finally:
        for compiler in compilers:
            with suppress(psutil.NoSuchProcess):
                compiler.kill()
    errors = cli.finish(process).stderr
    assert number == signal.SIGKILL or errors.endswith("error: interrupted\n")


def test_a_compiler_that_dies_is_said_in_one_message(tmp_path: Path) -> None:
    """As where libtpu aborts: the message names the topology and the file with the compiler's own messages."""
    log = tmp_path / "compiler.log"
    expected = f"plan.topology=cpu: a process that compiles died.*{re.escape(str(log))}"
    with pytest.raises(Unavailable, match=expected), _compilers("cpu", 2, 2, log) as pool:
        pool.submit(time.sleep, 60)
        pool.submit(os.abort).result()


def planned_rows(**changes: Any) -> dict[str, Any]:
    """A plan of two rows that differ in the stage and in `changes` of the second."""
    row = dict.fromkeys(("state_bytes", "gradient_bytes", "gathered_bytes", "evaluation_peak_bytes"), 2**30)
    row |= {"peak_bytes": 2**32, "sampling_peak_bytes": 5 * 2**30, "available_bytes": 2**33, "parameters": 10**9}
    row |= {"stage": 3, "micro_batch": 2, "accumulation": 1, "context": 64, "tokens": 1024, "flops": 10**12}
    found: dict[str, Any] = row | {"remat": "full", "fused_update": False, "fits": True, "collective_bytes": None}
    found |= {"state_bytes_per_parameter": 12.0, "tensor_shards": 2, "context_shards": 1, "expert_shards": 1}
    found |= {"collective_bytes_across_hosts": None, "gathers_hidden": None, "grid": [1, 2, 4]}
    found |= {"master_dtype": "float32", "state_dtype": "float32", "overlap_gathers": True, "compile_seconds": 3.0}
    found |= {"is_estimate": False, "statistics_peak_bytes": None, "devices": 8, "hosts": 1, "replicas": 1}
    found |= {"phases": "auto"}
    found |= {"seconds": 0.512, "seconds_lower_bound": 0.25, "tokens_per_second": 2000.0, "mfu": 0.456}
    found |= {"exposed_bytes": 5.8e9, "exposed_seconds": 0.1}
    found |= {"breakdown": [["MLP", "forward", 0.128], ["MLP", "backward", 0.256], ["<softmax>", "forward", 0.128]]}
    rows = [found, found | {"stage": 2} | changes]
    return {"topology": "v3-8", "devices": 8, "parameters": 10**9, "best": 0, "rows": rows}


def request_of(config: Any) -> Request:
    return Request(config, load_sizes()["bytes"], config.plan.micro_batch)


def test_plan_table() -> None:
    """The table shows the columns that differ and those that decide."""
    config = PlanConfig()
    text = table(planned_rows(), config.plan)
    assert max(map(len, text.splitlines())) <= WIDTH
    _, same, _, header, *rows = text.splitlines()
    assert "context 64" in same and "stage" not in same
    assert header.split() == ["stage", "peak", "seconds", "tokens/s", "MFU", "exposed"]
    assert rows[0].split()[:6] == ["3", "4.00", "0.5120", "2,000", "45.6%", "5.8"]
    assert rows[0].endswith("fits, 3.00 GiB to spare <- best")  # sampling needs the most
    text = table(planned_rows(micro_batch=4, seconds=None, tokens_per_second=None), config.plan)
    _, _, _, header, _, second, *_ = text.splitlines()
    assert "sequences x micro-batches" in header and "> 0.2500" in second  # no prediction: the lower bound


def test_memory_of_the_hosts() -> None:
    """What lies on the host is shown with its limit and the time on the link, and refused where it does not fit."""
    config = PlanConfig()
    moved: dict[str, Any] = {"offload": "activations", "on_host": ["layer_input"], "host_bytes": 12 * 2**30}
    moved |= {"bytes_of_one_host": 96 * 2**30}
    moved |= {"host_available_bytes": 536 * 2**30, "host_link_bytes": 25.8e9, "host_link_seconds": 0.403}
    moved |= {"host_exposed_seconds": 0.0125}
    plan = planned_rows(**moved)
    text = table(plan, config.plan, 300)
    assert "full, on the host" in text and "96.0 GiB per host of 536" in text
    assert "25.8 GB per step and device over the link, which takes 0.403 s, of which 0.0125 s are not hidden" in text
    assert "12.00 GiB per device" in page(plan, request_of(config))
    full = moved | {"fits": False, "bytes_of_one_host": 600 * 2**30}
    assert "does not fit in the memory of a host by 64.00 GiB" in table(planned_rows(**full), config.plan)
    assert "host" not in table(planned_rows(), config.plan)


@pytest.mark.parametrize(
    ("on_host", "shown", "named"),
    [
        (["layer_input", "attention"], "attention, on the host", "attention"),
        (["layer_input"], "attention, layer_input on the host", "auto"),
        ([], "attention, nothing on the host", "auto"),
    ],
)
def test_kinds_on_the_host(on_host: list[str], shown: str, named: str) -> None:
    """The table names them where they are not all, and the command leaves the choice to `zero.remat=auto`."""
    (_, row) = planned_rows(remat="attention", offload="activations", on_host=on_host)["rows"]
    assert COLUMNS["remat"](row) == shown
    config: Any = check(compose("mode=plan", "plan.topology=v3-8", "zero.offload=activations"), load_sizes())
    assert f"zero.remat={named}" in shlex.split(training_command(row, request_of(config)))


@pytest.mark.parametrize(("on_host", "reported", "expected"), [(0, 430, 430), (64, 324, 324), (513, 672, 410)])
def test_the_peak_is_that_of_the_device(on_host: int, reported: int, expected: int) -> None:
    """The compiler for TPU reports the peak of the host's memory where that is fuller: 159 + 513 of 159 + 251."""
    sizes = {"argument_size_in_bytes": 159, "output_size_in_bytes": 159, "alias_size_in_bytes": 159}
    sizes |= {"temp_size_in_bytes": 251, "host_temp_size_in_bytes": on_host, "peak_memory_in_bytes": reported}
    assert device_peak(SimpleNamespace(**sizes), "tpu") == expected
    if on_host:  # the compiler has accepted it for a device of so much memory
        assert device_peak(SimpleNamespace(**sizes), "tpu", available=300) == 300


@pytest.mark.parametrize(
    ("kind", "count", "hosts", "expected"),
    [("TPU v6 lite", 8, 1, 0.8 * 1440e9), ("TPU v3", 32, 4, 0.8 * 335e9), ("TPU7x", 16, 2, 0.8 * 960e9)],
)
def test_memory_of_a_host(kind: str, count: int, hosts: int, expected: float) -> None:
    """A host has the memory of its chips, of which v3 and TPU7x have two devices each."""
    devices = [SimpleNamespace(device_kind=kind, process_index=number * hosts // count) for number in range(count)]
    assert host_memory(devices) == pytest.approx(expected)
    assert host_memory([SimpleNamespace(device_kind="cpu", process_index=0)]) is None


def test_the_legend_is_as_wide_as_the_terminal() -> None:
    config = PlanConfig()
    for width in (60, 80, 200):
        first, *_, last = table(planned_rows(), config.plan, width).splitlines()
        legend = table(planned_rows(), config.plan, width).partition("to spare\n")[2].splitlines()
        assert max(map(len, legend)) <= width and max(map(len, legend)) > width - 20, first
        assert last.endswith("nothing")


def test_days_and_dollars() -> None:
    """Days are shown for the tokens of the run, dollars where there is a price."""
    plan = PlanConfig().plan
    assert "dollars" not in table(planned_rows(), plan) and "days" not in table(planned_rows(), plan)
    plan = dataclasses.replace(plan, dollars_per_hour=8.8)
    priced = table(planned_rows(days=1234.5, dollars=98765.4), plan)
    assert "1,234.50" in priced and "98,765" in priced and "> 1,234.50" not in priced
    assert "> 1,234.50" in table(planned_rows(days=1234.5, seconds=None), plan)  # from a lower bound
    assert "dollars of these days, at 8.8 per hour" in priced.replace("\n  ", " ")
    rows = planned_rows()
    rows["rows"][0]["days"] = 3.0
    assert "days of 20,000,000,000 tokens (20 per parameter)" in table(rows, plan).replace("\n  ", " ")
    plan = dataclasses.replace(plan, tokens=10**12)
    assert "days of 1,000,000,000,000 tokens (plan.tokens)" in table(rows, plan).replace("\n  ", " ")


@pytest.mark.parametrize(("seconds", "bound"), [(0.5, 0.25), (None, 0.5)])
def test_the_cost_is_that_of_all_tokens(seconds: float | None, bound: float) -> None:
    """Days and dollars are those of 20 tokens per parameter, or of `plan.tokens`, whatever total_steps is."""
    config = PlanConfig()
    row: dict[str, Any] = {"tokens": 1_000_000, "parameters": 10**9, "seconds_lower_bound": bound, "model_flops": 1}
    predicted = None if seconds is None else Prediction(seconds, {}, 0.0, 0.0)
    cost = time_and_cost(config.plan, row, predicted, None)
    assert cost["run_tokens"] == 20 * 10**9 and "dollars" not in cost
    assert cost["days"] == pytest.approx(20_000 * 0.5 / 86400)
    plan = dataclasses.replace(config.plan, tokens=86_400_000_000, dollars_per_hour=10.0)
    cost = time_and_cost(plan, row, predicted, None)
    assert cost["days"] == pytest.approx(0.5) and cost["dollars"] == pytest.approx(120)


def test_breakdown_sums_to_the_predicted_time() -> None:
    result = planned_rows()
    header, mlp, softmax = breakdown_table(result["rows"][0]).splitlines()
    assert header.split() == ["ms", "forward", "recomputed", "backward", "update", "all", "share"]
    assert mlp.split() == ["MLP", "128.0", "0.0", "256.0", "0.0", "384.0", "75.0%"]
    assert softmax.split()[-1] == "25.0%"


def test_plan_page() -> None:
    """The page shows what was chosen, its command, a bar of time and of memory per setting, and every column."""
    config = PlanConfig()
    result = planned_rows(fits=False, peak_bytes=9 * 2**30)
    text = page(result, request_of(config))
    assert all(f'<th class="number">{name}</th>' in text for name in (*SETTINGS, *RESULTS, *DETAILS))
    assert "Fastest that fits: stage 3" in text and text.count('class="setting chosen"') == 1
    assert training_command(result["rows"][0], request_of(config)) in text.replace("&#39;", "'")
    assert "&lt;softmax&gt;" in text and "<softmax>" not in text
    assert "forward and backward <b>0.412 s</b>" in text and "exposed communication <b>0.1 s</b>" in text
    assert text.count('<b class="limit" style="left:88.889%">') == 2  # 8 of the 9 GiB of the longest bar
    assert "more in the sampling <b>1.00 GiB</b>" in text and "does not fit by 1.00 GiB" in text
    unknown = dict.fromkeys(("seconds", "breakdown", "tokens_per_second", "mfu", "exposed_bytes", "exposed_seconds"))
    result = planned_rows(**unknown, fits=False)
    text = page(result | {"rows": result["rows"][1:], "best": None}, request_of(config))
    assert "Nothing fits" in text and "at least <b>0.25 s</b>" in text and "main_zero.py" not in text


@pytest.mark.parametrize("longest", [0.512, 2.0])
def test_segments_of_a_page_sum_to_their_row(longest: float) -> None:
    row = planned_rows()["rows"][0]
    row["breakdown"] = [["MLP", "forward", 0.4], ["optimizer", "update", 0.112]]
    times = time_segments(row, longest)
    assert [name for name, _, _ in times] == ["forward and backward", "exposed communication", "optimizer update"]
    assert [share * longest for _, share, _ in times] == pytest.approx([0.3, 0.1, 0.112])
    sizes = memory_segments(row, 2**33)
    assert sum(share * 2**33 for _, share, _ in sizes) == highest_peak(row)


@browser.needed
def test_plan_page_in_a_browser(tmp_path: Path) -> None:
    """Nothing leaves the page, overlaps or is hard to read, at any width, in light and dark; all bars are in it."""
    config = with_values(PlanConfig(), {"plan.dollars_per_hour": 8.8})
    result = planned_rows(fits=False, peak_bytes=9 * 2**30, days=1234.5, dollars=98765.4, remat="nested")
    path = tmp_path / "plan.html"
    path.write_text(page(result, request_of(config)))
    assert path.stat().st_size < 100_000
    with browser.Browser(tmp_path / "profile") as opened:
        for width in browser.WIDTHS:
            for dark in (False, True):
                opened.open(path, width, dark=dark)
                assert opened.evaluate("document.querySelector('details').open = true; 0") == 0
                assert opened.evaluate(browser.LAYOUT) == [], (width, dark)
        share = "[...document.querySelectorAll('.chosen .bar')].map(bar => [...bar.querySelectorAll('i')].map(i => "
        share += "i.getBoundingClientRect().width / bar.clientWidth))"
        time, memory = opened.evaluate(share)
        assert time == pytest.approx([0.412 / 0.512, 0.1 / 0.512, 0], abs=2e-3)
        assert memory == pytest.approx([1 / 9] * 5, abs=2e-3)
        assert (opened.complaints, opened.asked) == ([], [])


MIXTURE = "[{index: 'my text.index', weight: 0.7}, {index: gs://b/c.index, weight: 0.3}]"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["+preset=v3-8-fused", "model.attention=auto", "data.index_path_train=a.index"],
        ["model.size=1_1b", "zero.wire_dtype=bfloat16", "zero.reduce_dtype=bfloat16", "zero.compute_dtype=float32"],
        ["training.max_gradient_norm=null", "training.max_skipped_in_a_row=5", "training.skip_spikes=6", "seed=3"],
        ["zero.master_dtype=bfloat16"],
        ["training.ema=0.999", "model.attention=blockwise", f"data.index_path_train={MIXTURE}", "profile.steps=[2,3]"],
    ],
    ids=lambda overrides: overrides[0] if overrides else "defaults",
)
def test_training_command_equals_plan(overrides: list[str]) -> None:
    """The training command composes to the configuration that was planned.

    Every key of it, but those of the plan: the step is then the one that was compiled.
    """
    planned: Any = check(compose("mode=plan", "plan.topology=v3-32", *overrides), load_sizes())
    row: dict[str, Any] = {"micro_batch": 2, "devices": 32, "hosts": 4, "context": 128, "state_dtype": "bfloat16"}
    is_fused = planned.zero.fused_update
    row |= (
        {"stage": 3, "remat": "nested", "accumulation": 1}
        if is_fused
        else {"stage": 2, "remat": "dots", "accumulation": 4}
    )
    row |= {"master_dtype": planned.zero.master_dtype, "tensor_shards": 1, "context_shards": 2, "replicas": 2}
    row |= {"expert_shards": 1, "phases": "auto", "overlap_gathers": False, "seconds": 0.5}
    python, program, *command = shlex.split(training_command(row, request_of(planned)))
    assert (python, program) == ("python", "main_zero.py")
    trained = check(compose(*command), load_sizes())
    assert (trained.mode, trained.training.batch_size) == ("train", 8 * row["accumulation"])
    values = {
        "data.max_context": 128,
        "zero.stage": row["stage"],
        "zero.remat": row["remat"],
        "optimizer.state_dtype": row["state_dtype"],
        "zero.context_shards": 2,
        "zero.replicas": 2,
        "zero.overlap_gathers": False,
        "training.batch_size": trained.training.batch_size,
        "training.gradient_accumulation_steps": row["accumulation"],
        "mode": trained.mode,
        "profile.step_time": 0.5,
    }
    ours = dataclasses.asdict(with_values(planned, values))
    del ours["plan"]
    assert dataclasses.asdict(trained) == ours


def test_no_command_for_parts_of_sequences() -> None:
    """Two groups of devices on four hosts take two sequences; training.batch_size counts whole ones per host."""
    planned: Any = check(compose("mode=plan", "plan.topology=v3-32"), load_sizes())
    row = {"micro_batch": 1, "devices": 32, "hosts": 4, "context": 128, "state_dtype": "float32", "stage": 3}
    row |= {"remat": "full", "accumulation": 1, "master_dtype": "float32", "tensor_shards": 16, "context_shards": 1}
    row |= {"replicas": 1, "expert_shards": 1, "phases": "auto", "overlap_gathers": True, "seconds": 0.5}
    assert training_command(row, request_of(planned)).startswith(
        "# no command: 2 sequences per step do not divide over 4 hosts"
    )
    assert "training.batch_size=1" in training_command(row | {"accumulation": 2}, request_of(planned))


@pytest.mark.slow
def test_one_billion_on_32_cores(tmp_path: Path) -> None:
    """A model of one billion parameters fits 32 v3 cores."""
    pytest.importorskip("libtpu")
    overrides = ("plan.topology=v3-32", "model.size=1_1b", "plan.micro_batch=4", "plan.processes=1", "zero.remat=full")
    exact = ("plan.search=stages", "plan.exact=true")
    rows = plan(tmp_path, *overrides, *exact, timeout=1100)["rows"]
    assert [row["fits"] for row in rows] == [False, True, True, True]
    for row, gib in zip(rows[1:], (5.3, 3.4, 1.5), strict=True):
        assert row["peak_bytes"] <= gib * 2**30 and row["clipping"] and row["skipping"]
