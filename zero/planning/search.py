"""Searches for the fastest setting, or for the largest model, that fits on a slice."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, as_completed, wait
from dataclasses import replace
from typing import Any, TypeVar

from zero.base.errors import UserError
from zero.hosts.speeds import GIB
from zero.models.config import GPTConfig
from zero.planning.compile import Row, compile_step, highest_peak, outline, peak_by_formula
from zero.planning.config import Request
from zero.planning.table import shown, verdict
from zero.tracking.progress import Stage

log = logging.getLogger(__name__)
T = TypeVar("T")

HEADROOM = 0.05  # share of memory that search=fastest leaves free, because the compiler does not count everything
WIDTHS = (2048, 3072, 4096, 6144, 8192)  # widths that search=largest tries, with heads of 256


def one_setting(pool: Executor, request: Request) -> list[Row]:
    """The row of the request alone. First logs the formula's estimate for it and for other stages."""
    outlined = pool.submit(outline, request).result()
    log.info("by a formula, before anything is compiled: %s", outline_text(outlined))
    others = [setting for setting in _stages(request) if setting.config.zero.stage != request.config.zero.stage]
    peaks = [pool.submit(peak_by_formula, setting) for setting in others]
    texts = [
        f"stage {setting.config.zero.stage} {peak.result() / GIB:.2f}"
        for setting, peak in zip(others, peaks, strict=True)
    ]
    if texts:
        log.info("by the formula at the other stages: %s GiB", ", ".join(texts))
    return _shown_as_compiled({pool.submit(compile_step, request): request}, request)


def every_stage(pool: Executor, request: Request) -> list[Row]:
    """A row for each stage compatible with the other keys; a fused update allows only stage 3."""
    return _shown_as_compiled({pool.submit(compile_step, setting): setting for setting in _stages(request)}, request)


def _stages(request: Request) -> list[Request]:
    """The request at each stage compatible with its other keys, least memory first."""
    settings = [request.with_changes(stage=stage) for stage in (3, 2, 1, 0)]
    return [setting for setting in settings if not any(setting.config.mistakes(setting.size))]


def _shown_as_compiled(jobs: dict[Future[Row], Request], request: Request) -> list[Row]:
    """The rows ordered by stage; each is logged once compiled."""
    with Stage("plans compiled", len(jobs)) as stage:
        waiting = dict(jobs)
        while waiting:
            stage.begin(f"compiling {_name(next(iter(waiting.values())))} for {request.config.plan.topology}")
            for job in wait(waiting, return_when=FIRST_COMPLETED).done:
                setting = waiting.pop(job)
                if job.exception() is None:
                    log.info("%s: %s", _name(setting), row_text(job.result()))
                stage.advance()
    return sorted(_results(list(jobs)).values(), key=lambda row: row["stage"])


def _name(setting: Request) -> str:
    """The keys that a search varies most often, as text."""
    accumulation = setting.config.training.gradient_accumulation_steps
    return f"stage {setting.config.zero.stage} with {setting.micro_batch} x {accumulation} sequences per device"


def outline_text(row: Row) -> str:
    """The known facts about a step before it is compiled.

    >>> outline_text({"peak_bytes": 3 * 2**29, "seconds_lower_bound": 0.25})
    'about 1.50 GiB per device at the peak, at least 0.2500 s per step'
    """
    bound = row["seconds_lower_bound"]
    seconds = "" if bound is None else f", at least {bound:#.4g} s per step"
    return f"about {row['peak_bytes'] / GIB:.2f} GiB per device at the peak{seconds}"


def row_text(row: Row) -> str:
    """A row as one line: its memory, its time, and whether it fits."""
    return ", ".join([*(f"{name} {shown([row], name)[0]}" for name in ("peak", "seconds")), verdict(row)])


def fastest(pool: Executor, request: Request, processes: int) -> list[Row]:
    """A row for each setting of the grid that could be the fastest one that fits, compiled by `processes` processes.

    State and operations give an upper bound on the speed of each setting without compiling it; the highest bounds come
    first. A setting is skipped if its bound is below the speed of a row that fits with headroom, or if the same one
    with fewer sequences does not fit.

    Raises:
      UserError: none is possible.
    """
    settings = _combinations(request)
    outlines = gather([pool.submit(outline, setting) for setting in settings], "settings outlined")
    # Settings whose bounds agree to three digits stay in the order of the grid: fewer sequences first.
    waiting = sorted(outlines, key=lambda number: -float(f"{_speed(outlines[number]):.2e}"))
    running: dict[Future[Row], int] = {}
    rows: dict[int, Row] = {}

    def fewer(number: int, among: Iterable[int]) -> list[int]:
        """The settings that have fewer sequences and are the same otherwise."""
        setting = settings[number]
        same = [n for n in among if settings[n].config == setting.config]
        return [n for n in same if settings[n].micro_batch < setting.micro_batch]

    def is_pointless(number: int) -> bool:
        leader = best(list(rows.values()), HEADROOM)
        is_slower = leader is not None and _speed(outlines[number]) < _speed(leader)
        return is_slower or not all(rows[smaller]["fits"] for smaller in fewer(number, rows))

    with Stage("plans compiled", len(waiting)) as stage:
        while waiting or running:
            possible = [number for number in waiting if not is_pointless(number)]
            stage.advance(len(waiting) - len(possible))
            # Whether more sequences fit is known when fewer have been compiled.
            ready = [number for number in possible if not fewer(number, [*running.values(), *possible])]
            start = ready[: processes - len(running)]
            running |= {pool.submit(compile_step, settings[number]): number for number in start}
            waiting = [number for number in possible if number not in start]
            if running:
                stage.begin(f"compiling {_name(settings[next(iter(running.values()))])}")
            for job in wait(running, return_when=FIRST_COMPLETED).done:
                number = running.pop(job)
                rows[number] = job.result()
                log.info("%s: %s", _name(settings[number]), row_text(rows[number]))
                stage.advance()
    left_out = len(outlines) - len(rows)
    log.info("%d settings compiled; %d skipped because they are slower or do not fit", len(rows), left_out)
    return [rows[number] for number in sorted(rows)]


def _combinations(request: Request) -> list[Request]:
    """The valid combinations of the grid's values, fewer sequences first.

    Raises:
      UserError: none is possible.
    """
    grid = request.config.plan.grid
    zero = request.config.zero
    keys: dict[str, Any] = {
        "stage": grid.stage,
        "accumulation": grid.accumulation,
        "remat": grid.remat,
        "tensor_shards": grid.tensor or [zero.tensor_shards],
        "context_shards": grid.context_shards or [zero.context_shards],
        "expert_shards": grid.expert or [zero.expert_shards],
        "replicas": grid.replicas or [zero.replicas],
        "phases": grid.phases or [zero.phases],
        "overlap_gathers": grid.overlap_gathers or [zero.overlap_gathers],
    }
    possible = []
    refused = []
    for values in itertools.product(*keys.values()):
        for setting in _state_dtypes(request.with_changes(**dict(zip(keys, values, strict=True)))):
            for context in grid.context or [request.config.data.max_context]:
                requests = [setting.with_changes(rows, context=context) for rows in sorted(grid.micro_batch)]
                mistake = next(requests[0].config.mistakes(requests[0].size), None)
                if mistake is None:
                    possible += requests
                else:
                    refused.append(f"{mistake[0]}: expected {mistake[1]}")
    if not possible:
        raise UserError("plan.grid: no combination of its values is possible\n" + "\n".join(dict.fromkeys(refused)))
    return possible


def _speed(row: Row) -> float:
    """Tokens per second by the predicted time, else by its lower bound; tokens if neither is known."""
    return float(row["tokens"] / (row["seconds"] or row["seconds_lower_bound"] or 1.0))


def largest(pool: Executor, request: Request) -> list[Row]:
    """A row for the deepest model that fits, for each width and state dtype in the grid."""
    context = max(request.config.plan.grid.context or [1024])
    requests: list[Request] = []
    for width in WIDTHS:
        size = GPTConfig(width, 50304, width // 256, context, 0.0, 4, vocab_chunks=12)
        requests += _state_dtypes(replace(request, size=size).with_changes(context=context))
    rows = gather([pool.submit(deepest, request) for request in requests], "models searched")
    return [row for row in rows.values() if row is not None]


def _state_dtypes(request: Request) -> list[Request]:
    """The request with each dtype of weights and moments in the grid."""
    grid = request.config.plan.grid
    config = request.config
    masters = grid.master_dtype or [config.zero.master_dtype]
    states = grid.state_dtype or [config.optimizer.state_dtype]
    return [request.with_changes(master_dtype=m, state_dtype=s) for m, s in itertools.product(masters, states)]


def deepest(request: Request) -> Row | None:
    """The row of the deepest model of this width that fits, if any.

    Memory of devices, and of hosts, is almost linear in the number of layers: two programs give the lines, the third is
    the depth at which the first line reaches the available memory, and a few more correct it. Layers in spans are added
    by eight, because some other numbers have no spans of similar size and number.
    """
    unit = 8 if request.config.zero.remat == "nested" else 1
    tried: dict[int, Row] = {}

    def try_layers(layers: int) -> Row:
        if layers not in tried:
            tried[layers] = compile_step(replace(request, size=replace(request.size, N=layers)))
        return tried[layers]

    fewest = max(4, unit)
    low = try_layers(fewest)
    high = try_layers(2 * fewest)
    if not low["fits"]:
        return None
    more = _more_layers(highest_peak(low), highest_peak(high), low["available_bytes"], fewest)
    if low["bytes_of_one_host"] and high["bytes_of_one_host"] and low["host_available_bytes"] is not None:
        host_bytes = low["bytes_of_one_host"], high["bytes_of_one_host"], low["host_available_bytes"]
        more = min(more, _more_layers(*host_bytes, fewest))
    layers = fewest + unit * int(more / unit)
    while not try_layers(layers)["fits"]:
        layers -= unit
    while layers + unit not in tried and try_layers(layers + unit)["fits"]:
        layers += unit
    return tried[layers]


def _more_layers(low: int, high: int, available: int, layers: int) -> float:
    """How many layers can be added to the lower of two models until a line through both reaches the available bytes.

    >>> _more_layers(20, 30, 50, 4)  # the higher one has 4 layers more
    12.0
    """
    return (available - low) * layers / (high - low)


def best(rows: list[Row], headroom: float) -> Row | None:
    """The row that fits with headroom and has the most parameters, then the highest predicted speed."""
    fitting = [row for row in rows if row["fits"] and highest_peak(row) <= (1 - headroom) * row["available_bytes"]]

    def value(row: Row) -> tuple[float, ...]:
        return row["parameters"], _speed(row), -highest_peak(row)

    return max(fitting, key=value, default=None)


def gather(jobs: Sequence[Future[T]], stage_name: str) -> dict[int, T]:
    """Like `_results`, with a live line that counts finished jobs."""
    with Stage(stage_name, len(jobs)) as stage:
        for _ in stage.counted(as_completed(jobs)):
            pass
    return _results(jobs)


def _results(jobs: Sequence[Future[T]]) -> dict[int, T]:
    """The results of finished jobs, keyed by their indices.

    Raises:
      UserError: no setting is possible on these devices; single impossible settings are only logged.
    """
    errors: dict[str, UserError] = {}
    results = {}
    for place, job in enumerate(jobs):
        error = job.exception()
        if isinstance(error, UserError):
            errors[str(error)] = error
        else:
            results[place] = job.result()
    if errors and not results:
        raise next(iter(errors.values()))
    for message in errors:
        log.warning("skipped: %s", message)
    return results
