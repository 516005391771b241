"""Names of metrics in W&B and TensorBoard."""

import pytest

from docs.print_reference import all_metrics
from zero.tracking.dashboard import HIDDEN, panel_name

pytestmark = pytest.mark.quick


def test_every_metric_has_a_panel() -> None:
    """A new metric is in a panel of zero/tracking/dashboard.py, or has a name with one."""
    names = {name for metric in all_metrics() for name in metric.names}
    assert "mfu" in names and {name for name in names if "/" not in panel_name(name)} - {*HIDDEN} == {"step"}
