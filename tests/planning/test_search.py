"""Searches over rows that are made up: no compiler is needed to see what they choose."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.config.composing import compose
from zero.base.errors import UserError
from zero.base.keys import with_values
from zero.commands.modes import typed
from zero.models.config import GPTConfig
from zero.planning import search
from zero.planning.config import Grid, PlanConfig, Request

# What is known of a step before it is compiled, and after.
SAME = {"tokens": 100, "seconds": None, "seconds_lower_bound": 1.0}
PEAKS = {
    "peak_bytes": 50,
    "evaluation_peak_bytes": 10,
    "sampling_peak_bytes": None,
    "statistics_peak_bytes": None,
    "available_bytes": 100,
}
FITTING: dict[str, Any] = SAME | PEAKS | {"fits": True, "parameters": 1}


FIXED = {  # which a grid does not change
    "data.max_context": 64,
    "optimizer.state_dtype": "float32",
    "zero.master_dtype": "float32",
    "zero.fused_update": False,
}


def plan_config(*overrides: str) -> PlanConfig:
    """As a start of mode=plan has it."""
    config = typed(compose("mode=plan", "data.max_context=64", *overrides))
    assert isinstance(config, PlanConfig)
    return config


def grid_of(**values: Any) -> Grid:
    """One setting, but for these values."""
    one: dict[str, Any] = {field.name: [1] for field in dataclasses.fields(Grid)}
    one |= {"stage": [3], "remat": ["full"], "phases": ["flat"], "overlap_gathers": [True]}
    return Grid(**one | dict.fromkeys(("master_dtype", "state_dtype", "context")) | values)


def test_search_prefers_fast_with_headroom() -> None:
    """A search prefers configurations that are fast and leave headroom."""
    row = FITTING
    slow, fast = row | {"seconds_lower_bound": 2.0}, row | {"seconds_lower_bound": 1.0}
    full = row | {"seconds_lower_bound": 0.1, "peak_bytes": 96}
    too_big = row | {"seconds_lower_bound": 0.1, "fits": False}
    assert search.best([slow, full, fast, too_big], headroom=0.05) is fast
    assert search.best([full, too_big], headroom=0.05) is None
    evaluates = row | {"seconds_lower_bound": 0.1, "evaluation_peak_bytes": 96}
    assert search.best([evaluates, slow], headroom=0.05) is slow
    predicted = row | {"seconds_lower_bound": 0.1, "seconds": 1.5}
    assert search.best([predicted, slow], headroom=0.05) is predicted
    assert search.best([predicted, fast], headroom=0.05) is fast


def test_rows_of_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage has a row that a run does not refuse."""
    monkeypatch.setattr(search, "compile_step", lambda request: FITTING | {"stage": request.config.zero.stage})
    settings: dict[tuple[str, ...], list[int]] = {
        (): [0, 1, 2, 3],
        ("zero.fused_update=true",): [3],
        ("zero.product_dtype=int8", "zero.gather_dtype=products"): [3],
        ("zero.wire_dtype=int8",): [1, 2, 3],
    }
    with ThreadPoolExecutor(1) as pool:
        for keys, stages in settings.items():
            request = Request(plan_config(*keys), GPTConfig(512, 50304, 2, 64, 0.0, 4), 1)
            assert [row["stage"] for row in search.every_stage(pool, request)] == stages


def test_one_setting_is_compiled_by_default(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The step that the keys describe, after a formula has said what it and other stages need."""
    lines: list[str] = []  # in the order in which they were logged

    def compile_step(request: Request) -> dict[str, Any]:
        lines.extend(caplog.messages)
        return FITTING | {"stage": request.config.zero.stage, "seconds": 2.0}

    monkeypatch.setattr(search, "outline", lambda request: SAME | {"peak_bytes": 3 * 2**29})
    monkeypatch.setattr(search, "peak_by_formula", lambda request: (5 - request.config.zero.stage) * 2**30)
    monkeypatch.setattr(search, "compile_step", compile_step)
    request = Request(plan_config("zero.stage=2"), GPTConfig(512, 50304, 2, 64, 0.0, 4), 1)
    with ThreadPoolExecutor(1) as pool, caplog.at_level("INFO"):
        assert [row["stage"] for row in search.one_setting(pool, request)] == [2]
    assert lines[:2] == [
        "by a formula, before anything is compiled: about 1.50 GiB per device at the peak, at least 1.000 s per step",
        "by the formula at the other stages: stage 3 2.00, stage 1 4.00, stage 0 5.00 GiB",
    ]
    assert "compiling stage 2 with 1 x 1 sequences per device for local" in caplog.messages
    assert caplog.messages[-1].startswith("stage 2 with 1 x 1 sequences per device: peak 0.00, seconds 2.000, fits")


def test_search_covers_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search covers all combinations of the grid."""
    monkeypatch.setattr(search, "outline", lambda request: SAME)
    monkeypatch.setattr(search, "compile_step", lambda request: FITTING | {"config": request.config})
    for state_dtypes, master_dtypes in ((None, None), (["float32", "int8"], ["float32", "bfloat16"])):
        grid = grid_of(stage=[2, 3], micro_batch=[4, 1], state_dtype=state_dtypes, master_dtype=master_dtypes)
        config = with_values(plan_config(), FIXED | {"optimizer.state_dtype": "bfloat16", "plan.grid": grid})
        with ThreadPoolExecutor(1) as pool:
            rows = search.fastest(pool, Request(config, GPTConfig(512, 50304, 2, 64, 0.0, 4), 1), 1)
        found = [row["config"] for row in rows]
        assert [(c.zero.stage, c.optimizer.state_dtype, c.zero.master_dtype) for c in found[::2]] == [
            (stage, state_dtype, master_dtype)
            for stage in (2, 3)
            for master_dtype in master_dtypes or ["float32"]
            for state_dtype in state_dtypes or ["bfloat16"]
        ]


@pytest.mark.parametrize("processes", [1, 3])
def test_search_compiles_possible_winners(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search compiles only what can be the fastest.

    The step takes twice its bound; rows of 4 do not fit; the bound of stage 1 is below the speed of stage 3.
    """
    bounds, compiled = {1: 5.0, 2: 1.5, 3: 1.0}, []

    def outline(request: Request) -> dict[str, Any]:
        rows = request.micro_batch
        return {
            "tokens": 100 * rows,
            "seconds": None,
            "seconds_lower_bound": rows * bounds[request.config.zero.stage],
        }

    def compile_step(request: Request) -> dict[str, Any]:
        row, rows = outline(request), request.micro_batch
        compiled.append((request.config.zero.stage, rows))
        seconds = 2 * row["seconds_lower_bound"]
        return FITTING | row | {"seconds": seconds, "fits": rows < 4}

    monkeypatch.setattr(search, "outline", outline)
    monkeypatch.setattr(search, "compile_step", compile_step)
    grid = Grid([1, 2, 3], [8, 1, 4, 2], [1], ["full"], None, None, None, [1], [1], [1], [1], ["flat"], [True])
    config = with_values(plan_config(), FIXED | {"plan.grid": grid})
    with ThreadPoolExecutor(processes) as pool:
        rows = search.fastest(pool, Request(config, GPTConfig(512, 50304, 2, 64, 0.0, 4), 1), processes)
    if processes == 1:
        assert compiled == [(3, 1), (3, 2), (3, 4), (2, 1), (2, 2), (2, 4)]
    else:  # whoever has nothing else to do tries stage 1, before anything is known
        assert {(3, 1), (3, 2), (3, 4), (2, 1)} <= set(compiled) and (3, 8) not in compiled
    assert len(rows) == len(compiled)
    assert search.best(rows, 0.05) in [row for row in rows if row["seconds"] == 2 * row["tokens"] / 100]


def test_search_skips_the_impossible(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A search leaves out what is not possible.

    By the configuration alone, and by the devices, which the processes that compile know.
    """

    def outline(request: Request) -> dict[str, Any]:
        if request.config.zero.replicas == 3:
            raise UserError("zero.replicas=3: expected a divisor of 8")
        return SAME

    def compile_step(request: Request) -> dict[str, Any]:
        zero = request.config.zero
        return FITTING | {"zero": (zero.tensor_shards, zero.context_shards, zero.replicas, zero.phases)}

    monkeypatch.setattr(search, "outline", outline)
    monkeypatch.setattr(search, "compile_step", compile_step)
    numbers, phases = [1, 2, 3], ["flat", "torus"]
    grid = grid_of(context=[64], tensor=numbers, context_shards=numbers, replicas=numbers, phases=phases)
    values = {"plan.grid": grid, "model.size": "two_heads", "training.staged_warmup_steps": 0}
    config = with_values(plan_config(), FIXED | values)
    request = Request(config, GPTConfig(512, 50304, 2, 64, 0.0, 4), 1)
    with ThreadPoolExecutor(1) as pool:
        found = [row["zero"] for row in search.fastest(pool, request, 1)]
        expected = [(1, 1), (1, 2), (2, 1)]  # of 64 positions 3 devices have no equal numbers of pieces
        assert sorted({one[:2] for one in found}) == expected
        for groups in expected:
            of_phases = [one[:1:-1] for one in found if one[:2] == groups]
            assert of_phases == [("flat", 1), ("torus", 1), ("flat", 2)]
        assert "skipped: zero.replicas=3: expected a divisor of 8" in caplog.text
        of_three = with_values(config, {"plan.grid.replicas": [3]})
        with pytest.raises(UserError, match="divisor of 8"):
            search.fastest(pool, dataclasses.replace(request, config=of_three), 1)
        of_three = with_values(of_three, {"plan.grid.tensor": [3]})
        with pytest.raises(
            UserError, match=r"(?s)no combination.*zero.tensor_shards: expected a divisor of num_head=2"
        ):
            search.fastest(pool, dataclasses.replace(request, config=of_three), 1)


@pytest.mark.parametrize(("fits_up_to", "remat"), [(4, "full"), (5, "full"), (8, "full"), (61, "full"), (77, "nested")])
def test_deepest_that_fits(fits_up_to: int, remat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deepest model that fits is found with a few programs."""
    tried = []

    def compile_step(request: Request) -> dict[str, Any]:
        layers = request.size.N
        tried.append(layers)
        peak = 1000 + 100 * layers + (layers % 3) * 2  # a line, but for rounding
        available = 1000 + 100 * fits_up_to + 50
        peaks = {
            "peak_bytes": peak,
            "evaluation_peak_bytes": None,
            "sampling_peak_bytes": None,
            "statistics_peak_bytes": None,
            "bytes_of_one_host": 0,
            "host_available_bytes": None,
        }
        return peaks | {"fits": layers <= fits_up_to, "available_bytes": available, "layers": layers}

    monkeypatch.setattr(search, "compile_step", compile_step)
    request = Request(plan_config(), GPTConfig(512, 50304, 2, 64, 0.0, 4), 1).with_changes(remat=remat)
    row = search.deepest(request)
    assert row is not None and row["layers"] == (72 if remat == "nested" else fits_up_to) and len(tried) <= 6
    monkeypatch.setattr(search, "compile_step", lambda request: compile_step(request) | {"fits": False})
    assert search.deepest(request) is None


def test_deepest_that_fits_in_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the memory of hosts is full before that of devices, as few programs find the depth."""
    tried = []

    def compile_step(request: Request) -> dict[str, Any]:
        layers = request.size.N
        tried.append(layers)
        per_host = {"bytes_of_one_host": 50 + 10 * layers, "host_available_bytes": 458}
        peaks = PEAKS | {"peak_bytes": 10 + layers, "available_bytes": 1000}
        return peaks | per_host | {"fits": per_host["bytes_of_one_host"] <= 458, "layers": layers}

    monkeypatch.setattr(search, "compile_step", compile_step)
    row = search.deepest(Request(plan_config(), GPTConfig(512, 50304, 2, 64, 0.0, 4), 1))
    assert row is not None and row["layers"] == 40 and tried == [4, 8, 40, 41]


def test_search_keeps_rules_of_all_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that a run refuses is none of a search, whichever section the rule is of."""
    monkeypatch.setattr(search, "outline", lambda request: SAME)
    monkeypatch.setattr(search, "compile_step", lambda request: FITTING | {"tensor": request.config.zero.tensor_shards})
    config = with_values(plan_config("tuning=lora", "tuning.dropout=0.1"), {"plan.grid": grid_of(tensor=[1, 2])})
    with ThreadPoolExecutor(1) as pool:
        rows = search.fastest(pool, Request(config, GPTConfig(512, 50304, 2, 64, 0.0, 4), 1), 1)
    assert [row["tensor"] for row in rows] == [1]


def test_search_over_state_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches include the dtypes of the state."""
    grid = grid_of(master_dtype=["float32", "bfloat16"], state_dtype=["int8"], context=[64])
    config = with_values(plan_config(), {"plan.grid": grid, "zero.fused_update": False})

    def dtypes(request: Request) -> dict[str, Any]:
        return FITTING | {"dtypes": (request.config.zero.master_dtype, request.config.optimizer.state_dtype)}

    monkeypatch.setattr(search, "outline", lambda request: SAME)
    monkeypatch.setattr(search, "compile_step", dtypes)
    monkeypatch.setattr(search, "deepest", dtypes)
    monkeypatch.setattr(search, "WIDTHS", (512,))
    size = GPTConfig(512, 50304, 2, 64, 0.0, 4)
    with ThreadPoolExecutor(1) as pool:
        for rows in (search.fastest(pool, Request(config, size, 1), 1), search.largest(pool, Request(config, size, 1))):
            assert [row["dtypes"] for row in rows] == [("float32", "int8"), ("bfloat16", "int8")]
