"""Virtual CPU devices in a process of its own, whose settings are not those of the tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import cli

STEPS_AHEAD = Path(__file__).parents[2] / "benchmarks" / "steps_ahead.py"


@pytest.mark.wide
def test_steps_dispatched_far_ahead() -> None:
    """Steps may be dispatched far ahead of their results."""
    env = cli.untouched_environment()
    done = subprocess.run([sys.executable, STEPS_AHEAD], capture_output=True, text=True, env=env, timeout=900)
    assert (done.returncode, done.stdout) == (0, "2000 steps\n"), done.stderr[-2000:]
