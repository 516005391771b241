"""The table that `mode=plan` prints, and the command that trains what one of its rows has planned (hydra)."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf

from zero.runtime.config.constraints import shown
from zero.runtime.config.saved_config import default_config
from zero.runtime.config.schema import Config
from zero.runtime.planning.compile import PLACEMENT_KEYS, Row, highest_peak
from zero.runtime.planning.topology import GIB


def table(result: dict[str, Any], config: Config) -> str:
    """A line per row: sizes in GiB per device, operations, traffic and time per step."""
    columns = _COLUMNS | (_cost_columns(config.plan.mfu) if config.plan.dollars_per_hour is not None else {})
    cells = [[*columns, ""]]
    for i, row in enumerate(result["rows"]):
        spare = (row["available_bytes"] - highest_peak(row)) / GIB
        verdict = f"fits, {spare:.2f} to spare" if row["fits"] else f"does not fit by {-spare:.2f}"
        mark = " <- best" if i == result["best"] else ""
        cells.append([*(show(row) for show in columns.values()), verdict + mark])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(line[:-1], widths, strict=False)) for line in cells]
    head = (
        f"{result['topology']}: {result['devices']} devices of {result['rows'][0]['available_bytes'] / GIB:.2f} GiB; "
        f"{result['parameters']:,} parameters"
    )
    legend = [
        "state: weights and optimizer state between steps; bytes/parameter: of one copy of it",
        "memory in GiB per device: of the step, and while the run evaluates and samples between two steps",
        "per step: GB that a device sends, in all and in groups that span hosts; the share of gathered bytes that is "
        "sent while matrix products run; TFLOP that it computes; a lower bound on the time; tokens of all devices",
    ]
    if config.plan.dollars_per_hour is not None:
        legend.append(
            f"days and dollars of {config.training.total_steps:,} steps, at {config.plan.dollars_per_hour:g} dollars "
            f"per hour: at least, and at a model FLOPs utilization of {config.plan.mfu:.0%}"
        )
    return "\n".join(
        [head, *(f"{line}  {cell[-1]}".rstrip() for line, cell in zip(lines, cells, strict=True)), *legend]
    )


# Keys that the command always names: the model and what a search chooses.
_CHOSEN = (
    "model.size",
    "data.max_context",
    "training.batch_size",
    "training.gradient_accumulation_steps",
    "zero.stage",
    "zero.remat",
)


def training_command(row: Row, config: Config) -> str:
    """The command line that trains what a row has planned: it names every key whose value is not the default."""
    config = copy.deepcopy(config)
    config.data.max_context = row["context"]
    groups = row["devices"] // (row["tensor_shards"] * row["context_shards"])
    config.training.batch_size = row["micro_batch"] * row["accumulation"] * groups // row["hosts"]
    config.training.gradient_accumulation_steps = row["accumulation"]
    config.zero.stage, config.zero.remat = row["stage"], row["remat"]
    config.zero.master_dtype, config.optimizer.state_dtype = row["master_dtype"], row["state_dtype"]
    for key in PLACEMENT_KEYS:
        setattr(config.zero, key, row[key])
    default, planned = (_by_key(values) for values in (OmegaConf.to_container(default_config()), asdict(config)))
    changed = [key for key in planned if planned[key] != default[key] and key not in _CHOSEN]
    overrides = [f"{key}={_override_value(planned[key])}" for key in (*_CHOSEN, *changed)]
    return shlex.join(["python", "main_zero.py", *overrides])


def _by_key(config: Any) -> dict[str, Any]:
    """The values of a configuration by their keys, such as `zero.stage`, without those of other modes."""
    sections = {name: values for name, values in config.items() if name not in ("mode", "resume", "plan")}
    by_key = {"seed": sections.pop("seed")}
    return by_key | {f"{name}.{key}": value for name, values in sections.items() for key, value in values.items()}


def _override_value(value: Any) -> str:
    """A value in the syntax of Hydra's overrides.

    >>> _override_value([{"index": "a.index", "weight": 0.7}]), _override_value("a, b"), _override_value("1_1b")
    ('[{index:a.index,weight:0.7}]', "'a, b'", '1_1b')
    """
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_override_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_override_value, value)) + "]"
    if not isinstance(value, str):
        return shown(value)
    try:
        is_plain = OverridesParser.create().parse_override(f"key={value}").value() == value
    except HydraException:
        is_plain = False
    return value if is_plain else QuotedString(value, Quote.single).with_quotes()


def _number(key: str, form: str, unit: float = 1) -> Callable[[Row], str]:
    return lambda row: "-" if row[key] is None else form.format(row[key] / unit)


def _activations(row: Row) -> str:
    """What the peak of a step holds in addition to state, gradients and gathered parameters."""
    if not row["fits"]:
        return "-"
    named = sum(row[f"{name}_bytes"] for name in ("state", "gradient", "gathered"))
    return f"{(row['peak_bytes'] - named) / GIB:.3f}"


def _traffic(row: Row) -> str:
    kinds = row["collective_bytes"]
    return "-" if kinds is None else " ".join(f"{kind} {n / 1e9:.2f}" for kind, n in sorted(kinds.items()) if n > 1e6)


def _cost_columns(mfu: float) -> dict[str, Callable[[Row], str]]:
    return {
        "days": _number("days_lower_bound", "{:,.2f}"),
        "dollars": _number("dollars_lower_bound", "{:,.0f}"),
        f"days at {mfu:.0%}": _number("days_at_mfu", "{:,.2f}"),
        f"dollars at {mfu:.0%}": _number("dollars_at_mfu", "{:,.0f}"),
    }


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "stage": lambda row: str(row["stage"]),
    "sequences x micro-batches": lambda row: f"{row['micro_batch']} x {row['accumulation']}",
    "context": lambda row: str(row["context"]),
    "remat": lambda row: row["remat"] + (", fused" if row["fused_update"] else ""),
    "tensor": lambda row: str(row["tensor_shards"]),
    "context shards": lambda row: str(row["context_shards"]),
    "expert": lambda row: str(row["expert_shards"]),
    "copies x phases": lambda row: " x ".join(map(str, row["grid"])),
    "parameters": _number("parameters", "{:.3f}B", 1e9),
    "bytes/parameter": _number("state_bytes_per_parameter", "{:.2f}"),
    "state": _number("state_bytes", "{:.3f}", GIB),
    "gradients": _number("gradient_bytes", "{:.3f}", GIB),
    "gathered": _number("gathered_bytes", "{:.3f}", GIB),
    "activations": _activations,
    "peak": _number("peak_bytes", "{:.3f}", GIB),
    "evaluation": _number("evaluation_peak_bytes", "{:.3f}", GIB),
    "sampling": _number("sampling_peak_bytes", "{:.3f}", GIB),
    "traffic": _traffic,
    "across hosts": _number("collective_bytes_across_hosts", "{:.2f}", 1e9),
    "gathers hidden": lambda row: "-" if row["gathers_hidden"] is None else f"{row['gathers_hidden']:.0%}",
    "TFLOP": _number("flops", "{:.2f}", 1e12),
    "at least": _number("seconds_lower_bound", "{:.3f} s"),
    "tokens": lambda row: f"{row['tokens']:,}",
    "compiled in": _number("compile_seconds", "{:.0f} s"),
}
