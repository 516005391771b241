"""`mode=plan`: memory, traffic, time and cost of a training run, before any hardware is rented."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from zero.base.child_process import end_with_parent
from zero.base.errors import Unavailable, UnknownTopology, UserError
from zero.costs.topology import prepare_environment
from zero.files import storage
from zero.models.config import GPTConfig
from zero.partition.virtual_devices import use_cpu_devices
from zero.planning import search
from zero.planning.compile import SCHEDULE, Row
from zero.planning.config import PlanConfig, Request
from zero.planning.page import PAGE_FILE, SCHEDULE_FILE, page
from zero.planning.process_per_call import ProcessPerCall
from zero.planning.table import WIDTH, breakdown_table, table, training_command

PLAN_FILE = "plan.json"
COMPILER_LOG = "compiler.log"


def plan(config: PlanConfig, model_config: GPTConfig, run_directory: Path) -> int:
    """Prints the costs of a training run on `plan.topology`, and writes them to plan.json and plan.html.

    Returns:
      The exit status, 0.

    Raises:
      UserError: there is no such slice, or no compiler for it.
    """
    settings = config.plan
    request = Request(config, model_config, config.plan.micro_batch)
    try:
        rows = _rows(request, run_directory)
    except UnknownTopology as error:
        raise UserError(f"plan.{error}") from error
    if not rows:
        raise UserError(f"plan.topology={settings.topology}: not even the smallest model fits")
    best = None
    if settings.search in ("fastest", "largest"):
        headroom = 0.0 if settings.search == "largest" else search.HEADROOM
        best = search.best(rows, headroom)
    schedules = [row.pop(SCHEDULE, None) for row in rows]
    schedule = schedules[0] if settings.search == "none" else None
    result = {
        "topology": settings.topology,
        "devices": rows[0]["devices"],
        "parameters": (best or rows[0])["parameters"],
        "best": None if best is None else rows.index(best),
        "rows": rows,
    }
    summary = table(result, settings, shutil.get_terminal_size((WIDTH, 24)).columns)
    predicted = [row for row in rows if row["breakdown"]]
    if settings.breakdown and predicted:
        summary += "\n\n" + breakdown_table(best if best in predicted else predicted[-1])
    written = {
        PLAN_FILE: json.dumps(result, indent=1) + "\n",
        PAGE_FILE: page(result, request, has_schedule=schedule is not None),
    }
    if schedule is not None:
        written[SCHEDULE_FILE] = schedule
    for name, text in written.items():
        storage.write(run_directory / name, text.encode())
    print(summary)
    if best is not None and settings.search == "largest":
        print(f"\nThe largest model that fits, as an entry of conf/model_config.yaml: {best['model']}")
    elif best is not None:
        print(f"\nThe fastest that fits, with {search.HEADROOM:.0%} of the memory to spare:")
        print(training_command(best, request))
    print("\n" + ", ".join(_from_here(run_directory / name) for name in written))
    return 0


def _from_here(path: Path) -> str:
    """A path below the current directory relative to it, as it can be typed; any other path as it is.

    >>> _from_here(Path.cwd() / "runs" / "plan.html"), _from_here(Path("/elsewhere/plan.html"))
    ('runs/plan.html', '/elsewhere/plan.html')
    """
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _rows(request: Request, run_directory: Path) -> list[Row]:
    """The rows of the settings that are searched, compiled in processes of their own."""
    config = request.config
    settings = config.plan
    prepare_environment(settings.topology)
    processes = 1 if settings.search == "none" else settings.processes or min(os.cpu_count() or 1, 4)
    with _compilers(settings.topology, config.distributed.cpu_devices, processes, run_directory / COMPILER_LOG) as pool:
        match settings.search:
            case "largest":
                return search.largest(pool, request)
            case "fastest":
                return search.fastest(pool, request, processes)
            case "stages":
                return search.every_stage(pool, request)
            case _:
                return search.one_setting(pool, request)


@contextmanager
def _compilers(topology: str, cpu_devices: int, processes: int, log: Path) -> Iterator[ProcessPerCall]:
    """Fresh processes, each of which starts jax for the topology.

    They are killed if this process is interrupted, and exit on their own if it is killed.

    Raises:
      Unavailable: one of them died, for example of a fault in libtpu.
    """
    with tempfile.TemporaryDirectory(prefix="zero-plan-", ignore_cleanup_errors=True) as temporary:
        initargs = (str(log), topology, cpu_devices, temporary)
        pool = ProcessPerCall(processes, ["zero.planning.compile", "zero.planning.plan"], _start_compiler, initargs)
        try:
            yield pool
        except BrokenProcessPool as error:
            pool.kill()
            raise Unavailable(
                f"plan.topology={topology}: a process that compiles died, of a lack of memory or a fault of the "
                f"compiler; its messages are in {log}, and the programs that it has compiled are kept"
            ) from error
        except BaseException:  # otherwise the shutdown waits for their compilations
            pool.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _start_compiler(log: str, topology: str, cpu_devices: int, temporary: str) -> None:
    """Starts a process that compiles; libtpu's stderr goes to a file, temporary files to a directory."""
    end_with_parent(Path(temporary))
    tempfile.tempdir = temporary
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 2)
    if topology in ("local", "cpu"):
        use_cpu_devices(cpu_devices)
