"""The history of a run has every point of a short run, and the extremes of a long one, from one reading."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from zero.record import history
from zero.record.history import read_history
from zero.record.metrics_file import read_metrics
from zero.record.run_files import METRICS_FILE
from zero.training.statistics import ACTIVATION


def write_run(run: Path, steps: int, resumes: int = 3) -> list[dict[str, Any]]:
    """A run that was resumed; its lines that count."""
    draw = random.Random(7)
    texts: list[dict[str, Any]] = []
    step = 0
    for number in range(steps):
        step += 1
        line = {
            "step": step,
            "train/loss": draw.choice([None, draw.random()]),
            "rate": draw.random(),
            "wall_time": step,
        }
        if step % 7 == 0:
            line |= {"validation/loss": draw.random()}
        if step % 3 == 0:
            line |= {f"activation/mlp/{layer}": 1.0 for layer in range(2)}
        texts.append(line)
        if number % (steps // (resumes + 1)) == steps // (resumes + 2):
            step -= draw.randint(0, 20)
            texts.append({"event": "resume", "step": step})
    (run / METRICS_FILE).write_text("".join(json.dumps(text) + "\n" for text in texts))
    return read_metrics(run / METRICS_FILE)


def test_short_run_has_all_points(tmp_path: Path) -> None:
    lines = write_run(tmp_path, 500)
    found = read_history(tmp_path / METRICS_FILE)
    for name in ("train/loss", "rate", "validation/loss", "step"):
        assert found.curves[name] == [(line["step"], line[name]) for line in lines if name in line]
    assert (found.count, found.first, found.last) == (len(lines), lines[0], lines[-1])
    assert found.null_losses == sum(line["train/loss"] is None for line in lines)
    assert found.evaluations == [line for line in lines if "validation/loss" in line]
    assert [line["step"] for line in found.activations] == [line["step"] for line in lines if line["step"] % 3 == 0]
    assert history.ACTIVATIONS == f"{ACTIVATION}/"
    assert len(found.resumes) == 4 and "activation/mlp/0" not in found.curves


def test_long_run_keeps_its_extremes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_POINTS", 600)
    monkeypatch.setattr(history, "MOST_ACTIVATIONS", 20)
    lines = write_run(tmp_path, 5000)
    found = read_history(tmp_path / METRICS_FILE)
    assert sum(map(len, found.curves.values())) <= 600 + len(found.curves)
    for name in ("train/loss", "rate", "validation/loss"):
        points = [(line["step"], line[name]) for line in lines if name in line]
        curve = found.curves[name]
        assert set(curve) <= set(points) and sorted(curve) == curve and curve[-1] == points[-1]
        values = [value for _, value in points if value is not None]
        assert {min(values), max(values)} <= {value for _, value in curve}
        assert len(curve) > 30 and max(b[0] - a[0] for a, b in itertools.pairwise(curve)) < 512
    steps = [line["step"] for line in found.activations]
    assert 10 <= len(steps) <= 20 and len({b - a for a, b in itertools.pairwise(steps)}) == 1
    assert found.count == len(lines) and len(found.evaluations) == history.MOST_EVALUATIONS
    assert found.evaluations[-1] == [line for line in lines if "validation/loss" in line][-1]


def test_lines_are_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more lines are in memory than a batch, and each is parsed once."""
    write_run(tmp_path, 2000)
    yielded, batches = 0, []
    lines_that_count = history.lines_that_count

    def count(path: Path, resumes: list[int]) -> Any:
        nonlocal yielded
        for line in lines_that_count(path, resumes):
            yielded += 1
            yield line

    class Curves(history._Curves):
        def add(self, batch: Any) -> None:
            batches.append((yielded, len(batch)))
            super().add(batch)

    monkeypatch.setattr(history, "lines_that_count", count)
    monkeypatch.setattr(history, "_Curves", Curves)
    found = read_history(tmp_path / METRICS_FILE)
    assert yielded == found.count and max(size for _, size in batches) == history._BATCH
    assert [end for end, _ in batches[:3]] == [history._BATCH, 2 * history._BATCH, 3 * history._BATCH]
