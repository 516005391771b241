"""Searches for the fastest setting, or for the largest model, that fits on a slice (tqdm)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from concurrent.futures import Executor, Future, as_completed
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from zero.models.config import GPTConfig
from zero.runtime.config.sections import Config
from zero.runtime.errors import UserError
from zero.runtime.planning.compile import Request, Row, compile_step, compile_steps, highest_peak

log = logging.getLogger(__name__)

HEADROOM = 0.05  # of the memory, which a search for the fastest leaves for what the compiler does not know of
WIDTHS = (2048, 3072, 4096, 6144, 8192)  # of the models that a search for the largest tries, with heads of 256


def every_stage(pool: Executor, request: Request) -> list[Row]:
    """A row for each stage; a fused update has stage 3 only."""
    stages = [3] if request.config.zero.fused_update else [0, 1, 2, 3]
    return gather(pool.submit(compile_steps, [request.with_changes(stage=stage)]) for stage in stages)


def fastest(pool: Executor, request: Request) -> list[Row]:
    """A row for each setting of the grid that is possible, but those with more sequences than one that does not fit.

    Raises:
      UserError: none is possible.
    """
    grid, zero = request.config.plan.grid, request.config.zero
    keys: dict[str, Any] = {
        "stage": grid.stage,
        "accumulation": grid.accumulation,
        "remat": grid.remat,
        "tensor_shards": grid.tensor or [zero.tensor_shards],
        "replicas": grid.replicas or [zero.replicas],
        "phases": grid.phases or [zero.phases],
        "overlap_gathers": grid.overlap_gathers or [zero.overlap_gathers],
    }
    jobs, mistakes = [], []
    for values in itertools.product(*keys.values()):
        for other in _state_dtypes(request.with_changes(**dict(zip(keys, values, strict=True)))):
            for context in grid.context or [request.config.data.max_context]:
                rows = [other.with_changes(rows, context=context) for rows in sorted(grid.micro_batch)]
                mistake = next(rows[0].config.zero.mistakes(rows[0].config, rows[0].size), None)
                if mistake is None:
                    jobs.append(pool.submit(compile_steps, rows))
                else:
                    mistakes.append(f"{mistake[0]}: expected {mistake[1]}")
    if not jobs:
        raise UserError("plan.grid: no combination of its values is possible\n" + "\n".join(dict.fromkeys(mistakes)))
    return gather(jobs)


def largest(pool: Executor, config: Config) -> list[Row]:
    """A row for the deepest model of each width and each dtype of the state in the grid, where one fits."""
    context = max(config.plan.grid.context or [1024])
    sizes = (GPTConfig(width, 50304, width // 256, context, 0.0, 4, vocab_chunks=12) for width in WIDTHS)
    requests = (Request(config, size, config.plan.micro_batch).with_changes(context=context) for size in sizes)
    return gather([pool.submit(deepest, other) for request in requests for other in _state_dtypes(request)])


def _state_dtypes(request: Request) -> list[Request]:
    """The request with each dtype of weights and moments in the grid."""
    grid, config = request.config.plan.grid, request.config
    masters, states = (
        grid.master_dtype or [config.zero.master_dtype],
        grid.state_dtype or [config.optimizer.state_dtype],
    )
    return [request.with_changes(master_dtype=m, state_dtype=s) for m, s in itertools.product(masters, states)]


def deepest(request: Request) -> list[Row]:
    """The row of the deepest model of this width that fits, if any does.

    Memory is almost linear in the number of layers. Two programs give the line, the third is where the line reaches the
    available memory, and from there it is a few steps at most. Layers in groups are added by eight, because of other
    numbers some have no groups of similar size and number.
    """
    unit = 8 if request.config.zero.remat == "nested" else 1
    tried: dict[int, Row] = {}

    def try_layers(layers: int) -> Row:
        if layers not in tried:
            tried[layers] = compile_step(replace(request, size=replace(request.size, N=layers)))
        return tried[layers]

    fewest = max(4, unit)
    low, high = try_layers(fewest), try_layers(2 * fewest)
    if not low["fits"]:
        return []
    per_layer = (highest_peak(high) - highest_peak(low)) / fewest
    layers = fewest + unit * int((low["available_bytes"] - highest_peak(low)) / per_layer / unit)
    while not try_layers(layers)["fits"]:
        layers -= unit
    while layers + unit not in tried and try_layers(layers + unit)["fits"]:
        layers += unit
    return [tried[layers]]


def best(rows: list[Row], headroom: float) -> Row | None:
    """Of the rows that fit with headroom, the one with the most parameters, then the fastest by the roofline."""
    fitting = [row for row in rows if row["fits"] and highest_peak(row) <= (1 - headroom) * row["available_bytes"]]

    def value(row: Row) -> tuple[float, ...]:
        seconds = row["seconds_lower_bound"] or 1.0
        return row["parameters"], row["tokens"] / seconds, -highest_peak(row)

    return max(fitting, key=value, default=None)


def gather(jobs: Iterable[Future[list[Row]]]) -> list[Row]:
    """All rows in the order of the jobs; a progress bar counts the jobs that are done.

    Raises:
      UserError: no setting is possible on these devices. One that is not, among others, is logged.
    """
    jobs = list(jobs)
    for _ in tqdm(as_completed(jobs), total=len(jobs), unit="plan", dynamic_ncols=True):
        pass
    errors = {str(error): error for job in jobs if isinstance(error := job.exception(), UserError)}
    rows = [row for job in jobs if not isinstance(job.exception(), UserError) for row in job.result()]
    if errors and not rows:
        raise next(iter(errors.values()))
    for message in errors:
        log.warning("left out: %s", message)
    return rows
