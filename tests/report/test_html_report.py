"""The page about runs: its numbers are those of metrics.jsonl, and in a real browser it is laid out well."""

import html
import json
import math
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers import browser
from tests.helpers.browser import LAYOUT, WIDTHS, Browser
from tests.helpers.command_lines import accept
from tests.helpers.pages import facts, plain, table
from zero.config.saved_config import flat_config
from zero.models.codebook import METRICS as OF_CODEBOOKS
from zero.models.experts import METRICS
from zero.record import run_files as run_directory
from zero.record.metrics_file import read_metrics
from zero.report.curves import MOST_POINTS, MOST_POINTS_OF_A_CURVE, PANELS
from zero.report.html_report import write_report
from zero.run.config import default_config
from zero.tracking.goodput import PHASES
from zero.tracking.tracker import open_tracker

EVALUATED = ("validation/ema_loss", "harness/choice/acc", "harness/lambada/acc")
LAYOUT_TEXT = "1,234,567 elements in 1 leaves\n"
TOKENS_PER_STEP = 4096

DEFAULTS = flat_config(default_config())


def make_run(directory: Path, rate: float, resumed_from: int | None = None, with_device: bool = True) -> Path:
    directory.mkdir(exist_ok=True)
    with open_tracker(directory, project=None, config={}, resumed_from=resumed_from) as tracker:
        for step in range((resumed_from or 0) + 1, (resumed_from or 0) + 21):
            names = ["learning_rate", "sequence_length", "tokens_per_second", "gradient_norm", "data_wait", "step_time"]
            names += ["tokens_per_second_per_device"]
            device = ["mfu", "device_wait", "predicted_speed", "peak_memory", *METRICS, *OF_CODEBOOKS]
            names += device if with_device else []
            line = {
                "step": step,
                "train/loss": 5 * rate / step,
                "skipped_steps": 0,
                "skipped_spikes": 0,
                "tokens_seen": step * TOKENS_PER_STEP,
                "time": 1.7e9 + step,
                "wall_time": 60.0 * step,
                **{f"goodput/{phase}": 1 / len(PHASES) for phase in PHASES},
                **dict.fromkeys(names, rate / step),
            }
            evaluated = dict.fromkeys(("validation/loss", *(EVALUATED if with_device else ())), 6 * rate / step)
            tracker(line | (evaluated if step % 5 == 0 else {}))
    config = default_config()
    config.training.peak_learning_rate = rate
    OmegaConf.save(config, directory / run_directory.CONFIG_FILE)
    (directory / run_directory.LAYOUT_FILE).write_text(LAYOUT_TEXT)
    (directory / run_directory.SAMPLES_FILE).write_text("--- step 5\n<b>&amp; zero\n--- step 10\nmore\n")
    return directory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 40 steps that was resumed once."""
    run = make_run(tmp_path / "first", 0.5)
    return make_run(run, 0.5, resumed_from=20)


@pytest.fixture
def page(run: Path, tmp_path: Path) -> Path:
    """Of two runs."""
    return write_report([run, make_run(tmp_path / "second", 0.125)], tmp_path / "page.html", DEFAULTS)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as opened:
        yield opened


def drawn(page: Path) -> dict[str, Any]:
    """What the script of a page draws."""
    text = page.read_text(encoding="utf-8")
    (island,) = re.findall(r'<script type="application/json" id="curves">(.*?)</script>', text, re.DOTALL)
    return json.loads(island)


def test_curves_are_those_of_the_metrics(run: Path, tmp_path: Path) -> None:
    """Each logged value of each panel is on the page, to the last digit."""
    data = drawn(write_report([run], tmp_path / "page.html", DEFAULTS))
    lines = read_metrics(run / "metrics.jsonl")
    (shown,) = data["runs"]
    metrics = {metric for panel in data["panels"] for metric, _ in panel["curves"]}
    logged = {metric for line in lines for metric in line}
    assert {metric for panel in PANELS for metric, _ in panel.curves} <= metrics
    assert shown["curves"].keys() == metrics & logged
    for metric, (steps, values) in shown["curves"].items():
        assert list(zip(steps, values, strict=True)) == [
            (line["step"], line[metric]) for line in lines if metric in line
        ]
    assert shown["tokens_per_step"] == TOKENS_PER_STEP and shown["parameters"] == 1_234_567
    assert shown["hours"] == [[line["step"] for line in lines], [line["wall_time"] / 3600 for line in lines]]
    assert shown["resumes"] == [20]


def test_commands_of_the_page_are_accepted(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of "What next?" as a person copies it."""
    text = write_report([run], tmp_path / "page.html", DEFAULTS).read_text(encoding="utf-8")
    copied = re.findall(r"<li>([\w ]+)\n<code>(.*?)</code>", text)
    assert [purpose for purpose, _ in copied] == ["resume", "sample", "evaluate", "export"]
    for _, code in copied:
        accept(shlex.split(html.unescape(re.sub(r"<[^>]*>", "", code))), monkeypatch)


def test_what_a_start_finds_in_the_data_is_no_difference(run: Path, tmp_path: Path) -> None:
    """data.last_target is null by default, and a run saves whether its rows have the target of their last position."""
    config = OmegaConf.load(run / "config.yaml")
    OmegaConf.update(config, "data.last_target", False)
    OmegaConf.update(config, "seed", 7)
    OmegaConf.save(config, run / "config.yaml")
    keys = [row[0] for row in table(write_report([run], tmp_path / "page.html", DEFAULTS), "keys")]
    assert "seed" in keys and "data.last_target" not in keys


def test_first_screen_of_a_run(run: Path, tmp_path: Path) -> None:
    """It answers whether it went well, what it cost, what it wrote and what next, with the numbers of metrics.jsonl."""
    (run / "checkpoints" / "20").mkdir(parents=True)
    page = write_report([run], tmp_path / "page.html", DEFAULTS)
    lines = read_metrics(run / "metrics.jsonl")
    shown, last = facts(page), lines[-1]
    best = min((line["validation/loss"], line["step"]) for line in lines if "validation/loss" in line)
    assert shown["state"] == ("step 40 of 960", "4%")
    assert shown["best validation loss"] == (f"{best[0]:.4f}", f"at step {best[1]}")
    assert shown["validation loss"][0] == f"{last['validation/loss']:.4f}"
    assert shown["training loss"][0] == f"{last['train/loss']:.4f}"
    assert shown["skipped steps"] == ("0", "") and shown["resumed"] == ("once", "most recently from step 20")
    assert shown["wall clock"][0] == "40:00" and shown["goodput"][0] == f"{1 / len(PHASES):.1%}"
    assert shown["tokens"][0] == f"{40 * TOKENS_PER_STEP:,}"
    assert shown["checkpoints"][1] == "of steps 20" and shown["metrics"] == ("metrics.jsonl", "40 lines")
    text = plain(page.read_text(encoding="utf-8"))
    assert "1,234,567 parameters · corpus stdlib" in text
    text = " ".join(text.split())
    for command in ("--resume hydra.run.dir=", "mode=sample model.model_path=", "mode=evaluate model.model_path="):
        assert f"python main_zero.py {command}{run}" in text
    assert f"zero-weights export {run} first-model --with-code" in text
    row = dict(zip(("step", "tokens", "train", "validation"), table(page, "numbers")[-1], strict=False))
    assert row["step"] == "40" and row["train"] == f"{last['train/loss']:.6g}"
    assert [row[0] for row in table(page, "numbers")] == [str(step) for step in range(5, 41, 5)]


def test_a_run_that_its_data_have_ended(run: Path, tmp_path: Path) -> None:
    """It is finished, although steps of its schedule are left, and more epochs make it longer."""
    config = OmegaConf.load(run / run_directory.CONFIG_FILE)
    config.training.max_epochs = 3
    OmegaConf.save(config, run / run_directory.CONFIG_FILE)
    assert facts(write_report([run], tmp_path / "page.html", DEFAULTS))["state"] == ("step 40 of at most 960", "4%")
    with open_tracker(run, project=None, config={}, resumed_from=40) as tracker:
        tracker({"step": 41, "train/loss": 1.0, "end_of_data": 1})
    page = write_report([run], tmp_path / "page.html", DEFAULTS)
    assert facts(page)["state"] == ("finished", "at step 41, where training.max_epochs=3 ends the data")
    text = page.read_text(encoding="utf-8")
    assert 'id="reload"' not in text and "training.max_epochs=6" in text and "training.total_steps=1920" not in text


def test_losses_that_went_wrong(tmp_path: Path) -> None:
    """A best loss that is not the last one, skipped steps and losses that are not finite are marked."""
    run = make_run(tmp_path / "run", 0.5)
    with open_tracker(run, project=None, config={}, resumed_from=20) as tracker:
        tracker({"step": 21, "train/loss": math.inf, "skipped_steps": 3, "skipped_spikes": 1, "validation/loss": 9.0})
    shown = facts(write_report([run], tmp_path / "page.html", DEFAULTS))
    assert shown["best validation loss"] == ("0.1500", "at step 20; the last loss is 8.8500 higher")
    assert shown["skipped steps"] == ("3", "of which 1 spikes") and shown["losses that are not finite"][0] == "1"
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<span class="bad">0.1500</span>' in text and '<span class="bad">3</span>' in text


def test_several_runs(page: Path) -> None:
    """The runs are beside each other, the lowest validation loss first, with the keys that differ and the samples."""
    (second, first) = table(page, "runs")
    assert [row[0].split("/")[1] for row in (second, first)] == ["second best", "first"]
    assert second[1:4] == ["step 20 of 960", "0.0375", "20"] and first[1:4] == ["step 40 of 960", "0.0750", "40"]
    assert table(page, "keys") == [["training.peak_learning_rate", "0.003", "0.5", "0.125"]]
    text = page.read_text(encoding="utf-8")
    assert text.count("2 samples over time") == 2 and "&lt;b&gt;&amp;amp; zero" in text
    assert text.count(LAYOUT_TEXT) == 2
    assert [path.name for path in page.parent.iterdir() if path.is_file()] == ["page.html"]


def test_statistics_of_tensors(tmp_path: Path) -> None:
    """A page has heat maps of activations and curves of leaves."""
    run = make_run(tmp_path / "run", 0.5)
    before = write_report([run], tmp_path / "page.html", DEFAULTS)
    assert drawn(before)["heat"] is None and "Statistics of tensors" not in before.read_text(encoding="utf-8")
    with open_tracker(run, project=None, config={}, resumed_from=20) as tracker:
        for step in (25, 30):
            places = [(name, layer) for name in ("query", "stream") for layer in (0, 1)]
            sizes = {f"activation/{name}/{layer}": step * 10.0**-layer for name, layer in places}
            leaves = {f"{kind}/norm/scale": 2.0 for kind in ("change", "gradient_norm", "weight_norm")}
            tracker({"step": step, "train/loss": 1.0, **sizes, **leaves})
    data = drawn(write_report([run], tmp_path / "page.html", DEFAULTS))
    maps = data["heat"]["maps"]
    assert [(drawn_map["name"], drawn_map["steps"]) for drawn_map in maps] == [
        ("query", [25, 30]),
        ("stream", [25, 30]),
    ]
    assert maps[0]["values"][1] == pytest.approx([math.log10(2.5), math.log10(3)])
    assert data["heat"]["range"] == pytest.approx([math.log10(2.5), math.log10(30)])
    of_leaves = [panel for panel in data["panels"] if panel["run"] == 0]
    assert [panel["curves"][0][1] for panel in of_leaves] == ["norm/scale"] * 3
    assert data["runs"][0]["curves"]["change/norm/scale"] == [[25, 30], [2.0, 2.0]]


@pytest.mark.wide
@browser.needed
def test_layout(page: Path, run: Path, tmp_path: Path, opened: Browser) -> None:
    """Nothing leaves the page, overlaps or is hard to read, at any width, in light and dark; nothing is asked for."""
    single = write_report([run], tmp_path / "single.html", DEFAULTS)
    for path in (single, page):
        assert path.stat().st_size < 1.5e6
        for width in WIDTHS:
            for dark in (False, True):
                opened.open(path, width, dark=dark)
                opened.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true }); 0")
                assert opened.evaluate(LAYOUT) == [], (path.name, width, dark)
                boxes = "[...document.querySelectorAll('.plot')].map(p => [p.clientWidth, p.querySelector('canvas')"
                sizes = opened.evaluate(f"{boxes}.getBoundingClientRect().width])")
                assert sizes and all(abs(plot - canvas) <= 1 for plot, canvas in sizes)
    assert (opened.complaints, opened.asked) == ([], [])


@browser.needed
def test_the_first_screen_has_the_answers(run: Path, tmp_path: Path, opened: Browser) -> None:
    opened.open(write_report([run], tmp_path / "page.html", DEFAULTS), 1300, 900)
    bottoms = opened.evaluate("[...document.querySelectorAll('.card')].map(c => c.getBoundingClientRect().bottom)")
    assert len(bottoms) == 4 and max(bottoms) < 900


@browser.needed
def test_curves_in_a_browser(page: Path, tmp_path: Path, opened: Browser) -> None:
    """Every panel is drawn, with a key and the newest values; the arrow keys read others; screen readers hear them."""
    opened.open(page)
    panels = drawn(page)["panels"]
    assert opened.evaluate("document.querySelectorAll('.plot canvas').length") == len(panels) + 1  # that of the sweep
    # Each canvas has something other than its background on it.
    ink = "[...document.querySelectorAll('.chart:not(#sweep) canvas')].map(c => c.getContext('2d')"
    ink += ".getImageData(0, 0, c.width, c.height).data.some(value => value > 0))"
    assert opened.evaluate(ink) == [True] * len(panels)
    keys = "document.querySelector('#panel-0 .key').innerText"
    assert "first" in opened.evaluate(keys) and "0.0625" in opened.evaluate(keys)
    opened.evaluate("document.querySelector('#panel-0 .plot').focus(); 0")
    opened.press("Home")
    said = opened.evaluate("document.getElementById('said').textContent")
    assert said.startswith("Loss, step 1: ") and "first: training 2.5," in said and "second: training 0.625" in said
    opened.press("ArrowRight")
    assert "Loss, step 2: " in opened.evaluate("document.getElementById('said').textContent")
    names = {node["name"]["value"] for node in opened.tree() if node["role"]["value"] in ("image", "img")}
    assert any(name.startswith("Loss, nats per token") for name in names)
    hidden = "document.querySelector('input[name=run]').click(); location.hash"
    assert opened.evaluate(hidden) == "#hidden=0"
    assert opened.evaluate("document.querySelector('#panel-0 .key').innerText") != ""
    axis = "document.querySelector('input[name=x][value=%s]').click(); location.hash"
    for kind in ("tokens", "flops", "hours"):
        assert f"x={kind}" in opened.evaluate(axis % kind)
    assert opened.complaints == []


@browser.needed
def test_the_page_of_a_run_in_progress_reloads(run: Path, tmp_path: Path, opened: Browser) -> None:
    """It shows what was written since, keeps what was chosen, and stops where that is asked for."""
    page = write_report([run], tmp_path / "page.html", DEFAULTS)
    page.write_text(page.read_text().replace('data-seconds="30"', 'data-seconds="4"'))
    opened.open(f"{page.as_uri()}#x=tokens")
    opened.wait_for_load(opened.loads)
    assert opened.evaluate("document.querySelector('input[name=x]:checked').value") == "tokens"
    later = "new Promise(resolve => setTimeout(() => resolve(1), 5000))"
    for _ in range(2):  # on a busy machine a reload may have begun before the switch is off
        opened.evaluate("(box => box.checked && box.click())(document.getElementById('reload')); 0")
        loads = opened.loads
        opened.evaluate(later)
    assert opened.loads == loads
    config = OmegaConf.load(run / run_directory.CONFIG_FILE)
    config.training.total_steps = 40
    OmegaConf.save(config, run / run_directory.CONFIG_FILE)
    assert 'id="reload"' not in write_report([run], page, DEFAULTS).read_text()  # it is finished
    assert facts(page)["state"] == ("finished", "at step 40")


@browser.needed
def test_the_browser_sees_what_is_wrong(tmp_path: Path, opened: Browser) -> None:
    """The tests above would fail on a page with mistakes."""
    broken = tmp_path / "broken.html"
    broken.write_text(
        '<!doctype html><img src="http://127.0.0.1:9/x.png"><script>console.error("seen")</script>'
        '<h2 style="margin:0">one title</h2><h2 style="margin:-1em 0 0">another title</h2>'
        '<p style="color:#bbb">pale</p><div style="width:3000px">wide</div>'
    )
    complaints, asked = len(opened.complaints), len(opened.asked)
    opened.open(broken)
    wrong = " ".join(opened.evaluate(LAYOUT))
    assert all(text in wrong for text in ("the page is", "overlaps", "contrast", "leaves the page"))
    assert any("seen" in text for text in opened.complaints[complaints:])
    assert opened.asked[asked:] == ["http://127.0.0.1:9/x.png"]
    del opened.complaints[complaints:], opened.asked[asked:]


def test_losses_of_a_sweep(tmp_path: Path) -> None:
    """The last losses over a swept number, a line for each value of a second key; none where more keys differ."""
    runs = []
    for number, (rate, seed) in enumerate([(0.5, 0), (0.25, 0), (0.25, 1), (0.5, 1)]):
        run = make_run(tmp_path / str(number), rate)
        config = OmegaConf.load(run / run_directory.CONFIG_FILE)
        config.seed = seed
        OmegaConf.save(config, run / run_directory.CONFIG_FILE)
        runs.append(run)
    page = write_report(runs, tmp_path / "page.html", DEFAULTS)
    points = [[0.25, 6 * 0.25 / 20], [0.5, 6 * 0.5 / 20]]
    assert drawn(page)["sweep"] == {
        "key": "training.peak_learning_rate",
        "lines": [{"name": "seed=0", "points": points}, {"name": "seed=1", "points": points}],
    }
    assert "Last loss against training.peak_learning_rate" in page.read_text()
    config = OmegaConf.load(runs[0] / run_directory.CONFIG_FILE)
    config.training.total_steps = 7
    OmegaConf.save(config, runs[0] / run_directory.CONFIG_FILE)
    assert drawn(write_report(runs, tmp_path / "page.html", DEFAULTS))["sweep"] is None


def test_no_empty_panels(tmp_path: Path) -> None:
    """Quantities that no run has logged have no panel."""
    run = make_run(tmp_path / "run", 0.5, with_device=False)
    titles = [panel["title"] for panel in drawn(write_report([run], tmp_path / "page.html", DEFAULTS))["panels"]]
    assert "Throughput" in titles
    assert not {"Model FLOPs utilization", "Peak memory", "Tasks", "Experts"} & set(titles)


@pytest.mark.wide
def test_long_run(tmp_path: Path) -> None:
    """The page of a long run that was resumed often is small, is written quickly, and keeps its spikes."""
    run, spike = make_run(tmp_path / "run", 0.5), 5_555
    lines: list[dict[str, object]] = [
        {
            "step": step,
            "train/loss": 9.0 if step == spike else None if step > 7_000 else 1 / step,
            "gradient_norm": 3 * step % 10,
            **{f"validation/set{number}/loss": math.pi / step for number in range(40)},
        }
        for step in range(21, 8_026)
    ]
    lines += [{"event": "resume", "step": 8_025 + number} for number in range(200)]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)
    started = time.process_time()
    page = write_report([run], tmp_path / "page.html", DEFAULTS)
    assert time.process_time() - started < 20  # seconds; lines of resumes that were added one by one took minutes
    assert page.stat().st_size < 1.5e6
    (shown,) = drawn(page)["runs"]
    curves = shown["curves"]
    most = min(MOST_POINTS // len(curves), MOST_POINTS_OF_A_CURVE)
    assert all(len(steps) <= most for steps, _ in curves.values())
    steps, losses = curves["train/loss"]
    assert (steps[0], losses[0]) == (1, 2.5) and steps == sorted(steps)
    assert losses[steps.index(spike)] == 9 and losses[-1] is None
    steps, norms = curves["gradient_norm"]
    assert (steps[-1], norms[-1]) == (8_025, 5)
    assert shown["resumes"] == [8_025 + number for number in range(200)]


def test_report_command(tmp_path: Path) -> None:
    """The command writes into the first run and names directories that are not runs."""
    run = make_run(tmp_path / "run", 0.5)
    command = [sys.executable, "-m", "zero.commands.zero_report"]
    done = subprocess.run([*command, str(run)], capture_output=True, text=True)
    assert done.stdout == f"{run / 'report.html'}\n", done.stderr
    assert re.match(rf"{run}: step \d+; .*in steps.*\n", done.stderr)
    (run / "metrics.jsonl").unlink()
    done = subprocess.run([*command, str(run)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {run}: metrics.jsonl is missing; expected a run that has taken a step\n",
    )
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path}: not a run directory, config.yaml is missing\n"
