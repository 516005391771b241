"""The page of a plan: blocks, tables and the curve of memory."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import browser
from zero.costs.hlo import Instruction
from zero.costs.holders import Holder
from zero.costs.live_arrays import LiveArray, LiveArrays, Place
from zero.costs.plan_page import BLOCKS, Block, merged, place
from zero.costs.planned_program import PlannedProgram
from zero.costs.predict import CORE, Event, TimedPart, Timeline
from zero.costs.program_plan import CollectiveCost, Plan
from zero.costs.source_lines import SourceLines

TEXT = """HloModule step
FileNames
1 "/home/me/train.py"
2 "/home/me/.venv/lib/python3.11/site-packages/optax/_src/update.py"
FunctionNames
1 "step"
FileLocations
1 {file_name_id=1 function_name_id=1 line=19 end_line=19 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
%add (x: f32[]) -> f32[] {
"""
PART = TimedPart("MLP", "forward")


def instruction(name: str, op: str, frame: int, cycles: int | None = None) -> Instruction:
    estimate = "" if cycles is None else f', backend_config={{"estimated_cycles":"{cycles}"}}'
    rest = f"%x), replica_groups={{{{0,1,2,3}}}}, metadata={{stack_frame_id={frame}}}{estimate}"
    return Instruction(name, "f32[1024,1024]{1,0}", op, rest)


PRODUCT = instruction("fusion.1", "fusion", frame=2, cycles=1500)
GATHER = instruction("all-gather-start.1", "all-gather-start", frame=1)
DONE = instruction("all-gather-done.1", "all-gather-done", frame=1)
LOOP = instruction("while.1", "while", frame=1)


def planned(events: list[Event]) -> Plan:
    """A plan of a loop of 16 runs of these events, of 10 µs each, between two of 20 µs."""
    around = [
        Event(CORE, 0.0, 20e-6, PRODUCT, PART),
        Event(CORE, 20e-6, 160e-6, LOOP, PART, calls="body", times=16),
        Event(CORE, 180e-6, 20e-6, PRODUCT, PART, is_guess=True),
    ]
    arrays = [LiveArray(PRODUCT, Place(1, 0, 2**30), 0, 3), LiveArray(GATHER, Place(2, 0, 2**29), 2, 2)]
    timeline = Timeline("main", {"main": around, "body": events})
    program = PlannedProgram("step", timeline, SourceLines(TEXT), LiveArrays(arrays, list("abcd")), 2**31)
    cost = CollectiveCost("all-gather", 16, 10**9, 96e-6, 64e-6)
    facts = (2**31, 16 * 2**30, (Holder("argument 0", 2**30),), (cost,), 1e9, 200e-6, 64e-6, 0.0, 20e-6, (), 1.0)
    return Plan("step", "v5e-8", "TPU v5 lite", 8, *facts, programs=((program, 1),))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Of each run 6 µs of a product, during which a gather starts, and 4 µs of a wait for it."""
    return planned(
        [
            Event("network", 1e-6, 9e-6, GATHER, PART),
            Event(CORE, 0.0, 6e-6, PRODUCT, PART),
            Event(CORE, 6e-6, 4e-6, DONE, PART, waits_for=GATHER),
        ]
    )


def test_a_loop_is_shown_once_as_wide_as_its_runs(plan: Plan) -> None:
    placed = list(place(plan.programs[0][0].timeline))
    assert [(round(1e6 * x.begin), round(1e6 * x.seconds), x.runs) for x in placed] == [
        (0, 20, 1),
        (36, 144, 16),
        (20, 96, 16),
        (116, 64, 16),
        (180, 20, 1),
    ]
    on_core = sum(x.seconds for x in placed if x.event.lane == CORE)
    assert on_core == pytest.approx(plan.seconds)


def test_the_page_says_what_an_instruction_is_and_where_it_comes_from(plan: Plan, tmp_path: Path) -> None:
    """Lines of libraries are skipped; a wait names what it waits for, and a guess is called one."""
    plan.save(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    (island,) = re.findall(r'<script type="application/json">(.*?)</script>', text)
    said = [block[4] for block in json.loads(island)["blocks"]]
    assert "fusion.1 · train.py:19 · 6.0 µs x 16 · 1,500 cycles · 4.19 MB" in said
    assert any(words.startswith("wait for all-gather-start.1 · train.py:19 · 4.0 µs x 16") for words in said)
    assert [words.endswith("a guess") for words in said].count(True) == 1
    assert '<td>train.py:19</td><td class="number">0.064</td>' in text and "<td>all-gather</td>" in text
    assert "Memory over the schedule, at most 1.5 GiB" in text


def test_instructions_without_a_line_are_together(tmp_path: Path) -> None:
    """A row for each of the compiler's copies would hide the program's lines."""
    copies = [instruction(f"copy.{number}", "copy", frame=0, cycles=1500) for number in (530, 531)]
    planned([Event(CORE, 1e-6 * number, 1e-6, copy, PART) for number, copy in enumerate(copies)]).save(
        tmp_path / "plan.html"
    )
    row = '<td>copy</td><td class="number">0.032</td>\n<td class="number">44.4 %</td><td>copy</td>'
    assert f'{row}<td class="number">32</td>' in (tmp_path / "plan.html").read_text()


def test_a_hundred_thousand_instructions_are_aggregated(tmp_path: Path) -> None:
    """The page stays small, and the blocks cover the same time."""
    count = 100_000
    seconds = [2e-10 if number % 100 else 1e-8 for number in range(count)]
    begins = itertools.accumulate(seconds, initial=0.0)
    events = [Event(CORE, begin, spent, PRODUCT, PART) for begin, spent in zip(begins, seconds, strict=False)]
    planned(events).save(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert len(text) < 2_000_000 and " instructions" in text


def test_joined_blocks_cover_what_they_join() -> None:
    blocks = [
        Block(number % 2, number / 1000, 0.001 if number % 7 else 0.002, 0, str(number)) for number in range(1000)
    ]
    joined = merged(blocks, 100)
    for lane in (0, 1):
        before = [block for block in blocks if block.lane == lane]
        after = [block for block in joined if block.lane == lane]
        assert after[0].begin == before[0].begin
        assert after[-1].begin + after[-1].width == pytest.approx(before[-1].begin + before[-1].width)
    assert len(joined) < len(blocks) // 2 and len(merged(blocks, BLOCKS)) == len(blocks)


def test_an_idle_lane_is_not_covered() -> None:
    blocks = [Block(0, begin + number / 10_000, 0.0001, 0, "") for begin in (0, 0.9) for number in range(30)]
    assert [(block.begin, round(block.width, 4)) for block in merged(blocks, 20)] == [(0, 0.003), (0.9, 0.003)]


@pytest.mark.wide
@browser.needed
def test_the_page_in_a_browser(plan: Plan, tmp_path: Path) -> None:
    """It fits all widths, asks for nothing, and says what is under the pointer, also after a zoom."""
    plan.save(tmp_path / "plan.html")
    with browser.Browser(tmp_path / "profile") as opened:
        for width, dark in itertools.product((390, 1280), (False, True)):
            opened.open(tmp_path / "plan.html", width=width, dark=dark)
            assert opened.evaluate(browser.LAYOUT) == [], (width, dark)
        assert said(opened, 0.5, lane=0).startswith("fusion.1")
        opened.evaluate("document.querySelector('button[data-zoom=\"2\"]').click()")
        assert said(opened, 0.9, lane=0).startswith("wait for all-gather-start.1")
        assert opened.complaints == [] and opened.asked == []


def said(opened: Any, share: float, lane: int) -> str:
    """What the page says when a pointer is at this share of a lane's width."""
    text = opened.evaluate(
        f"""(() => {{
          const canvas = document.querySelector("canvas"), box = canvas.getBoundingClientRect();
          const at = {{clientX: box.left + {share} * box.width, clientY: box.top + 34 * {lane} + 20}};
          canvas.dispatchEvent(new PointerEvent("pointermove", at));
          return document.querySelector("output").textContent;
        }})()"""
    )
    return str(text)
