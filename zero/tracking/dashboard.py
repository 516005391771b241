"""The names of metrics in W&B and TensorBoard, grouped into panels."""

from __future__ import annotations

from collections.abc import Mapping

PANELS = {  # a name without a panel, such as a metric of an objective, belongs to train
    "data": ("tokens_seen", "epochs", "skipped_rows", "end_of_data"),
    "perf": (
        *("step_time", "tokens_per_second", "tokens_per_second_per_device", "mfu", "predicted_speed", "data_wait"),
        *("device_wait", "seconds_to_first_step", "peak_memory", "wall_time", "goodput"),
    ),
    "experts": ("expert_share_max", "expert_share_min", "dropped_share", "router_entropy"),
}
HIDDEN = ("samples_checksum", "time")  # no curves
_PANEL = {name: panel for panel, names in PANELS.items() for name in names}


def shown(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a line under the names of a dashboard, without those that are not curves; `step` is the axis.

    >>> shown({"step": 3, "train/loss": 2.5, "mfu": 0.4, "samples_checksum": 7, "goodput/steps": 0.9})
    {'step': 3, 'train/loss': 2.5, 'perf/mfu': 0.4, 'perf/goodput/steps': 0.9}
    """
    return {panel_name(name): value for name, value in metrics.items() if name not in HIDDEN}


def panel_name(name: str) -> str:
    """A metric's name behind its panel, unless the name begins with one already; `step` is the axis."""
    panel = _PANEL.get(name.partition("/")[0])
    if panel is not None:
        return f"{panel}/{name}"
    if "/" in name or name == "step":
        return name
    return f"train/{name}"
