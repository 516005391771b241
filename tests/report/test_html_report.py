"""The page about runs, in a real browser: the curves are there, nothing is wrong, and nothing leaves the page."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from zero import run_directory
from zero.config.saved_config import default_config
from zero.models.codebook import METRICS as OF_CODEBOOKS
from zero.models.experts import METRICS
from zero.report.html_report import MOST_POINTS, PANELS, TASKS, write_report
from zero.report.tensor_panels import tensor_panels
from zero.tracking.metrics_file import read_metrics
from zero.tracking.tracker import open_tracker

EVALUATED = ("validation/ema_loss", "harness/choice/acc", "harness/lambada/acc")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def make_run(directory: Path, rate: float, resumed_from: int | None = None, with_device: bool = True) -> Path:
    directory.mkdir(exist_ok=True)
    with open_tracker(directory, project=None, config={}, resumed_from=resumed_from) as tracker:
        for step in range((resumed_from or 0) + 1, (resumed_from or 0) + 21):
            names = ["learning_rate", "sequence_length", "tokens_per_second", "gradient_norm", "data_wait", "step_time"]
            names += ["goodput/steps", "goodput/restarts", "goodput/evaluation"]
            device = ["mfu", "device_wait", "predicted_speed", "peak_memory", *METRICS, *OF_CODEBOOKS]
            names += device if with_device else []
            line = {
                "step": step,
                "train/loss": 5 * rate / step,
                "skipped_steps": 0,
                "skipped_spikes": 0,
                **dict.fromkeys(names, rate / step),
            }
            evaluated = dict.fromkeys(("validation/loss", *(EVALUATED if with_device else ())), 6 * rate / step)
            tracker(line | (evaluated if step % 5 == 0 else {}))
    config = default_config()
    config.training.peak_learning_rate = rate
    OmegaConf.save(config, directory / run_directory.CONFIG_FILE)
    (directory / run_directory.LAYOUT_FILE).write_text("12 elements in 1 leaves\n")
    (directory / run_directory.SAMPLES_FILE).write_text("--- step 5\n<b>&amp; zero\n--- step 10\nmore\n")
    return directory


@pytest.fixture
def page(tmp_path: Path) -> Path:
    first = make_run(tmp_path / "first", 0.5)
    make_run(first, 0.5, resumed_from=20)
    return write_report([first, make_run(tmp_path / "second", 0.25)], tmp_path / "page.html")


def test_statistics_of_tensors(tmp_path: Path) -> None:
    """A page has heat maps of activations and curves of leaves."""
    run = make_run(tmp_path / "run", 0.5)
    before = write_report([run], tmp_path / "page.html").read_text(encoding="utf-8")
    with open_tracker(run, project=None, config={}, resumed_from=20) as tracker:
        for step in (25, 30):
            places = [(name, layer) for name in ("query", "stream") for layer in (0, 1)]
            sizes = {f"activation/{name}/{layer}": step * 10.0**-layer for name, layer in places}
            leaves = {f"{kind}/norm/scale": 2.0 for kind in ("change", "gradient_norm", "weight_norm")}
            tracker({"step": step, "train/loss": 1.0, **sizes, **leaves})
    page = write_report([run], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Statistics of tensors" in page and "Statistics of tensors" not in before
    maps, curves = tensor_panels(read_metrics(run / "metrics.jsonl"))
    shown, drawn = (
        json.loads(re.findall(r"Plotly\.newPlot\(\s*\S+,\s*(\[.*?\]),\s*\{", figure, re.DOTALL)[0])
        for figure in (maps, curves)
    )
    assert [trace["x"] for trace in shown] == [[25, 30]] * 2
    assert shown[0]["z"][1] == pytest.approx([math.log10(2.5), math.log10(3)])
    assert [(trace["name"], trace["y"]) for trace in drawn] == [("norm/scale", [2.0, 2.0])] * 3


def test_differences_and_samples(page: Path) -> None:
    """The page lists what differs and shows samples as they are."""
    text = page.read_text(encoding="utf-8")
    rows = re.findall(r"<tr>(<td>.*?)</tr>", text)
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    assert cells == [["training.peak_learning_rate", "0.003", "0.5", "0.25"]]
    assert text.count("2 samples over time") == 2 and "&lt;b&gt;&amp;amp; zero" in text
    assert text.count("12 elements in 1 leaves") == 2
    assert [path.name for path in page.parent.iterdir() if path.is_file()] == ["page.html"]


def browse(page: Path, profile: Path) -> tuple[str, list[str], list[str]]:
    """What a browser made of a page: its elements, what it complained of, and which addresses the page asked for."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={profile}",
            f"--log-net-log={profile}.json",
            "--enable-logging=stderr",
            "--window-size=1250,2600",
            "--virtual-time-budget=20000",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    log = json.loads(profile.with_suffix(".json").read_text())
    start = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    started = [
        event["params"] for event in log["events"] if event["type"] == start and "url" in event.get("params", {})
    ]
    # What the browser asks for on its own account has no origin.
    asked = [params["url"] for params in started if params.get("initiator") != "not an origin"]
    complaints = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return done.stdout, complaints, [url for url in asked if not url.startswith(("file:", "data:"))]


@pytest.mark.skipif(BROWSER is None, reason="no browser on this machine: apt-get install chromium")
@pytest.mark.timeout(300)
def test_opens_in_a_browser(page: Path, tmp_path: Path) -> None:
    """The page opens in a browser without errors or requests."""
    elements, complaints, asked = browse(page, tmp_path / "profile")
    tasks = 2
    curves = sum(map(len, PANELS.values())) + tasks
    assert len(re.findall(r'<path class="js-line"', elements)) == 2 * curves + 1  # that of the sweep
    for title in (TASKS, *PANELS):
        assert f">{title}</text>" in elements
    assert elements.count(">resumed</text>") == 1
    assert (complaints, asked) == ([], [])

    broken = tmp_path / "broken.html"
    broken.write_text('<img src="http://127.0.0.1:9/x.png"><script>console.error("seen")</script>')
    _, complaints, asked = browse(broken, tmp_path / "other")
    assert "seen" in complaints[0] and asked == ["http://127.0.0.1:9/x.png"]


def test_losses_of_a_sweep(tmp_path: Path) -> None:
    """The last losses over a swept number, a line for each value of a second key; none where more keys differ."""
    runs = []
    for number, (rate, seed) in enumerate([(0.5, 0), (0.25, 0), (0.25, 1), (0.5, 1)]):
        run = make_run(tmp_path / str(number), rate)
        config = OmegaConf.load(run / run_directory.CONFIG_FILE)
        config.seed = seed
        OmegaConf.save(config, run / run_directory.CONFIG_FILE)
        runs.append(run)
    _, _, drawn = write_report(runs, tmp_path / "page.html").read_text().rpartition("Plotly.newPlot(")
    traces, _ = json.JSONDecoder().raw_decode(drawn, drawn.index("[{"))
    assert [(trace["name"], trace["x"], trace["y"]) for trace in traces] == [
        ("0", [0.25, 0.5], [6 * 0.25 / 20, 6 * 0.5 / 20]),
        ("1", [0.25, 0.5], [6 * 0.25 / 20, 6 * 0.5 / 20]),
    ]
    assert "last loss against training.peak_learning_rate, a line per seed" in drawn
    config = OmegaConf.load(runs[0] / run_directory.CONFIG_FILE)
    config.training.total_steps = 7
    OmegaConf.save(config, runs[0] / run_directory.CONFIG_FILE)
    assert "last loss against" not in write_report(runs, tmp_path / "page.html").read_text()


def test_no_empty_panels(tmp_path: Path) -> None:
    """Quantities that no run has logged have no panel."""
    run = make_run(tmp_path / "run", 0.5, with_device=False)
    text = write_report([run], tmp_path / "page.html").read_text()
    assert "throughput" in text and "utilization" not in text and "peak memory" not in text and TASKS not in text
    assert "most chosen expert" not in text


@pytest.mark.timeout(40)  # lines of resumes that are added one by one took minutes
def test_long_run(tmp_path: Path) -> None:
    """The page of a long run that was resumed often opens."""
    run, spike = make_run(tmp_path / "run", 0.5), 5_555
    lines: list[dict[str, object]] = [
        {
            "step": step,
            "train/loss": 9.0 if step == spike else None if step > 7_000 else 1 / step,
            "gradient_norm": 3 * step % 10,
        }
        for step in range(21, 8_026)
    ]
    lines += [{"event": "resume", "step": 8_025 + number} for number in range(200)]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)
    text = write_report([run], tmp_path / "page.html").read_text()
    _, _, drawn = text.rpartition("Plotly.newPlot(")
    traces, end = json.JSONDecoder().raw_decode(drawn, drawn.index("[{"))
    layout, _ = json.JSONDecoder().raw_decode(drawn, drawn.index("{", end))
    (loss,) = (trace for trace in traces if trace["name"].endswith("train/loss"))
    assert len(loss["x"]) <= MOST_POINTS and (loss["x"][0], loss["y"][0]) == (1, 2.5)
    assert loss["x"] == sorted(loss["x"]) and loss["y"][loss["x"].index(spike)] == 9 and loss["y"][-1] is None
    (norm,) = (trace for trace in traces if trace["name"].endswith("gradient_norm"))
    assert len(norm["x"]) <= MOST_POINTS and (norm["x"][-1], norm["y"][-1]) == (8_025, 5)
    panels = len(PANELS) + 1  # that of tasks
    assert len(layout["shapes"]) == 200 * panels
    assert [shape["x0"] for shape in layout["shapes"] if shape["label"].get("text")] == [8_025]
    assert {(shape["xref"], shape["yref"]) for shape in layout["shapes"]} == {
        (f"x{number or ''}", f"y{number or ''} domain") for number in (0, *range(2, panels + 1))
    }


def test_report_command(tmp_path: Path) -> None:
    """The command writes into the first run and names directories that are not runs."""
    run = make_run(tmp_path / "run", 0.5)
    command = [sys.executable, "-m", "zero.report.zero_report"]
    done = subprocess.run([*command, str(run)], capture_output=True, text=True)
    assert done.stdout == f"{run / 'report.html'}\n", done.stderr
    assert re.match(rf"{run}: step \d+; the wall clock was not recorded\n", done.stderr)
    (run / "metrics.jsonl").unlink()
    done = subprocess.run([*command, str(run)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {run}: metrics.jsonl is missing; expected a run that has made a step\n",
    )
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path}: not a run directory, config.yaml is missing\n"
