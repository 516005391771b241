"""The table that `mode=plan` prints, and the command that trains with the settings of a row (hydra)."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf

from zero.base.errors import trainer
from zero.base.keys import with_values
from zero.base.text_table import in_columns
from zero.config.command_line import override_value
from zero.config.files import literal
from zero.costs.predict import PHASES
from zero.hosts.speeds import GIB
from zero.models.stack import OFFLOADED, movable_kinds
from zero.planning.compile import PLACEMENT_KEYS, Row, highest_peak, run_tokens
from zero.planning.config import Plan, Request, with_keys
from zero.run.config import GROUPS, TrainConfig, default_config

WIDTH = 120  # characters per line without a terminal


def table(result: dict[str, Any], plan: Plan, width: int = WIDTH) -> str:
    """One line per row: the settings in which rows differ, memory and predicted time.

    Args:
      width: characters per line for the text above and below the rows.
    """
    rows = result["rows"]
    same = [f"{name} {value}" for name, value in same_settings(rows)]
    columns = {name: shown(rows, name) for name in differing_settings(rows)}
    for name in RESULTS | COSTS:
        if set(shown(rows, name)) != {"-"}:
            columns[name] = shown(rows, name)
    lines = [
        f"{result['topology']}: {result['devices']} devices of {rows[0]['available_bytes'] / GIB:.2f} GiB; "
        f"{result['parameters']:,} parameters",
        *_wrapped("every row: " + ", ".join(same), width),
    ]
    cells = [list(columns), *zip(*columns.values(), strict=True)]
    ends = ["", *map(verdict, rows)]
    if result["best"] is not None:
        ends[1 + result["best"]] += " <- best"
    lines += [f"{line}  {end}".rstrip() for line, end in zip(in_columns(cells), ends, strict=True)]
    legend = (
        "peak: GiB per device. Per step: seconds predicted from the compiled program (>: a lower bound from "
        "published peaks), tokens per second over all devices, model FLOPs utilization, GB that a device sends while "
        "it computes nothing"
    )
    if any(row.get("from_schedule") for row in rows):
        legend += (
            "; seconds and memory are estimated from the compiler's schedule, usually within a few percent "
            "(plan.exact=true compiles the whole program)"
        )
    with_host = [row for row in rows if row.get("host_bytes")]
    if with_host:
        lines += _wrapped("; ".join(host_text(row, rows) for row in with_host), width)
    if rows[0].get("days") is not None:
        legend += f"; days of {tokens_text(plan, result['parameters'])}"
    if plan.dollars_per_hour is not None:
        legend += f"; dollars of these days, at {plan.dollars_per_hour:g} per hour"
    if rows[0]["is_estimate"]:
        legend += (
            "; nothing was compiled: memory is estimated by a formula, and seconds are a lower bound "
            "(docs/how-to/planning.md)"
        )
    return "\n".join([*lines, *_wrapped(legend, width)])


def host_text(row: Row, rows: list[Row]) -> str:
    """What a setting stores in host memory, and what crosses the link in a step."""
    same = len(rows) == 1 or not differing_settings(rows)
    setting = "" if same else ", ".join(f"{name} {COLUMNS[name](row)}" for name in differing_settings(rows)) + ": "
    text = f"{setting}in the host's memory {row['host_bytes'] / GIB:.2f} GiB per device, "
    text += f"{row['bytes_of_one_host'] / GIB:.1f} GiB per host"
    if row["host_available_bytes"] is not None:
        text += f" of {row['host_available_bytes'] / GIB:.0f}"
    if row["host_link_seconds"] is None:
        return text
    return (
        f"{text}; {row['host_link_bytes'] / 1e9:.1f} GB per step and device over the link, which takes "
        f"{row['host_link_seconds']:#.3g} s, of which {row['host_exposed_seconds']:#.3g} s are not hidden"
    )


def shown(rows: list[Row], column: str) -> list[str]:
    """A column as text."""
    return [COLUMNS[column](row) for row in rows]


def same_settings(rows: list[Row]) -> list[tuple[str, str]]:
    """The settings that all rows share, with their value."""
    columns = {name: shown(rows, name) for name in SETTINGS}
    return [(name, values[0]) for name, values in columns.items() if len(set(values)) == 1]


def differing_settings(rows: list[Row]) -> list[str]:
    """The names of the settings in which rows differ."""
    return [name for name in SETTINGS if len(set(shown(rows, name))) > 1]


def breakdown_table(row: Row) -> str:
    """The predicted time of a step in milliseconds, by part of the model and phase."""
    parts: dict[str, dict[str, float]] = {}
    for part, phase, seconds in row["breakdown"]:
        parts.setdefault(part, dict.fromkeys(PHASES, 0.0))[phase] += 1000 * seconds
    lines = [f"{'ms':<18}" + "".join(f"{phase:>12}" for phase in (*PHASES, "all", "share"))]
    for part, phases in sorted(parts.items(), key=lambda item: -sum(item[1].values())):
        total = sum(phases.values())
        cells = "".join(f"{phases[phase]:>12.1f}" for phase in PHASES)
        lines.append(f"{part:<18}{cells}{total:>12.1f}{total / (1000 * row['seconds']):>12.1%}")
    return "\n".join(lines)


def tokens_text(plan: Plan, parameters: int) -> str:
    """The number of tokens for which days are shown, and its origin."""
    source = "20 per parameter" if plan.tokens is None else "plan.tokens"
    return f"{run_tokens(plan, parameters):,} tokens ({source})"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)


def verdict(row: Row) -> str:
    spare = (row["available_bytes"] - highest_peak(row)) / GIB
    if row["fits"]:
        return f"fits, {spare:.2f} GiB to spare"
    if spare < 0 or not row.get("host_bytes"):
        return f"does not fit by {-spare:.2f} GiB"
    lacking = (row["bytes_of_one_host"] - row["host_available_bytes"]) / GIB
    return f"does not fit in the memory of a host by {lacking:.2f} GiB"


# Keys that the command always includes: the model and the choices of a search.
_CHOSEN = (
    "model.size",
    "data.max_context",
    "training.batch_size",
    "training.gradient_accumulation_steps",
    "zero.stage",
    "zero.remat",
)


def training_command(row: Row, request: Request) -> str:
    """The command line that trains with the settings of a row, with every key that differs from its default.

    A comment if there is none, because each host would have a part of a sequence.
    """
    keys = ("context", "accumulation", "stage", "remat", "master_dtype", "state_dtype", *PLACEMENT_KEYS)
    chosen = with_keys(request.config, {key: row[key] for key in keys})
    groups = row["devices"] // (row["tensor_shards"] * row["context_shards"])
    sequences = row["micro_batch"] * row["accumulation"] * groups
    if sequences % row["hosts"]:
        return (
            f"# no command: {sequences} sequences per step do not divide over {row['hosts']} hosts, each of which has "
            "training.batch_size of them: plan more micro-batches"
        )
    values = {
        "training.batch_size": sequences // row["hosts"],
        "profile.step_time": None if row["seconds"] is None else float(f"{row['seconds']:.4g}"),
    }
    if _is_partly_on_host(row):  # only auto chooses this, in training as in the plan
        values["zero.remat"] = "auto"
    if chosen.plan.tokens is not None:
        values["training.total_steps"] = math.ceil(chosen.plan.tokens / row["tokens"])
    config = with_values(chosen, values)
    choices = {name: getattr(config, name).name for name in GROUPS}
    default = _by_key(default_config(**choices))
    planned = _by_key(OmegaConf.create(literal(asdict(config))))
    idle = {key for key, _ in TrainConfig.without_effect(config)}
    changed = [key for key in planned if planned[key] != default[key] and key not in _CHOSEN and key not in idle]
    overrides = [f"{name}={choice}" for name, choice in choices.items() if choice != default_config()[name].name]
    overrides += [f"{key}={override_value(planned[key])}" for key in (*_CHOSEN, *changed)]
    return shlex.join([*trainer(), *overrides])


def _by_key(config: DictConfig) -> dict[str, Any]:
    """The values of a configuration keyed by name, such as `zero.stage`, without the keys of mode=plan and of names."""
    values: dict[str, Any] = {"seed": config.seed}
    for name, section in config.items():
        if isinstance(section, DictConfig) and name != "plan":
            plain: Any = OmegaConf.to_container(section, resolve=True)
            values |= {f"{name!s}.{key}": value for key, value in plain.items() if key != "name"}
    return values


def _number(key: str, form: str, unit: float = 1) -> Callable[[Row], str]:
    return lambda row: "-" if row.get(key) is None else form.format(row[key] / unit)


def _if_any(key: str, form: str, unit: float = 1) -> Callable[[Row], str]:
    """A column about host memory, with "-" for a setting that stores nothing there."""
    show_number = _number(key, form, unit)
    return lambda row: show_number(row) if row.get("host_bytes") else "-"


def _cost(key: str, form: str) -> Callable[[Row], str]:
    """A number, marked as a lower bound if the seconds of a step are one."""
    show_number = _number(key, form)

    def show(row: Row) -> str:
        is_bound = row.get(key) is not None and row["seconds"] is None
        return f"> {show_number(row)}" if is_bound else show_number(row)

    return show


def _activations(row: Row) -> str:
    """The rest of a step's peak, besides state, gradients and gathered parameters."""
    if not row["fits"]:
        return "-"
    named = sum(row[f"{name}_bytes"] for name in ("state", "gradient", "gathered"))
    return f"{(row['peak_bytes'] - named) / GIB:.3f}"


def _traffic(row: Row) -> str:
    kinds = row["collective_bytes"]
    if kinds is None:
        return "-"
    return " ".join(f"{kind} {n / 1e9:.2f}" for kind, n in sorted(kinds.items()) if n > 1e6)


def _placements(row: Row) -> str:
    """Link seconds per step for each placement of tensor groups, if there is a choice."""
    return ", ".join(f"{name} {seconds:.3f}" for name, seconds in row.get("placements", {}).items()) or "-"


def _is_partly_on_host(row: Row) -> bool:
    """Whether `zero.remat=auto` left some activations on the device that could be in host memory."""
    may_move = "activations" in OFFLOADED[row.get("offload", "none")]
    return may_move and tuple(row["on_host"]) != movable_kinds(row["remat"])


def _remat(row: Row) -> str:
    parts = [row["remat"]]
    offloaded = OFFLOADED[row.get("offload", "none")]
    if _is_partly_on_host(row):
        parts.append(f"{'+'.join(row['on_host']) or 'nothing'} on the host")
    elif "activations" in offloaded:
        parts.append("on the host")
    if "optimizer" in offloaded:
        parts.append("moments on the host")
    if row["fused_update"]:
        parts.append("fused")
    return ", ".join(parts)


def _overlap(row: Row) -> str:
    return "yes" if row["overlap_gathers"] else "no"


def _seconds(row: Row) -> str:
    if row["seconds"] is not None:
        return f"{row['seconds']:#.4g}"
    return "-" if row["seconds_lower_bound"] is None else f"> {row['seconds_lower_bound']:#.4g}"


# Columns by name: the choices, what decides, the price, and the rest.
SETTINGS: dict[str, Callable[[Row], str]] = {
    "stage": lambda row: str(row["stage"]),
    "sequences x micro-batches": lambda row: f"{row['micro_batch']} x {row['accumulation']}",
    "context": lambda row: str(row["context"]),
    "tokens": lambda row: f"{row['tokens']:,}",
    "remat": _remat,
    "master": lambda row: row["master_dtype"],
    "moments": lambda row: row["state_dtype"],
    "tensor": lambda row: str(row["tensor_shards"]),
    "context shards": lambda row: str(row["context_shards"]),
    "expert": lambda row: str(row["expert_shards"]),
    "copies x phases": lambda row: " x ".join(map(str, row["grid"])),
    "overlap": _overlap,
    "parameters": _number("parameters", "{:.3f}B", 1e9),
}
RESULTS: dict[str, Callable[[Row], str]] = {
    "peak": _number("peak_bytes", "{:.2f}", GIB),
    "seconds": _seconds,
    "tokens/s": _number("tokens_per_second", "{:,.0f}"),
    "MFU": _number("mfu", "{:.1%}"),
    "exposed": _number("exposed_bytes", "{:.1f}", 1e9),
}
COSTS: dict[str, Callable[[Row], str]] = {
    "days": _cost("days", "{:,.2f}"),
    "dollars": _cost("dollars", "{:,.0f}"),
}
DETAILS: dict[str, Callable[[Row], str]] = {  # GiB per device, GB per step and device
    "bytes/parameter": _number("state_bytes_per_parameter", "{:.2f}"),
    "state": _number("state_bytes", "{:.3f}", GIB),
    "gradients": _number("gradient_bytes", "{:.3f}", GIB),
    "gathered": _number("gathered_bytes", "{:.3f}", GIB),
    "activations": _activations,
    "evaluation": _number("evaluation_peak_bytes", "{:.3f}", GIB),
    "sampling": _number("sampling_peak_bytes", "{:.3f}", GIB),
    "statistics": _number("statistics_peak_bytes", "{:.3f}", GIB),
    "traffic": _traffic,
    "placements": _placements,
    "across hosts": _number("collective_bytes_across_hosts", "{:.2f}", 1e9),
    "between slices": _number("bytes_between_slices", "{:.2f}", 1e9),
    "gathers hidden": _number("gathers_hidden", "{:.0%}"),
    "on the host": _if_any("host_bytes", "{:.3f}", GIB),
    "in one host": _if_any("bytes_of_one_host", "{:.1f}", GIB),
    "host link": _if_any("host_link_bytes", "{:.2f}", 1e9),
    "link seconds": _if_any("host_link_seconds", "{:#.3g}"),
    "link exposed": _if_any("host_exposed_seconds", "{:#.3g}"),
    "exposed seconds": _number("exposed_seconds", "{:.3f}"),
    "TFLOP": _number("flops", "{:.2f}", 1e12),
    "at least": _number("seconds_lower_bound", "{:.3f} s"),
    "compiled in": _number("compile_seconds", "{:.0f} s"),
}
COLUMNS = SETTINGS | RESULTS | COSTS | DETAILS
