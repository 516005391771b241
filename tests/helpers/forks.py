"""Runs the program in a fork for each line of stdin; answers with its process id, then with its status and output.

A line is JSON: `{"cwd": ..., "environment": {...}, "arguments": [...]}`. `cli.Forks` starts this file.
"""

import gc
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hydra
from hydra._internal.hydra import Hydra

# What takes long to import.
import zero.checkpoints.orbax_commit
import zero.commands.cli
import zero.run.train  # noqa: F401
from tests.helpers import hydra_mode
from tests.helpers.blank_pages import leave_blank
from zero.commands.modes import default_config
from zero.record.run_files import save_config
from zero.run.features import report
from zero.tracking.tracker import open_tracker

program = sys.argv[1]
with hydra.initialize_config_dir(str(Path(program).parent / "conf"), version_base="1.3"):
    hydra.compose("config", ["seed=1"])  # whose parser takes long to make
with tempfile.TemporaryDirectory() as place:  # the first line of metrics imports what writes it
    save_config(Path(place), default_config())
    with open_tracker(Path(place), project=None, config={}, resumed_from=1) as tracker:
        tracker({"step": 1, "train/loss": 1.0})


report.draw = leave_blank
patch.object(Hydra, "get_mode", hydra_mode.default_mode).start()
gc.freeze()  # what has been imported is no garbage
gc.set_threshold(100_000, 20, 20)


def answer(**message: Any) -> None:
    print(json.dumps(message), flush=True)


for line in sys.stdin:
    request = json.loads(line)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            os.chdir(request["cwd"])
            os.environ.update(request["environment"])
            sys.argv = [program, *request["arguments"]]
            sys.path[0] = str(Path(program).parent)
            exec(os.environ.get("ZERO_TESTS_CODE", ""), {})  # of `cli.customized`
            runpy.run_path(program, run_name="__main__")
            sys.exit()
        answer(pid=child)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    answer(status=status, output=texts[0], errors=texts[1])
