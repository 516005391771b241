"""Forks once a line of stdin, a JSON list of arguments, runs the program there and answers with what came of it."""

import json
import os
import runpy
import sys
from pathlib import Path

import hydra

import zero.runtime.main
import zero.runtime.train  # noqa: F401  what takes long to import

program = sys.argv[1]
with hydra.initialize_config_dir(str(Path(program).parent / "conf"), version_base="1.3"):
    hydra.compose("config", ["seed=1"])  # whose parser takes long to make
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        for name, descriptor in (("output", 1), ("errors", 2)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        sys.argv = [program, *json.loads(line)]
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
        sys.exit()
    _, status = os.waitpid(child, 0)
    answer = {
        "status": os.waitstatus_to_exitcode(status),
        "output": Path("output").read_text(),
        "errors": Path("errors").read_text(),
    }
    print(json.dumps(answer), flush=True)
