"""metrics.jsonl is read from its end where one line of it is asked for."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from zero.files import json_lines
from zero.record import metrics_file
from zero.record.metrics_file import line_of, read_metrics
from zero.record.run_files import METRICS_FILE


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
@pytest.mark.parametrize("seed", range(5))
def test_line_of_a_step(block: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one that `read_metrics` returns, after resumes, damage and a line that has no end."""
    monkeypatch.setattr(json_lines, "_BLOCK", block)
    draw = random.Random(seed)
    texts = []
    step = 0
    for number in range(60):
        step += draw.randint(1, 2)
        texts.append(json.dumps({"step": step, "train/loss": number}))
        if draw.random() < 0.1:
            step = draw.randint(step * 2 // 3, step)
            texts.append(json.dumps({"event": "resume", "step": step}))
        if draw.random() < 0.1:
            texts.append(draw.choice(["", '{"step": 3, "tra', "[1]"]))
    path = tmp_path / METRICS_FILE
    path.write_text("\n".join(texts) + draw.choice(["", "\n", '\n{"step": 9']))
    known = {line["step"]: line for line in read_metrics(path)}
    assert len(known) > 10
    for asked in range(130):
        assert line_of(tmp_path, asked) == known.get(asked)


def test_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    def count(text: bytes) -> dict[str, Any] | None:
        parsed.append(text)
        return json_lines.parse_line(text)

    monkeypatch.setattr(metrics_file, "parse_line", count)
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps({"step": step}) + "\n" for step in range(20_000)))
    assert line_of(tmp_path, 19_990) == {"step": 19_990} and len(parsed) < 20
    assert line_of(tmp_path, 20_000) is None and len(parsed) < 25
    assert line_of(tmp_path / "absent", 1) is None
