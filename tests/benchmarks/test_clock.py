"""The tables of MaxText's own programs are printed from their rows, and those are the programs of published steps."""

import importlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import clock, published
from benchmarks.clock import HELD_BACK, Row
from benchmarks.published import RECIPES
from benchmarks.recipe_sources import with_part
from zero.costs.topology import slice_shape, slices_in

ROW = Row("MaxText", "abc", 3.7, 1.0, 0.25, 0.125, 0.0625)


def maxtext_step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that compiles MaxText, which sets variables of the environment for itself."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return importlib.import_module("benchmarks.maxtext_step")


def test_programs_are_of_published_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has the slice, the sequences and the context of the recipe that it is named after."""
    programs = maxtext_step(monkeypatch).RECIPES
    assert set(HELD_BACK) < set(programs) < set(RECIPES)
    for name, program in programs.items():
        recipe = RECIPES[name]
        assert program.context == recipe.context
        chips = clock.chips_of(recipe)
        generation, _, devices = program.topology.rpartition("-")
        cores = 2 if generation == "tpu7x" else 1
        assert (int(devices), program.rows * cores) == (chips * cores, recipe.sequences)
        assert slice_shape(slices_in(recipe.topology)[1]).startswith(generation)


def test_pages_are_printed_from_the_rows() -> None:
    page = clock.PAGE.read_text()
    assert clock.START in page
    assert page == with_part(page, clock.page_part(clock.load_rows()), clock.START)
    for name, (seconds, _) in published.maxtext_seconds().items():
        assert f"| {seconds:.3f} | {seconds / RECIPES[name].seconds:.2f} |" in published.PAGE.read_text()


def test_rows() -> None:
    assert clock.table_row("llama3-8b-v6e-16", ROW) == (
        "| `llama3-8b-v6e-16` | 3.393 | 3.700 | +9% | +5% | 1.000 | 2.325 | 0.250 | 0.125 | 0.062 |\n"
    )
    assert clock.group_row("both", [-0.15, 0.09]) == "| both | 2 | 12% | -15% | +9% | 1 |\n"
    assert clock.group_row("none", []) == ""


def test_held_back_programs_are_apart() -> None:
    looked_at, held_back = clock.page_part({"llama3-8b-v6e-16": ROW, HELD_BACK[0]: ROW}).split("\nHeld back:\n")
    assert "`llama3-8b-v6e-16`" in looked_at and HELD_BACK[0] not in looked_at
    assert HELD_BACK[0] in held_back
    assert "| held back | 1 |" in held_back
    assert f"| {clock.WITHOUT_WAITS}all | 2 |" in held_back


def test_seconds_by_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, and instructions that are rated by their bytes, are counted apart, as often as they run."""
    pytest.importorskip("libtpu")
    heads, mask = "bf16[2,1024,128]{2,1,0}", "s8[2,2]{1,0}"
    layouts = f"operand_layout_constraints={{{mask}, {heads}, {heads}, {heads}}}"
    kernel = f'%splash_mha_fwd.1 = {heads} custom-call(%x), custom_call_target="tpu_custom_call", {layouts}'
    other = f'%other = {heads} custom-call(%x), custom_call_target="tpu_custom_call", {layouts}'
    trips = 'backend_config={"known_trip_count":{"n":"3"}}'
    config = 'backend_config={"estimated_cycles":"1750000"}'
    text = "\n".join(
        (
            f"%body (p: f32[8]) -> f32[8] {{\n  {kernel}\n  {other}\n}}",
            "%cond (p: f32[8]) -> pred[] {\n}",
            "%c (p: f32[8]) -> f32[8] {\n  %y = f32[8] multiply(%p, %p)\n}",
            "ENTRY %main (x: f32[8]) -> f32[8] {",
            f"  %w = f32[8] while(%x), condition=%cond, body=%body, {trips}",
            f"  %f = f32[8] fusion(%x), kind=kLoop, calls=%c, {config}",
            "}",
        )
    )
    row = clock.row_of("llama3-8b-v6e-16", text)
    assert row.kernel_seconds > 0 and row.guessed_seconds > 0
    assert row.seconds == pytest.approx(row.kernel_seconds + row.guessed_seconds + 0.001, rel=1e-3)
    monkeypatch.setattr(published, "MAXTEXT", tmp_path / "rows.json")
    (tmp_path / "rows.json").write_text(json.dumps({"llama3-8b-v6e-16": asdict(row)}))
    assert clock.load_rows() == {"llama3-8b-v6e-16": row}
    assert published.maxtext_seconds() == {"llama3-8b-v6e-16": (row.seconds, row.host_seconds)}
