"""Generates conf/config.yaml, the head of conf/model_config.yaml and two reference pages from the declarations.

`python -m docs.print_reference`, after a key or a metric has changed.
"""

from __future__ import annotations

from itertools import chain

from zero.config.files import conf_directory
from zero.config.printed import config_yaml, keys_page, models_head
from zero.run import run, step_metrics
from zero.run.features import FEATURES
from zero.tracking.metrics import Metric

METRICS_HEAD = """\
# Metrics

A run writes one JSON object per line to `metrics.jsonl`: every `training.log_frequency` steps, and at each evaluation
and checkpoint. Weights & Biases and TensorBoard show them by step in the panels
`train/`, `validation/`, `perf/`, `data/` and `experts/`, without checksums, and the sampled texts as a table.

- Of two lines for one step the later one counts.
- A resume writes `{"event": "resume", "step": STEP}`.
- Times are means over the steps since the line before, without those that were compiled.
- A metric is left out where it does not apply. One that is not finite is `null`.

This page is printed from the declarations in `zero/run` (`python -m docs.print_reference`).

| metric | meaning |
|---|---|
"""


def metrics_page() -> str:
    """The text of docs/reference/metrics.md."""
    rows = []
    for metric in all_metrics():
        names = ", ".join(f"`{name}`" for name in metric.names)
        rows.append(f"| {names} | {metric.sentence} |\n")
    return METRICS_HEAD + "".join(rows)


def all_metrics() -> list[Metric]:
    """The metrics of every run, then those that each feature adds."""
    of_features = chain.from_iterable(feature.adds for feature in FEATURES)
    return [*run.METRICS, *step_metrics.METRICS, *step_metrics.metrics_of_objectives(), *of_features]


if __name__ == "__main__":
    (conf_directory() / "config.yaml").write_text(config_yaml())
    models = conf_directory() / "model_config.yaml"
    _, separator, entries = models.read_text().partition("\ntest:")
    models.write_text(models_head() + separator + entries)
    reference = conf_directory().resolve().parent / "docs" / "reference"
    (reference / "keys.md").write_text(keys_page())
    (reference / "metrics.md").write_text(metrics_page())
