"""examples/zero_from_scratch.py: 80 lines that run, equal losses after every step, and the bytes that ZeRO promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "zero_from_scratch.py"
WEIGHTS = 8 * 256 * 256 * 4  # bytes, float32


@pytest.mark.wide  # partition has equal losses, and the bytes of each stage
def test_losses_agree_and_bytes_fall() -> None:
    assert len(PROGRAM.read_text().splitlines()) <= 80
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, PROGRAM], env=environment, capture_output=True, text=True, check=True)
    rows = re.findall(r"^\w+ +([\d.]+) +([\d,]+) +([\d,]+)$", done.stdout, re.MULTILINE)
    losses = [loss for loss, *_ in rows]
    held, temporaries = ([int(row[i].replace(",", "")) for row in rows] for i in (1, 2))
    assert len(losses) == 4 and len(set(losses)) == 1
    assert held == [3 * WEIGHTS] + [3 * WEIGHTS // 8] * 3
    # Stage 1 has whole weights and a whole gradient, stage 2 no whole gradient, stage 3 neither.
    assert temporaries[3] < WEIGHTS / 2 < WEIGHTS < temporaries[2] < temporaries[1]
