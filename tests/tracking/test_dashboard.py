"""Names of metrics in W&B and TensorBoard."""

import pytest

from docs.print_reference import all_metrics
from zero.tracking.dashboard import PANELS, panel_name

pytestmark = pytest.mark.quick


def test_every_metric_has_a_panel() -> None:
    """Each name is behind one panel; the names of panels and of tensors stay as they are."""
    names = {name for metric in all_metrics() for name in metric.names}
    assert {name for name in names if "/" not in panel_name(name)} == {"step"}
    assert {name for panel in PANELS.values() for name in panel} <= {name.partition("/")[0] for name in names}
    assert panel_name("mfu") == "perf/mfu" and panel_name("goodput/steps") == "perf/goodput/steps"
    assert panel_name("gradient_norm") == "train/gradient_norm" and panel_name("gradient_norm/x") == "gradient_norm/x"
